"""Names of other systems whose meaning is specific to `vlarl finetune`.

The same tables as in `aliases`, which looks here first for a configuration of finetune.
"""

from __future__ import annotations

ALIASES: dict[str, str] = {
    "batch_size": "optim.batch_size",
    "per_device_train_batch_size": "optim.batch_size",
    "max_steps": "optim.steps",
    "steps": "optim.steps",
    "num_training_steps": "optim.steps",
    "warmup_steps": "optim.warmup_steps",
    "logging_steps": "optim.log_interval",
    "log_freq": "optim.log_interval",
    "save_steps": "checkpoint.interval",
    "save_freq": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "micro_batch_size": "optim.microbatch_size",
    "image_aug": "augment.enabled",
    "eval_steps": "validation.interval",
    "eval_freq": "validation.interval",
    "val_interval": "validation.interval",
    "val_freq": "validation.interval",
    "early_stopping_patience": "validation.patience",
    "num_workers": "demos.num_workers",
    "suite": "demos.suites",
    "task_suite": "demos.suites",
    "task_suite_name": "demos.suites",
    "task_id": "demos.task_ids",
    "task_ids": "demos.task_ids",
    "tasks": "demos.task_ids",
    "image_size": "demos.image_size",
    "dataset": "demos.path",
    "data_mix": "demos.mixture",
    "dataset_mixture": "demos.mixture",
    "static_mixture": "demos.mixture",
}
"""Names that set the option as it is written."""

_LENGTH = "set the length of training with --optim.steps; a step reads --optim.batch_size samples"
_DEMOS = "set --demos.episodes_per_task, the number of demonstrations per task"
_NO_EVALUATION = (
    "`vlarl finetune` plays no episodes; `vlarl eval RUN` does, and --demos.holdout validates on demonstrations"
)
_DOWNLOAD = "download it with `hf download NAME --repo-type dataset --local-dir DIR`, and set --demos.path DIR"
_PASSES = "a batch of --optim.batch_size samples is split into passes of --optim.microbatch_size"

ELSEWHERE: dict[str, str] = {
    "dataset.repo_id": _DOWNLOAD,
    "dataset.root": "set --demos.path to the folder of the dataset",
    "dataset_name": "set --demos.path to the folder of the dataset, such as DATA_ROOT_DIR/DATASET_NAME",
    **dict.fromkeys(("epochs", "n_epochs", "num_epochs", "max_epochs", "num_train_epochs"), _LENGTH),
    **dict.fromkeys(("iterations", "n_iterations", "num_iterations", "max_iterations", "total_iterations"), _LENGTH),
    **dict.fromkeys(("timesteps", "n_timesteps", "total_timesteps"), _LENGTH),
    **dict.fromkeys(("episodes", "num_episodes", "total_episodes"), _DEMOS),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum", "grad_accum_steps"), _PASSES),
    "n_eval_episodes": _NO_EVALUATION,
}
"""Names without an option of that meaning: what to do instead."""
