"""Checkpoints with something wrong in one of their files.

`load_policy`, `vlarl doctor --model` and `vlarl eval` must load each one or refuse it with a message. A policy that was
loaded must give finite actions; what can't be right must be refused; what doesn't matter must change nothing.
"""

import shutil
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes.golden_folder import OWN as GOLDEN
from fuzz.answers import DONE, FAILED, REFUSED, Answer, ask, judged, litter
from fuzz.checkpoint_mutations import CANARY, MUTATIONS, Expected
from fuzz.harness import Case, Defect, Row

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.decisions import Sampling
from vlarl.errors import VlarlError
from vlarl.policies.load import checkpoint_folder, load_policy
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.types import Observation

BASES = ("whole", "sharded", "adapter", "original")


def prepare(shared: Path) -> None:
    """The checkpoints that mutants are made of: one file, two shards with a critic, an adapter, original OFT."""
    source = checkpoint_folder("builtin:tiny-oft")
    shutil.copytree(source, shared / "whole")
    policy = load_policy(shared / "whole")
    policy.attach_value_head((8,), seed=0)
    policy.save(shared / "sharded", torch.bfloat16, max_shard_bytes=4_000_000)
    adapted = load_policy(shared / "whole")
    adapted.prepare_training(
        ModelConfig(), LoraConfig(enabled=True, rank=2, target_modules=("q_proj", "v_proj")), seed=0
    )
    adapted.save(shared / "adapter")
    shutil.copytree(GOLDEN / "openvla-oft-tiny", shared / "original", ignore=shutil.ignore_patterns("*.npz"))
    for base in BASES:
        torch.save(_logits(_load(shared / base)), shared / f"{base}.logits")


def _load(folder: Path) -> Any:
    policy = load_policy(folder)
    policy.use_statistics(None, "libero_spatial" if _is_original(folder) else "tabletop_spatial")
    return policy


def _is_original(folder: Path) -> bool:
    return any(folder.glob("action_head--*.pt"))


def _logits(policy: Any) -> torch.Tensor:
    """What the policy says of one observation, with the greedy actions behind it."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (policy.num_images, policy.image_size, policy.image_size, 3), dtype=np.uint8)
    proprio = rng.uniform(-1, 1, 8).astype(np.float32)
    if policy.tokenizer is None:
        return torch.cat([weight.flatten().float() for _, weight in sorted(policy.named_parameters())])[:100_000]
    inputs = policy.process([Observation(images, proprio, "put the red bowl on the plate")])
    with torch.inference_mode():
        ids, logits = policy.decode(inputs, lambda given, first: given.argmax(-1))
    if not logits.isfinite().all():  # such as by a bit of an exponent that is flipped: shown by acting, not by loading
        TorchEngine(policy, torch.device("cpu")).generate(inputs, Sampling(0.0), [0])
    actions = policy.unnormalize(policy.codec.decode(ids.numpy()))
    if not np.isfinite(actions).all():
        raise FloatingPointError(f"actions that are not finite: {actions}")
    return logits


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """Load a mutant, and ask a command about it."""
    rng = case.rng()
    base = rng.choice(BASES)
    folder = case.folder / "checkpoint"
    shutil.copytree(case.shared / base, folder)
    expected = MUTATIONS[case.mutation](rng, folder)
    answer, defects = _loaded(case, folder, base, expected)
    work = case.folder / "work"
    work.mkdir()
    if rng.random() < 0.5 or base == "original":
        command = ["doctor", "--model", str(folder)]
        defects += _judged_doctor(ask(command, work))
    else:
        size = ("--tasks", "0", "--episodes", "1", "--num-envs", "1", "--env.max_steps", "4")
        command = ["eval", str(folder), "--suite", "tabletop_spatial", *size, "--device", "cpu", "--out", "results"]
        told = ask(command, work)
        says_so = "probabilities are not finite with the weights that it was loaded with" in told.err
        defects += judged(told, (FAILED,) if says_so else (DONE, REFUSED), f"vlarl eval of a mutant of {base}")
        if told.code == DONE and expected == "refuse":
            defects.append(Defect("wrong", f"vlarl eval takes what can't be right ({base}):\n{told.text}"))
    defects += litter(work, ("results",))
    if (case.folder / CANARY).exists():
        defects.append(Defect("wrong", "the checkpoint ran code of its own"))
    return answer, defects


def _judged_doctor(told: Answer) -> list[Defect]:
    """`vlarl doctor` says on its own lines what is wrong with a checkpoint, and exits with 1."""
    if told.code == FAILED and "problem: " in told.out:
        return judged(Answer(DONE, told.out, told.err, told.raised), what="vlarl doctor --model")
    return judged(told, what="vlarl doctor --model")


def _loaded(case: Case, folder: Path, base: str, expected: Expected) -> tuple[str, list[Defect]]:
    try:
        logits = _logits(_load(folder))
    except VlarlError as error:
        if expected == "same":
            return "refused", [Defect("wrong", f"refused for what doesn't matter ({base}): {error}")]
        return "refused", []
    except FloatingPointError as error:
        return "worked", [Defect("wrong", f"loaded ({base}), with {error}")]
    except Exception:  # noqa: BLE001 - whatever else is raised is a traceback to the user
        return "failed", [Defect("traceback", f"load_policy of a mutant of {base}\n{traceback.format_exc()}")]
    if expected == "refuse":
        return "worked", [Defect("wrong", f"loaded, though it can't be right (a mutant of {base})")]
    if not logits.isfinite().all():
        return "worked", [Defect("wrong", f"acts ({base}), with logits that are not finite")]
    if expected == "same" and not logits.equal(torch.load(case.shared / f"{base}.logits")):
        return "worked", [Defect("wrong", f"other logits, by a file that doesn't matter ({base})")]
    return "worked", []


ROW = Row(
    name="checkpoints",
    about="checkpoint folders (one file, shards with a critic, an adapter, original OpenVLA-OFT) with one file damaged: "
    "configuration, weights, index, heads, pickles, statistics, tokenizer, processor; loaded, described, evaluated",
    mutations=tuple(MUTATIONS),
    cases=504,
    deadline_s=60.0,
    run=run,
    prepare=prepare,
)
