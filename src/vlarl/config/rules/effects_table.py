"""When each option is read: one table for `vlarl train`, one for `vlarl finetune`.

`ALWAYS_…` names the options that every run reads. A `Condition` names options that are read only if something else is
set, and the message that says what: `lora.rank has no effect without lora.enabled true`. An option may have several
conditions; all of them must hold. An option for something that holds anyway, such as env.lockstep on the tabletop,
counts as "always" read: it is not refused. A test fails for an option of the schemas that is in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Generic, TypeVar

from vlarl.config.derive import policy_loss_of
from vlarl.config.finetune import DemoConfig, FinetuneConfig
from vlarl.config.known import EXPERTS, GROUP_METHODS, GYM, PROMPTS, is_prompts
from vlarl.config.rules.reward import NAMED_BY, READ_BY, used_kinds, used_rewards
from vlarl.config.run_checkpoints import ADAPTER, is_flow
from vlarl.config.schema import Config, FlowConfig, TextConfig
from vlarl.config.suites import suite_facts
from vlarl.config.training_data import local_folder

AnyConfig = TypeVar("AnyConfig", Config, FinetuneConfig)

OUTCOME_METHODS = (*GROUP_METHODS, "reinforce_baseline")  # discount the outcome of an episode
STEP_METHODS = ("ppo", "reinforce", "reinforce_pp", "group_norm")  # discount from step to step
STD_METHODS = ("grpo", "group_norm", "cpgd")


@dataclass(frozen=True)
class Condition(Generic[AnyConfig]):
    """Options that are read only if `holds` is true."""

    options: tuple[str, ...]  # section.field, or a pattern such as vllm.*
    switches: tuple[str, ...]  # the options that `holds` reads
    holds: Callable[[AnyConfig], bool]
    otherwise: str  # the rest of the message after "has no effect", if it does not hold

    def concerns(self, path: str) -> bool:
        """Whether an option is one of `options` and not itself a switch."""
        return path not in self.switches and any(fnmatchcase(path, option) for option in self.options)


def _paths(by_section: dict[str, str]) -> frozenset[str]:
    """section.field for each name."""
    return frozenset(f"{section}.{name}" for section, names in by_section.items() for name in names.split())


FRESH_ADAPTER = ("lora.rank", "lora.alpha", "lora.dropout", "lora.target_modules")
INSIDE_TRAINER = (
    "with environments inside the trainer's process, such as the tabletop; simulator processes (libero_*, metaworld_*, "
    "gym) and distributed.backend ray read it"
)
OF_ROBOTS = (
    "policy.decoder",
    "policy.unnorm_key",
    "policy.actions",
    "policy.chunk_length",
    "policy.num_images",
    "policy.use_proprio",
    "policy.resize",
    "policy.center_crop",
    "policy.heads_device",
    "algorithm.action_reconstruction_coef",
)
OF_FLOWS = ("policy.train_backbone", *(f"policy.{name}" for name in FlowConfig.model_fields))
CRITIC = (
    "critic.*",
    "algorithm.gae_level",
    "algorithm.gae_lambda",
    "algorithm.vf_coef",
    "algorithm.cliprange_value",
    "algorithm.value_init_steps",
    "algorithm.critic_hidden",
)


def _in_processes(config: Config) -> bool:
    """Whether each environment is its own process; another rule refuses unknown suites."""
    facts = suite_facts(config.env, config.gym)
    return facts is None or facts.in_processes


def _is_mujoco(config: Config) -> bool:
    return config.env.suite.startswith(("libero_", "metaworld_"))


def _renders_in_processes(config: Config) -> bool:
    return _is_mujoco(config) or (config.env.suite == GYM and not config.gym.batched)


def _on_gpus(config: AnyConfig) -> bool:
    """Whether a GPU may be used: `auto` is not known before the run."""
    return config.run.device != "cpu"


def _may_record_updates(c: Config) -> bool:
    ranks = c.distributed
    alone = ranks.backend == "local" or (ranks.sharding == "none" and sum(ranks.learners_per_node) == 1)
    return alone and not is_prompts(c.env.suite) and is_flow(c.policy.path) is not True and c.policy.quantize is None


def _weights_importance(config: Config) -> bool:
    """Whether tokens are weighted, as in `training/importance.py`."""
    algorithm = config.algorithm
    by_default = config.distributed.asynchronous and algorithm.old_logprobs == "learner"
    return algorithm.importance == "truncated" or (algorithm.importance == "auto" and by_default)


def _is_builtin(path: str) -> bool:
    return path.startswith(("builtin:", "init:"))


def _is_adapter(path: str) -> bool:
    """Whether a policy is an adapter on this machine; on the hub, that is not known before the download."""
    folder = local_folder(path)
    return folder is not None and (folder / ADAPTER).is_file()


def _may_be_flow(path: str) -> bool:
    """Whether a policy may be a flow policy: for some, that is not known before a download."""
    return is_flow(path) is not False


def _is_whole(path: str) -> bool:
    """Whether a policy is a whole checkpoint, as far as that is known before a download."""
    return _is_builtin(path) or (local_folder(path) is not None and not _is_adapter(path))


def _of_reward(option: str, readers: tuple[str, ...]) -> Condition[Config]:
    return Condition(
        (f"reward.{option}",),
        ("reward.source",) if option == "sources" else ("reward.source", "reward.sources"),
        lambda c: not used_kinds(c.reward).isdisjoint(readers),
        f"without reward.source {' or '.join(readers)}",
    )


def _of_one_reward(option: str, name: str) -> Condition[Config]:
    return Condition(
        (f"reward.{option}",),
        ("reward.source", "reward.sources"),
        lambda c: name in used_rewards(c.reward),
        f"without reward.source {name}",
    )


RANKS: tuple[Condition[Any], ...] = (
    Condition(
        ("distributed.*",),
        ("distributed.backend",),
        lambda c: c.distributed.backend == "ray",
        "without distributed.backend ray",
    ),
    Condition(
        ("distributed.cpu_offload", "distributed.compute_dtype"),
        ("distributed.sharding",),
        lambda c: c.distributed.sharding != "none",
        "without distributed.sharding full or hybrid",
    ),
    Condition(
        ("distributed.shard_group_size",),
        ("distributed.sharding",),
        lambda c: c.distributed.sharding == "hybrid",
        "without distributed.sharding hybrid",
    ),
    Condition(("distributed.learner_gpus",), ("run.device",), _on_gpus, "without a GPU (run.device)"),
    Condition(
        ("distributed.dashboard",),
        ("distributed.address",),
        lambda c: c.distributed.address is None,
        "with distributed.address: `ray start` has started its dashboard or not",
    ),
)

MODEL: tuple[Condition[Any], ...] = (
    Condition(
        ("policy.base",),
        ("policy.path",),
        lambda c: not _is_builtin(c.policy.path),
        "without an adapter as policy.path",
    ),
    Condition(
        OF_FLOWS,
        ("policy.path",),
        lambda c: _may_be_flow(c.policy.path),
        "without a flow policy such as SmolVLA as policy.path",
    ),
    Condition(
        FRESH_ADAPTER,
        ("policy.path",),
        lambda c: not _is_adapter(c.policy.path),
        "if policy.path is an adapter, whose own rank, scale and layers are kept",
    ),
    Condition(
        FRESH_ADAPTER,
        ("lora.enabled", "lora.adapter"),
        lambda c: c.lora.enabled or c.lora.adapter is not None,
        "without lora.enabled true",
    ),
    Condition(
        FRESH_ADAPTER,
        ("lora.adapter",),
        lambda c: c.lora.adapter is None,
        "with lora.adapter, whose rank, scale and layers are kept",
    ),
)
"""Conditions of the sections `policy` and `lora` in both commands."""

TRAIN: tuple[Condition[Config], ...] = (
    # env, gym
    Condition(
        ("env.timeout_s",),
        ("env.suite", "gym.batched", "distributed.backend"),
        lambda c: _in_processes(c) or c.distributed.backend == "ray",
        INSIDE_TRAINER,
    ),
    Condition(
        ("env.retries",),  # a batched Gymnasium environment fails by slots, whose episodes are retried
        ("env.suite", "distributed.backend"),
        lambda c: _in_processes(c) or c.env.suite in (GYM, PROMPTS) or c.distributed.backend == "ray",
        INSIDE_TRAINER,
    ),
    Condition(
        ("env.cameras",), ("env.suite",), lambda c: c.env.suite != GYM, "with env.suite gym, whose views are gym.images"
    ),
    Condition(
        ("env.render", "env.render_gpu"),
        ("env.suite", "gym.batched"),
        _renders_in_processes,
        "without a suite whose simulators render in their own processes (libero_*, metaworld_*, gym)",
    ),
    Condition(
        ("env.render_gpu",),
        ("env.render",),
        lambda c: c.env.render in ("auto", "egl"),
        "without env.render egl",
    ),
    Condition(("env.exact_pixels",), ("env.suite",), _is_mujoco, "without a suite of MuJoCo (libero_*, metaworld_*)"),
    Condition(
        ("env.assets",), ("env.suite",), lambda c: c.env.suite.startswith("libero_"), "without a suite of LIBERO"
    ),
    Condition(
        ("checkpoint.merge",),
        ("lora.enabled", "lora.adapter", "policy.path"),
        lambda c: c.lora.enabled or c.lora.adapter is not None or not _is_whole(c.policy.path),
        "without adapters (lora.enabled): the final checkpoint is whole already",
    ),
    Condition(
        ("env.suite_tasks",), ("env.suites",), lambda c: bool(c.env.suites), "without several suites (env.suites)"
    ),
    Condition(("gym.*",), ("env.suite",), lambda c: c.env.suite == GYM, "without env.suite gym"),
    Condition(("prompts.*",), ("env.suite",), lambda c: c.env.suite == PROMPTS, "without env.suite prompts"),
    Condition(
        ("prompts.eval_fraction", "prompts.split_seed"),
        ("prompts.eval_path",),
        lambda c: not c.prompts.eval_path,
        "with prompts.eval_path, which is evaluated on as a whole",
    ),
    Condition(
        ("env.cameras", "env.image_size", "env.max_steps"),
        ("env.suite",),
        lambda c: not is_prompts(c.env.suite),
        "with prompts, which are one step with the images of their own rows",
    ),
    Condition(
        ("rollout.top_p", "rollout.top_k", *(f"rollout.{name}" for name in TextConfig.model_fields)),
        ("env.suite",),
        lambda c: is_prompts(c.env.suite),
        "without a suite of prompts (prompts, prompts_*), whose policies write texts",
    ),
    # policy, lora
    Condition(
        OF_ROBOTS,
        ("env.suite",),
        lambda c: not is_prompts(c.env.suite),
        "with prompts, whose policies write texts",
    ),
    Condition(
        ("policy.heads_device",),
        ("algorithm.name", "policy.actions"),
        lambda c: c.algorithm.name == "ppo" or c.policy.actions != "tokens",
        "without a critic (algorithm.name ppo) or a regression head (policy.actions hybrid)",
    ),
    Condition(
        ("policy.flow_level",),
        ("policy.flow_noise",),
        lambda c: c.policy.flow_noise != "noise",
        "with policy.flow_noise noise, whose std is learned between the bounds of policy.flow_std",
    ),
    Condition(
        ("policy.flow_std",),
        ("policy.flow_noise",),
        lambda c: c.policy.flow_noise == "noise",
        "without policy.flow_noise noise",
    ),
    Condition(
        ("policy.flow_critic",),
        ("algorithm.name",),
        lambda c: c.algorithm.name == "ppo",
        "without a critic (algorithm.name ppo)",
    ),
    *MODEL,
    # rollout, curriculum
    Condition(
        ("rollout.batch_size", "rollout.cuda_graphs", "distributed.torch_num_engines"),
        ("vllm.num_engines",),
        lambda c: c.vllm.num_engines == 0,
        "with vLLM engines (vllm.num_engines)",
    ),
    Condition(
        ("rollout.oversample", "rollout.refill", "rollout.accuracy_bounds"),
        ("algorithm.name",),
        lambda c: c.algorithm.name in GROUP_METHODS,
        f"without a method that compares groups (algorithm.name {', '.join(GROUP_METHODS)})",
    ),
    Condition(
        ("rollout.num_groups",),
        ("rollout.num_steps",),
        lambda c: c.rollout.num_steps is None,
        "with rollout.num_steps: an iteration has that many steps in each of env.num_envs environments",
    ),
    Condition(
        ("rollout.save_filter", "rollout.save_every"),
        ("rollout.save",),
        lambda c: c.rollout.save != "none",
        "without rollout.save rlds or lerobot",
    ),
    Condition(
        ("rollout.save_fps",),
        ("rollout.save",),
        lambda c: c.rollout.save == "lerobot",
        "without rollout.save lerobot",
    ),
    Condition(
        ("rollout.videos",),
        ("env.suite",),
        lambda c: not is_prompts(c.env.suite),
        "with prompts, whose responses are kept as samples (logging.samples)",
    ),
    Condition(("rollout.max_refills",), ("rollout.refill",), lambda c: c.rollout.refill, "without rollout.refill true"),
    Condition(
        ("curriculum.weights",),
        ("curriculum.mode",),
        lambda c: c.curriculum.mode != "uniform",
        "without curriculum.mode weighted or adaptive",
    ),
    Condition(
        ("curriculum.tau", "curriculum.floor", "curriculum.skip_solved_above", "curriculum.start_from"),
        ("curriculum.mode",),
        lambda c: c.curriculum.mode == "adaptive",
        "without curriculum.mode adaptive",
    ),
    Condition(
        ("curriculum.ema_alpha",),
        ("curriculum.mode",),
        lambda c: c.curriculum.mode == "adaptive",
        "on which tasks are trained without curriculum.mode adaptive",
    ),
    # reward
    *(_of_reward(option, readers) for option, readers in READ_BY.items()),
    *(_of_one_reward(option, name) for option, name in NAMED_BY.items()),
    Condition(
        ("reward.idle_tolerance",),
        ("reward.idle_penalty",),
        lambda c: c.reward.idle_penalty > 0,
        "without reward.idle_penalty above 0",
    ),
    Condition(
        ("reward.length_limit",),
        ("reward.length_penalty",),
        lambda c: c.reward.length_penalty > 0,
        "without reward.length_penalty above 0",
    ),
    # algorithm, critic, kl
    Condition(CRITIC, ("algorithm.name",), lambda c: c.algorithm.name == "ppo", "without algorithm.name ppo"),
    Condition(
        ("algorithm.dual_clip",),
        ("algorithm.name", "algorithm.policy_loss"),
        lambda c: policy_loss_of(c.algorithm) != "cpg",
        "with algorithm.name cpgd or algorithm.policy_loss cpg, whose gradient has no ratio to bound",
    ),
    Condition(
        ("algorithm.policy_drift_coef",),
        ("algorithm.name", "algorithm.policy_loss"),
        lambda c: policy_loss_of(c.algorithm) == "cpg",
        "without algorithm.name cpgd or algorithm.policy_loss cpg",
    ),
    Condition(
        ("algorithm.entropy_coef",),
        ("policy.path", "policy.flow_noise"),
        lambda c: is_flow(c.policy.path) is not True or c.policy.flow_noise == "noise",
        "on a flow policy without policy.flow_noise noise, whose std is learned; those of sde and cps are constant",
    ),
    Condition(
        ("algorithm.normalize_std",),
        ("algorithm.name",),
        lambda c: c.algorithm.name in STD_METHODS,
        f"without algorithm.name {' or '.join(STD_METHODS)}",
    ),
    Condition(
        ("algorithm.verifier_gamma",),
        ("algorithm.name",),
        lambda c: c.algorithm.name in OUTCOME_METHODS,
        "with an algorithm that discounts from step to step, by algorithm.gamma",
    ),
    Condition(
        ("algorithm.gamma",),
        ("algorithm.name",),
        lambda c: c.algorithm.name in STEP_METHODS,
        "with an algorithm that discounts the outcome of an episode, by algorithm.verifier_gamma",
    ),
    Condition(
        ("algorithm.importance_cap",),
        ("algorithm.importance", "algorithm.old_logprobs", "distributed.asynchronous"),
        _weights_importance,
        "without algorithm.importance truncated or distributed.asynchronous true",
    ),
    Condition(
        ("algorithm.aux_loss_coef", "optim.packing", "optim.microbatch_tokens"),
        ("env.suite",),
        lambda c: is_prompts(c.env.suite),
        "on the models of robots, without a suite of prompts in env.suite",
    ),
    Condition(
        ("run.memory_gb",),
        ("run.device",),
        _on_gpus,
        "on a CPU (run.device), whose memory is not limited",
    ),
    Condition(
        ("run.memory_gb",),
        ("distributed.backend",),
        lambda c: c.distributed.backend == "local",
        "with distributed.backend ray, whose learners take optim.microbatch_size as it is",
    ),
    Condition(
        ("optim.microbatch_size",),
        ("optim.microbatch_tokens",),
        lambda c: c.optim.microbatch_tokens is None,
        "with optim.microbatch_tokens, which limits a pass by its tokens",
    ),
    Condition(
        ("optim.cuda_graphs",),
        ("env.suite", "policy.path", "policy.quantize", "distributed.sharding", "distributed.learners_per_node"),
        _may_record_updates,
        "on updates that are not recorded: those of texts, flow policies, quantised models and several learners",
    ),
    Condition(("kl.*",), ("kl.coef",), lambda c: c.kl.coef > 0, "without kl.coef above 0"),
    Condition(("kl.horizon",), ("kl.target",), lambda c: c.kl.target is not None, "without kl.target"),
    # ptx
    Condition(("ptx.*",), ("ptx.path",), lambda c: c.ptx.path is not None, "without ptx.path"),
    Condition(
        ("ptx.prompt_column", "ptx.response_column"),
        ("env.suite",),
        lambda c: is_prompts(c.env.suite),
        "without a suite of prompts",
    ),
    Condition(
        ("ptx.episodes_per_task",),
        ("ptx.path",),
        lambda c: c.ptx.path == EXPERTS,
        "without ptx.path experts",
    ),
    # eval, checkpoint, logging
    Condition(
        ("eval.videos",),
        ("env.suite",),
        lambda c: not is_prompts(c.env.suite),
        "with prompts, whose responses are kept as samples (logging.samples)",
    ),
    Condition(
        ("logging.samples",),
        ("env.suite",),
        lambda c: is_prompts(c.env.suite),
        "without a suite of prompts (env.suite prompts, prompts_arithmetic, prompts_shapes)",
    ),
    Condition(
        ("eval.interval",),
        ("eval.interval_steps",),
        lambda c: c.eval.interval_steps is None,
        "with eval.interval_steps, which counts environment steps instead of iterations",
    ),
    Condition(
        ("checkpoint.interval",),
        ("checkpoint.interval_steps",),
        lambda c: c.checkpoint.interval_steps is None,
        "with checkpoint.interval_steps, which counts environment steps instead of iterations",
    ),
    Condition(("eval.use_ema",), ("ema.beta",), lambda c: c.ema.beta is not None, "without ema.beta"),
    Condition(
        ("checkpoint.best_return_*",),
        ("checkpoint.best_return",),
        lambda c: c.checkpoint.best_return,
        "without checkpoint.best_return true",
    ),
    Condition(("logging.wandb_*",), ("logging.wandb",), lambda c: c.logging.wandb, "without logging.wandb true"),
    # vllm, distributed
    Condition(
        ("vllm.*",), ("vllm.num_engines",), lambda c: c.vllm.num_engines > 0, "without vLLM engines (vllm.num_engines)"
    ),
    Condition(
        ("vllm.model_class",),
        ("env.suite",),
        lambda c: not is_prompts(c.env.suite),
        "with prompts, whose models vLLM runs by its own classes",
    ),
    Condition(
        ("vllm.num_engines",),
        ("distributed.backend",),
        lambda c: c.distributed.backend == "ray",
        "without distributed.backend ray",
    ),
    *RANKS,
    Condition(
        ("distributed.num_env_workers",),
        ("env.suite", "gym.batched"),
        lambda c: not _in_processes(c),
        "with a suite whose simulators are one worker each; env.num_envs is their count",
    ),
    Condition(
        ("distributed.*_gpus", "vllm.gpu_memory_utilization", "vllm.sleep"),
        ("run.device",),
        _on_gpus,
        "without a GPU (run.device)",
    ),
    Condition(
        ("vllm.sleep",),
        ("distributed.colocate",),
        lambda c: c.distributed.colocate,
        "without distributed.colocate true: engines on GPUs of their own take no memory from the learners",
    ),
    Condition(
        ("vllm.sleep",),
        ("distributed.asynchronous",),
        lambda c: not c.distributed.asynchronous,
        "with distributed.asynchronous true, where engines act during updates",
    ),
    Condition(
        ("distributed.reward_gpus",),
        ("distributed.num_reward_workers",),
        lambda c: c.distributed.num_reward_workers > 0,
        "without distributed.num_reward_workers above 0",
    ),
    Condition(
        ("distributed.max_staleness",),
        ("distributed.asynchronous",),
        lambda c: c.distributed.asynchronous,
        "without distributed.asynchronous true",
    ),
    Condition(
        ("distributed.sync_checksum",),
        ("vllm.sync_backend",),
        lambda c: c.vllm.sync_backend == "object_store",
        "without vllm.sync_backend object_store",
    ),
    Condition(
        ("distributed.object_store_mb",),
        ("distributed.address",),
        lambda c: c.distributed.address is None,
        "with distributed.address: a running cluster has its own object store",
    ),
)

ALWAYS_TRAIN = _paths(
    {
        "run": "name root seed device num_threads iterations total_env_steps",
        "env": "suite suites task_ids num_envs protocol lockstep",
        "policy": "path dtype quantize attention gradient_checkpointing freeze",
        "lora": "enabled adapter",
        "rollout": "group_size num_steps temperature save",
        "curriculum": "mode persist",
        "reward": "source models urls retries fallback max_failure_rate",
        "algorithm": (
            "name policy_loss epochs clip_low clip_high ratio_level aggregate entropy_top_fraction "
            "max_approx_kl old_logprobs importance normalize_advantages "
            "advantage_clamp"
        ),
        "kl": "coef",
        "ptx": "path",
        "optim": (
            "lr schedule warmup_iterations weight_decay betas max_grad_norm minibatches "
            "rollouts_per_update sort_by_length"
        ),
        "ema": "beta",
        "eval": "interval_steps states_per_task temperature",
        "checkpoint": "interval_steps keep max_total_gib best_return",
        "logging": "tensorboard wandb report trace",
        "distributed": "backend",
    }
)


RECORDED = (
    "demos.mapping",
    "demos.mixture",
    "demos.mixture_weights",
    "demos.split",
    "demos.views",
    "demos.missing_views",
    "demos.noops",
    "demos.unlabeled",
    "demos.damaged",
)


DEMONSTRATIONS = tuple(f"demos.{name}" for name in DemoConfig.model_fields if name != "holdout")


def _trains_policy(config: FinetuneConfig) -> bool:
    return config.reward.labels == "none"


def _reads_rows(config: FinetuneConfig) -> bool:
    return config.reward.labels in ("pairs", "steps")


def _reads_episodes(config: FinetuneConfig) -> bool:
    return config.reward.labels == "episodes"


def _uses_experts(config: FinetuneConfig) -> bool:
    return config.demos.path is None


def _uses_fallible_experts(config: FinetuneConfig) -> bool:
    return _uses_experts(config) and any(suite.startswith(("tabletop_", "libero_")) for suite in config.demos.suites)


def _uses_simulator_experts(config: FinetuneConfig) -> bool:
    return _uses_experts(config) and any(not suite.startswith("tabletop_") for suite in config.demos.suites)


def _is_fresh(config: FinetuneConfig) -> bool:
    return config.policy.path.startswith("init:")


FINETUNE: tuple[Condition[FinetuneConfig], ...] = (
    Condition(
        (
            *("policy.actions", "policy.chunk_length", "policy.num_images", "policy.use_proprio", "policy.resize"),
            *("policy.center_crop", "policy.heads_device", "augment.*"),
        ),
        ("reward.labels",),
        _trains_policy,
        "with reward.labels, which trains a reward model and no policy of a robot",
    ),
    Condition(
        DEMONSTRATIONS,
        ("reward.labels",),
        lambda c: not _reads_rows(c),
        "with reward.labels pairs or steps, whose samples are the rows of reward.path",
    ),
    Condition(
        ("reward.path",),
        ("reward.labels",),
        _reads_rows,
        "without reward.labels pairs or steps; episodes are those of the section demos",
    ),
    Condition(
        ("reward.states_per_episode", "reward.step_discount"),
        ("reward.labels",),
        _reads_episodes,
        "without reward.labels episodes",
    ),
    Condition(
        ("policy.resize", "policy.center_crop", "policy.attention", "policy.heads_device"),
        ("policy.path",),
        lambda c: not _is_fresh(c),
        "with fresh weights (policy.path init:…)",
    ),
    Condition(
        ("policy.heads_device",),
        ("policy.actions",),
        lambda c: c.policy.actions == "l1",
        "without a regression head (policy.actions l1)",
    ),
    *MODEL,
    Condition(
        ("demos.suites", "demos.task_ids", "demos.episodes_per_task", "demos.action_noise", "demos.num_workers"),
        ("demos.path",),
        _uses_experts,
        "with demos.path, whose recorded episodes are imitated as they are",
    ),
    Condition(
        ("demos.dataset_name", "demos.gripper"),
        ("demos.path",),
        lambda c: not _uses_experts(c),
        "without demos.path, a LeRobot folder",
    ),
    Condition(
        ("demos.dataset_name",),
        ("demos.mixture",),
        lambda c: not c.demos.mixture,
        "with demos.mixture, whose datasets have names of their own",
    ),
    Condition(
        ("demos.gripper",),
        ("demos.mapping",),
        lambda c: c.demos.mapping is None,
        "with demos.mapping, which says what the gripper means",
    ),
    Condition(
        ("demos.image_size",),
        ("demos.path", "policy.path"),
        lambda c: _uses_experts(c) or _is_fresh(c) or _reads_episodes(c),
        "with demos.path, whose recorded images have a fixed size",
    ),
    Condition(
        RECORDED,
        ("demos.path",),
        lambda c: not _uses_experts(c),
        "without recorded episodes (demos.path)",
    ),
    Condition(
        ("demos.mixture_weights",),
        ("demos.mixture",),
        lambda c: bool(c.demos.mixture),
        "without several datasets (demos.mixture)",
    ),
    Condition(
        ("demos.close_high", "demos.release_early"),
        ("demos.suites", "demos.path"),
        _uses_fallible_experts,
        "without demonstrations of the tabletop or of LIBERO (demos.suites)",
    ),
    Condition(
        ("demos.hesitation",),
        ("demos.suites", "demos.path"),
        _uses_simulator_experts,
        "without demonstrations in a simulator (demos.suites libero_* or metaworld_*)",
    ),
    Condition(
        ("augment.crop_area", "augment.brightness", "augment.contrast", "augment.saturation", "augment.hue"),
        ("augment.enabled",),
        lambda c: c.augment.enabled,
        "without augment.enabled true",
    ),
    Condition(
        ("validation.*",),
        ("demos.holdout",),
        lambda c: c.demos.holdout > 0,
        "without held-out episodes (demos.holdout)",
    ),
    Condition(
        ("checkpoint.keep", "checkpoint.max_total_gib"),
        ("checkpoint.interval",),
        lambda c: c.checkpoint.interval > 0,
        "without checkpoints that a run resumes from (checkpoint.interval)",
    ),
    Condition(("logging.wandb_*",), ("logging.wandb",), lambda c: c.logging.wandb, "without logging.wandb true"),
    *RANKS,
)

ALWAYS_FINETUNE = _paths(
    {
        "run": "name root seed device num_threads",
        "policy": "path dtype quantize gradient_checkpointing freeze",
        "lora": "enabled adapter",
        "demos": "holdout",
        "reward": "labels",
        "optim": "steps batch_size microbatch_size lr warmup_steps weight_decay max_grad_norm autocast log_interval "
        "save_dtype",
        "checkpoint": "interval",
        "logging": "tensorboard wandb report",
        "distributed": "backend",
    }
)
