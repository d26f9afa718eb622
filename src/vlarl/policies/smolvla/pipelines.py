"""The pipelines that lerobot runs before and after a SmolVLA, and the state files of their steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from vlarl.policies.checkpoint_json import read_json
from vlarl.policies.smolvla.config import DEFAULT_NORM_MODES

PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
NORMALIZER, UNNORMALIZER = "normalizer_processor", "unnormalizer_processor"
NORMALIZING = {PREPROCESSOR: NORMALIZER, POSTPROCESSOR: UNNORMALIZER}  # the step of each that reads statistics
STATE_FILE = "policy_{}_step_{}_{}.safetensors"
OF_ITS_OWN = (  # steps that the policy does itself, or that change no values
    "rename_observations_processor",
    "to_batch_processor",
    "smolvla_new_line_processor",
    "tokenizer_processor",
    "device_processor",
)


def standard_pipelines(raw: Mapping[str, Any]) -> dict[str, bytes]:
    """Both for a policy with this config.json, and empty state files, which statistics are written to."""
    outputs, inputs = raw["output_features"], raw["input_features"]
    before, after = (
        STATE_FILE.format("preprocessor", 5, NORMALIZER),
        STATE_FILE.format("postprocessor", 0, UNNORMALIZER),
    )
    tokens = {
        "max_length": raw.get("tokenizer_max_length", 48),
        "task_key": "task",
        "padding_side": "right",
        "padding": "longest",
        "truncation": True,
        "tokenizer_name": raw.get("vlm_model_name"),
    }
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}

    def scaling(name: str, features: dict[str, Any], file: str) -> dict[str, Any]:
        norm_map = raw.get("normalization_mapping") or DEFAULT_NORM_MODES
        config = {"eps": 1e-8, "features": features, "norm_map": norm_map}
        return {"registry_name": name, "config": config, "state_file": file}

    preprocessor = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "smolvla_new_line_processor", "config": {}},
        {"registry_name": "tokenizer_processor", "config": tokens},
        device,
        scaling(NORMALIZER, inputs | outputs, before),
    ]
    postprocessor = [scaling(UNNORMALIZER, outputs, after), device]
    return {
        PREPROCESSOR: written({"name": "policy_preprocessor", "steps": preprocessor}),
        POSTPROCESSOR: written({"name": "policy_postprocessor", "steps": postprocessor}),
        before: save({}),
        after: save({}),
    }


def with_statistics(
    files: Mapping[str, bytes], raw: Mapping[str, Any], statistics: dict[str, torch.Tensor]
) -> dict[str, bytes]:
    """The files of a folder with these statistics in the state files of both pipelines. A pipeline, a step or a state
    file that lacks is added."""
    standard, result = standard_pipelines(raw), dict(files)
    for file, normalizing in NORMALIZING.items():
        content = json.loads(files.get(file, standard[file]))
        steps = content["steps"]
        if (step := _find(steps, normalizing)) is None:
            step = _find(json.loads(standard[file])["steps"], normalizing)
            assert step is not None
            del step["state_file"]  # named by its place below
            steps.insert(len(steps) if file == PREPROCESSOR else 0, step)
        if not step.get("state_file"):
            kind = Path(file).stem.removeprefix("policy_")
            step["state_file"] = STATE_FILE.format(kind, steps.index(step), normalizing)
            result[file] = written(content)
        result.setdefault(file, standard[file])
        result[step["state_file"]] = save(statistics)
    return result


def written(content: object) -> bytes:
    """A JSON file."""
    return json.dumps(content, indent=2).encode()


def normalizing_step(folder: Path, file: str) -> dict[str, Any] | None:
    """The step of a pipeline that normalises; None if the folder or the pipeline has none.

    ValueError for a step that is not known: it may change what the policy reads or predicts.
    """
    if not (folder / file).is_file():
        return None
    found = steps_of(folder, file)
    for step in found:
        name = step.get("registry_name") or step.get("class")
        if name not in (*OF_ITS_OWN, NORMALIZING[file]):
            raise ValueError(
                f"{folder / file} has the step {str(name)[:80]!r}, which is not supported: supported are "
                f"{', '.join((*OF_ITS_OWN, NORMALIZING[file]))}. Use a checkpoint without it"
            )
    return _find(found, NORMALIZING[file])


def pipeline_files(folder: Path) -> list[str]:
    """The pipelines of a folder and their state files, by name."""
    names = []
    for name in NORMALIZING:
        if (folder / name).is_file():
            names += [name, *(state_file(folder, step) for step in steps_of(folder, name) if step.get("state_file"))]
    return names


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The steps of a pipeline."""
    steps = read_json(folder / name).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError(f"{folder / name} has no list of steps: copy or download it again")
    return steps


def state_file(folder: Path, step: Mapping[str, Any]) -> str:
    """The name of a step's state file, which is beside the pipeline."""
    name = str(step["state_file"])
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"{folder}: a pipeline names the state file {name[:80]!r}, which is not a file beside it")
    return name


def _find(steps: list[dict[str, Any]], registry_name: str) -> dict[str, Any] | None:
    return next((step for step in steps if step.get("registry_name") == registry_name), None)
