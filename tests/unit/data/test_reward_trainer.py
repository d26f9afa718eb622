"""Reward models from the command line: resumed to the bit, loaded as reward.model, and what can't be trained."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.reward_models import save_classifier
from fakes.texts import text_episode
from fakes.vlm_models import write_model
from safetensors.torch import load_file

from vlarl.cli import main
from vlarl.config.finetune import FinetunePolicyConfig
from vlarl.config.schema import LoraConfig, RewardConfig
from vlarl.data.reward_batches import RewardBatches
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.rewards import RewardContext, build_bare_reward
from vlarl.rewards.model import ClassifierReward
from vlarl.rewards.reward_checkpoint import begin_reward_model, load_trained, trained_folder
from vlarl.rewards.reward_model import Candidate, Description, state_candidate
from vlarl.rewards.trained import TrainedReward, beginnings

pytestmark = pytest.mark.timeout(120)

CPU = torch.device("cpu")
SAME = ("iteration", "train/", "val/")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model("qwen2_5_vl", tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    rows = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"no{'!' * (n % 3)}"} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(root: Path, name: str, base: Path, *options: str) -> Path:
    """The run directory of a short run of `vlarl finetune`."""
    arguments = [
        *("finetune", "--run.root", str(root), "--run.name", name, "--run.num_threads", "1", "--run.device", "cpu"),
        *("--policy.path", str(base), "--optim.steps", "7", "--optim.batch_size", "6", "--optim.microbatch_size", "4"),
        *("--optim.warmup_steps", "2", "--optim.log_interval", "3", "--optim.lr", "5e-3", "--checkpoint.interval", "2"),
        *("--optim.autocast", "none", "--optim.save_dtype", "float32", "--demos.holdout", "0.3"),
        *("--validation.interval", "3", "--no-logging.tensorboard", *options),
    ]
    assert main(arguments) == 0
    return root / name


def of_pairs(path: Path) -> tuple[str, ...]:
    return "--reward.labels", "pairs", "--reward.path", str(path)


def rows(run: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name.startswith(SAME)} for row in found]


def test_a_run_that_failed_resumes_to_the_bit(tmp_path, base, pairs, monkeypatch, capsys):
    whole = trained(tmp_path, "whole", base, *of_pairs(pairs))
    read = RewardBatches.batch

    def failing(self, first, size):
        if first >= 4 * size:  # in step 5: the newest checkpoint is of step 4, the newest row of step 3
            raise VlarlError("the disk is gone")
        return read(self, first, size)

    with monkeypatch.context() as broken:
        broken.setattr(RewardBatches, "batch", failing)
        with pytest.raises(AssertionError):
            trained(tmp_path, "broken", base, *of_pairs(pairs))
    assert main(["finetune", "--resume", str(tmp_path / "broken")]) == 0
    assert "agreement with held-out labels: accuracy" in capsys.readouterr().out
    assert rows(whole) == rows(tmp_path / "broken") and len(rows(whole)) == 3
    for name in ("final", "step_000007", "best_validation"):
        for file in sorted((whole / "checkpoints" / name).glob("*.safetensors")):
            one, two = load_file(file), load_file(tmp_path / "broken" / "checkpoints" / name / file.name)
            assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one), file
    described = json.loads((whole / "checkpoints" / "final" / "reward_model.json").read_text())
    assert described["labels"] == "pairs" and described["scorer"] == "policy"
    last = {name.removeprefix("val/"): value for name, value in rows(whole)[-1].items() if name.startswith("val/")}
    assert described["held_out"] == pytest.approx(last, abs=1e-6) and {"loss", "accuracy"} == last.keys()


def test_a_trained_model_scores_texts_as_it_did_in_training(tmp_path, base, pairs, monkeypatch):
    kept = []
    save = VlmPolicy.save

    def saved(self, *arguments, **options):
        kept.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(VlmPolicy, "save", saved)
    run = trained(tmp_path, "pairs", base, *of_pairs(pairs))
    final = run / "checkpoints" / "final"
    config = RewardConfig(source="model", model=str(run), batch_size=4)
    reward = build_bare_reward(config, RewardContext(CPU, 1.0, False))
    assert isinstance(reward, TrainedReward) and reward.reads_images
    episodes = [text_episode(text, prompt=f"{n} + 1 = ") for n, text in enumerate(("1", "no", "", "3!"))]
    candidates = [Candidate(e.transitions[0].observation.prompt, e.transitions[0].text) for e in episodes]
    with torch.no_grad():
        rows = reward.model.read(candidates)
        in_training = kept[-1].eval().text_values(rows.inputs, rows.texts)
        again = load_trained(final, CPU).eval().score(rows)
    scored = [episode.env_return for episode in reward.score_all(episodes)]
    assert scored == in_training.tolist() == again.tolist() and len(set(scored)) == 4
    one_by_one = [reward.score(episode).env_return for episode in episodes]
    size = max(map(abs, scored))  # padding changes the order of sums: a few roundings of float32
    assert one_by_one == pytest.approx(scored, abs=200 * float(np.finfo(np.float32).eps) * size)


def test_the_score_is_the_heads_value_after_the_last_token(base):
    model = begin_reward_model(FinetunePolicyConfig(path=str(base)), LoraConfig(), 0, "pairs", CPU).eval()
    candidate = Candidate(text_episode("ab", prompt="Say it").transitions[0].observation.prompt, "ab")
    rows = model.read([candidate])
    prompt = rows.inputs.ids[0].tolist()
    ids = torch.tensor([[*prompt, *rows.texts.sample.ids[0, :2].tolist()]])
    with torch.no_grad():
        states = model.policy.model.base_model(input_ids=ids).last_hidden_state
        expected = model.policy.value_head(states[0, -1])
        found = model.score(rows)
    assert rows.texts.sample.length.tolist() == [3]  # a, b and the end of the turn, which is not read
    assert found.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)


def test_a_classifier_is_trained_and_loads_as_a_classifier_and_as_a_reward_model(tmp_path, pairs):
    run = trained(tmp_path, "bert", save_classifier(tmp_path / "base"), *of_pairs(pairs))
    final = run / "checkpoints" / "final"
    assert json.loads((final / "reward_model.json").read_text())["scorer"] == "classifier"
    episodes = [text_episode("2", prompt="1 + 1 = "), text_episode("no!!", prompt="14 + 1 = ")]
    ours = TrainedReward(str(final), CPU, "outcome", 2).scores(episodes)
    theirs = ClassifierReward(str(final), CPU, batch_size=2).scores(episodes)
    assert ours == theirs and ours[0] != ours[1]
    before = ClassifierReward(str(tmp_path / "base"), CPU, batch_size=2).scores(episodes)
    assert ours != before


def test_steps_are_labelled_and_the_lowest_step_is_the_score(tmp_path, base):
    path = tmp_path / "steps.jsonl"
    made = [{"prompt": f"{n}?", "completions": ["a", "b"], "labels": [True, n % 2 == 0]} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    run = trained(tmp_path, "steps", base, "--reward.labels", "steps", "--reward.path", str(path))
    final = run / "checkpoints" / "final"
    assert {"accuracy", "auc", "loss"} == json.loads((final / "reward_model.json").read_text())["held_out"].keys()
    reward = TrainedReward(str(final), CPU, "outcome", 8)
    episode = text_episode("a\nb", prompt="0?")
    prompt = episode.transitions[0].observation.prompt
    with torch.no_grad():
        each = reward.model.score(reward.model.read([Candidate(prompt, "a"), Candidate(prompt, "a\nb")])).sigmoid()
    assert reward.scores([episode]) == [[each.min().item()]]
    assert beginnings("a\n\nb\n") == ["a", "a\n\nb"] and beginnings("") == [""]


def test_a_pass_scores_no_more_texts_than_the_batch_size_allows(tmp_path, base, monkeypatch):
    """A response has as many steps as it has lines."""
    begin_reward_model(FinetunePolicyConfig(path=str(base)), LoraConfig(), 0, "steps", CPU).save(tmp_path / "model")
    episodes = [text_episode("\n".join("abcdefg"), prompt="0?"), text_episode("h\ni", prompt="1?")]
    whole = TrainedReward(str(tmp_path / "model"), CPU, "outcome", 64).scores(episodes)
    reward = TrainedReward(str(tmp_path / "model"), CPU, "outcome", 4)
    sizes, score = [], reward.model.score
    monkeypatch.setattr(reward.model, "score", lambda rows: sizes.append(len(rows)) or score(rows))
    assert np.ravel(reward.scores(episodes)) == pytest.approx(np.ravel(whole), abs=1e-5)
    assert sizes == [4, 4, 1]


EPISODES = (
    *("--reward.labels", "episodes", "--reward.states_per_episode", "3", "--demos.image_size", "28"),
    *("--demos.suites", "tabletop_spatial", "--demos.task_ids", "0", "1", "--demos.episodes_per_task", "12"),
    *("--demos.num_workers", "1", "--demos.close_high", "0.3", "--demos.release_early", "0.3"),
)


def test_a_model_of_episodes_rewards_the_change_of_each_decision(tmp_path, base, trajectory, observation):
    final = trained(tmp_path, "episodes", base, *EPISODES) / "checkpoints" / "final"
    described = json.loads((final / "reward_model.json").read_text())
    assert described["image_size"] == 28 and {"accuracy", "auc", "loss"} == described["held_out"].keys()
    episode = trajectory([[0, 0], [0, 0], [0, 0]], num_executed=[2, 2, 1])
    seen = [observation(n, "open the drawer", size=40) for n in range(4)]
    transitions = tuple(replace(t, observation=o) for t, o in zip(episode.transitions, seen[:3], strict=True))
    episode = replace(episode, transitions=transitions, final_observation=seen[3])
    outcome = TrainedReward(str(final), CPU, "outcome", 8)
    with torch.no_grad():
        candidates = [state_candidate(each.images[0], "open the drawer", 28) for each in seen]
        levels = outcome.model.score(outcome.model.read(candidates)).sigmoid().tolist()
    close = 1e-5  # of probabilities, in batches of other sizes
    assert outcome.scores([episode])[0] == pytest.approx(levels[3:], abs=close)
    steps = TrainedReward(str(final), CPU, "steps", 8).score(episode)
    changes = [later - now for now, later in zip(levels, levels[1:], strict=False)]
    assert [t.rewards.sum() for t in steps.transitions] == pytest.approx(changes, abs=close)
    assert [t.rewards.tolist().index(t.rewards.sum()) for t in steps.transitions] == [1, 1, 0]
    total = TrainedReward(str(final), CPU, "sum", 2).score(episode)
    assert total.env_return == pytest.approx(levels[3] - levels[0], abs=close)
    with pytest.raises(VlarlError, match="was trained on robots, and a text is to be scored"):
        outcome.score(text_episode("7"))


def refusal(capsys, root: Path, base: Path, *options: str) -> str:
    with pytest.raises(AssertionError):
        trained(root, "refused", base, *options)
    return capsys.readouterr().err


def test_labels_that_cannot_be_learned_are_refused(tmp_path, base, pairs, capsys):
    options = [*EPISODES, "--demos.close_high", "0", "--demos.release_early", "0", "--demos.action_noise", "0"]
    said = refusal(capsys, tmp_path, base, *options)
    assert "episodes of tabletop are all good, and both kinds are needed" in said and "--keep-failures" in said
    bert = save_classifier(tmp_path / "bert")
    assert "a model that reads no images can't score a robot's views" in refusal(
        capsys, tmp_path / "b", bert, *EPISODES
    )
    said = refusal(capsys, tmp_path / "c", bert, *of_pairs(pairs), "--lora.enabled")
    assert "a sequence classifier is trained as a whole" in said
    said = refusal(capsys, tmp_path / "d", Path("builtin:tiny-oft"), *of_pairs(pairs))
    assert "it gives actions, not scores" in said
    assert not (tmp_path / "b").exists() and not (tmp_path / "c").exists() and not (tmp_path / "d").exists()


def test_an_early_end_needs_held_out_rows(tmp_path, base, capsys):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}) + "\n")
    said = refusal(capsys, tmp_path, base, *of_pairs(path), "--demos.holdout", "0.01", "--validation.patience", "2")
    assert "validation.patience = 2: nothing is held out to validate on; raise demos.holdout (now 0.01)" in said


def test_a_folder_that_is_not_a_reward_model_is_refused(tmp_path, base):
    assert trained_folder(str(base)) is None
    model = begin_reward_model(FinetunePolicyConfig(path=str(base)), LoraConfig(), 0, "pairs", CPU)
    model.save(tmp_path / "model")
    assert trained_folder(str(tmp_path / "model")) == tmp_path / "model"
    (tmp_path / "model" / "value_head.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks the head that gives the score|checksum"):
        load_trained(tmp_path / "model", CPU)
    for content, words in (
        ({"labels": "stars", "scorer": "policy"}, "another kind"),
        ({"a": 1}, "not the description"),
    ):
        (tmp_path / "model" / "reward_model.json").write_text(json.dumps(content))
        with pytest.raises(UsageError, match=words):
            load_trained(tmp_path / "model", CPU)


def test_adapters_of_a_reward_model_are_saved_with_its_head(tmp_path, base):
    settings, lora = FinetunePolicyConfig(path=str(base)), LoraConfig(enabled=True, rank=2)
    model = begin_reward_model(settings, lora, 0, "pairs", CPU).eval()
    trained_names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained_names and all("lora_" in name or "value_head" in name for name in trained_names)
    rows = model.read([Candidate(text_episode("", prompt="Say it").transitions[0].observation.prompt, "ab")])
    with torch.no_grad():
        before = model.score(rows).item()
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.1)
        expected = model.score(rows).item()
    model.save(tmp_path / "model")
    assert (tmp_path / "model" / "adapter_config.json").is_file()
    with torch.no_grad():
        found = load_trained(tmp_path / "model", CPU).eval().score(rows).item()
    assert found == expected != before


def test_training_continues_with_the_head_of_a_reward_model(tmp_path, base):
    fresh = begin_reward_model(FinetunePolicyConfig(path=str(base)), LoraConfig(), 3, "pairs", CPU)
    assert fresh.description == Description("pairs", "policy")
    fresh.save(tmp_path / "model")
    settings = FinetunePolicyConfig(path=str(tmp_path / "model"))
    again = begin_reward_model(settings, LoraConfig(), 4, "steps", CPU)
    assert torch.equal(again.policy.value_head.out.weight, fresh.policy.value_head.out.weight)
    other = begin_reward_model(FinetunePolicyConfig(path=str(base)), LoraConfig(), 4, "pairs", CPU)
    assert not torch.equal(other.policy.value_head.out.weight, fresh.policy.value_head.out.weight)
