"""The command lines that the seeds print, as they print them: `vlarl train` for the script's name, and nothing else."""

import json

import pytest
import yaml

from vlarl.cli import main
from vlarl.config import Config

SINGLE = "--task-suite libero_spatial --task-id 0 --timesteps 10000"
SEVERAL = "--task-suite libero_spatial --task-ids 0 1 2 3 --num-envs 4 --timesteps"
COMMANDS = {
    "000: python vlarl/ppo_vllm_thread_ray_fsdp_vla_v3.py": ("", {}),
    "001: quick start": (
        '--actor_num_gpus_per_node "[1]" --vllm_num_engines 0 --task_suite_name "libero_spatial" --num_steps 64 '
        "--local_rollout_batch_size 1",
        {"env.suite": "libero_spatial", "vllm.num_engines": 0, "rollout.num_steps": 64, "env.num_envs": 1},
    ),
    "004: python OpenVLA_PPO.py": ("", {}),
    "004: full training run": (
        f"{SINGLE} --use-wandb",
        {"env.suite": "libero_spatial", "env.task_ids": [0], "run.total_env_steps": 10_000, "logging.wandb": True},
    ),
    "004: quick test": (f"{SINGLE} --no-wandb", {"logging.wandb": False, "run.total_env_steps": 10_000}),
    "004: full training with wandb": (
        "--task-suite libero_spatial --task-id 0 --timesteps 100000 --use-wandb",
        {"run.total_env_steps": 100_000, "run.iterations": None},
    ),
    "004: multi-task training": (
        f"{SEVERAL} 50000",
        {"env.task_ids": [0, 1, 2, 3], "env.num_envs": 4, "run.total_env_steps": 50_000},
    ),
    "004: four tasks in parallel": (f"{SEVERAL} 200000", {"env.num_envs": 4, "run.total_env_steps": 200_000}),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_printed_command_is_understood(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, expected = COMMANDS[name]
    assert main(["train", *command.replace('"', "").split(), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    data = yaml.safe_load(printed)
    assert set(data) == set(Config.model_fields)
    for path, value in expected.items():
        section, _, option = path.partition(".")
        assert data[section][option] == value, path
    if "run.total_env_steps" in expected:
        most = 128 * 220  # environment steps of an iteration of libero_spatial_grpo_oft
        iterations = -(-expected["run.total_env_steps"] // most)
        assert f"# total_iterations: {iterations}\n" in printed and f"# total_episodes: {iterations * 128}\n" in printed


@pytest.mark.slow
def test_one_for_real(checkpoint, tmp_path, monkeypatch):
    """The quick test, on the tabletop and with smaller rollouts: it trains until the steps are done, and no longer."""
    monkeypatch.chdir(tmp_path)
    command = (
        f"--task-suite tabletop_spatial --task-id 0 --timesteps 200 --no-wandb --pretrained_checkpoint {checkpoint}"
    )
    small = "--rollout.num_groups 1 --optim.minibatches 1 --eval.states_per_task 1 --eval.videos 0 --run.num_threads 1"
    quiet = "--run.name quick --run.device cpu --no-logging.tensorboard --no-logging.report"
    assert main(["train", *command.split(), *small.split(), *quiet.split()]) == 0
    run = tmp_path / "runs" / "quick"
    status = json.loads((run / "status.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    steps = [0] * (rows[-1]["iteration"] + 1)
    for episode in episodes:
        if episode["phase"] == "rollout":
            steps[episode["iteration"]] += episode["length"]
    assert status["state"] == "finished" and status["iterations"] == rows[-1]["iteration"]
    assert sum(steps) >= 200 > sum(steps[:-1])
    assert "val/success_rate" in rows[-1]
