"""benchmarks/memory_limit.py at its toy size: a case plans, decides and updates."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory_limit import CASES, main, waves  # noqa: E402

from vlarl.config import load_config  # noqa: E402


def test_the_benchmark_runs_at_toy_size(tmp_path, capsys):
    main(["--toy", "--decisions", "8", "--cases", "autoregressive", "--out", str(tmp_path / "r.json")])
    result = json.loads((tmp_path / "r.json").read_text())["autoregressive"]
    assert result["plan"][0].startswith("memory for tensors: 360 MiB") and result["sizes"]["fits"]
    assert result["microbatch_size"] == result["sizes"]["microbatch_size"] < 128
    assert result["oom_retries"] == {"rollout": 0, "update": 0} and result["peak_allocated_gib"] is None
    assert result["samples_per_s"] > result["samples_per_s_with_annotation"] > 0
    assert "== autoregressive" in capsys.readouterr().out


def test_every_case_is_of_a_card_of_its_preset():
    limits = {case: load_config(preset, given).run.memory_gb for case, (preset, given) in CASES.items()}
    assert limits == {"parallel": 24, "autoregressive": 24, "4-bit": 16}
    assert load_config(*CASES["4-bit"]).policy.quantize == 4


def test_each_decision_is_made_once_and_the_last_ones_in_a_smaller_batch():
    """As at the end of a rollout, where few slots are left: another shape is recorded."""
    for count in (1024, 100, 40, 16, 3):
        assert [row for wave in waves(count) for row in wave] == list(range(count))
    assert [len(wave) for wave in waves(1024)] == [64] * 15 + [48, 16]
