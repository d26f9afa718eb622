"""Reward models for texts with known answers: classifiers, and generative judges that were trained to say a score."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.float_error import FloatJudge
from fakes.reward_models import save_clip
from fakes.reward_service import RewardService, answers
from fakes.texts import text_episode
from fakes.vlm_models import TEXT_SIZES, TEXT_TEMPLATE, byte_tokenizer, write_model
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from vlarl.config.schema import RewardConfig
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.rewards import RewardContext, build_bare_reward, build_reward
from vlarl.rewards.judge import JudgeReward, filled, found_score
from vlarl.rewards.model import ClassifierReward
from vlarl.rollout.statistics import reward_part_metrics
from vlarl.types import Observation, Prompt

pytestmark = pytest.mark.timeout(120)

RUN = RewardContext(torch.device("cpu"), 1.0, False)
WHITE, BLACK = (np.full((28, 28, 3), value, np.uint8) for value in (255, 0))
TEMPLATE = "{response}?"
SAID = [("yes", (WHITE,), "Score: 8"), ("yes", (BLACK,), "Score: 2.5"), ("hm", (), "none")]  # response, images, text


def save_text_classifier(
    folder: Path, template: str | None = TEXT_TEMPLATE, positions: int = 4096, seed: int = 0
) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(**TEXT_SIZES | {"max_position_embeddings": positions}, num_labels=1)
    model = Qwen2ForSequenceClassification(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    return save_text_classifier(tmp_path_factory.mktemp("models") / "classifier")


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """The folder of a model that says the texts of `SAID`, greedily."""
    root = tmp_path_factory.mktemp("judge")
    policy = read_policy(write_model("qwen2_5_vl", root / "random"))
    shown = [
        [*({"type": "image"} for _ in images), {"type": "text", "text": f"{response}?"}] for response, images, _ in SAID
    ]
    prompts = [Prompt(({"role": "user", "content": c},), images) for c, (_, images, _) in zip(shown, SAID, strict=True)]
    nothing = np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), ""
    inputs = policy.process([Observation(*nothing, prompt) for prompt in prompts])
    decisions = policy.decisions_of([text for *_, text in SAID])
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        found = policy.evaluate(inputs, decisions, 1.0).logprobs
        (-torch.where(decisions.mask, found, 0.0).sum()).backward()
        optimizer.step()
    policy.save(root / "judge")
    return root / "judge"


def logits(folder: Path, texts: list[str]) -> FloatJudge:
    """The logit of each whole text by itself: the last state times the head."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    ids = [byte_tokenizer()(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts]

    def of(network: Qwen2ForSequenceClassification) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack([network.score(network.model(row).last_hidden_state[0, -1])[0] for row in ids])

    return FloatJudge.of(of(copy.deepcopy(model).double()), of(model))


def returns(reward, episodes) -> torch.Tensor:
    return torch.tensor([episode.env_return for episode in reward.score_all(episodes)], dtype=torch.float64)


RENDERED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"


def test_a_classifier_reads_the_conversation_in_its_own_chat_template(classifier):
    """In batches of different lengths, each text as by itself."""
    episodes = [
        text_episode(text, prompt) for text, prompt in (("7", "3 + 4?"), ("no idea", "?"), ("", "Why is that?"))
    ]
    reward = build_bare_reward(RewardConfig(source="model", model=str(classifier), batch_size=2), RUN)
    assert isinstance(reward, ClassifierReward) and not reward.reads_images
    texts = [RENDERED.format(e.transitions[0].observation.prompt.text, e.transitions[0].text) for e in episodes]
    logits(classifier, texts).check(returns(reward, episodes))


def test_a_plain_prompt_and_its_continuation_are_one_text(classifier):
    reward = build_bare_reward(RewardConfig(source="model", model=str(classifier)), RUN)
    episodes = [
        text_episode(" 7", "3 + 4 =", conversational=False),
        text_episode(" 8", "3 + 4 =", conversational=False),
    ]
    logits(classifier, ["3 + 4 = 7", "3 + 4 = 8"]).check(returns(reward, episodes))


def test_a_classifier_without_a_chat_template_reads_prompt_and_response_as_a_pair(tmp_path):
    """As BERT's tokenizers write a pair; the tiny one writes them one after the other."""
    folder = save_text_classifier(tmp_path / "model", template=None)
    reward = build_bare_reward(RewardConfig(source="model", model=str(folder)), RUN)
    logits(folder, ["3 + 4?7", "3 + 4?8"]).check(returns(reward, [text_episode(t, "3 + 4?") for t in "78"]))


def test_of_a_text_that_is_too_long_the_end_is_read(tmp_path):
    folder = save_text_classifier(tmp_path / "model", positions=40)
    reward = build_bare_reward(RewardConfig(source="model", model=str(folder)), RUN)
    episode = text_episode("the response", "a long prompt " * 9)
    whole = RENDERED.format("a long prompt " * 9, "the response")
    tokens = byte_tokenizer()(whole, add_special_tokens=False).input_ids
    kept = byte_tokenizer().decode(tokens[-40:])
    logits(folder, [kept]).check(returns(reward, [episode]))
    assert "response" in kept


def judged(episode, **options) -> float:
    return float(returns(build_bare_reward(RewardConfig(source="model", **options), RUN), [episode])[0])


def test_a_judge_reads_images_and_response_and_its_score_is_the_reward(judge):
    options = RewardConfig(source="model", model=str(judge), judge_template=TEMPLATE, judge_max_tokens=12, batch_size=2)
    reward = build_bare_reward(options, RUN)
    assert isinstance(reward, JudgeReward) and reward.reads_images
    episodes = [text_episode(response, images=images) for response, images, _ in SAID[:2]]
    assert returns(reward, [*episodes, episodes[0]]).tolist() == [8.0, 2.5, 8.0]


def test_a_judge_without_a_score_is_a_failed_reward_and_not_zero(judge):
    """The others of its batch are kept."""
    options = {"judge_template": TEMPLATE, "judge_max_tokens": 12, "retries": 0}
    reward = build_reward(RewardConfig(source="model", model=str(judge), **options), RUN)
    white, _, unclear = (text_episode(response, images=images, state=i) for i, (response, images, _) in enumerate(SAID))
    good, failed = reward.score_all([white, unclear])
    assert good.env_return == 8.0 and good.reward_error is None
    assert failed.status == "reward_failed"
    assert "has no score that reward.judge_pattern finds: 'none'" in failed.reward_error


def test_a_robots_last_view_can_be_judged(judge, trajectory):
    """The instruction is the prompt, and the views come first; there is no response."""
    options = {"judge_max_tokens": 12, "model": str(judge)}
    episode = trajectory([[0.0]])
    shown = build_bare_reward(RewardConfig(source="model", judge_template="{prompt}?", **options), RUN)._shown(
        episode, 1
    )
    assert shown.instruction == f"{episode.final_observation.instruction}?"
    assert len(shown.prompt.images) == len(episode.final_observation.images) == 1
    with pytest.raises(VlarlError, match=r"judge_template names \{response\}, which this episode does not have"):
        judged(episode, judge_template=TEMPLATE, **options)


def test_the_template_is_filled_with_columns_and_leaves_other_braces():
    values = {"prompt": "3 + 4?", "response": "7", "level": 2}
    assert filled('{prompt} {response} (level {level}): {"score": {}}', values) == '3 + 4? 7 (level 2): {"score": {}}'
    with pytest.raises(VlarlError, match=r"names \{solution\}, which this episode does not have; it has prompt, resp"):
        filled("{solution}", values)
    several = Prompt(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}))
    assert several.conversation == "system: Be brief.\n\nuser: 3 + 4?"


@pytest.mark.parametrize(
    ("text", "pattern", "expected"),
    [
        ("Score: 3", r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", 3.0),
        ("score: 3\nScore: -4.5.", r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", -4.5),
        ("about 7", r"\d+", 7.0),
        ("Score: high", r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", None),
        ("Score: high", r"Score: (\w+)", None),
        ("", r"\d+", None),
        ("a", r"a(\d)?", None),
    ],
)
def test_the_last_match_is_the_score(text, pattern, expected):
    found = found_score(text, pattern)
    assert np.isnan(found) if expected is None else found == expected


def test_what_can_not_judge_is_refused_by_the_option(judge, tmp_path):
    with pytest.raises(UsageError, match=r"^reward.model: .*nowhere.* can't be loaded"):
        judged(text_episode("7"), model=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"100000"):
        judged(text_episode("7"), model=str(judge), judge_max_tokens=100_000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((judge / "config.json").read_text())
    with pytest.raises(UsageError, match=r"^reward.model: .*empty can't be loaded"):
        judged(text_episode("7"), model=str(tmp_path / "empty"))


def test_a_pair_of_encoders_scores_no_texts(tmp_path):
    with pytest.raises(VlarlError, match="compares the views of a robot with the instruction, and scores no texts"):
        judged(text_episode("7"), model=str(save_clip(tmp_path / "clip")))


def test_several_models_and_services_are_named_and_each_is_a_metric(judge, classifier, tmp_path):
    other = save_text_classifier(tmp_path / "other", seed=1)
    service = RewardService()
    service.script = [answers({"rewards": [0.5, 1.5]})]
    try:
        config = RewardConfig(
            source="combined",
            sources=("first", "second", "grader", "judge", "exact_match"),
            weights=(1.0, -2.0, 4.0, 1.0, 1.0),
            models={"first": str(classifier), "second": str(other), "judge": str(judge)},
            urls={"grader": service.url},
            judge_template=TEMPLATE,
            judge_max_tokens=12,
        )
        episodes = [
            text_episode("yes", images=images, solution=right)
            for images, right in (((WHITE,), "yes"), ((BLACK,), "no"))
        ]
        scored = build_reward(config, RUN).score_all(episodes)
    finally:
        service.stop()
    parts = [episode.reward_parts for episode in scored]
    assert [part["grader"] for part in parts] == [0.5, 1.5]
    assert [part["judge"] for part in parts] == [8.0, 2.5] and [part["exact_match"] for part in parts] == [1.0, 0.0]
    texts = [RENDERED.format("What is 3 plus 4?", "yes")] * 2
    for name, folder in (("first", classifier), ("second", other)):
        logits(folder, texts).check(torch.tensor([part[name] for part in parts], dtype=torch.float64))
    for episode, part in zip(scored, parts, strict=True):
        weighted = sum(weight * part[name] for name, weight in zip(config.sources, config.weights, strict=True))
        assert episode.env_return == pytest.approx(weighted, rel=1e-5)
    metrics = reward_part_metrics(scored)
    assert metrics["reward/judge/mean"] == 5.25 and metrics["reward/judge/std"] == 2.75
    assert metrics["reward/grader/mean"] == 1.0
