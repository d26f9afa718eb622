"""Command-line flags `--section.field value`, read by the schema's types; and the nearest name for unknown ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vlarl.config.callables import GivenCallable, named
from vlarl.config.describe import Option, options
from vlarl.config.problems import Problem, nearest
from vlarl.config.schema import Section
from vlarl.config.yaml_source import as_tuples, parse_value

ALIASES: dict[str, str] = {
    "model": "policy.path",
    "task-suite": "env.suite",
    "task-id": "env.task_ids",
    "task-ids": "env.task_ids",
    "num-envs": "env.num_envs",
    "timesteps": "run.total_env_steps",
    "use-wandb": "logging.wandb",
    "value-init-steps": "algorithm.value_init_steps",
    "freezing-actor-steps": "algorithm.value_init_steps",
    "advantage-estimator": "algorithm.name",
    "max-epochs": "algorithm.epochs",
    "n-epochs": "algorithm.epochs",
    "num-epochs": "algorithm.epochs",
    "clip-ratio-low": "algorithm.clip_low",
    "clip-ratio-high": "algorithm.clip_high",
    "entropy-coef": "algorithm.entropy_coef",
    "action-reconstruction-coef": "algorithm.action_reconstruction_coef",
    "aux-loss-coef": "algorithm.aux_loss_coef",
    "advantage-clamp": "algorithm.advantage_clamp",
    "verifier-gamma": "algorithm.verifier_gamma",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.gae_lambda",
    "gae-lambda": "algorithm.gae_lambda",
    "vf-coef": "algorithm.vf_coef",
    "value-loss-coef": "algorithm.vf_coef",
    "cliprange-value": "algorithm.cliprange_value",
    "value-clip": "algorithm.cliprange_value",
    "kl-coef": "kl.coef",
    "init-kl-coef": "kl.coef",
    "kl-target": "kl.target",
    "kl-horizon": "kl.horizon",
    "kl-estimator": "kl.estimator",
    "actor-lr": "optim.lr",
    "critic-lr": "critic.lr",
    "value-learning-rate": "critic.lr",
    "max-grad-norm": "optim.max_grad_norm",
    "max-norm": "optim.max_grad_norm",
    "micro-train-batch-size": "optim.microbatch_size",
    "ema-beta": "ema.beta",
    "remote-rm-url": "reward.url",
    "reward-fn": "reward.source",
    "reward-recipe": "reward.recipe",
    "length-penalty": "reward.length_penalty",
    "curriculum-ema-alpha": "curriculum.ema_alpha",
    "curriculum-tau": "curriculum.tau",
    "vla-path": "policy.path",
    "pretrained-checkpoint": "policy.path",
    "unnorm-key": "policy.unnorm_key",
    "use-proprio": "policy.use_proprio",
    "num-images-in-input": "policy.num_images",
    "enable-gradient-checkpointing": "policy.gradient_checkpointing",
    "use-lora": "lora.enabled",
    "lora-rank": "lora.rank",
    "lora-alpha": "lora.alpha",
    "lora-dropout": "lora.dropout",
    "lora-target-modules": "lora.target_modules",
    "load-adapter-checkpoint": "lora.adapter",
    "env-gpu-id": "env.render_gpu",
    "actor-num-gpus-per-node": "distributed.learners_per_node",
    "sharding-strategy": "distributed.sharding",
    "offload": "distributed.cpu_offload",
    "async-mode": "distributed.asynchronous",
    "vllm-num-engines": "vllm.num_engines",
    "vllm-tensor-parallel-size": "vllm.tensor_parallel_size",
    "vllm-enforce-eager": "vllm.enforce_eager",
    "vllm-sync-backend": "vllm.sync_backend",
    "enable-prefix-caching": "vllm.prefix_caching",
    "gpu-memory-utilization": "vllm.gpu_memory_utilization",
    "seed": "run.seed",
    "name": "run.name",
}
"""Flags that other systems of the field use, and the option each one sets here."""

MODELS = {"tiny": "init:tiny-oft", "tiny-openvla": "init:tiny-openvla"}
"""Short names that `--model` takes besides paths: fresh weights, to try a configuration out."""

SINGLE_VALUE_ALIASES = frozenset({"task-id"})

HABITS: dict[str, str] = {
    "learning_rate": "lr",
    "total_timesteps": "total_env_steps",
    "grad_clip": "max_grad_norm",
    "minibatch_size": "minibatches",
    "model_path": "path",
    "model": "path",
}
"""Field names of other systems, for suggestions only."""


@dataclass
class Flags:
    """What the command line says about a configuration."""

    values: dict[str, object] = field(default_factory=dict)  # dotted path -> value
    spelled: dict[str, str] = field(default_factory=dict)  # dotted path -> the flag as written
    positionals: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    given: dict[str, dict[str, GivenCallable]] = field(default_factory=dict)  # section -> callables by their names

    def set(self, option: Option, spelled: str, value: object) -> None:
        """Give an option its value; the last flag wins."""
        self.values[option.path] = value
        self.spelled[option.path] = spelled


def parse_flags(tokens: Sequence[str], schema: type[Section]) -> Flags:
    """Read flags; what is no flag and no flag's value is a positional. Errors are collected, not raised."""
    flags = Flags()
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("-"):
            flags.positionals.append(token)
            continue
        spelled, has_value, value = token.partition("=")
        option, negated = _find(spelled, schema)
        if option is None:
            if not has_value and rest and not _is_flag(rest[0]):
                rest.pop(0)
            message = "unknown option" + suggestion(spelled.lstrip("-"), schema, prefix="--")
            flags.problems.append(Problem(spelled, message, (spelled,)))
        elif negated or (option.is_flag and not has_value):
            stated = not negated and bool(rest) and rest[0] in ("true", "false")
            text = rest.pop(0) if stated else str(not negated).lower()
            flags.set(option, spelled, parse_value(text))
        else:
            single = spelled.lstrip("-") in SINGLE_VALUE_ALIASES
            texts = [value] if has_value else _take(rest, many=option.is_list and not single)
            if texts:
                if spelled == "--model":
                    texts = [MODELS.get(text, text) for text in texts]
                flags.set(option, spelled, _value(option, texts))
            else:
                flags.problems.append(Problem(spelled, f"needs a value: {option.allowed}", (option.path,)))
    return flags


def from_mapping(overrides: Mapping[str, object]) -> Flags:
    """The same from Python: `{"optim.lr": 1e-3}` or `{"optim": {"lr": 1e-3}}`; a callable is kept beside its name."""
    flags = Flags()
    for key, value in overrides.items():
        # A section's options; gym.kwargs is an option itself, and a mapping.
        nested = value if isinstance(value, Mapping) and "." not in key else None
        entries = {key: value} if nested is None else {f"{key}.{k}": v for k, v in nested.items()}
        for path, item in entries.items():
            given = flags.given.setdefault(path.partition(".")[0], {})
            flags.values[path] = as_tuples(named(item, given))
    return flags


def suggestion(name: str, schema: type[Section], prefix: str = "") -> str:
    """`; did you mean …?` for an unknown option name, or the names there are."""
    name = name.replace("-", "_")
    known = options(schema)
    section, _, leaf = name.rpartition(".")
    leaf = HABITS.get(nearest(leaf, HABITS, cutoff=0.85) or leaf, leaf)
    by_leaf: dict[str, list[str]] = {}
    for path in known:
        by_leaf.setdefault(path.partition(".")[2], []).append(path)
    siblings = {path.partition(".")[2]: path for path in known if path.startswith(f"{section}.")}
    alias = nearest(name.replace("_", "-"), ALIASES, cutoff=0.8) if prefix and not section else None
    if leaf in siblings:
        matches = [siblings[leaf]]
    elif leaf in by_leaf:
        matches = by_leaf[leaf]
    elif alias and ALIASES[alias] in known:
        matches = [alias]
    elif found := nearest(leaf, siblings):
        matches = [siblings[found]]
    elif found := nearest(name, known, cutoff=0.75):
        matches = [found]
    elif found := nearest(leaf, by_leaf, cutoff=0.75):
        matches = by_leaf[found]
    else:
        matches = []
    if matches:
        return "; did you mean " + " or ".join(prefix + match for match in matches) + "?"
    if siblings:
        return f"; options of {section}: " + ", ".join(siblings)
    return "; sections: " + ", ".join(schema.model_fields)


def _is_flag(token: str) -> bool:
    """Whether a token opens a new flag: negative numbers do not."""
    return token.startswith("-") and not isinstance(parse_value(token), int | float)


def _find(spelled: str, schema: type[Section]) -> tuple[Option | None, bool]:
    """The option a flag names, and whether the flag is its `--no-` form."""
    known = options(schema)

    def look_up(name: str) -> Option | None:
        return known.get(ALIASES.get(name, name.replace("-", "_")))

    if not spelled.startswith("--"):
        return None, False
    name = spelled.removeprefix("--")
    if option := look_up(name):
        return option, False
    option = look_up(name.removeprefix("no-")) if name.startswith("no-") else None
    return (option, True) if option is not None and option.is_flag else (None, False)


def _take(rest: list[str], many: bool) -> list[str]:
    """The values that follow a flag: one, or all up to the next flag."""
    taken: list[str] = []
    while rest and not _is_flag(rest[0]) and (many or not taken):
        taken.append(rest.pop(0))
    return taken


def _value(option: Option, texts: list[str]) -> object:
    """A flag's texts as the option's type reads them: text stays text, `0 1`, `0,1` and `[0, 1]` are lists."""
    first = texts[0]
    if option.nullable and texts == ["null"]:
        return None
    if option.is_text:
        return first
    if not option.is_list:
        return parse_value(first)
    if len(texts) == 1 and first.startswith("["):
        return parse_value(first)
    # A comma with a space after it belongs to a sentence, such as an instruction.
    items = [item for text in texts for item in ([text] if ", " in text else text.split(","))]
    return tuple(parse_value(item) for item in items)
