"""All files of a run have the mode that the umask gives."""

import os
import stat

import pytest

from vlarl.config import load_config, to_yaml
from vlarl.observability.run_dir import RunDirectory
from vlarl.observability.sinks import JsonlSink
from vlarl.policies.tiny import init_tiny
from vlarl.training.checkpoint import CheckpointStore
from vlarl.training.state import TrainerState


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_every_file_of_a_run_has_one_mode(umask, tmp_path, build):
    before = os.umask(umask)
    try:
        run = RunDirectory.create(tmp_path, "first")
        config = load_config("tabletop_ppo", {"critic.kind": "separate", "ema.beta": 0.9})
        run.write_config(to_yaml(config))
        run.write_status("running", 0, 1)
        with run.log_to_file():
            pass
        JsonlSink(run.metrics_file).close()
        CheckpointStore(run.checkpoints, 2).save("final", build(init_tiny("parallel", seed=3), config), TrainerState())
    finally:
        os.umask(before)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"config.yaml", "trainer.safetensors", "trained.safetensors", "train.log"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in files}
    assert modes == {0o666 & ~umask}
