"""benchmarks/smolvla_450m.py at its toy size, and the real one's number of weights."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from smolvla_450m import backbone_config, main, policy_config  # noqa: E402

from vlarl.policies.smolvla.config import parse_config  # noqa: E402
from vlarl.policies.smolvla.model import SmolVLAModel  # noqa: E402


def test_the_benchmark_runs_at_toy_size(tmp_path, capsys):
    main(["--toy", "--rows", "1", "2", "--update-rows", "3", "--repeats", "1", "--out", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    assert [(r["what"], r["rows"]) for r in found["results"]] == [("decide", 1), ("decide", 2), ("update", 3)]
    assert all(r["seconds"] > 0 and r["peak_bytes"] > 0 and r["limit"] == "none" for r in found["results"])
    assert found["prefix_tokens"] == 3 * 4 + 16 + 1, "three views of 2 x 2 tokens"
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3


def test_the_shape_is_that_of_smolvla_base():
    """450 million weights with the language model's head, which the policy does not use; 64 tokens of an image."""
    config = parse_config(policy_config(False), backbone_config(False))
    with torch.device("meta"):
        model = SmolVLAModel(config)
    head = config.vocab_size * config.text.hidden
    assert round((sum(p.numel() for p in model.parameters()) + head) / 1e6) == 450
    assert config.tower.tokens == 64 and config.expert.hidden == 720 and config.expert.layers == 16
    assert (config.chunk_size, config.num_steps) == (50, 10)
