"""An OpenVLA checkpoint as transformers' users call it: a model with `predict_action`, and a processor.

Thin covers of the policy: what is computed, and from which files, is the policy's own code. No code of the folder runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from transformers.feature_extraction_utils import BatchFeature
from transformers.modeling_utils import PreTrainedModel

from vlarl.errors import UsageError
from vlarl.policies.locate import checkpoint_folder
from vlarl.policies.openvla.auto import OpenVLAConfig
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.weight_files import stored_dtype

OPTIONS = ("decoder", "chunk_length", "num_images", "use_proprio", "actions", "resize", "center_crop", "base")
"""Keyword arguments that are those of `vlarl.load_policy`."""
UNUSED = frozenset(
    {
        *("trust_remote_code", "low_cpu_mem_usage", "revision", "code_revision", "cache_dir", "token", "subfolder"),
        *("force_download", "local_files_only", "proxies", "use_safetensors", "adapter_kwargs", "_from_auto"),
        *("_commit_hash", "return_unused_kwargs", "name_or_path"),
    }
)
"""Arguments of transformers that mean nothing for a folder on this machine."""


class OpenVLAForActionPrediction(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A policy with the interface of the original's class. `policy` is the policy itself."""

    config_class = OpenVLAConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: OpenVLAConfig, policy: OpenVLAPolicy | None = None) -> None:
        super().__init__(config)
        if policy is None:
            raise UsageError("an OpenVLA model is made from a checkpoint: use from_pretrained(folder).")
        self.policy = policy

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:  # type: ignore[override]
        """Load a checkpoint or adapter folder, a run or a hub id.

        `dtype` is that of the files unless it is given, `device_map` a device or "auto". The options of
        `vlarl.load_policy` can be given as well, such as num_images=2 for OpenVLA-OFT's folders.
        """
        from vlarl.policies.load import load_policy

        config = kwargs.pop("config", None)
        dtype = kwargs.pop("dtype", None) or kwargs.pop("torch_dtype", None)
        device = _device(kwargs.pop("device_map", None))
        attention: Any = kwargs.pop("attn_implementation", None) or "sdpa"
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        if surplus := sorted(name for name in kwargs if name not in UNUSED):
            raise UsageError(
                f"from_pretrained: {', '.join(surplus)} can't be used with an OpenVLA folder; vlarl.load_policy has "
                "quantize and other options."
            )
        wanted = _dtype_name(dtype, path)
        policy = load_policy(path, dtype=wanted, device=device, attention=attention, **options)
        if not isinstance(policy, OpenVLAPolicy):
            raise UsageError(f"{path} holds another kind of policy: load it with vlarl.load_policy.")
        found = config if isinstance(config, OpenVLAConfig) else OpenVLAConfig(**policy.config.raw)
        return cls(found, policy)  # the policy is in evaluation mode

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *args: Any, **kwargs: Any
    ) -> None:
        """Write the checkpoint, in the original's layout."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.policy.save(Path(save_directory))

    @torch.no_grad()
    def predict_action(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        unnorm_key: str | None = None,
        *,
        proprio: torch.Tensor | np.ndarray | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
    ) -> np.ndarray:
        """The action [D] in the robot's units, or the chunk [K, D] of a policy with chunks; [B, …] for several rows.

        `proprio` [B, P] is normalised, as in OpenVLA-OFT. The action is greedy, or sampled from torch's generator.
        """
        ids = self._with_suffix(input_ids, attention_mask)
        state = None if proprio is None else torch.as_tensor(proprio, dtype=torch.float32)
        state = state[None] if state is not None and state.ndim == 1 else state
        policy = self.policy
        if policy.acts_by_regression:
            actions = policy.regress(policy._inputs(ids, pixel_values.cpu(), state)).cpu().numpy()
        else:
            found = policy.generate(ids, pixel_values.cpu(), state, temperature, greedy=not do_sample)
            actions = policy.codec.decode(found.sample.ids.cpu().numpy())  # type: ignore[attr-defined]
        robot = policy.unnormalize(actions, unnorm_key)
        robot = robot[:, 0] if robot.shape[1] == 1 else robot
        return robot[0] if len(robot) == 1 else robot

    def _with_suffix(self, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[B, P] right-padded prompts that end in the token that the original appends where it is absent."""
        config = self.policy.config
        suffix, padding = config.prompt_suffix_id, config.pad_token_id
        kept = ids != padding if mask is None else mask.bool()
        rows = [row[keep].tolist() for row, keep in zip(ids.cpu(), kept.cpu(), strict=True)]
        rows = [row if suffix is None or row[-1:] == [suffix] else [*row, suffix] for row in rows]
        width = max(map(len, rows))
        return torch.tensor([row + [padding] * (width - len(row)) for row in rows])


class PrismaticProcessor:
    """Prompts and images as the model reads them; the class has the name that checkpoints give for it."""

    def __init__(self, policy: OpenVLAPolicy) -> None:
        self.policy = policy  # without weights
        self.tokenizer = policy.processor.tokenizer

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> Self:
        """Read the tokenizer and the sizes of a checkpoint folder; `num_images` and `center_crop` as in the model."""
        from vlarl.policies.load import load_policy

        options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        policy = load_policy(path, device="meta", **options)
        if not isinstance(policy, OpenVLAPolicy):
            raise UsageError(f"{path} holds another kind of policy: load it with vlarl.load_policy.")
        return cls(policy)

    def __call__(self, text: str | Sequence[str], images: Any, return_tensors: str = "pt") -> BatchFeature:
        """The ids of one prompt or several, and the normalised pixels of an image for each, or of a list of views.

        A prompt is the whole text, `In: What action should the robot take to open the drawer?\\nOut:`.
        """
        if return_tensors != "pt":
            raise UsageError(f"return_tensors = {return_tensors!r}: the processor makes PyTorch tensors (pt) only.")
        texts = [text] if isinstance(text, str) else list(text)
        given = [images] if isinstance(text, str) else list(images)
        if len(given) != len(texts):
            raise ValueError(f"{len(texts)} prompts with {len(given)} images: give one image, or list, for each prompt")
        rows = [self._ids(each) for each in texts]
        width, padding = max(map(len, rows)), self.policy.config.pad_token_id
        ids = torch.tensor([row + [padding] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        frames = self.policy.processor.frames([_views(each) for each in given])  # [B, I, H, W, 3]
        pixels = torch.from_numpy(frames).permute(0, 1, 4, 2, 3)
        normalized = self.policy.model.vision_backbone.normalize(pixels)
        return BatchFeature({"input_ids": ids, "attention_mask": mask, "pixel_values": normalized})

    def _ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the folder has no tokenizer.json: copy the tokenizer of its base model into it")
        ids: list[int] = self.tokenizer.encode(text).ids
        bos = self.policy.config.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _views(images: Any) -> np.ndarray:
    """[I, H, W, 3] uint8 of an image of PIL or numpy, or of a list of them."""
    views = images if isinstance(images, list | tuple) else [images]
    arrays = [np.asarray(view.convert("RGB") if hasattr(view, "convert") else view) for view in views]
    return arrays[0] if arrays[0].ndim == 4 else np.stack(arrays)


def _device(device_map: Any) -> str:
    if device_map is None:
        return "cpu"
    if device_map == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device_map, dict):
        raise UsageError("device_map: an OpenVLA folder is loaded onto one device; name it, such as 'cuda:0'.")
    return str(device_map)


def _dtype_name(dtype: Any, path: str | Path) -> Any:
    """float32 or bfloat16, as given or as stored."""
    if dtype in (None, "auto"):
        from vlarl.config.run_checkpoints import locate_checkpoint

        folder = checkpoint_folder(locate_checkpoint(path).path)
        dtype = stored_dtype(folder) if (folder / "config.json").is_file() else torch.float32
    return str(dtype).removeprefix("torch.")
