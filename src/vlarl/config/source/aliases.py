"""Names of options in other systems of the field, and their counterparts in vlarl.

A name either sets an option (`ALIASES`), sets it with another value (`TRANSLATED`), is not needed because vlarl does
the same by itself (`NEEDLESS`: a note, and the command continues), or is refused with advice (`ELSEWHERE`). Hyphens and
underscores are equivalent. `hydra_aliases` has the dotted names of verl, SimpleVLA-RL, RLinf and lerobot,
`finetune_aliases` the meaning of names in `vlarl finetune`.

The systems: VLA-RL and OpenVLA-OFT-RL, LightRFT, TRL, Stable-Baselines3 and its zoo. docs/coming-from.md is the guide
for their users.
"""

from __future__ import annotations

import re

from vlarl.config.source import finetune_aliases, hydra_aliases
from vlarl.config.source import translations as to
from vlarl.config.source.translations import Translation

RENAMED: dict[str, str] = {"algorithm.entropy_top_share": "algorithm.entropy_top_fraction"}
"""Options of earlier versions of vlarl, which are refused with their new name."""

ALIASES: dict[str, str] = {
    "algorithm": "algorithm.name",
    "lora": "lora.enabled",
    "policy": "policy.path",
    "reward": "reward.source",
    "model": "policy.path",
    "vla_path": "policy.path",
    "pretrained_checkpoint": "policy.path",
    "pretrain": "policy.path",
    "model_name_or_path": "policy.path",
    "model_path": "policy.path",
    "checkpoint": "policy.path",
    "unnorm_key": "policy.unnorm_key",
    "use_proprio": "policy.use_proprio",
    "num_images_in_input": "policy.num_images",
    "center_crop": "policy.center_crop",
    "enable_gradient_checkpointing": "policy.gradient_checkpointing",
    "gradient_checkpointing": "policy.gradient_checkpointing",
    "attn_implementation": "policy.attention",
    "torch_dtype": "policy.dtype",
    "dtype": "policy.dtype",
    "precision": "policy.dtype",
    "mixed_precision": "policy.dtype",
    "use_lora": "lora.enabled",
    "use_peft": "lora.enabled",
    "lora_rank": "lora.rank",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "load_adapter_checkpoint": "lora.adapter",
    "task_suite": "env.suite",
    "task_suite_name": "env.suite",
    "suite": "env.suite",
    "task_id": "env.task_ids",
    "task_ids": "env.task_ids",
    "tasks": "env.task_ids",
    "num_envs": "env.num_envs",
    "n_envs": "env.num_envs",
    "image_size": "env.image_size",
    "max_episode_steps": "env.max_steps",
    "env_gpu_id": "env.render_gpu",
    "data_root_dir": "demos.path",
    "dataset_path": "demos.path",
    "timesteps": "run.total_env_steps",
    "total_timesteps": "run.total_env_steps",
    "n_timesteps": "run.total_env_steps",
    "num_episodes": "run.iterations",
    "iterations": "run.iterations",
    "iters": "run.iterations",
    "n_iterations": "run.iterations",
    "max_iterations": "run.iterations",
    "total_iterations": "run.iterations",
    "seed": "run.seed",
    "name": "run.name",
    "exp_id": "run.name",
    "exp_name": "run.name",
    "experiment_name": "run.name",
    "job_name": "run.name",
    "run_name": "run.name",
    "wandb_run_name": "run.name",
    "exp_dir": "run.root",
    "log_dir": "run.root",
    "device": "run.device",
    "training_device": "run.device",
    "rollout_batch_size": "rollout.num_groups",
    "n_samples_per_prompt": "rollout.group_size",
    "prompt_data": "prompts.path",
    "eval_dataset": "prompts.eval_path",
    "input_key": "prompts.prompt_column",
    "label_key": "prompts.solution_column",
    "num_generations": "rollout.group_size",
    "prompt_max_len": "prompts.max_tokens",
    "max_prompt_length": "prompts.max_tokens",
    "max_completion_length": "rollout.max_tokens",
    "generate_max_len": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "min_new_tokens": "rollout.min_tokens",
    "top_p": "rollout.top_p",
    "stop_strings": "rollout.stop",
    "num_steps": "rollout.num_steps",
    "n_steps": "rollout.num_steps",
    "rollout_temperature": "rollout.temperature",
    "temperature": "rollout.temperature",
    "micro_rollout_batch_size": "rollout.batch_size",
    "curriculum_ema_alpha": "curriculum.ema_alpha",
    "curriculum_tau": "curriculum.tau",
    "curriculum_persist": "curriculum.persist",
    "reward_fn": "reward.source",
    "reward_weights": "reward.weights",
    "reward_recipe": "reward.recipe",
    "remote_rm_url": "reward.url",
    "length_penalty": "reward.length_penalty",
    "advantage_estimator": "algorithm.name",
    "algo": "algorithm.name",
    "epochs": "algorithm.epochs",
    "max_epochs": "algorithm.epochs",
    "n_epochs": "algorithm.epochs",
    "num_epochs": "algorithm.epochs",
    "ppo_epochs": "algorithm.epochs",
    "num_iterations": "algorithm.epochs",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "epsilon_high": "algorithm.clip_high",
    "delta": "algorithm.dual_clip",
    "importance_sampling_level": "algorithm.ratio_level",
    "entropy_coef": "algorithm.entropy_coef",
    "ent_coef": "algorithm.entropy_coef",
    "action_reconstruction_coef": "algorithm.action_reconstruction_coef",
    "aux_loss_coef": "algorithm.aux_loss_coef",
    "advantage_clamp": "algorithm.advantage_clamp",
    "verifier_gamma": "algorithm.verifier_gamma",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.gae_lambda",
    "lambd": "algorithm.gae_lambda",
    "gae_lambda": "algorithm.gae_lambda",
    "vf_coef": "algorithm.vf_coef",
    "value_loss_coef": "algorithm.vf_coef",
    "cliprange_value": "algorithm.cliprange_value",
    "clip_range_vf": "algorithm.cliprange_value",
    "value_clip": "algorithm.cliprange_value",
    "value_init_steps": "algorithm.value_init_steps",
    "freezing_actor_steps": "algorithm.value_init_steps",
    "ptx_coef": "ptx.coef",
    "pretrain_data": "ptx.path",
    "target_kl": "algorithm.max_approx_kl",
    "kl_coef": "kl.coef",
    "init_kl_coef": "kl.coef",
    "beta": "kl.coef",
    "kl_target": "kl.target",
    "kl_horizon": "kl.horizon",
    "kl_estimator": "kl.estimator",
    "learning_rate": "optim.lr",
    "actor_lr": "optim.lr",
    "actor_learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup_iterations",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "max_norm": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm",
    "per_device_train_batch_size": "optim.microbatch_size",
    "micro_batch_size": "optim.microbatch_size",
    "micro_train_batch_size": "optim.microbatch_size",
    "packing_samples": "optim.packing",
    "critic_lr": "critic.lr",
    "critic_learning_rate": "critic.lr",
    "value_learning_rate": "critic.lr",
    "ema_beta": "ema.beta",
    "eval_steps": "eval.interval",
    "eval_freq": "eval.interval",
    "val_interval": "eval.interval",
    "val_episodes": "eval.states_per_task",
    "n_eval_episodes": "eval.states_per_task",
    "eval_temperature": "eval.temperature",
    "save_freq": "checkpoint.interval",
    "save_steps": "checkpoint.interval",
    "save_interval": "checkpoint.interval",
    "max_ckpt_num": "checkpoint.keep",
    "max_ckpt_mem": "checkpoint.max_total_gib",
    "save_total_limit": "checkpoint.keep",
    "best_return_ema_alpha": "checkpoint.best_return_ema_alpha",
    "best_return_min_delta": "checkpoint.best_return_min_delta",
    "best_return_patience": "checkpoint.best_return_patience",
    "wandb": "logging.wandb",
    "use_wandb": "logging.wandb",
    "wandb_project": "logging.wandb_project",
    "wandb_org": "logging.wandb_entity",
    "wandb_entity": "logging.wandb_entity",
    "wandb_group": "logging.wandb_group",
    "tensorboard": "logging.tensorboard",
    "use_tensorboard": "logging.tensorboard",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_enforce_eager": "vllm.enforce_eager",
    "vllm_sync_backend": "vllm.sync_backend",
    "enable_prefix_caching": "vllm.prefix_caching",
    "gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_max_model_length": "vllm.max_model_len",
    "actor_num_gpus_per_node": "distributed.learners_per_node",
    "sharding_strategy": "distributed.sharding",
    "offload": "distributed.cpu_offload",
    "adam_offload": "distributed.cpu_offload",
    "async_mode": "distributed.asynchronous",
    **hydra_aliases.ALIASES,
}
"""Names that set the option as it is written."""

_EPOCHS = "the passes over the decisions of an iteration; the length of training is --run.iterations"

MEANINGS: dict[str, str] = {
    "epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_iterations": _EPOCHS,
    "num_episodes": "the length of training; an iteration has --rollout.num_groups x --rollout.group_size episodes",
}
"""Meaning of the option that a name sets, if the name means something else in other systems: printed as a note."""

SINGLE_VALUE = frozenset({"task_id"})
"""Names of a list option that take one value."""

SOURCES = frozenset({"config", "config_path", "config_file", "config_name"})
"""Flags by which other systems name the configuration file, or the preset."""

TRANSLATED: dict[str, Translation] = {
    "cliprange": to.CLIP,
    "clip_range": to.CLIP,
    "clip_ratio": to.CLIP,
    "eps_clip": to.CLIP,
    "epsilon": to.CLIP,
    "gpu": to.GPU,
    "gpu_id": to.GPU,
    "cuda": to.GPU,
    "task": to.TASK,
    "secondary_gpu_id": to.HEADS_GPU,
    "gpus": to.NUM_GPUS,
    "num_gpus": to.NUM_GPUS,
    "num_processes": to.NUM_GPUS,
    "nproc_per_node": to.NUM_GPUS,
    "n_gpus_per_node": to.NUM_GPUS,
    "nnodes": to.NUM_NODES,
    "num_nodes": to.NUM_NODES,
    "bf16": to.BF16,
    "quantization": to.QUANTIZATION,
    "load_in_4bit": to.FOUR_BITS,
    "load_in_8bit": to.EIGHT_BITS,
    "use_flash_attention": to.FLASH,
    "flash_attn": to.FLASH,
    "output_dir": to.RUN_FOLDER,
    "save_path": to.RUN_FOLDER,
    "ckpt_path": to.RUN_FOLDER,
    "report_to": to.TRACKER,
    "wandb_mode": to.WANDB_MODE,
    "scale_rewards": to.SCALE_REWARDS,
    "top_k": to.TOP_K,
    "local_rollout_batch_size": to.ROLLOUT_SIZE,
    "loss_type": to.LOSS_TYPE,
    "normalize_advantage": to.switch("algorithm.normalize_advantages", "batch", "none"),
    "use_kl_loss": to.switch("kl.place", "loss", "reward"),
    "use_cpg_loss": to.if_true("algorithm.policy_loss", "cpg"),
    "adam_beta1": to.BETA_1,
    "adam_beta2": to.BETA_2,
    "num_tasks_per_suite": to.FIRST_TASKS,
    "disable_training_ckpt": to.if_true("checkpoint.interval", 0),
    "freeze_vla_backbone": to.switch("policy.freeze", "backbone", "none"),
    "load_l1_action_head": to.if_true("policy.actions", "hybrid"),
    "use_tokenized_actions": to.TOKENIZED,
    "use_l1_regression": to.switch("policy.actions", "l1", "tokens"),
    "deterministic_eval": to.GREEDY,
    "high_entropy_mask": to.ENTROPY_MASK,
    "optim": to.only(("adamw", "adamw_torch", "adamw_torch_fused"), "AdamW is the optimizer; leave it out"),
    **hydra_aliases.TRANSLATED,
}
"""Names that set options to a translated value, or several options at once."""

EPISODES = (
    "an iteration has --rollout.num_groups x --rollout.group_size episodes, each of which runs to its end, or with PPO "
    "--rollout.num_steps steps in each of --env.num_envs environments"
)
PASSES = "a minibatch is split into passes of --optim.microbatch_size decisions, whose gradients add up"

NEEDLESS: dict[str, str] = {
    "world_size": "it follows from --distributed.learners_per_node",
    "gradient_accumulation_steps": PASSES,
    "grad_accum": PASSES,
    "grad_accum_steps": PASSES,
    "stop_token_check": "a decision has a fixed number of action tokens, and no stop token",
    "buffer_cpu_offload": "episodes are kept in the memory of the host, and only a microbatch is on the GPU",
    "dataloader_pin_memory": "memory that is copied to a GPU is always pinned",
    "save_hf_ckpt": "every checkpoint is a folder in the original layout of its model",
    "consumed_samples": "the counters are in the checkpoint, and --resume RUN reads them",
    "logging_steps": "every iteration is one row of metrics.jsonl",
    "log_interval": "every iteration is one row of metrics.jsonl",
    "log_freq": "every iteration is one row of metrics.jsonl",
    "logging_strategy": "every iteration is one row of metrics.jsonl",
    "logging_dir": "metrics, TensorBoard files and logs are in the run's own folder (--run.root, --run.name)",
    "tensorboard_log": "TensorBoard files are in the run's own folder (--run.root, --run.name)",
    "verbose": "every iteration is one line",
    "obs_mode": "an observation has images, the robot's state and the instruction; --env.cameras and "
    "--policy.use_proprio choose what the policy reads",
    "use_local": "--policy.path is a folder if there is one of that name, else a hub id",
    "proprio_dim": "the checkpoint knows its size",
    "freeze_l1_action_head": "`vlarl train` never trains that head",
    "finetuned_on_discrete_actions": "--policy.actions chooses what acts; a head that the checkpoint lacks is refused",
    "per_device_eval_batch_size": "evaluations use the environments of training: --env.num_envs",
    "eval_on_start": "the policy is evaluated before the first iteration and after the last one",
    "mask_truncated_completions": "steps that were not executed are masked",
    "remove_unused_columns": "every column of a prompt's row is passed to rewards by its name",
    **dict.fromkeys(
        ("num_workers", "dataloader_num_workers"),
        "RL loads no dataset; --env.num_envs is the number of environments that run in parallel",
    ),
    "trust_remote_code": "no code of a checkpoint is run",
    "tf32": "matrix products run in the precision that --policy.dtype says",
    "progress_bar": "a terminal always shows one",
    **hydra_aliases.NEEDLESS,
}
"""Names that are not needed, and why."""

GENERATION = (
    "set --rollout.temperature, and for texts --rollout.top_p, --rollout.top_k, --rollout.max_tokens, "
    "--rollout.min_tokens, --rollout.stop and --rollout.stop_token_ids"
)
BATCHES = (
    "the episodes of an update are split into --optim.minibatches optimizer steps; one forward pass has "
    "--optim.microbatch_size decisions"
)
LENGTH = "set the length of training with --run.iterations, or with --run.total_env_steps"
FEW_GPUS = "set --distributed.backend ray and --distributed.learners_per_node; docs/distributed.md shows how"
LATER = "after training: `vlarl merge ADAPTER OUT` makes a checkpoint of an adapter and its base"
ENVIRONMENT = "set --env.suite, such as libero_spatial; a Gymnasium environment is --env.suite gym with --gym.env ID"
HUB = "after training, with a separate command: `vlarl push RUN ORG/NAME`"

ELSEWHERE: dict[str, str] = {
    "merge_model": LATER,
    "merge_dtype": f"{LATER}; its --dtype is the precision of the weights",
    "push_to_hub": HUB,
    "hub_model_id": HUB,
    "eval_run_dir": "separate evaluations are `vlarl eval CHECKPOINT --out DIR`",
    "data_root_dir": "RL reads no dataset; `vlarl finetune --demos.path DIR` imitates RLDS demonstrations, and "
    "--env.assets is the folder of LIBERO's meshes",
    "dataset_path": "RL reads no dataset; `vlarl finetune --demos.path DIR` imitates RLDS demonstrations",
    "dataset": "prompts are --env.suite prompts with --prompts.path; `vlarl finetune --demos.path DIR` imitates RLDS "
    "demonstrations",
    "dataset_name": "prompts are --env.suite prompts with --prompts.path (.jsonl, .parquet, a saved dataset); a "
    "robot's tasks are --env.suite and --env.task_ids",
    "static_mixture": "to train on some tasks of the suite more often, set --curriculum.mode weighted and "
    "--curriculum.weights, one for each task; `vlarl finetune --demos.mixture` samples several datasets",
    "process_reward_model": "set --reward.source model with --reward.model and --reward.scoring steps, and an "
    "algorithm that credits single decisions (ppo, reinforce, reinforce_pp); serve a model that is neither a "
    "classifier, CLIP nor a language model behind --reward.url with --reward.source remote",
    "reward_model": "set --reward.source model and --reward.model PATH",
    "reward_model_name_or_path": "set --reward.source model and --reward.model PATH",
    "reward_funcs": "set --reward.source to a reward or to module:function, or --reward.source combined and "
    "--reward.sources for several",
    "reward_fn_label_map": "labels are part of --reward.recipe, such as 'libero_spatial -> sparse=1 rules=0.5'",
    "num_trials_per_task": "set --rollout.num_groups for training, and --eval.states_per_task for evaluations",
    "episodes": f"{LENGTH}; evaluations have --eval.states_per_task episodes per task",
    "total_episodes": f"{LENGTH}; {EPISODES}",
    "num_training_steps": LENGTH,
    "max_steps": f"{LENGTH}; --env.max_steps is the time limit of an episode",
    "steps": LENGTH,
    "num_train_epochs": LENGTH,
    "batch_size": BATCHES,
    "mini_batch_size": BATCHES,
    "local_mini_batch_size": BATCHES,
    "train_batch_size": f"{BATCHES}; --optim.rollouts_per_update gathers several iterations for one update",
    "generation_batch_size": EPISODES,
    "steps_per_generation": BATCHES,
    "traj_mini_batch_size": BATCHES,
    "traj_split_num": PASSES,
    "buffer_limit": "set --optim.rollouts_per_update, the number of iterations that one update is trained on",
    "generate_kwargs": GENERATION,
    "generation_kwargs": GENERATION,
    "min_p": "tokens below a fraction of the likeliest one's probability are not left out; --rollout.top_p and "
    "--rollout.top_k limit what is sampled",
    "repetition_penalty": "log-probs are those of the model's own distribution; --rollout.top_p and --rollout.top_k "
    "limit what is sampled",
    "separate_rollout_training": FEW_GPUS,
    "use_multi_gpu": FEW_GPUS,
    "deepspeed": FEW_GPUS,
    "fsdp": "set --distributed.backend ray and --distributed.sharding full",
    "zero_stage": "set --distributed.backend ray and --distributed.sharding full",
    "fp16": "use bfloat16: --policy.dtype bfloat16",
    "num_generations_eval": "an evaluation runs one episode from each initial state: --eval.states_per_task",
    "eval_strategy": "set --eval.interval, in iterations",
    "save_strategy": "set --checkpoint.interval, in iterations",
    "warmup_ratio": "set --optim.warmup_iterations, a number of updates",
    "use_vllm": "set --vllm.num_engines 1 and --distributed.backend ray; docs/engines.md says for which policies",
    "vllm_mode": "set --vllm.num_engines 1 and --distributed.backend ray; --distributed.colocate shares the GPUs",
    "sync_ref_model": "the reference of --kl.coef is always the policy that training started from",
    "resume_from_checkpoint": "write --resume RUN, with the name or folder of the run",
    "debug": "there is no such mode: --dry-run prints the resolved configuration, and a run writes logs/train.log",
    "load": "write --resume RUN to continue a run, or --policy.path CHECKPOINT to start from one",
    "policy_kwargs": "the policy is the checkpoint's own; section policy has the options",
    "use_sde": "exploration is sampling from the action tokens: set --rollout.temperature",
    **dict.fromkeys(("env", "env_name", "env_id"), ENVIRONMENT),
    **hydra_aliases.ELSEWHERE,
}
"""Names without an option of that meaning: what to do instead."""

FOREIGN_PREFIXES = ("actor_rollout_ref.", "trainer.", "data.", "reward_model.", "runner.", "actor.", "cluster.")
FLAG = re.compile(r"--(\w+\.\w+)")
OF_TRAIN = "an option of `vlarl train` only"
LEROBOT_PREFIXES = ("dataset.", "optimizer.", "scheduler.", "peft.", "wandb.", "robot.", "teleop.", "job.")
PAGE = "an option of another system; docs/coming-from.md has a table of what replaces what"


def plain_name(name: str) -> str:
    """A name without dashes in front, with underscores, in lower case."""
    return name.lstrip("-+").replace("-", "_").lower()


def alias_of(name: str, known: frozenset[str]) -> str | None:
    """The option that a name of another system sets, among those that are known."""
    path = finetune_aliases.ALIASES.get(name)
    if path is None or path not in known:
        path = None if _has_finetune_advice(name, known) else ALIASES.get(name)
    return path if path in known else None


def translation_of(name: str, known: frozenset[str]) -> Translation | None:
    """How a name of another system is translated, if all options that it sets are known."""
    found = TRANSLATED.get(name)
    return found if found is not None and known.issuperset(found.options) else None


def advice_for(name: str, known: frozenset[str], prefix: str = "") -> str | None:
    """The advice for a name of another system: the option that it is here, or what to do instead."""
    if path := RENAMED.get(name):
        return f"it is now called {prefix}{path}"
    if path := alias_of(name, known):
        return f"here it is {prefix}{path}" + (f", {MEANINGS[name]}" if name in MEANINGS else "")
    if (found := translation_of(name, known)) and found.options:
        return "here it is " + " and ".join(prefix + path for path in found.options)
    if _has_finetune_advice(name, known):
        return finetune_aliases.ELSEWHERE[name]
    if sentence := ELSEWHERE.get(name):
        return sentence if names_only(sentence, known) else OF_TRAIN
    if sentence := NEEDLESS.get(name):
        return f"not needed: {sentence}" if names_only(sentence, known) else OF_TRAIN
    if path := ALIASES.get(name) or finetune_aliases.ALIASES.get(name):
        command = "finetune" if path.startswith("demos.") else "train"
        return f"an option of `vlarl {command}`, where it is {prefix}{path}"
    if name in TRANSLATED and TRANSLATED[name].options:
        return "an option of `vlarl train`, where it is " + " and ".join(TRANSLATED[name].options)
    return PAGE if name.startswith((*FOREIGN_PREFIXES, *LEROBOT_PREFIXES)) else None


def names_only(sentence: str, known: frozenset[str]) -> bool:
    """Whether every option that a sentence names belongs to the command, or is named for `vlarl finetune`."""
    named = FLAG.findall(re.sub(r"`[^`]*`", "", sentence))
    return known.issuperset(named)


def _has_finetune_advice(name: str, known: frozenset[str]) -> bool:
    return name in finetune_aliases.ELSEWHERE and "demos.path" in known
