"""A checkpoint or adapter folder -> a policy.

adapter folder ─► base folder ─► config ─► model on the meta device ─► weights, one at a time ─► heads ─► adapters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from tokenizers import Tokenizer

from vlarl.config.source.yaml_file import read_document
from vlarl.config.training_data import TrainingData, training_data_of
from vlarl.policies import adapters
from vlarl.policies.base import BaseCheckpoint
from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.checksums import TRAINER_FILE, verify_checksums
from vlarl.policies.locate import checkpoint_folder
from vlarl.policies.openvla.attention import AttentionName
from vlarl.policies.openvla.components import has_component, read_component
from vlarl.policies.openvla.config import (
    NATIVE_KEY,
    DecoderName,
    OpenVLAConfig,
    read_config,
    refuse_other_model,
    with_statistics,
)
from vlarl.policies.openvla.film import fold_film_state
from vlarl.policies.openvla.heads import L1ActionHead
from vlarl.policies.openvla.images import ImagePipeline
from vlarl.policies.openvla.limits import building, check_size
from vlarl.policies.openvla.model import QUANTIZED
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.quantize import quantize_linears
from vlarl.policies.value_head import ValueHead
from vlarl.policies.weight_files import load_model, load_state, read_shapes

# Files of the tokenizer and processor that are copied with a checkpoint but not read.
ASSET_NAMES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "preprocessor_config.json",
    "generation_config.json",
)


def read_policy(
    path: Path | str,
    *,
    folder: Path | None = None,
    decoder: DecoderName | None = None,
    chunk_length: int | None = None,
    num_images: int | None = None,
    use_proprio: bool | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    heads_device: torch.device | str | None = None,
    unnorm_key: str | None = None,
    l1_head: bool = False,
    images: ImagePipeline = ImagePipeline(),  # noqa: B008 - frozen
    quantize: Literal[4, 8] | None = None,
    attention: AttentionName = "sdpa",
    base: str | None = None,
    deferred: bool = False,
) -> OpenVLAPolicy:
    """Read a checkpoint or adapter folder, a built-in model or a hub id; None takes the folder's value.

    `folder` is where it is on this machine, if that is known. Original OFT folders don't record the number of images:
    pass num_images=2. `base` is the base model of an adapter, if it has moved. On the device `meta` the policy has
    neither weights nor heads. `deferred` leaves the weights of the model on disk (policies/deferred.py).
    """
    folder = folder or checkpoint_folder(path)
    adapter = folder if adapters.is_adapter(folder) else None
    if adapter is None:
        refuse_other_model(read_json(folder / "config.json"))
        origin = BaseCheckpoint(str(path), folder, adapters.fingerprint(folder))
    else:
        origin = _base_of(folder, base)
    folders = (folder, origin.folder)
    config = resolve_config(folders, decoder, chunk_length, num_images, use_proprio)
    check_size(config, origin.folder, read_shapes(origin.folder), towers=not has_film_file(origin.folder))
    with building(folder), torch.device("meta"):  # allocate no memory for weights that the file replaces
        policy = OpenVLAPolicy(
            config,
            _read_tokenizer(folders),
            unnorm_key,
            images=images,
            attention=attention,
            heads_device=heads_device,
        )
    policy.base = replace(origin, path=_recorded(origin))
    policy.training_data = _training_data(str(path), folder, origin)
    if torch.device(device).type == "meta":
        policy.adapter_folder = adapter
        return policy  # it only processes observations and encodes actions
    for each in dict.fromkeys(folders):
        verify_checksums(each, lambda name: "/" not in name and name != TRAINER_FILE)
    if quantize is not None:
        quantize_linears(policy.model, quantize, QUANTIZED)
    load_model(policy.model, origin.folder, dtype, device, _film_state(origin.folder), deferred)
    _restore_constants(policy, device)
    _load_heads(policy, folders, dtype, l1_head)
    if adapter is not None:
        policy.add_adapter_from(adapter)
    policy.assets = {name: file.read_bytes() for name in ASSET_NAMES if (file := _find(folders, name)) is not None}
    return policy


def _base_of(adapter: Path, given: str | None) -> BaseCheckpoint:
    """The base model of an adapter: the one given, else the one that it names; one with other weights is refused."""
    path, folder = adapters.find_base(adapter, given)
    base = BaseCheckpoint(path, folder, adapters.fingerprint(folder))
    adapters.check_base(adapter, path, base.fingerprint)
    return base


def _training_data(path: str, folder: Path, origin: BaseCheckpoint) -> TrainingData:
    """What a checkpoint, and the base of an adapter, was trained on."""
    own, base = training_data_of(folder), training_data_of(origin.folder)
    if own is None:
        unknown = (path,) if base is not None else dict.fromkeys((origin.path, path))
        return (base or TrainingData()).plus((), unknown)
    return own if base is None else base.joined(own)  # an adapter's own file also describes a base that has none


def _restore_constants(policy: OpenVLAPolicy, device: torch.device | str) -> None:
    """Create the constants that no checkpoint contains and that the meta device left empty."""
    language = cast(Any, policy.model.language_model)
    language.model.rotary_emb = type(language.model.rotary_emb)(language.config)
    policy.model.to(device)


def _load_heads(policy: OpenVLAPolicy, folders: Sequence[Path], dtype: torch.dtype, l1_head: bool) -> None:
    """Load each head from the first folder that has it: the critic if present, the regression head on request."""
    critic = _read_head(folders, "value_head")
    if critic is not None:
        hidden = [critic.get(f"layers.{i}.weight") for i in range(len(critic))]
        widths = [len(weight) for weight in hidden if weight is not None and weight.ndim == 2]
        num_values = len(critic["out.weight"]) if "out.weight" in critic and critic["out.weight"].ndim == 2 else 1
        policy.value_head = ValueHead(policy.model.hidden_size, widths, num_values)
    if l1_head:
        policy.l1_head = L1ActionHead(policy.model.hidden_size, policy.action_dim)
    for name, head in policy.components().items():
        if head is None:
            continue
        state = _read_head(folders, name)
        if state is None:
            raise FileNotFoundError(f"{folders[-1]} has no {name} file (.safetensors, or OFT's --<step>_checkpoint.pt)")
        kept = torch.float32 if name == "value_head" else dtype
        device = policy.device if name == "proprio_projector" else policy.heads_device
        load_state(head, {k: v.to(device, kept) for k, v in state.items()}, f"{folders[-1]} ({name})")


def _recorded(base: BaseCheckpoint) -> str:
    """How an adapter names its base: a folder by its full path, since adapters get moved; anything else as given."""
    return str(base.folder.resolve()) if Path(base.path).expanduser().is_dir() else base.path


def resolve_config(
    folders: Sequence[Path],
    decoder: DecoderName | None = None,
    chunk_length: int | None = None,
    num_images: int | None = None,
    use_proprio: bool | None = None,
) -> OpenVLAConfig:
    """The config of a checkpoint (or of an adapter and its base, in this order): from its files, or as requested."""
    config = _read_config(folders)
    has_film = has_film_file(folders[-1])
    if NATIVE_KEY not in config.raw:  # OFT's own folders are identified by the files they contain
        proprio, head = (any(has_component(f, name) for f in folders) for name in ("proprio_projector", "action_head"))
        decoder = decoder or ("parallel" if has_film or proprio or head else None)
        use_proprio = decoder == "parallel" and proprio if use_proprio is None else use_proprio
        config = replace(config, untrained_tokens=head)  # OFT saves that head with an L1 (or diffusion) loss only
    return config.with_decoder(decoder, chunk_length, num_images, use_proprio, use_film=True if has_film else None)


def has_untrained_tokens(folder: Path) -> bool:
    """Whether a checkpoint acts with a regression head, so that its action tokens were not trained with it.

    OpenVLA-OFT saves that head with checkpoints of an L1 (or diffusion) loss only. Ours may also have it together with
    trained tokens (policy.actions hybrid), so their config.json says which it is.
    """
    if not has_component(folder, "action_head"):
        return False
    written = folder / "config.json"  # adapters may have none
    native = read_json(written).get(NATIVE_KEY) if written.is_file() else None
    if not isinstance(native, dict):
        return True
    if "untrained_tokens" in native:
        return bool(native["untrained_tokens"])
    config = folder.parent.parent / "config.yaml"  # older checkpoints: the configuration of the run that made them
    run = read_document(config).data if config.is_file() else {}
    policy = run.get("policy")
    return "demos" in run and isinstance(policy, dict) and policy.get("actions") == "l1"


def has_film_file(base: Path) -> bool:
    """Whether OFT's file of a vision backbone with FiLM is beside the model; our folders keep it with the model."""
    native = (base / "config.json").is_file() and NATIVE_KEY in read_json(base / "config.json")
    return not native and has_component(base, "vision_backbone")


def _film_state(base: Path) -> dict[str, torch.Tensor] | None:
    """That file's tensors by the model's names; None if there is no such file."""
    state = read_component(base, "vision_backbone") if has_film_file(base) else None
    if state is None:
        return None
    try:
        folded = fold_film_state(state)
    except (LookupError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(
            f"the vision_backbone file of {base} holds adapters that don't fit their layers ({error}): copy or "
            "download it again"
        ) from error
    return {f"vision_backbone.{name}": tensor for name, tensor in folded.items()}


def _read_config(folders: Sequence[Path]) -> OpenVLAConfig:
    """The first config.json, with the statistics of all folders; the first folder takes precedence."""
    holder = next((folder for folder in folders if (folder / "config.json").is_file()), folders[-1])
    config = read_config(holder)
    return config if holder == folders[0] else with_statistics(config, folders[0] / "dataset_statistics.json")


def _find(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _read_head(folders: Sequence[Path], name: str) -> dict[str, torch.Tensor] | None:
    """The state of a component, from the first folder that has it."""
    for folder in dict.fromkeys(folders):
        if (state := read_component(folder, name)) is not None:
            return state
    return None


def _read_tokenizer(folders: Sequence[Path]) -> Tokenizer | None:
    path = _find(folders, "tokenizer.json")
    if path is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()  # some files enable it; padding is the processor's job
        tokenizer.no_truncation()
        return tokenizer
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a tokenizer ({error}): copy or download it again") from error
