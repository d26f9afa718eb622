"""Damaged run folders that are resumed, looked at and reported on.

`vlarl train --resume` must end with the weights of the undisturbed run, or refuse with a message and leave the run as it
was. `vlarl status` and `vlarl report` must answer whatever state the folder is in.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from fuzz.answers import DONE, FAILED, REFUSED, ask, content, judged
from fuzz.harness import Case, Defect, Row
from fuzz.json_mutations import DAMAGED_JSON, replace_leaf
from fuzz.small_run import ITERATIONS, differences, flags, undisturbed
from safetensors.torch import load_file, save_file

Expected = Literal["refuse", "same", "weights", "any"]
"""refuse; the undisturbed run or refused; its weights, where rows were lost before, or refused; anything that is said."""

Mutation = Callable[[random.Random, Path], Expected]
KEPT = ("metrics.jsonl", "episodes.jsonl", "checkpoints/")


def prepare(shared: Path) -> None:
    """The undisturbed run, and one that stopped half way."""
    undisturbed(shared)
    half = ask(flags(shared / "policy", shared / "half", "--run.iterations", str(ITERATIONS // 2)), shared)
    if half.code != DONE:
        raise RuntimeError(f"half a run fails:\n{half.raised or half.text}")


def _final(folder: Path) -> Path:
    return folder / "checkpoints" / "final"


def _garbage(rng: random.Random, path: Path) -> None:
    """Something else in the place of a file."""
    path.unlink(missing_ok=True)
    kinds: tuple[Callable[[], object], ...] = (
        path.mkdir,
        path.touch,
        lambda: path.symlink_to("nothing"),
        lambda: path.symlink_to(path),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(rng.randbytes(3000)),
    )
    rng.choice(kinds)()


def _truncate(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size - 2))


def nothing_damaged(rng: random.Random, folder: Path) -> Expected:
    return "same"


def rows_truncated(rng: random.Random, folder: Path) -> Expected:
    _truncate(rng, folder / rng.choice(("metrics.jsonl", "episodes.jsonl")))
    return "weights"


def rows_damaged(rng: random.Random, folder: Path) -> Expected:
    path = folder / rng.choice(("metrics.jsonl", "episodes.jsonl"))
    lines = path.read_bytes().split(b"\n")
    lines[rng.randrange(len(lines))] = rng.choice((*DAMAGED_JSON, b'{"iteration": "x"}', b'{"iteration": null}', b"{}"))
    path.write_bytes(b"\n".join(lines))
    return "weights"


def rows_replaced(rng: random.Random, folder: Path) -> Expected:
    _garbage(rng, folder / rng.choice(("metrics.jsonl", "episodes.jsonl")))
    return "weights"


def status_damaged(rng: random.Random, folder: Path) -> Expected:
    path = folder / "status.json"
    kind = rng.randrange(3)
    if kind == 0:
        path.write_bytes(rng.choice(DAMAGED_JSON))
    elif kind == 1:
        _garbage(rng, path)
    else:
        tree = json.loads(path.read_text())
        replace_leaf(rng, tree)
        path.write_text(json.dumps(tree))
    return "same"


def configuration_truncated(rng: random.Random, folder: Path) -> Expected:
    _truncate(rng, folder / "config.yaml")
    return "refuse"


def configuration_of_another_run(rng: random.Random, folder: Path) -> Expected:
    (folder / "config.yaml").write_text(
        rng.choice(
            (
                "run: {seed: 1}\n",
                "env: {suite: tabletop_goal}\n",
                "{}\n",
                "run: {name: other, root: elsewhere}\npolicy: {path: builtin:tiny-openvla}\n",
                "demos: {episodes_per_task: 1}\n",
            )
        )
    )
    return "refuse"


def configuration_replaced(rng: random.Random, folder: Path) -> Expected:
    _garbage(rng, folder / "config.yaml")
    return "refuse"


def counters_damaged(rng: random.Random, folder: Path) -> Expected:
    path = _final(folder) / "trainer.json"
    if rng.random() < 0.5:
        path.write_bytes(rng.choice(DAMAGED_JSON))
        return "refuse"
    tree = json.loads(path.read_text())
    replace_leaf(rng, tree)
    path.write_text(json.dumps(tree))
    return "any"


def trainer_truncated(rng: random.Random, folder: Path) -> Expected:
    _truncate(rng, _final(folder) / "trainer.safetensors")
    return "refuse"


def trainer_of_another_shape(rng: random.Random, folder: Path) -> Expected:
    path = _final(folder) / "trainer.safetensors"
    tensors = load_file(path)
    name = rng.choice([name for name, tensor in tensors.items() if tensor.ndim == 2])
    tensor = tensors[name]
    kinds = (tensor[:1].clone(), tensor.flatten(), tensor.to(torch.int32), tensor * float("nan"), None)
    chosen = kinds[rng.randrange(len(kinds))]
    if chosen is None:
        del tensors[name]
    else:
        tensors[name] = chosen
    save_file(tensors, path)
    return "refuse"


def weights_truncated(rng: random.Random, folder: Path) -> Expected:
    _truncate(rng, _final(folder) / "model.safetensors")
    return "refuse"


def checkpoint_file_replaced(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice([path for path in sorted(_final(folder).iterdir()) if path.suffix == ".safetensors"])
    _garbage(rng, path)
    return "refuse"


def checkpoint_file_missing(rng: random.Random, folder: Path) -> Expected:
    rng.choice([path for path in sorted(_final(folder).iterdir()) if path.suffix == ".safetensors"]).unlink()
    return "refuse"


def curriculum_damaged(rng: random.Random, folder: Path) -> Expected:
    (folder / "curriculum.json").write_bytes(rng.choice(DAMAGED_JSON))
    return "same"


def training_data_damaged(rng: random.Random, folder: Path) -> Expected:
    (_final(folder) / "training_data.json").write_bytes(rng.choice(DAMAGED_JSON))
    return "weights"


def partial_checkpoints(rng: random.Random, folder: Path) -> Expected:
    """What a kill in the middle of a save leaves."""
    for name in (".new-final", ".new-step_000003", ".old-final"):
        partial = folder / "checkpoints" / name
        partial.mkdir(exist_ok=True)
        (partial / "trainer.json").write_bytes(rng.choice(DAMAGED_JSON))
    return "same"


def empty_checkpoint(rng: random.Random, folder: Path) -> Expected:
    (folder / "checkpoints" / rng.choice(("step_999999", "step_", "step_x", "step_-00001"))).mkdir()
    return "same"


def folders_replaced(rng: random.Random, folder: Path) -> Expected:
    path = folder / rng.choice(("checkpoints", "logs", "videos", "eval", ".lock"))
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("a file")
    else:
        path.unlink(missing_ok=True)
        path.mkdir()
    return "any"


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__.replace("_", " "): mutation
    for mutation in (
        *(nothing_damaged, rows_truncated, rows_damaged, rows_replaced, status_damaged),
        *(configuration_truncated, configuration_of_another_run, configuration_replaced),
        *(counters_damaged, trainer_truncated, trainer_of_another_shape, weights_truncated),
        *(checkpoint_file_replaced, checkpoint_file_missing, curriculum_damaged, training_data_damaged),
        *(partial_checkpoints, empty_checkpoint, folders_replaced),
    )
}


def run(case: Case) -> tuple[str, Sequence[Defect]]:
    """Damage the run that stopped, and go on with it."""
    run = case.folder / "runs" / "run"
    shutil.copytree(case.shared / "half" / "run", run, symlinks=True)
    expected = MUTATIONS[case.mutation](case.rng(), run)
    defects: list[Defect] = []
    for command in (["status", str(run)], ["status"], ["report", str(run)]):
        defects += judged(ask(command, case.folder), what=f"vlarl {command[0]}")
    before = _kept(run)
    answer = ask(["train", "--resume", str(run), "--run.iterations", str(ITERATIONS)], case.folder)
    defects += judged(answer, (DONE, FAILED, REFUSED), "vlarl train --resume")
    if answer.code == DONE and not defects:
        if expected == "refuse":
            defects.append(Defect("wrong", f"resumed, though it can't be right\n{answer.text}"))
        elif expected in ("same", "weights"):
            defects += differences(run, case.shared / "whole" / "run", with_rows=expected == "same")
    elif answer.code == REFUSED and _kept(run) != before:
        defects.append(Defect("wrong", f"refused, and the run is no longer as it was:\n{answer.text}"))
    if case.mutation == "nothing damaged" and answer.code != DONE:
        defects.append(Defect("wrong", f"an undamaged run can't be resumed\n{answer.text}"))
    return ("worked" if answer.code == DONE else "refused"), defects


def _kept(run: Path) -> dict[str, bytes]:
    """What a refusal must not change; pipes and links are left alone."""
    return {name: data for name, data in content(run).items() if name.startswith(KEPT)}


ROW = Row(
    name="resumed",
    about="run folders with damaged metrics, status, configuration, counters, optimizer state and weights, and with "
    "partial checkpoints: `status`, `report` and `train --resume`; a refusal leaves the run as it was",
    mutations=tuple(MUTATIONS),
    cases=60,
    deadline_s=120.0,
    run=run,
    prepare=prepare,
)
