"""What can be wrong in a checkpoint folder: each mutation damages one file, and says what must come of it."""

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from fuzz.json_mutations import ABSURD, DAMAGED_JSON, replace_leaf
from safetensors.torch import load_file, save_file

INDEX, STATISTICS = "model.safetensors.index.json", "dataset_statistics.json"
Expected = Literal["any", "refuse", "same"]
Mutation = Callable[[random.Random, Path], Expected]
CANARY = "canary"  # what the code in a pickle would make


# config.json


def config_value(rng: random.Random, folder: Path) -> Expected:
    return _mutate_json(rng, folder / _config_of(folder), replace_leaf)


def config_key_missing(rng: random.Random, folder: Path) -> Expected:
    def drop(rng: random.Random, tree: Any) -> None:
        target = rng.choice([tree, *(value for value in tree.values() if isinstance(value, dict) and value)])
        target.pop(rng.choice(sorted(target)))

    return _mutate_json(rng, folder / _config_of(folder), drop)


def config_damaged(rng: random.Random, folder: Path) -> Expected:
    (folder / _config_of(folder)).write_bytes(rng.choice(DAMAGED_JSON))
    return "refuse"


def config_truncated(rng: random.Random, folder: Path) -> Expected:
    return _truncate(rng, folder / _config_of(folder))


def config_of_another_model(rng: random.Random, folder: Path) -> Expected:
    kinds = ("smolvla", "pi0", "llama", "clip", "act", "", "x" * 1000)
    (folder / "config.json").write_text(json.dumps({"model_type": rng.choice(kinds), "type": rng.choice(kinds)}))
    return "any" if _config_of(folder) != "config.json" else "refuse"


def config_sizes(rng: random.Random, folder: Path) -> Expected:
    path = folder / "config.json"
    if not path.is_file():
        path = folder / _config_of(folder)
        tree = json.loads(path.read_text())
        tree["r"] = rng.choice((0, -1, 10**9, 10**30, 1.5))
    else:
        tree = json.loads(path.read_text())
        text, value = tree["text_config"], rng.choice((0, -1, 10**6, 10**9, 10**18, 10**30))
        where = rng.choice(
            [
                *((text, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")),
                *((text, name) for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")),
                *((tree, name) for name in ("n_action_bins", "pad_to_multiple_of")),
                *((tree.setdefault("vlarl", {}), name) for name in ("chunk_length", "action_dim", "num_images")),
                (tree["image_sizes"], 0),
            ]
        )
        where[0][where[1]] = value
    path.write_text(json.dumps(tree))
    return "any"


# Weights


def weights_truncated(rng: random.Random, folder: Path) -> Expected:
    return _truncate(rng, _weights(rng, folder))


def weights_flipped_in_header(rng: random.Random, folder: Path) -> Expected:
    path = _weights(rng, folder)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    return _flip(rng, path, 0, 8 + length)


def weights_flipped_in_data(rng: random.Random, folder: Path) -> Expected:
    path = _weights(rng, folder)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    return _flip(rng, path, 8 + length, path.stat().st_size)


def weights_not_finite(rng: random.Random, folder: Path) -> Expected:
    def spoil(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = rng.choice((float("nan"), float("inf")))

    return _rewrite(rng, folder, spoil)


def weights_of_another_shape(rng: random.Random, folder: Path) -> Expected:
    def reshape(tensors: dict[str, torch.Tensor], name: str) -> None:
        wide = torch.cat([tensors[name], tensors[name]])
        tensors[name] = rng.choice((wide, tensors[name][None], tensors[name][:0]))

    return _rewrite(rng, folder, reshape)


def weights_of_another_type(rng: random.Random, folder: Path) -> Expected:
    def convert(tensors: dict[str, torch.Tensor], name: str) -> None:
        tensors[name] = tensors[name].to(rng.choice((torch.int64, torch.int8, torch.bool)))

    return _rewrite(rng, folder, convert)


def weights_missing_one(rng: random.Random, folder: Path) -> Expected:
    def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
        del tensors[name]

    return _rewrite(rng, folder, drop)


def weights_header_lengths(rng: random.Random, folder: Path) -> Expected:
    path = _weights(rng, folder)
    path.write_bytes(struct.pack("<Q", rng.choice((0, 1, 2**31, 2**62, 2**64 - 1))) + path.read_bytes()[8:])
    return "refuse"


def weights_replaced(rng: random.Random, folder: Path) -> Expected:
    return _replace_file(rng, _weights(rng, folder))


def index_damaged(rng: random.Random, folder: Path) -> Expected:
    path = folder / INDEX
    if not path.is_file():
        path.write_bytes(rng.choice(DAMAGED_JSON))
        return "any"
    tree = json.loads(path.read_text())
    name = rng.choice(sorted(tree["weight_map"]))
    wrong = (".", "..", "/", "nothing.safetensors", "../whole/model.safetensors", "config.json", "", 7, None, ["x"], {})
    changes = (
        lambda: tree["weight_map"].update({name: rng.choice(wrong)}),
        lambda: tree.update(weight_map=rng.choice(([], "x", None, {}, 1))),
        lambda: tree.pop("weight_map"),
        lambda: tree["weight_map"].pop(name),
    )
    rng.choice(changes)()
    path.write_text(json.dumps(tree))
    return "refuse"


def heads_damaged(rng: random.Random, folder: Path) -> Expected:
    heads = sorted(path for path in folder.iterdir() if path.name.split(".")[0] in ("proprio_projector", "value_head"))
    if not heads:
        return weights_truncated(rng, folder)
    path = rng.choice(heads)
    if rng.random() < 0.5:
        return _truncate(rng, path)
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensors[name] = rng.choice(
        (tensors[name] * float("nan"), tensors[name].repeat_interleave(2, 0), tensors[name][..., None])
    )
    if rng.random() < 0.3:
        del tensors[name]
    save_file(tensors, path)
    return "refuse"


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def pickled_component(rng: random.Random, folder: Path) -> Expected:
    """OFT's .pt files are pickles: nothing but tensors is ever made of them."""
    files = sorted(folder.glob("*_checkpoint.pt"))
    path = rng.choice(files) if files else folder / "proprio_projector--1_checkpoint.pt"
    bomb = Bomb(folder.parent / CANARY)
    contents = ({"a": 1}, {}, [], 7, None, {"module.x": torch.zeros(3)}, {"module.fc1.weight": "x"}, bomb, {"x": bomb})
    if rng.random() < 0.4:
        path.write_bytes(rng.choice((b"", b"\x80", b"PK\x03\x04", rng.randbytes(500), b"cos\nsystem\n(S'id'\ntR.")))
    else:
        torch.save(rng.choice(contents), path)
    return "any"


# Statistics, tokenizer, processor


def statistics_wrong(rng: random.Random, folder: Path) -> Expected:
    """Numbers by which no action can be computed."""
    path = folder / STATISTICS
    tree = (
        json.loads(path.read_text())
        if path.is_file()
        else json.loads((folder / "config.json").read_text())["norm_stats"]
    )
    for statistics in tree.values():
        action = statistics["action"]
        q01, q99 = action["q01"], action["q99"]
        changes: tuple[Callable[[], object], ...] = (
            lambda q01=q01: q01.__setitem__(0, float("nan")),
            lambda q99=q99: q99.__setitem__(0, float("inf")),
            lambda q01=q01: q01.append(0.0),
            lambda q99=q99: q99.pop(),
            lambda q01=q01, q99=q99: q01.__setitem__(0, q99[0] + 1.0),
            lambda q01=q01: q01.__setitem__(0, "x"),
            lambda q99=q99: q99.__setitem__(0, None),
            lambda action=action: action.pop("q01"),
            lambda action=action: action.update(q99=1.0),
            lambda action=action: action.update(mask=[True]),
            lambda statistics=statistics: statistics.pop("action"),
        )
        changes[rng.randrange(len(changes))]()
    path.write_text(json.dumps(tree))
    return "refuse"


def statistics_damaged(rng: random.Random, folder: Path) -> Expected:
    (folder / STATISTICS).write_bytes(rng.choice(DAMAGED_JSON))
    return "refuse"


def tokenizer_damaged(rng: random.Random, folder: Path) -> Expected:
    path = folder / "tokenizer.json"
    if not path.is_file():
        path.write_bytes(rng.choice(DAMAGED_JSON))
        return "any" if _config_of(folder) != "config.json" else "refuse"
    if rng.random() < 0.3:
        return _truncate(rng, path)
    return _mutate_json(rng, path, replace_leaf)


def processor_value(rng: random.Random, folder: Path) -> Expected:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        path.write_bytes(rng.choice(DAMAGED_JSON))
        return "any"
    return _mutate_json(rng, path, replace_leaf)


def pixel_statistics_wrong(rng: random.Random, folder: Path) -> Expected:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return config_value(rng, folder)
    tree = json.loads(path.read_text())
    value = rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e-320))
    tree[rng.choice(("means", "stds")) if value != 0.0 and np.isnan(value) else "stds"][0][0] = value
    path.write_text(json.dumps(tree))
    return "refuse"


def training_data_damaged(rng: random.Random, folder: Path) -> Expected:
    path = folder / "training_data.json"
    if not path.is_file() or rng.random() < 0.5:
        path.write_bytes(rng.choice(DAMAGED_JSON))
        return "any"
    return _mutate_json(rng, path, replace_leaf)


# Files


def file_replaced(rng: random.Random, folder: Path) -> Expected:
    """A folder, a loop of links, a pipe, a device, an empty or unreadable file in the place of any file."""
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    _replace_file(rng, path)
    return "any"


def file_missing(rng: random.Random, folder: Path) -> Expected:
    path = rng.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    path.unlink()
    is_needed = path.suffix == ".safetensors" and path.name != "value_head.safetensors"  # a policy may have no critic
    return "refuse" if is_needed or path.name == _config_of(folder) else "any"


def files_that_do_not_matter(rng: random.Random, folder: Path) -> Expected:
    for name in ("training_log.jsonl", "metadata.json", "README.md"):
        (folder / name).write_bytes(rng.randbytes(1000))
    (folder / "something").mkdir()
    return "same"


def adapter_damaged(rng: random.Random, folder: Path) -> Expected:
    path = folder / "adapter_config.json"
    if not path.is_file():
        path.write_bytes(rng.choice(DAMAGED_JSON))
        return "any"
    tree = json.loads(path.read_text())
    tree[rng.choice(sorted(tree))] = rng.choice(ABSURD)
    path.write_text(json.dumps(tree))
    return "any"


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__.replace("_", " "): mutation
    for mutation in (
        *(config_value, config_key_missing, config_damaged, config_truncated, config_of_another_model, config_sizes),
        *(weights_truncated, weights_flipped_in_header, weights_flipped_in_data, weights_not_finite),
        *(weights_of_another_shape, weights_of_another_type, weights_missing_one, weights_header_lengths),
        *(weights_replaced, index_damaged, heads_damaged, pickled_component, statistics_wrong, statistics_damaged),
        *(tokenizer_damaged, processor_value, pixel_statistics_wrong, training_data_damaged),
        *(file_replaced, file_missing, files_that_do_not_matter, adapter_damaged),
    )
}


def _config_of(folder: Path) -> str:
    return "adapter_config.json" if (folder / "adapter_config.json").is_file() else "config.json"


def _weights(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted([*folder.glob("model*.safetensors"), *folder.glob("adapter*.safetensors")]))


def _mutate_json(rng: random.Random, path: Path, change: Callable[[random.Random, Any], object]) -> Expected:
    tree = json.loads(path.read_text())
    change(rng, tree)
    path.write_text(json.dumps(tree))
    return "any"


def _truncate(rng: random.Random, path: Path) -> Expected:
    os.truncate(path, rng.randrange(path.stat().st_size))
    return "refuse"


def _flip(rng: random.Random, path: Path, begin: int, end: int) -> Expected:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 8))):
        data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return "any"


def _rewrite(rng: random.Random, folder: Path, change: Callable[[dict[str, torch.Tensor], str], None]) -> Expected:
    path = _weights(rng, folder)
    tensors = load_file(path)
    change(tensors, rng.choice(sorted(tensors)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return "refuse"


def _replace_file(rng: random.Random, path: Path) -> Expected:
    path.unlink()
    kinds: tuple[Callable[[], object], ...] = (
        path.mkdir,
        path.touch,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("nothing"),
        lambda: os.mkfifo(path),
        lambda: path.write_bytes(rng.randbytes(10_000)),
    )
    rng.choice(kinds)()
    return "refuse"
