"""A SmolVLA folder, or one of adapters -> a policy.

folder ─► config.json, the backbone's ─► model on the meta device ─► weights ─► statistics ─► heads, adapters
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from vlarl.config.training_data import TrainingData, training_data_of
from vlarl.json_files import read_object
from vlarl.policies import adapters
from vlarl.policies.base import BaseCheckpoint
from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.checksums import TRAINER_FILE, verify_checksums
from vlarl.policies.deferred import StoredWeight, placeholder
from vlarl.policies.family import FlowOptions
from vlarl.policies.flow import Denoising
from vlarl.policies.locate import small_files
from vlarl.policies.smolvla.config import SmolVLAConfig, read_config
from vlarl.policies.smolvla.conventions import FILE_NAME, Conventions, StoredConventions, read_stored
from vlarl.policies.smolvla.pipelines import PREPROCESSOR, pipeline_files
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.policies.smolvla.processor import Processor
from vlarl.policies.smolvla.saving import BACKBONE, MODEL
from vlarl.policies.smolvla.statistics import OLD_STATISTICS, read_scalings
from vlarl.policies.value_head import ValueHead
from vlarl.policies.weight_files import load_state, not_floats, read_tensors, weight_files

COMPILED = "._orig_mod."  # in names of older folders
UNUSED = ("model.vlm_with_expert.vlm.lm_head.", *OLD_STATISTICS)
BACKBONE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def read_policy(
    path: Path | str,
    folder: Path,
    *,
    flow: FlowOptions = FlowOptions(),  # noqa: B008 - frozen
    chunk_length: int | None = None,
    num_images: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    base: str | None = None,
    deferred: bool = False,
) -> SmolVLAPolicy:
    """Read a checkpoint or adapter folder. On the device `meta` the policy has no weights and only processes.
    `deferred` leaves the weights of the model on disk (policies/deferred.py)."""
    adapter = folder if adapters.is_adapter(folder) else None
    origin_path, origin = (str(path), folder) if adapter is None else adapters.find_base(folder, base)
    has_weights = torch.device(device).type != "meta"
    if has_weights:
        for each in {folder, origin}:
            verify_checksums(each, lambda name: "/" not in name and name != TRAINER_FILE)
    backbone = backbone_folder(origin)
    config = read_config(folder if (folder / "config.json").is_file() else origin, backbone)
    data = training_data_of(folder)
    stored = read_stored(folder if (folder / FILE_NAME).is_file() else origin, data)
    conventions = _conventions(config, flow, chunk_length, stored)
    with_pipelines = folder if (folder / PREPROCESSOR).is_file() else origin
    tensors, files = _read_tensors(origin)
    unread = {name: tensor.clone() for name, tensor in tensors.items() if name.startswith(UNUSED)}
    processor = Processor(
        config,
        _read_tokenizer(backbone, config.max_tokens),
        _pad_id(backbone, config),
        read_scalings(with_pipelines, config, unread),
        _num_views(config, num_images or stored.num_images),
        stored.state_dims if flow.state_dims is None else flow.state_dims,
    )
    with torch.device("meta"):
        policy = SmolVLAPolicy(config, processor, conventions)
    _fill(policy, tensors, dtype, device, origin, files if deferred else None)
    named_base = str(origin.resolve()) if Path(origin_path).expanduser().is_dir() else origin_path
    policy.base = BaseCheckpoint(named_base, origin, adapters.fingerprint(origin))
    policy.unread = unread if has_weights else {}
    policy.stored = {name: tensor.dtype for name, tensor in tensors.items()}
    policy.files = _files(with_pipelines, origin, backbone)
    policy.statistics_of = stored.statistics
    policy.training_data = data or TrainingData(unknown=(str(path),))
    _read_heads(policy, folder, device)
    if adapter is not None:
        policy.add_adapter_from(adapter)
    return policy.eval()


def backbone_folder(folder: Path) -> Path:
    """Where config.json and tokenizer of the vision-language model are: a folder in the checkpoint, a folder, or a hub
    id, of which the small files are downloaded."""
    name = str(read_json(folder / "config.json").get("vlm_model_name") or "")
    inside = folder / name
    if name and inside.is_dir() and inside.resolve().is_relative_to(folder.resolve()):
        return inside
    if name and Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    return small_files(name, BACKBONE_FILES)


def _conventions(
    config: SmolVLAConfig, flow: FlowOptions, chunk_length: int | None, stored: StoredConventions
) -> Conventions:
    if chunk_length is not None and chunk_length > config.chunk_size:
        raise ValueError(
            f"policy.chunk_length = {chunk_length}: the expert predicts {config.chunk_size} actions, of which at most "
            "all are executed"
        )
    denoising = Denoising(
        flow.steps or config.num_steps, flow.noise, flow.level, flow.std[0], flow.std[1], flow.stochastic_step
    )
    return Conventions(denoising, chunk_length or config.n_action_steps, flow.critic, flow.gripper or stored.gripper)


def _num_views(config: SmolVLAConfig, wanted: int | None) -> int:
    if wanted is not None and wanted > len(config.views):
        raise ValueError(f"policy.num_images = {wanted}: the checkpoint has {len(config.views)} views")
    return wanted or len(config.views)


def _read_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, tuple[Path, str]]]:
    """All tensors of the weight files as views of them, by the names of today's folders; their files, and their names
    there."""
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, tuple[Path, str]] = {}
    for path in weight_files(folder):
        for name, tensor in read_tensors(path):
            if not tensor.is_floating_point():
                raise not_floats(path, name, tensor.dtype)
            tensors[name.replace(COMPILED, ".")] = tensor
            files[name.replace(COMPILED, ".")] = path, name
    return tensors, files


def _fill(
    policy: SmolVLAPolicy,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    folder: Path,
    files: dict[str, tuple[Path, str]] | None,
) -> None:
    """Give the model its weights: the backbone's in the wanted type, the expert's in float32 or better; placeholders
    for those in `files`, where they are given."""
    wide = dtype if dtype == torch.float64 else torch.float32
    used = {name: tensor for name, tensor in tensors.items() if not name.startswith(UNUSED)}
    # Copied: a view of the mapped file lies at any address, products of matrices round by it, and resumed runs differ.
    loaded: dict[str, torch.Tensor] = {}
    for name, tensor in used.items():
        own = dtype if name.startswith(BACKBONE) else wide
        if files is None:
            loaded[name] = tensor.to(device, own, copy=True)
        else:
            loaded[name] = placeholder(StoredWeight(*files[name], own), tuple(tensor.shape), True)
    load_state(nn.ModuleDict({MODEL.rstrip("."): policy.model}), loaded, str(folder))


def _read_heads(policy: SmolVLAPolicy, folder: Path, device: torch.device | str) -> None:
    """The critic if there is one; the noise head, or a fresh one."""
    critic = folder / "value_head.safetensors"
    if critic.is_file():
        state = dict(read_tensors(critic))
        widths = [len(state[n]) for n in sorted(state) if n.startswith("layers.") and n.endswith(".weight")]
        first = state.get("layers.0.weight", state.get("out.weight"))
        if first is None or first.ndim != 2:
            raise ValueError(f"{critic} does not hold a critic: copy or download it again")
        policy.value_head = ValueHead(first.shape[1], widths, len(state["out.weight"]))
        load_state(policy.value_head, _copied(state, device), str(critic))
    if policy.noise_head is not None:
        noise = folder / "noise_head.safetensors"
        fresh = type(policy.noise_head)(policy.config.expert.hidden, policy.config.max_action_dim)
        state = dict(read_tensors(noise)) if noise.is_file() else fresh.state_dict()
        load_state(policy.noise_head, _copied(state, device), str(noise))


def _copied(state: dict[str, torch.Tensor], device: torch.device | str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device, torch.float32, copy=True) for name, tensor in state.items()}


def _files(with_pipelines: Path, folder: Path, backbone: Path) -> dict[str, bytes]:
    """Files beside the weights that are copied as they are: pipelines, and a backbone inside the folder."""
    files = {name: (with_pipelines / name).read_bytes() for name in pipeline_files(with_pipelines)}
    if backbone.parent == folder:
        files |= {f"{backbone.name}/{file.name}": file.read_bytes() for file in sorted(backbone.glob("*.json"))}
    return files


def _read_tokenizer(folder: Path, longest: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json: copy the backbone's tokenizer there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_padding()  # the processor pads
        tokenizer.enable_truncation(longest)
        return tokenizer
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"{path} is not a tokenizer ({error}): copy or download it again") from error


def _pad_id(folder: Path, config: SmolVLAConfig) -> int:
    """The id of the tokenizer's padding token, which nothing attends to."""
    token = read_object(folder / "tokenizer_config.json").get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    added = read_object(folder / "tokenizer.json").get("added_tokens")
    ids = {entry.get("content"): entry.get("id") for entry in added or [] if isinstance(entry, dict)}
    found = ids.get(token)
    return found if isinstance(found, int) else config.pad_token_id
