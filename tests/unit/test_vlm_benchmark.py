"""benchmarks/vlm_3b.py at its toy size: full texts from both, and figures that belong together."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from vlm_3b import TEXT, VISION, main, make_inputs, make_policy, plain_generate  # noqa: E402


def test_the_benchmark_runs_at_toy_size(tmp_path, capsys):
    main(
        [
            "--toy",
            "--rows",
            "2",
            "3",
            "--text",
            "4",
            "--image",
            "56",
            "--repeats",
            "1",
            "--out",
            str(tmp_path / "r.json"),
        ]
    )
    found = json.loads((tmp_path / "r.json").read_text())
    assert [(r["rows"], r["what"]) for r in found["results"]] == [
        (rows, what) for rows in (2, 3) for what in ("engine", "generate", "update")
    ]
    assert all(r["tokens"] == 4 * r["rows"] and r["seconds"] > 0 and r["peak_bytes"] > 0 for r in found["results"])
    assert found["prompt_tokens"] == 4 + 2 + 64, "four tokens of an image of 4 x 4 patches, around them two"
    assert len(capsys.readouterr().out.splitlines()) == 2 + 6


def test_every_text_has_its_full_length():
    policy = make_policy(True, torch.device("cpu"))
    assert plain_generate(policy, make_inputs(policy, 2, 56), 5).shape == (2, 5)


def test_the_shape_is_that_of_qwen2_5_vl_3b():
    """3.75 billion weights: counted by hand, without the norms and biases."""
    hidden, layers, width = TEXT["hidden_size"], TEXT["num_hidden_layers"], VISION["hidden_size"]
    keys = TEXT["num_key_value_heads"] * hidden // TEXT["num_attention_heads"]
    layer = 2 * hidden**2 + 2 * hidden * keys + 3 * hidden * TEXT["intermediate_size"]
    tower = VISION["depth"] * (4 * width**2 + 3 * width * VISION["intermediate_size"])
    merger = (4 * width) ** 2 + 4 * width * hidden
    total = TEXT["vocab_size"] * hidden + layers * layer + tower + merger
    assert abs(total / 3.75e9 - 1) < 0.01
