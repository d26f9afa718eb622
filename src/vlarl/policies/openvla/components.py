"""The networks beside a model, each in a file of its own: ours in safetensors, OFT's pickled, of which only tensors are
read."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from vlarl.policies.weight_files import not_floats, read_tensors

OFT_HEADS = ("proprio_projector", "action_head")


def has_component(folder: Path, name: str) -> bool:
    """Whether a folder contains this component, ours or OFT's."""
    return (folder / f"{name}.safetensors").is_file() or any(folder.glob(f"{name}--*_checkpoint.pt"))


def read_component(folder: Path, name: str) -> dict[str, torch.Tensor] | None:
    """State of a component: our `<name>.safetensors`, or OFT's `<name>--<step>_checkpoint.pt` of the latest step."""
    path = folder / f"{name}.safetensors"
    if path.is_file():
        state = {key: tensor.clone() for key, tensor in read_tensors(path)}
    else:
        files = folder.glob(f"{name}--*_checkpoint.pt")
        found = {int(m[1]): p for p in files if (m := re.search(r"--(\d{1,18})_", p.name))}
        if not found:
            return None
        path = found[max(found)]
        state = {key.removeprefix("module."): tensor for key, tensor in _unpickled(path).items()}
    for key, tensor in state.items():
        if not tensor.is_floating_point() or tensor.is_sparse or tensor.is_quantized:
            raise not_floats(path, key, tensor.dtype)
    return state


def copy_oft_heads(source: Path, target: Path) -> None:
    """Copy OFT's own files of the heads, where a folder has them."""
    for name in OFT_HEADS:
        for path in source.glob(f"{name}--*.pt"):
            shutil.copyfile(path, target / path.name)


def write_oft_heads(folders: Sequence[Path], target: Path) -> None:
    """Write the heads to OFT's own files, from the first folder that has them: other programs treat every safetensors
    file as a part of the model. The critic, which belongs to training, is not copied."""
    for name in OFT_HEADS:
        holder = next((folder for folder in folders if has_component(folder, name)), None)
        if holder is None or (holder == folders[-1] and any(target.glob(f"{name}--*_checkpoint.pt"))):
            continue  # none, or copied with the base's other files
        for stale in target.glob(f"{name}--*_checkpoint.pt"):
            stale.unlink()
        state = {f"module.{key}": value for key, value in (read_component(holder, name) or {}).items()}
        torch.save(state, target / f"{name}--0_checkpoint.pt")
    for name in (*OFT_HEADS, "value_head"):
        (target / f"{name}.safetensors").unlink(missing_ok=True)


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """The named tensors of a torch.save file; a pickle of anything else is refused, and none of its code runs."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:  # omit its text, which advises loading the file anyway
        raise ValueError(
            f"{path} is not loaded: it is corrupt, or a pickle of more than tensors, which could run code. Download it "
            "again from a source that you trust, or have its tensors alone saved as safetensors"
        ) from error
    except Exception as error:  # other errors of a broken file are not documented
        raise ValueError(f"{path} is truncated or corrupt ({error}): copy or download it again") from error
    problem = None
    if not isinstance(state, dict):
        problem = f"it holds a {type(state).__name__}"
    elif odd := [name for name in state if not isinstance(name, str)]:
        problem = f"a name is {odd[0]!r}"
    elif odd := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        problem = f"{odd[0]} is a {type(state[odd[0]]).__name__}"
    elif not state:
        problem = "it is empty"
    if problem is not None:
        raise ValueError(f"{path} does not contain named tensors: {problem}. Save the module's state_dict")
    tensors: dict[str, torch.Tensor] = state
    return tensors
