"""Translates values of other systems' options to vlarl's: `--bf16` is policy.dtype bfloat16.

A reader takes the value as it was written and the options that have been set so far. It returns the values to set, by
dotted path (none if the value is the default behaviour), or a sentence that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlarl.config.known import PROMPTS
from vlarl.config.source.spelling import recipe

Values = dict[str, object]
Reader = Callable[[object, Mapping[str, object]], Values | str]

OFF = (False, None, "none", "None", "", 0)
"""Values by which other systems switch a feature off."""


@dataclass(frozen=True)
class Translation:
    """An option of another system that is written differently here."""

    options: tuple[str, ...]  # the options that it sets here
    read: Reader
    is_flag: bool = False  # may be given without a value, which means true


@dataclass(frozen=True)
class PairItem:
    """One of the two values of an option; the other one comes from the file or the default."""

    index: int
    value: object
    default: tuple[float, float]  # if there is no pair yet

    def of(self, pair: object) -> tuple[object, ...]:
        """The pair with this value in it."""
        values: list[object] = list(pair if isinstance(pair, list | tuple) and len(pair) == 2 else self.default)
        values[self.index] = self.value
        return tuple(values)


def to_all(*paths: str) -> Translation:
    """One value for several options."""
    return Translation(paths, lambda value, _: dict.fromkeys(paths, value))


def switch(path: str, on: object, off: object) -> Translation:
    """True and false as values of an option."""
    return _flag((path,), lambda wanted: {path: on if wanted else off})


def if_true(path: str, on: object) -> Translation:
    """True as a value of an option; false does not set it."""
    return _flag((path,), lambda wanted: {path: on} if wanted else {})


def part_of_pair(path: str, index: int, default: tuple[float, float]) -> Translation:
    """One of the two values of an option, such as the first of optim.betas."""

    def read(value: object, current: Mapping[str, object]) -> Values:
        item, before = PairItem(index, value, default), current.get(path)
        if isinstance(before, PairItem):
            return {path: item if before.index == index else item.of(before.of(default))}
        return {path: item.of(before) if path in current else item}

    return Translation((path,), read)


def interval(path: str) -> Translation:
    """Iterations between two events, where -1 stands for never."""
    return Translation((path,), lambda value, _: {path: 0 if value == -1 else value})


def unless(path: str, needless: object) -> Translation:
    """An option that need not be set for this value, which is the default behaviour."""
    return Translation((path,), lambda value, _: {} if value == needless else {path: value})


def of_prompts(path: str) -> Translation:
    """An option of prompts that scripts for robots give, too, where it is not needed."""

    def read(value: object, current: Mapping[str, object]) -> Values:
        suite = current.get("env.suite")
        is_robots = isinstance(suite, str) and not suite.startswith(PROMPTS)
        return {} if is_robots else {path: value}

    return Translation((path,), read)


def only(needless: tuple[object, ...], sentence: str) -> Translation:
    """An option without a counterpart: accepted for values that are vlarl's behaviour, else refused with advice."""
    return Translation((), lambda value, _: {} if value in needless else sentence)


def _flag(paths: tuple[str, ...], values: Callable[[bool], Values]) -> Translation:
    def read(value: object, _: Mapping[str, object]) -> Values | str:
        return values(value) if isinstance(value, bool) else "must be true or false"

    return Translation(paths, read, is_flag=True)


def _rollout_size(value: object, current: Mapping[str, object]) -> Values:
    """What a rollout has side by side: environments, where it is counted in their steps, else groups."""
    return {"env.num_envs" if "rollout.num_steps" in current else "rollout.num_groups": value}


def _gpu(path: str) -> Translation:
    """The index of a GPU as a device."""

    def read(value: object, _: Mapping[str, object]) -> Values | str:
        if isinstance(value, int) and not isinstance(value, bool):
            return {path: f"cuda:{value}" if value >= 0 else "cpu"}
        if isinstance(value, str) and value.startswith(("cuda", "cpu", "auto")):
            return {path: value}
        return (
            f"one process uses one GPU: write --{path} cuda:0; for several, set --distributed.backend ray and "
            "--distributed.learners_per_node"
        )

    return Translation((path,), read)


def _num_gpus(value: object, _: Mapping[str, object]) -> Values | str:
    if value in (1, (1,)):
        return {}
    return (
        f"for several GPUs write --distributed.backend ray --distributed.learners_per_node {_plain(value)}; "
        "docs/distributed.md says how they are assigned"
    )


def _num_nodes(value: object, _: Mapping[str, object]) -> Values | str:
    if value == 1:
        return {}
    return (
        "machines belong to a Ray cluster: start it, then write --distributed.backend ray --distributed.address auto "
        "and one value of --distributed.learners_per_node for each machine"
    )


def _plain(value: object) -> str:
    return " ".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


def _run_folder(value: object, _: Mapping[str, object]) -> Values | str:
    """The folder of a run is its root and its name."""
    path = Path(str(value))
    if not path.name or path.name == "..":
        return "must name a folder for this run, such as runs/first; or set --run.root and --run.name"
    return {"run.root": str(path.parent), "run.name": path.name}


TRACKERS = {
    "wandb": "logging.wandb",
    "tensorboard": "logging.tensorboard",
    "console": None,
    "none": None,
    "all": None,
}


def _trackers(value: object, _: Mapping[str, object]) -> Values | str:
    """Names of trackers, such as `wandb` or `[console, wandb]`."""
    names = [str(name).lower() for name in (value if isinstance(value, tuple) else (value if value else "none",))]
    if unknown := [name for name in names if name not in TRACKERS]:
        return f"no tracker {unknown[0]}; there are --logging.wandb and --logging.tensorboard, and metrics.jsonl always"
    wanted = {path for name in names if (path := TRACKERS[name])}
    if "all" in names:
        wanted = {path for path in TRACKERS.values() if path}
    if "none" in names:
        return {"logging.wandb": False, "logging.tensorboard": False}
    values: Values = {"logging.wandb": False}
    return values | dict.fromkeys(sorted(wanted), True)


def _wandb_mode(value: object, _: Mapping[str, object]) -> Values | str:
    return {"logging.wandb": False} if value == "disabled" else {"logging.wandb_mode": value}


def _scale_rewards(value: object, _: Mapping[str, object]) -> Values | str:
    if value in (True, "group", False, "none"):
        return {"algorithm.normalize_std": value in (True, "group")}
    if value == "batch":
        return {"algorithm.normalize_std": False, "algorithm.normalize_advantages": "scale"}
    return "use group, batch or none; here they are --algorithm.normalize_std and --algorithm.normalize_advantages"


LOSS_TYPES = {"grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean"}


def _loss_type(value: object, _: Mapping[str, object]) -> Values | str:
    """TRL's losses, which differ in how the losses of tokens are averaged."""
    if (name := str(value).lower()) in LOSS_TYPES:
        return {"algorithm.aggregate": LOSS_TYPES[name]}
    return recipe("algorithm.name", name) or "set --algorithm.aggregate to token_mean or sequence_mean"


def _first_tasks(value: object, _: Mapping[str, object]) -> Values | str:
    """The first tasks of a suite, by their count."""
    if isinstance(value, int) and 0 < value <= 1000:
        return {"env.task_ids": tuple(range(value))}
    return "must be a number of tasks; or name the tasks, such as --env.task_ids 0 1 2"


def _task(value: object, _: Mapping[str, object]) -> Values | str:
    """The id of a task, or the name of a suite."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"env.task_ids": (value,)}
    if isinstance(value, str):
        return {"env.suite": value}
    return "give the ids of tasks by --env.task_ids, and the suite by --env.suite"


def _quantization(value: object, _: Mapping[str, object]) -> Values | str:
    """Bits as other systems write them: 4, `4bit`, `int8`, `nf4`."""
    if value in OFF:
        return {"policy.quantize": None}
    digits = "".join(letter for letter in str(value) if letter.isdigit())
    if digits in ("4", "8"):
        return {"policy.quantize": int(digits)}
    return "set the bits of the weights: --policy.quantize 4 or --policy.quantize 8"


def _bits(bits: int) -> Translation:
    return switch("policy.quantize", bits, None)


def _tokenized(wanted: bool) -> Values:
    """Action tokens are the default; without them the regression head acts."""
    return {} if wanted else {"policy.actions": "l1"}


def _greedy(value: object, _: Mapping[str, object]) -> Values | str:
    if value is True:
        return {"eval.temperature": 0.0}
    return "set the temperature of evaluations instead: --eval.temperature 1"


def _entropy_mask(value: object, _: Mapping[str, object]) -> Values | str:
    if value is False:
        return {}
    if isinstance(value, float | int) and not isinstance(value, bool):
        return {"algorithm.entropy_top_fraction": value}
    return "give the fraction of tokens to train on: --algorithm.entropy_top_fraction 0.2"


def _decoder(value: object, _: Mapping[str, object]) -> Values | str:
    decoders = {"openvla": "autoregressive", "openvla-oft": "parallel", "openvla_oft": "parallel"}
    name = str(value).lower()
    if name in decoders:
        return {"policy.decoder": decoders[name]}
    return f"models of type {value} are not supported; there are openvla and openvla-oft"


def _lora_rank(value: object, _: Mapping[str, object]) -> Values | str:
    """Systems without a switch train adapters if their rank is above 0."""
    return {} if value == 0 else {"lora.enabled": True, "lora.rank": value}


def _env_type(value: object, current: Mapping[str, object]) -> Values | str:
    """lerobot's kind of environment; `env.task`, before or after it, says which suite of it."""
    if value == "libero":
        return {} if "env.suite" in current else {"env.suite": "libero_10"}
    if value == "metaworld":
        return "set --env.suite metaworld_mt10 or metaworld_mt50, and --env.task_ids for some of its tasks"
    return "set --env.suite, such as libero_spatial; a Gymnasium environment is --env.suite gym with --gym.env ID"


GPU = _gpu("run.device")
HEADS_GPU = _gpu("policy.heads_device")
NUM_GPUS = Translation((), _num_gpus)
NUM_NODES = Translation((), _num_nodes)
RUN_FOLDER = Translation(("run.root", "run.name"), _run_folder)
TRACKER = Translation(("logging.wandb", "logging.tensorboard"), _trackers)
WANDB_MODE = Translation(("logging.wandb_mode",), _wandb_mode)
SCALE_REWARDS = Translation(("algorithm.normalize_std", "algorithm.normalize_advantages"), _scale_rewards, True)
LOSS_TYPE = Translation(("algorithm.aggregate",), _loss_type)
FIRST_TASKS = Translation(("env.task_ids",), _first_tasks)
TASK = Translation(("env.task_ids", "env.suite"), _task)
QUANTIZATION = Translation(("policy.quantize",), _quantization)
FOUR_BITS, EIGHT_BITS = _bits(4), _bits(8)
CLIP = to_all("algorithm.clip_low", "algorithm.clip_high")
BF16 = switch("policy.dtype", "bfloat16", "float32")
FLASH = switch("policy.attention", "flash_attention_2", "sdpa")
TOKENIZED = _flag(("policy.actions",), _tokenized)
GREEDY = Translation(("eval.temperature",), _greedy, is_flag=True)
ENTROPY_MASK = Translation(("algorithm.entropy_top_fraction",), _entropy_mask)
DECODER = Translation(("policy.decoder",), _decoder)
LORA_RANK = Translation(("lora.enabled", "lora.rank"), _lora_rank)
BETA_1 = part_of_pair("optim.betas", 0, (0.9, 0.95))
BETA_2 = part_of_pair("optim.betas", 1, (0.9, 0.95))
LOWER_BOUND = part_of_pair("rollout.accuracy_bounds", 0, (0.0, 1.0))
UPPER_BOUND = part_of_pair("rollout.accuracy_bounds", 1, (0.0, 1.0))
ENV_TYPE = Translation(("env.suite",), _env_type)
TOP_K = Translation(("rollout.top_k",), lambda value, _: {"rollout.top_k": 0 if value in (-1, *OFF) else value})
ROLLOUT_SIZE = Translation(("rollout.num_groups", "env.num_envs"), _rollout_size)
