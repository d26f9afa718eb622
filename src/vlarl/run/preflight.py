"""What a run would be refused for, looked at before anything is made, loaded or announced.

    refuse_early     --dry-run, too: names, paths and memory; loads no torch, and runs nothing of the user's
    refuse_missing   before a run says that it begins: the same, packages and simulators
    refuse_unready   before its folder is made: the same, the reward's code, W&B's login, the device, which takes long

Each check is that of the part that it belongs to, which makes it again when it is built.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from vlarl.config.dataset_folder import dataset_folders, find_recording
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import EXPERTS, PROMPTS, is_prompts
from vlarl.config.reward_module import import_function, refuse_missing_module
from vlarl.config.rules.reward import own_rewards
from vlarl.config.run_checkpoints import OPTIONS, checkpoint_here
from vlarl.config.schema import Config, RanksConfig
from vlarl.config.suites import suites_of
from vlarl.errors import MissingExtraError, UsageError
from vlarl.observability.capacity import check_memory_for_config
from vlarl.observability.run_dir import RunDirectory


def refuse_early(config: Config | FinetuneConfig, is_new: bool = True) -> None:
    """Refuse a run whose name is taken, or that names files which are not there.

    A run that is not new has its folder already, and its weights in it; a supervised one also reads the policy that it
    began with.
    """
    if is_new and config.run.name is not None:
        RunDirectory.refuse_existing(config.run.root, config.run.name)
    if is_new or isinstance(config, FinetuneConfig):  # which makes its policy again, then reads the run's weights
        for section, field in OPTIONS:
            name = getattr(getattr(config, section), field, None)
            if name is not None and not name.startswith("init:"):
                checkpoint_here(name, config.run.root)
    if isinstance(config, FinetuneConfig):
        _refuse_missing_demos(config)
        return
    _refuse_missing_prompts(config)
    _refuse_missing_ptx(config)
    check_memory_for_config(config)
    for source in _own_rewards(config):
        refuse_missing_module(source)
    if is_new and config.curriculum.start_from is not None:
        from vlarl.rollout.curriculum import read_curriculum  # loads numpy

        read_curriculum(Path(config.curriculum.start_from), suites_of(config.env))


def refuse_missing(config: Config | FinetuneConfig, is_new: bool = True) -> None:
    """Refuse what needs a package or a simulator that is not installed, too."""
    refuse_early(config, is_new)
    if isinstance(config, FinetuneConfig):
        for folder in dataset_folders(config.demos) if config.demos.path is not None else ():
            _refuse_unreadable(folder)
        rows = config.reward.path
        _refuse_missing_packages(
            (
                ("ray", "cluster", config.distributed.backend == "ray"),
                ("wandb", "wandb", config.logging.wandb),
                ("pyarrow", "data", rows is not None and Path(rows).suffix != ".jsonl"),
            )
        )
        _refuse_missing_dashboard(config.distributed)
        return
    imitated = config.ptx.path
    if imitated is not None and not is_prompts(config.env.suite) and imitated != EXPERTS and config.ptx.coef > 0:
        _refuse_unreadable(Path(imitated))
    _refuse_missing_packages(
        (
            ("ray", "cluster", config.distributed.backend == "ray"),
            ("wandb", "wandb", config.logging.wandb),
            ("pyarrow", "data", config.rollout.save == "lerobot"),
            ("pyarrow", "data", any(Path(path).suffix != ".jsonl" for path in _row_files(config))),
        )
    )
    _refuse_missing_dashboard(config.distributed)
    if config.env.suite.startswith(("libero_", "metaworld_")):
        from vlarl.envs.build import refuse_missing_simulator  # loads numpy

        refuse_missing_simulator(config.env)


def _refuse_missing_dashboard(distributed: RanksConfig) -> None:
    if distributed.dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        raise UsageError(
            "distributed.dashboard: Ray is installed without its dashboard; run: pip install "
            f"'ray[default]=={importlib.metadata.version('ray')}', or leave the option out."
        )


def _refuse_missing_packages(packages: Sequence[tuple[str, str, bool]]) -> None:
    """Refuse a run without a package that it needs: its name, the extra that installs it, and whether it is needed."""
    for package, extra, is_needed in packages:
        if is_needed and importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra)


def refuse_unready(config: Config | FinetuneConfig, is_new: bool = True) -> None:
    """Refuse what the code of the user, or the device, can't do, too."""
    refuse_missing(config, is_new)
    if isinstance(config, Config):
        for source in _own_rewards(config):
            import_function(source)
    if config.logging.wandb and config.logging.wandb_mode == "online":
        from vlarl.observability.sinks import refuse_without_login  # loads numpy

        refuse_without_login()
    if config.distributed.backend == "local" and config.run.device not in ("auto", "cpu"):
        from vlarl.devices import usable_device  # loads torch, which takes seconds

        usable_device("run.device", config.run.device)


def _refuse_missing_demos(config: FinetuneConfig) -> None:
    demos, rows = config.demos, config.reward.path
    if rows is not None and not Path(rows).exists():
        raise UsageError(f"reward.path: there is no file {rows}.")
    if demos.path is None:
        return
    for folder in dataset_folders(demos):
        find_recording(folder)
    if demos.mapping is not None:
        from vlarl.data.rlds.declared import check_option  # loads numpy

        check_option(demos.mapping)


def _refuse_missing_prompts(config: Config) -> None:
    for path in _prompt_files(config):
        if not Path(path).exists():
            raise UsageError(f"prompts.path: there is no file {path}.")


def _refuse_missing_ptx(config: Config) -> None:
    path = config.ptx.path
    if path is None or path == EXPERTS or config.ptx.coef == 0:
        return
    if not is_prompts(config.env.suite):
        find_recording(Path(path))
    elif not Path(path).exists():
        raise UsageError(f"ptx.path: there is no file {path}.")


def _refuse_unreadable(path: Path) -> None:
    """Refuse a LeRobot dataset without the package that reads it."""
    if importlib.util.find_spec("pyarrow") is None and find_recording(path)[0] == "lerobot":
        raise MissingExtraError("pyarrow", "data")


def _row_files(config: Config) -> tuple[str, ...]:
    """All data of prompts: what is responded to, and what is imitated."""
    imitated = config.ptx.path if is_prompts(config.env.suite) and config.ptx.coef > 0 else None
    return (*_prompt_files(config), *(() if imitated is None else (imitated,)))


def _prompt_files(config: Config) -> tuple[str, ...]:
    """The data that the suite of prompts is read from."""
    return (*config.prompts.path, *config.prompts.eval_path) if config.env.suite == PROMPTS else ()


def _own_rewards(config: Config) -> list[str]:
    """The rewards that this process imports by name: workers of a cluster import their own."""
    if config.distributed.backend == "ray" and config.distributed.num_reward_workers:
        return []
    return own_rewards(config.reward)
