"""A whole run on real LIBERO with rendering: a simulator is killed in the middle, and training continues."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fakes.processes import MODULES, simulators

from vlarl.types import Trajectory


def height(trajectory: Trajectory) -> float:
    """How high the hand ends, in centimetres: a random policy's episodes differ in it, and none succeeds."""
    return 100.0 * float(trajectory.final_observation.proprio[2])


def test_the_preset_trains_with_a_tiny_model(libero_assets, tmp_path):
    command = [
        *(sys.executable, "-m", "vlarl.cli", "train", "libero_spatial_grpo_oft", "--model", "tiny"),
        *("--run.root", str(tmp_path), "--run.name", "run", "--run.iterations", "1", "--run.num_threads", "1"),
        *("--run.device", "cpu", "--env.num_envs", "2", "--env.task_ids", "2", "--env.max_steps", "16"),
        *("--rollout.num_groups", "2", "--rollout.group_size", "2", "--no-rollout.refill"),
        *("--rollout.accuracy_bounds", "null", "--reward.source", "e2e.test_libero_training:height"),
        *("--optim.minibatches", "1", "--eval.states_per_task", "1", "--eval.videos", "1"),
        "--no-logging.tensorboard",
    ]
    environment = {**os.environ, "PYTHONPATH": MODULES, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        metrics = tmp_path / "run" / "metrics.jsonl"
        limit = time.monotonic() + 240
        while not (metrics.exists() and metrics.read_text()) and run.poll() is None and time.monotonic() < limit:
            time.sleep(0.1)
        victims = simulators(run.pid)
        if victims:
            os.kill(victims[0], signal.SIGKILL)
        output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output
    assert len(victims) == 2, output
    before, after = (json.loads(line) for line in metrics.read_text().splitlines())
    assert before["val/mean_length"] == 16 and before["val/crashed"] == 0
    assert after["rollout/retried_episodes"] == 1 and after["rollout/num_crashed"] == 0
    assert after["rollout/num_trajectories"] == 4 and after["rollout/mean_length"] == 16
    assert after["train/optimizer_steps"] == 1 and after["train/grad_norm"] > 0
    assert after["train/ratio_first_minibatch_error"] == 0
    assert len(list((tmp_path / "run" / "videos").glob("*.mp4"))) == 2
    assert not [pid for pid in victims if Path(f"/proc/{pid}").exists()], "nothing is left running"
