"""`vlarl doctor`: what this machine can run; what a checkpoint is, and how much memory it needs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vlarl.cli import arguments as args
from vlarl.cli.installation import Check, Gpu, check_installation, find_gpus
from vlarl.config.derive import microbatch_size
from vlarl.config.paths import brief
from vlarl.config.run_checkpoints import locate_checkpoint, refuse_unknown
from vlarl.config.schema import Config
from vlarl.config.source.flags import model_path
from vlarl.config.source.load import load_config
from vlarl.config.source.start import start_of
from vlarl.config.words import counted
from vlarl.errors import UsageError
from vlarl.observability.terminal import printable

if TYPE_CHECKING:
    from vlarl.policies.family import Description, MemoryEstimate

GIB = 2**30
MIB = 2**20
CARDS = (24, 40, 48, 80)  # nominal GB, which are nearly GiB in the driver
CONTEXT_BYTES = GIB  # memory of CUDA itself and of fragmentation
SHOWN_NAMES = 300  # characters of a list of tensors
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "cache")
NOTES = (
    "checkpointed    with policy.gradient_checkpointing: layers are recomputed in the backward pass",
    "training run    the update, or the rollout with adapters, gradients and optimizer, whichever is larger",
    "cards           ok if it fits beside 1 GiB for CUDA itself; for a GPU of this machine, by its free memory",
)
ON_A_CARD = "On a card of {0} GB (--run.memory_gb {0}), where no preset or option sets the sizes of passes:"
COLUMNS = {  # key -> title, and its second line
    "rollout": ("rollout", ""),
    "update_checkpointed": ("LoRA update", "checkpointed"),
    "update": ("LoRA update", "without"),
}


def doctor(arguments: Sequence[str]) -> int:
    """Describe the machine, or with --model a checkpoint and its memory; return 1 if there is a problem."""
    parser = args.Parser(
        "doctor",
        "Say what this machine can run, what is missing and how to install it. With --model: what a checkpoint is, and "
        "the GPU memory of rollouts and of LoRA updates as `vlarl train` would do them, estimated without loading it.",
    )
    add = parser.add_argument
    add("named", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    models = "checkpoint or adapter folder, name or folder of a run, hub id (downloaded), builtin:tiny-oft…"
    add("--model", metavar="MODEL", help=models)
    args.add_root(parser)
    of_train = "by default what `vlarl train` would use"
    add("--batch-size", type=args.positive, metavar="N", help=f"observations in a pass of a rollout; {of_train}")
    add("--microbatch-size", type=args.positive, metavar="N", help=f"decisions in a pass of an update; {of_train}")
    add("--dtype", choices=("bfloat16", "float32"), help=f"precision of the frozen weights; {of_train}")
    add("--quantize", type=int, choices=(4, 8), help="bits of the linear layers' weights")
    rank = f"rank of fresh adapters; {of_train}. An adapter keeps its own"
    add("--lora-rank", type=args.positive, metavar="R", help=rank)
    add(
        "--num-images", type=args.positive, metavar="N", help="images that the model reads; by default the checkpoint's"
    )
    add(
        "--decoder", choices=("autoregressive", "parallel"), help="how actions are decoded; by default the checkpoint's"
    )
    fits = "also say which sizes of passes `vlarl train` would choose on a card of so many GB, such as 24"
    add("--memory", type=args.gigabytes, metavar="GB", help=fits)
    add("--json", action="store_true", help="print the same facts as JSON")
    given = parser.parse_args(arguments)
    if given.model is not None and given.named is not None:
        raise UsageError(f"one model is enough; got {given.named} and --model {given.model}")
    if given.model is not None or given.named is not None:
        located = locate_checkpoint(model_path(given.model or given.named), given.root)
        refuse_unknown(located.path, given.root)
        if located.note and not given.json:
            print(located.note, flush=True)
        given.model = located.path
        return _describe_model(given)
    of_models = [token for token in arguments if token.startswith("--") and token != "--json"]
    if of_models:
        raise UsageError(f"{of_models[0]} is about a checkpoint: add --model MODEL")
    from vlarl.cli.simulators import check_simulators

    checks = [*check_installation(), *check_simulators()]
    print(json.dumps({"checks": [vars(check) for check in checks]}, indent=2) if given.json else _machine_text(checks))
    return 1 if any(check.status == "problem" for check in checks) else 0


def _machine_text(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    lines = [f"{check.status:<8} {check.name:<{width}}  {check.detail}" for check in checks]
    broken = [check.name for check in checks if check.status == "problem"]
    lines += ["", f"To fix first: {', '.join(broken)}." if broken else "Everything that vlarl itself needs is here."]
    return "\n".join(lines)


def _describe_model(given: Any) -> int:
    from huggingface_hub.errors import StrictDataclassError

    from vlarl.policies.load import describe_checkpoint
    from vlarl.run.memory import card_bytes, decisions_at_once, described_path, plan_for

    options = _train_options(given)
    config = load_config(None, options | {"lora.enabled": True})
    try:
        model = described_path(model_path(given.model), config.policy.num_images)
        decoder = config.policy.decoder
        description = describe_checkpoint(model, None if decoder == "auto" else decoder, config.policy.num_images)
        if model != given.model:
            description = replace(description, path=given.model)
    except (OSError, ValueError, StrictDataclassError) as error:  # the last one: sizes that transformers refuses
        reason = " ".join(str(error).split())
        raise UsageError(f"the policy {given.model} can't be described: {reason}") from error
    rank = description.adapter.rank if description.adapter else config.lora.rank
    batch_size = config.rollout.batch_size or decisions_at_once(config)
    estimates, needs = _estimate(config, description, batch_size, rank)
    capacities = _capacities(find_gpus())
    plan = None
    if given.memory is not None:
        plan = plan_for(_without_sizes(config, options), description, rank, card_bytes(given.memory))
    if given.json:
        planned = {} if plan is None else {"plan": plan.to_json()}
        print(json.dumps(_as_json(description, estimates, needs, capacities) | planned, indent=2))
    else:
        sizes = [f"batch {batch_size}", *[f"microbatch {microbatch_size(config.optim)}"] * 2]
        table = _memory_lines(sizes, estimates, needs, capacities)
        title = _title(options, config, description, rank)
        table += [] if plan is None else ["", ON_A_CARD.format(f"{given.memory:g}"), *plan.lines()]
        print(printable("\n".join([*_facts_lines(description, config.policy.num_images), "", *title, "", *table])))
    return 1 if description.problems else 0


def _train_options(given: Any) -> dict[str, Any]:
    """The options of `vlarl train` that were given, by dotted path."""
    options = {
        "policy.path": given.model,
        "policy.dtype": given.dtype,
        "policy.quantize": given.quantize,
        "policy.num_images": given.num_images,
        "policy.decoder": given.decoder,
        "rollout.batch_size": given.batch_size,
        "optim.microbatch_size": given.microbatch_size,
        "lora.rank": given.lora_rank,
    }
    return {path: value for path, value in options.items() if value is not None}


def _without_sizes(config: Config, given: dict[str, Any]) -> Config:
    """The configuration without the sizes of passes that its preset sets, of which only given ones stay."""
    sizes = ("optim.microbatch_size", "policy.gradient_checkpointing", "rollout.batch_size")
    changed = {}
    for section, _, name in (path.partition(".") for path in sizes if path not in given):
        changed[section] = getattr(config, section).model_copy(update={name: None})
    return config.model_copy(update=changed)


def _title(options: dict[str, Any], config: Config, description: Description, rank: int) -> list[str]:
    """The command and the settings that the estimate is for."""
    policy, start = config.policy, start_of(None, options)
    is_adapted = description.adapter is not None or load_config(start.source).lora.enabled
    named = options | {"policy.path": brief(options["policy.path"])} | description.train_options
    flags = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    command = shlex.join(["vlarl", "train", *flags, *([] if is_adapted else ["--use-lora"])])
    base = f"base in {policy.quantize} bits, the rest {policy.dtype}" if policy.quantize else policy.dtype
    update = COLUMNS["update_checkpointed" if policy.gradient_checkpointing else "update"][1]
    return [
        f"Memory of `{command}`, which starts from the {start.label}:",
        f"{base}, LoRA of rank {rank} on all linear layers, prompts of {description.prompt_length} tokens; "
        f"its update is the column '{update}'.",
    ]


def _estimate(
    trained: Config, description: Description, batch_size: int, rank: int
) -> tuple[dict[str, MemoryEstimate], dict[str, int]]:
    """Memory by column, and the bytes that a card needs: for rollouts alone, or for training (rollouts and updates)."""
    dtype, quantize = trained.policy.dtype, trained.policy.quantize
    rollout = description.estimate_rollout(batch_size, dtype, quantize)
    # Adapters of a quantised base are trained in float32, so rollouts between updates are float32, too.
    between = description.estimate_rollout(batch_size, "float32", quantize) if quantize else rollout
    updates = [
        description.estimate_lora_update(microbatch_size(trained.optim), dtype, rank, recompute, quantize)
        for recompute in (True, False)
    ]
    needs = [rollout.total, *(max(update.total, between.total + update.lasting) for update in updates)]
    return dict(zip(COLUMNS, (rollout, *updates), strict=True)), dict(zip(COLUMNS, needs, strict=True))


def _capacities(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Bytes for tensors on common cards and on the GPUs of this machine."""
    common = {f"{size} GB card": size * GIB - CONTEXT_BYTES for size in CARDS}
    here = {f"GPU {index} here": gpu.free_bytes - CONTEXT_BYTES for index, gpu in enumerate(gpus)}
    return common | here


def _facts_lines(description: Description, num_images: int | None) -> list[str]:
    """The facts about the checkpoint, one per line."""
    stored, kind = description.stored, description.kind
    if (adapter := description.adapter) is not None:
        kind += f" of {adapter.base}, rank {adapter.rank}, alpha {adapter.alpha}"
    files = counted(stored.num_files, "file")
    facts = {
        "checkpoint": [description.path],
        "kind": [kind],
        **{title: [line] for title, line in description.model_facts(num_images).items()},
        "parameters": [f"{stored.num_parameters:,} in {stored.dtype}, {_size(stored.num_bytes)} in {files}"],
        "weights": [f"problem: {_short(problem)}" for problem in description.problems] or ["fit the config"],
        **description.file_facts(),
    }
    return [f"{name if row == 0 else '':<12}{text}" for name, texts in facts.items() for row, text in enumerate(texts)]


def _memory_lines(
    sizes: Sequence[str], estimates: dict[str, MemoryEstimate], needs: dict[str, int], capacities: dict[str, int]
) -> list[str]:
    """The table of memory, and which cards have enough."""
    unit, name = (GIB, "GiB") if max(needs.values()) >= GIB else (MIB, "MiB")

    def amounts(values: Sequence[int]) -> list[str]:
        return [f"{value / unit:.2f}" if value else "-" for value in values]

    rows = [(name, [COLUMNS[key][0] for key in estimates]), ("", list(sizes))]
    rows += [("", [COLUMNS[key][1] for key in estimates])]
    rows += [(part, amounts([e.parts[part] for e in estimates.values()])) for part in PARTS]
    rows += [("total", amounts([e.total for e in estimates.values()]))]
    rows += [("training run", ["", *amounts(list(needs.values())[1:])])]
    rows += [
        (card, ["ok" if need <= capacity else "no" for need in needs.values()]) for card, capacity in capacities.items()
    ]
    lines = [f"{label:<14}" + "".join(f"{cell:>15}" for cell in cells) for label, cells in rows]
    return [*lines, "", *NOTES]


def _as_json(
    description: Description, estimates: dict[str, MemoryEstimate], needs: dict[str, int], capacities: dict[str, int]
) -> dict[str, Any]:
    return {
        "checkpoint": description.to_json(),
        "memory_bytes": {
            key: estimate.parts | {"total": estimate.total, "needed": needs[key]} for key, estimate in estimates.items()
        },
        "fits": {card: {key: need <= capacity for key, need in needs.items()} for card, capacity in capacities.items()},
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def _short(text: str) -> str:
    """The beginning of a long list of tensors; --json has all of it."""
    return text if len(text) <= SHOWN_NAMES else f"{text[:SHOWN_NAMES]}… (all of them: --json)"
