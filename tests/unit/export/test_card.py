"""What a model card says, what a push sends, and what is refused before anything is sent."""

import json
from pathlib import Path

import pytest
import yaml
from fakes.eval_records import SETTINGS, episode
from fakes.hub import WRITER

import vlarl
from vlarl.cli import main
from vlarl.config.schema import Config
from vlarl.config.source.load import to_yaml
from vlarl.config.training_data import TrainedOn, TrainingData, write_training_data
from vlarl.evaluation.record import EvalDirectory, EvalRecord
from vlarl.evaluation.run import fingerprint
from vlarl.export.card import Source, model_card
from vlarl.observability.episodes import episode_row
from vlarl.observability.files import write_atomically
from vlarl.types import EvalResult

OPTIONS = {
    "run": {"name": "first", "root": "/home/me/secret/runs"},
    "policy": {"path": "openvla/openvla-7b"},
    "env": {"suite": "libero_goal", "task_ids": (0, 1, 2)},
    "reward": {"source": "remote", "url": "http://user-token.example/score"},
    "logging": {"wandb": True, "wandb_project": "private-project"},
    "optim": {"lr": 3e-6},
}


def evaluated(iteration: int, won: int, total: int) -> list[str]:
    rows = [episode_row(episode(0, 30 + i, i < won)) for i in range(total)]
    return [json.dumps({"iteration": iteration, "phase": "eval", **row}) for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two iterations: 1 of 4 before, 2 of 4 after the first, 4 of 4 after the second."""
    run = tmp_path / "runs" / "first"
    for name in ("eval", "logs", "videos", "tensorboard"):
        (run / name).mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(Config.model_validate(OPTIONS)))
    lines = [*evaluated(0, 1, 4), *evaluated(1, 2, 4), *evaluated(2, 4, 4)]
    (run / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    for name, iteration in (("final", 2), ("step_000001", 1)):
        folder = run / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights" * 300)
        (folder / "trainer.json").write_text(json.dumps({"iteration": iteration, "policy_updates": iteration}))
        (folder / "trainer.safetensors").write_bytes(b"optimizer state")
        on = TrainedOn(
            by="train", suite="libero_goal", protocol="disjoint", task_ids=(0, 1, 2), states=tuple(range(30))
        )
        write_training_data(folder, TrainingData((on,)))
    return run


def card_of(folder: Path, *records: EvalRecord) -> str:
    return model_card(Source.of(folder, records), "me/better")


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def test_a_card_says_base_algorithm_tasks_success_and_how_to_load_it(run):
    card = card_of(run / "checkpoints" / "final")
    head = front_matter(card)
    assert (head["base_model"], head["base_model_relation"]) == ("openvla/openvla-7b", "finetune")
    assert "grpo" in head["tags"] and head["library_name"] == "vlarl"
    assert "trained from openvla/openvla-7b, made by GRPO with vlarl " + vlarl.__version__ in card
    assert "`libero_goal`, tasks 0 to 2 (reinforcement learning, initial states 0 to 29 of each)" in card
    row = "| task 0 of `libero_goal`, greedy, by the training run | 4 | 25.0% [4.6%, 69.9%] | 100.0% [51.0%, 100.0%] |"
    assert row in card
    assert "This is the policy after 2 iterations and 2 updates." in card and "no update" not in card
    assert "pip install -c constraints.txt -e .    # in a clone" in card and "pip install vlarl" not in card
    assert 'vlarl.load_policy("me/better")' in card and "vlarl eval me/better --suite libero_goal" in card


def test_a_card_has_the_options_but_neither_paths_nor_secrets(run):
    card = card_of(run / "checkpoints" / "final")
    options = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert options["optim"]["lr"] == 3e-6 and options["env"]["task_ids"] == [0, 1, 2]
    for private in ("/home/me", "secret", "user-token", "private-project"):
        assert private not in card


def test_a_step_has_its_own_evaluation(run):
    assert "| 25.0% [4.6%, 69.9%] | 50.0% [15.0%, 85.0%] |" in card_of(run / "checkpoints" / "step_000001")


def test_weights_that_the_loop_has_not_evaluated_claim_nothing(run):
    (run / "config.yaml").write_text(to_yaml(Config.model_validate(OPTIONS | {"eval": {"use_ema": True}})))
    assert "| 4 | 25.0% [4.6%, 69.9%] | - |" in card_of(run / "checkpoints" / "final")
    averaged = run / "checkpoints" / "ema"
    (run / "checkpoints" / "final").rename(averaged)
    (averaged / "metadata.json").write_text('{"training_step": 2, "policy_updates": 1}')
    assert "| 25.0% [4.6%, 69.9%] | 100.0% [51.0%, 100.0%] |" in card_of(averaged)
    assert "This is the policy after 2 iterations and 1 update." in card_of(averaged)


def test_an_evaluation_says_which_tasks_it_covers(run):
    def row(*outcomes: tuple[int, bool]) -> str:
        record = EvalRecord(SETTINGS, 4, EvalResult(tuple(episode(task, 1, won) for task, won in outcomes)))
        (found,) = [
            line for line in card_of(run / "checkpoints" / "final", record).splitlines() if "vlarl eval`" in line
        ]
        return found

    assert row((0, True), (3, False)).startswith("| tasks 0, 3 of `tabletop_spatial`, greedy")
    assert row((4, True)).startswith("| task 4 of `tabletop_spatial`, greedy")
    assert row(*((task, True) for task in range(10))).startswith("| all 10 tasks of `tabletop_spatial`, greedy")
    lines = [*evaluated(0, 1, 4), *evaluated(2, 3, 3)]
    (run / "episodes.jsonl").write_text("\n".join(lines).replace('"task_id": 0', '"task_id": 2', 1) + "\n")
    assert "| tasks 0, 2 of `libero_goal`, greedy, by the training run | 4 / 3 |" in card_of(
        run / "checkpoints" / "final"
    )


@pytest.mark.parametrize("name", ["final", "step_000001", "best_return", "ema"])
def test_weights_that_no_update_has_changed_are_the_base_policy(run, monkeypatch, capsys, name):
    """Whatever the configuration says: here no iteration had anything to learn from."""
    monkeypatch.chdir(run.parent.parent)
    folder = run / "checkpoints" / name
    if not folder.is_dir():
        (run / "checkpoints" / "final").rename(folder)
        (folder / "trainer.json").unlink()
        (folder / "metadata.json").write_text('{"training_step": 2, "policy_updates": 0}')  # a critic's warm-up
    else:
        (folder / "trainer.json").write_text('{"iteration": 2, "policy_updates": 0}')
    said = "this checkpoint is the base policy, openvla/openvla-7b: no update was made"
    assert main(["push", str(folder), "me/better", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert f"warning: {said}. The model card says so." in printed.err
    assert f"\n\n**Note: {said}.**\n" in printed.out


def test_evaluations_by_the_command_are_in_it_with_their_warnings(run):
    result = EvalResult(tuple(episode(0, i, i < 3) for i in range(4)))
    settings = {**vars(SETTINGS), "warnings": ("It may have been trained on these.",)}
    card = card_of(run / "checkpoints" / "final", EvalRecord(type(SETTINGS)(**settings), 4, result))
    label = "task 0 of `tabletop_spatial`, greedy, protocol benchmark, by `vlarl eval`"
    assert f"| {label} | 4 | - | 75.0% [30.1%, 95.4%] |" in card
    assert "\nIt may have been trained on these." in card


def test_without_a_run_the_card_says_what_is_known(tmp_path):
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "merge_metadata.json").write_text(json.dumps({"base": str(tmp_path / "my-base")}))
    (tmp_path / "my-base").mkdir()
    card = card_of(folder)
    assert "trained from my-base, made with vlarl" in card and str(tmp_path) not in card
    assert "base_model" not in front_matter(card)
    assert "## Success" not in card and "## How it was trained" not in card


@pytest.mark.parametrize(("base", "warned"), [("openvla/openvla-7b", False), ("builtin:tiny-oft", False), ("", True)])
def test_an_adapter_on_a_base_of_this_machine_is_warned_about(tmp_path, base, warned):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base or str(tmp_path)}))
    source = Source.of(folder)
    assert len(source.warnings) == warned
    for warning in source.warnings:
        assert str(tmp_path) in warning and f"vlarl merge {folder} OUT" in warning
    card = model_card(source, "me/better")
    assert "A LoRA adapter on " in card
    if base == "openvla/openvla-7b":
        assert front_matter(card)["base_model_relation"] == "adapter"


# The command


@pytest.mark.parametrize("named", ["first", "runs/first", "runs/first/checkpoints/final"])
def test_a_run_is_pushed_with_its_card(run, hub, monkeypatch, capsys, named):
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert main(["push", named, "me/better", "--private"]) == 0
    assert capsys.readouterr().out == f"pushed: {hub.url}/me/better\n"
    repo = hub.repos["me/better"]
    assert repo.private
    files = repo.revisions["main"]
    assert sorted(files) == ["README.md", "config.json", "model.safetensors", "training_data.json"]
    assert "100.0% [51.0%, 100.0%]" in files["README.md"].decode()


def test_a_run_under_another_root_is_pushed_by_its_name(run, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    run.parent.rename(tmp_path / "elsewhere")
    assert main(["push", "first", "me/better", "--root", "elsewhere", "--dry-run"]) == 0
    assert "in total, to me/better; not uploaded" in capsys.readouterr().out


def test_a_card_of_your_own_is_left_alone(run, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    folder = run / "checkpoints" / "final"
    (folder / "README.md").write_text("Mine.")
    assert main(["push", str(folder), "me/better"]) == 0
    assert hub.repos["me/better"].revisions["main"]["README.md"] == b"Mine."


def test_a_dry_run_lists_the_files_and_prints_the_card_without_a_login(run, hub, monkeypatch, capsys):
    monkeypatch.chdir(run.parent.parent)
    final = run / "checkpoints" / "final"
    ours = EvalRecord(
        type(SETTINGS)(**{**vars(SETTINGS), "fingerprint": fingerprint(final)}), 1, EvalResult((episode(0, 1, True),))
    )
    for name, record in (("ours", ours), ("other", EvalRecord(SETTINGS, 1, EvalResult((episode(0, 1, False),))))):
        EvalDirectory.create(run / "eval" / name).write(record)
    assert main(["push", "first", "me/better", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "    2.1 kB  model.safetensors\n" in printed and "trainer" not in printed
    assert "in total, to me/better; not uploaded" in printed and "# better" in printed
    assert printed.count("by `vlarl eval` |") == 1, "that of these weights"
    assert hub.requests == [] and not (final / "README.md").exists()


def test_a_warning_comes_before_the_upload(tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", WRITER)
    folder = tmp_path / "adapter"
    folder.mkdir()
    write_atomically(folder / "adapter_config.json", json.dumps({"base_model_name_or_path": str(tmp_path)}))
    assert main(["push", str(folder), "me/adapter"]) == 0
    assert "warning: this is an adapter on" in capsys.readouterr().err


def test_parts_of_weights_are_not_pushed(run, hub, capsys):
    folder = run / "checkpoints" / "step_000001"
    (folder / "config.json").unlink()
    (folder / "sharded").mkdir()
    assert main(["push", str(folder), "me/better", "--dry-run"]) == 2
    assert "use `final` of the run" in capsys.readouterr().err
