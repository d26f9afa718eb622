"""OpenVLA folders through transformers' Auto classes, in either order of imports, with the original's actions."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.golden_arrays import load_arrays

import vlarl
from vlarl.errors import UsageError
from vlarl.types import Observation

GOLDEN = Path(__file__).parents[2] / "golden"
OPENVLA, OFT = GOLDEN / "openvla-tiny", GOLDEN / "openvla-oft-tiny"
PROMPT = "In: What action should the robot take to open the drawer?\nOut:"

ORDER = """
import sys
for name in sys.argv[2:]:
    __import__(name)
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
config = AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1])
processor = AutoProcessor.from_pretrained(sys.argv[1])
print(type(config).__name__, type(model).__name__, type(processor).__name__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("policy")
    vlarl.load_policy("builtin:tiny-openvla").save(made)
    return made


@pytest.mark.parametrize(
    "imported",
    [
        ["vlarl", "transformers"],
        ["transformers", "vlarl"],
        ["transformers.models.auto.modeling_auto", "transformers.models.auto.processing_auto", "vlarl"],
    ],
    ids=["vlarl first", "transformers first", "Auto classes first"],
)
def test_a_folder_is_known_in_either_order_of_imports(folder, imported):
    done = subprocess.run(
        [sys.executable, "-c", ORDER, str(folder), *imported], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["OpenVLAConfig", "OpenVLAForActionPrediction", "PrismaticProcessor"]


def test_importing_vlarl_imports_neither_torch_nor_transformers():
    code = "import sys, vlarl; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_example_of_the_docs_runs(folder, tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "AutoProcessor" in block]
    (tmp_path / "merged").symlink_to(folder)
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(7,)"


def model_of(folder: Path, **options):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, **options)


def units(model, key: str) -> float:
    """What float32 can represent of an action in the robot's units."""
    low, high, _ = model.policy.normalizer._bounds("action", key)
    return float(np.finfo(np.float32).eps) * max(1.0, float((high - low).max()))


def test_actions_equal_those_of_the_original():
    model, expected = model_of(OPENVLA), load_arrays(OPENVLA / "expected.npz")
    ids, pixels = (torch.from_numpy(expected[name]) for name in ("input_ids", "pixel_values"))
    suffix = model.policy.config.prompt_suffix_id
    assert (ids[:, -1] == suffix).all()
    for key in ("libero_spatial", "bridge_orig"):
        actions = expected[f"actions_{key}"]
        for given in (ids, ids[:, :-1]):  # the original appends the token where it is absent
            found = model.predict_action(given, pixels, unnorm_key=key)
            assert np.abs(found - actions).max() <= 2 * units(model, key)
        alone = model.predict_action(input_ids=ids[:1], pixel_values=pixels[:1], unnorm_key=key, do_sample=False)
        assert alone.shape == actions[0].shape and np.abs(alone - actions[0]).max() <= 2 * units(model, key)


def test_chunks_of_oft_equal_those_of_the_original():
    model = model_of(OFT, num_images=2, use_proprio=True)
    expected = load_arrays(OFT / "expected.npz")
    ids, pixels, proprio = (
        torch.from_numpy(expected[name]) for name in ("input_ids", "pixel_values", "proprio_normalized")
    )
    (key,) = model.policy.config.norm_stats
    found = model.predict_action(ids, pixels, unnorm_key=key, proprio=proprio)
    assert found.shape == expected["token_actions"].shape
    assert np.abs(found - expected["token_actions"]).max() <= 2 * units(model, key)


def test_the_processor_reads_prompts_and_images_as_the_policy_does(folder):
    from transformers import AutoProcessor

    processor, policy = AutoProcessor.from_pretrained(folder), vlarl.load_policy(folder)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 90, 70, 3), dtype=np.uint8)
    state = np.zeros(policy.config.proprio_dim, np.float32)
    longer = PROMPT.replace("the drawer", "the drawer and put the bowl on the plate")
    inputs = processor([PROMPT, longer], list(images))
    ours = policy.process(
        [
            Observation(images[0][None], state, "open the drawer"),
            Observation(images[1][None], state, "open the drawer and put the bowl on the plate"),
        ]
    )
    model = model_of(folder)
    assert torch.equal(model._with_suffix(inputs["input_ids"], inputs["attention_mask"]), ours.input_ids)
    assert torch.equal(inputs["pixel_values"], policy.model.vision_backbone.normalize(ours.pixels))
    one = processor(PROMPT, images[0])
    proprio = torch.from_numpy(policy.normalizer.normalize_proprio(state[None]))
    found = model.predict_action(**one, proprio=proprio if policy.config.use_proprio else None)
    expected = policy.predict_action(images[0], "open the drawer", state)
    assert np.array_equal(found, expected[0] if len(expected) == 1 else expected)


def test_what_a_folder_can_not_be_loaded_with_is_refused(folder):
    with pytest.raises(UsageError, match=r"from_pretrained: load_in_4bit can't be used .* vlarl.load_policy"):
        model_of(folder, load_in_4bit=True)
    with pytest.raises(UsageError, match="loaded onto one device"):
        model_of(folder, device_map={"": 0})
    with pytest.raises(UsageError, match=r"use from_pretrained\(folder\)"):
        type(model_of(folder))(model_of(folder).config)


def test_a_model_is_saved_and_loaded_again(folder, tmp_path):
    model = model_of(folder)
    model.save_pretrained(tmp_path / "saved")
    again = dict(model_of(tmp_path / "saved").named_parameters())
    assert again.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(again[name], weight) for name, weight in model.named_parameters())
