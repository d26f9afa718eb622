"""Hugging Face models as rewards: what they read, which rewards they assign, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.reward_models import save_classifier, save_clip, save_language_model, save_siglip, save_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertForSequenceClassification, CLIPImageProcessor, CLIPModel

from vlarl.errors import UsageError
from vlarl.rewards.judge import JudgeOptions
from vlarl.rewards.model import ClassifierReward, SimilarityReward, episode_text, state_after
from vlarl.rewards.model_kinds import load_reward_model

CPU = torch.device("cpu")
JUDGE = JudgeOptions("{response}", r"\d+", 8)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return save_classifier(tmp_path_factory.mktemp("models") / "classifier")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_clip(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture
def episodes(trajectory, observation):
    """Three episodes of 3, 1 and 2 decisions with random images."""

    def with_images(episode, seed):
        seen = [observation(10 * seed + n, episode.final_observation.instruction, size=20) for n in range(9)]
        transitions = tuple(replace(t, observation=o) for t, o in zip(episode.transitions, seen[:-1], strict=False))
        return replace(episode, transitions=transitions, final_observation=seen[-1])

    won = trajectory([[0, 0], [0, 0], [0, 0]], num_executed=[2, 2, 1], terminated=True, success=True)
    others = [trajectory([[0, 0]], seed=1), trajectory([[0, 0], [0, 0]], seed=2)]
    return [with_images(episode, seed) for seed, episode in enumerate([won, *others])]


def assigned(trajectory):
    return [t.rewards.tolist() for t in trajectory.transitions]


def test_an_episode_as_text(trajectory):
    episode = trajectory([[0, 0], [0, 0]], num_executed=[2, 1], terminated=True, success=True)
    state = np.array([0.1, -0.2, 0.346, 9, 9, 9, 0.04, -0.04], dtype=np.float32)
    seen = [
        replace(t, observation=replace(t.observation, proprio=state + n)) for n, t in enumerate(episode.transitions)
    ]
    final = replace(episode.final_observation, proprio=-state)
    episode = replace(episode, transitions=tuple(seen), final_observation=final)
    assert episode_text(episode, 1) == (
        "Task: open the drawer\n"
        "Result: under way after 2 steps\n"
        "Decision 1: gripper at 1.10 0.80 1.35, fingers 0.08 apart\n"
        "Decision 0: gripper at 0.10 -0.20 0.35, fingers 0.08 apart"
    )
    assert episode_text(episode, 2).splitlines()[1:3] == [
        "Result: success after 3 steps",
        "Decision 2: gripper at -0.10 0.20 -0.35, fingers 0.08 apart",
    ]
    lines = episode_text(trajectory([[0]] * 40), 40).splitlines()
    assert len(lines) == 18 and lines[1] == "Result: failure after 40 steps"
    assert lines[2].startswith("Decision 40:") and lines[-1].startswith("Decision 25:")
    assert state_after(episode, 1) is episode.transitions[1].observation
    assert state_after(episode, 2) is episode.final_observation


def classifier_logit(folder, text):
    model, tokenizer = BertForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return float(model.eval()(**tokenizer(text, return_tensors="pt")).logits)


def test_a_classifier_assigns_its_logit_to_the_whole_episode(classifier, episodes):
    """Batched and padded, its result is that of a single episode."""
    reward = load_reward_model(str(classifier), CPU, "outcome", 2, JUDGE)
    assert isinstance(reward, ClassifierReward) and reward.batch_size == 2 and reward.env_reward == "sparse"
    for episode, scored in zip(episodes, reward.score_all(episodes), strict=True):
        expected = classifier_logit(classifier, episode_text(episode, len(episode.transitions)))
        assert scored.transitions[-1].rewards[episode.transitions[-1].num_executed - 1] == pytest.approx(
            expected, abs=1e-5
        )
        assert scored.env_return == pytest.approx(expected, abs=1e-5)
    assert len({round(s.env_return, 4) for s in reward.score_all(episodes)}) == 3, "it tells the episodes apart"


def test_a_score_for_each_decision_is_assigned_to_it_or_summed(classifier, episodes):
    steps = load_reward_model(str(classifier), CPU, "steps", 4, JUDGE).score_all(episodes)
    summed = load_reward_model(str(classifier), CPU, "sum", 4, JUDGE).score_all(episodes)
    for episode, one, other in zip(episodes, steps, summed, strict=True):
        expected = [classifier_logit(classifier, episode_text(episode, n + 1)) for n in range(len(episode.transitions))]
        got = [row[t.num_executed - 1] for row, t in zip(assigned(one), episode.transitions, strict=True)]
        assert got == pytest.approx(expected, abs=1e-5)
        assert np.count_nonzero(assigned(one)) == len(expected)
        assert assigned(other)[-1][episode.transitions[-1].num_executed - 1] == pytest.approx(sum(expected), abs=1e-4)
        assert np.count_nonzero(assigned(other)) == 1


def test_encoders_assign_the_similarity_of_the_last_view_and_the_instruction(clip, episodes):
    reward = load_reward_model(str(clip), CPU, "outcome", 2, JUDGE)
    assert isinstance(reward, SimilarityReward)
    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), AutoTokenizer.from_pretrained(clip)
    processor = CLIPImageProcessor.from_pretrained(clip)
    for episode, scored in zip(episodes, reward.score_all(episodes), strict=True):
        last = episode.final_observation
        text = tokenizer([last.instruction], padding="max_length", max_length=24, return_tensors="pt")
        pixels = processor([last.images[0]], return_tensors="pt")
        with torch.no_grad():
            output = model(**text, **pixels)
        expected = float(output.logits_per_image / model.logit_scale.detach().exp())  # CLIP's own cosine
        assert scored.env_return == pytest.approx(expected, abs=1e-5) and -1 <= expected <= 1
    steps = load_reward_model(str(clip), CPU, "steps", 2, JUDGE).score_all(episodes)
    assert [np.count_nonzero(assigned(s)) for s in steps] == [3, 1, 2]
    assert assigned(steps[0])[-1] == pytest.approx(assigned(reward.score(episodes[0]))[-1], abs=1e-6)


def test_siglip_is_another_pair_of_encoders(tmp_path, episodes):
    reward = load_reward_model(str(save_siglip(tmp_path / "siglip")), CPU, "outcome", 2, JUDGE)
    assert isinstance(reward, SimilarityReward)
    together = [scored.env_return for scored in reward.score_all(episodes)]
    assert together == pytest.approx([reward.score(episode).env_return for episode in episodes], abs=1e-5)
    assert all(-1 <= score <= 1 for score in together) and len({round(score, 4) for score in together}) == 3


def test_a_text_longer_than_the_model_reads_is_cut(tmp_path, trajectory):
    reward = load_reward_model(str(save_classifier(tmp_path / "short", positions=32)), CPU, "outcome", 2, JUDGE)
    assert reward.reader.max_tokens == 32
    assert np.isfinite(reward.score(trajectory([[0]] * 30)).env_return)


def test_moving_to_the_cpu(classifier, episodes):
    reward = load_reward_model(str(classifier), CPU, "outcome", 2, JUDGE)
    assert reward.move_to_cpu() is False
    before = reward.score(episodes[0]).env_return
    reward.device = torch.device("meta")  # stands for a device that failed
    assert reward.move_to_cpu() is True and reward.device == CPU
    assert reward.score(episodes[0]).env_return == before and reward.move_to_cpu() is False


def test_what_can_not_score_is_refused(tmp_path):
    def refused(path, *words):
        with pytest.raises(UsageError) as refusal:
            load_reward_model(str(path), CPU, "outcome", 2, JUDGE)
        assert all(word in str(refusal.value) for word in ("reward.model", str(path), *words)), str(refusal.value)
        assert "\n" not in str(refusal.value)

    refused(tmp_path / "nowhere", "can't be loaded")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "can't be loaded")
    refused(save_classifier(tmp_path / "three", num_labels=3), "has 3 labels", "num_labels 1")
    refused(save_language_model(tmp_path / "lm"), "is a BertForMaskedLM", "CLIPModel", "remote")
    headless = save_classifier(tmp_path / "headless")
    tensors = load_file(headless / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "classifier" not in k}, headless / "model.safetensors", {"format": "pt"}
    )
    refused(headless, "lacks 2 weights", "classifier.bias", "random")
    no_weights = save_classifier(tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    refused(no_weights, "can't be loaded")
    padless = save_classifier(tmp_path / "padless")
    save_tokenizer(padless, unk_token="<unk>")
    refused(padless, "no padding token")
