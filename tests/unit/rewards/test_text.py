"""Rewards for texts: the built-in ones, and functions written for TRL and verl."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.texts import text_episode

from vlarl.config.schema import RewardConfig
from vlarl.errors import VlarlError
from vlarl.rewards import RewardContext, build_bare_reward, build_reward
from vlarl.rewards.remote import episode_json, jpeg_base64
from vlarl.rewards.safe import RewardFailureError
from vlarl.rewards.text import overlong_rule
from vlarl.rollout.statistics import reward_part_metrics

pytestmark = pytest.mark.timeout(60)

RUN = RewardContext(torch.device("cpu"), 1.0, False)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(name, text): a module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name, text: (tmp_path / f"{name}.py").write_text(text)


def value(source: str, episode, **options) -> float:
    return build_bare_reward(RewardConfig(source=source, **options), RUN).score(episode).env_return


@pytest.mark.parametrize(
    ("source", "text", "options", "expected"),
    [
        ("exact_match", "Seven.", {}, 1.0),
        ("exact_match", "it is seven", {}, 0.0),
        ("number_match", "so 3 + 4 = 7.0", {}, 0.0),  # the solution, "seven", has no number
        ("choice", "(A)", {}, 0.0),
        ("format", "<think>3\n4</think>\n<answer>7</answer>", {}, 1.0),
        ("format", "<answer>7</answer>", {}, 0.0),
        ("format", "7", {"pattern": r"\d+"}, 1.0),
        ("format", "7 apples", {"pattern": r"\d+"}, 0.0),
        ("length", "three tokens", {"length_limit": 1, "length_penalty": 0.25}, -0.5),
        ("overlong", "three tokens", {"max_tokens": 4, "overlong_buffer": 2}, -0.5),
        ("overlong", "three tokens", {"max_tokens": 3}, -1.0),
        ("overlong", "three tokens", {"max_tokens": 20}, 0.0),
    ],
)
def test_a_built_in_reward_has_this_value(source, text, options, expected):
    assert value(source, text_episode(text, solution="seven"), **options) == expected


def test_the_overlong_penalty_rises_over_its_buffer():
    assert [overlong_rule(n, 100, 20) for n in (0, 80, 85, 90, 100, 500)] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_a_service_gets_the_text_with_its_prompt_and_columns():
    image = np.full((4, 4, 3), 7, np.uint8)
    sent = episode_json(text_episode("7", images=(image,), solution="7"), "all")
    messages = [{"role": "user", "content": "What is 3 plus 4?"}]
    (response,) = sent["responses"]
    assert response.pop("images") == [jpeg_base64(image)] and "image" not in sent["decisions"][0] | sent["final"]
    assert response == {"prompt": messages, "completion": "7", "columns": {"solution": "7"}}
    assert "images" not in episode_json(text_episode("7", images=(image,)), "none")["responses"][0]


def test_number_and_choice_compare_with_the_solution():
    assert value("number_match", text_episode("so 3 + 4 = 7.0", solution="7")) == 1.0
    assert value("choice", text_episode("The answer is (B).", answer="B")) == 1.0


def test_a_row_without_a_solution_and_an_episode_of_a_robot_are_clear_errors(trajectory):
    with pytest.raises(VlarlError, match=r"'What is 3 plus 4\?' has no solution; name its column.*its columns: level"):
        value("exact_match", text_episode("7", level=3))
    with pytest.raises(VlarlError, match="has no text: rewards for texts need a suite of prompts"):
        value("exact_match", trajectory([[1.0]]))


TRL = """
import re

def accuracy(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if content.strip() == right else 0.0 for content, right in zip(contents, solution)]

def think_format(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(r"^<think>.*</think>", content, re.DOTALL) else 0.0 for content in contents]

def math_only(prompts, completions, task, **kwargs):
    return [1.0 if kind == "math" and "7" in c[0]["content"] else (0.0 if kind == "math" else None)
            for c, kind in zip(completions, task)]

async def slow(completions, completion_ids, **kwargs):
    import asyncio
    async def one(ids):
        await asyncio.sleep(0.001)
        return float(len(ids))
    return await asyncio.gather(*(one(ids) for ids in completion_ids))

def no_kwargs(completions):
    return [float(len(text)) for text in completions]

def short(completions, **kwargs):
    return [1.0]

def one_number(completions, **kwargs):
    return 1.0

def sometimes_nan(completions, **kwargs):
    return [float("nan") if "bad" in c[0]["content"] else 1.0 for c in completions]
"""


@pytest.fixture
def trl(module):
    module("trl_rewards", TRL)
    return lambda name: build_bare_reward(RewardConfig(source=f"trl_rewards:{name}"), RUN)


def test_a_function_of_trl_scores_a_batch_in_one_call(trl):
    episodes = [text_episode("7", solution="7"), text_episode("8", solution="7")]
    assert [e.env_return for e in trl("accuracy").score_all(episodes)] == [1.0, 0.0]
    assert trl("accuracy").batch_size > 10_000
    assert [e.env_return for e in trl("slow").score_all([text_episode("a"), text_episode("b", ids=[1, 0])])] == [3, 2]


def test_a_function_gets_prompts_columns_and_tokens_as_trl_gives_them():
    seen = {}

    def reward(prompts, completions, completion_ids, solution, images, **kwargs):
        seen.update(locals())
        return [0.0] * len(prompts)

    config = RewardConfig(source="python:f")
    from vlarl.config.callables import GivenCallable

    config.given["python:f"] = GivenCallable(reward)
    image = np.ones((2, 2, 3), np.uint8)
    chat = text_episode("7", images=(image,), solution="7", level=2)
    plain = text_episode("8", prompt="1 + 7 =", conversational=False, solution="8")
    built = build_bare_reward(config, RUN)
    built.score_all([chat, plain])
    assert built.reads_images
    assert seen["prompts"] == [[{"role": "user", "content": "What is 3 plus 4?"}], "1 + 7 ="]
    assert seen["completions"] == [[{"role": "assistant", "content": "7"}], "8"]
    assert seen["completion_ids"] == [[1, 2, 0], [1, 2, 0]], "without padding"
    assert seen["solution"] == ["7", "8"] and seen["kwargs"] == {"level": [2, None]}
    assert np.array_equal(seen["images"][0][0], image) and seen["images"][1] == []


def test_a_function_without_kwargs_gets_what_it_names(trl):
    assert trl("no_kwargs").score(text_episode("four", conversational=False, solution="x")).env_return == 4.0


@pytest.mark.parametrize("name", ["short", "one_number"])
def test_a_wrong_number_of_values_is_a_clear_error(trl, name):
    with pytest.raises(VlarlError, match=rf"trl_rewards:{name} returned .* for 2 completions; it must return a list"):
        trl(name).score_all([text_episode("a"), text_episode("b")])


def test_nan_affects_its_own_text_only_and_too_many_end_the_run(module):
    module("trl_nan", TRL)
    reward = build_reward(RewardConfig(source="trl_nan:sometimes_nan"), RUN)
    good, bad = text_episode("fine"), text_episode("bad")
    scored = reward.score_all([good, bad, good])
    assert [e.env_return for e in scored] == [1.0, 0.0, 1.0]
    assert [e.status for e in scored] == ["ok", "reward_failed", "ok"]
    assert re.search("returned nan; it must return a finite number, or None", scored[1].reward_error)
    with pytest.raises(RewardFailureError, match="failed on 5 of 8"):
        build_reward(RewardConfig(source="trl_nan:sometimes_nan"), RUN).score_all([bad] * 5 + [good] * 3)


def test_none_is_left_out_of_the_weighted_sum_and_of_the_metrics(module):
    module("trl_none", TRL)
    sources = ("trl_none:math_only", "trl_none:think_format", "exact_match")
    config = RewardConfig(source="combined", sources=sources, weights=(2.0, 1.0, 10.0))
    text = "<think>x</think>7"
    episodes = [
        text_episode(text, task="math", solution=text),
        text_episode(text, task="poem", solution="other"),
        text_episode("8", task="math", solution="7"),
    ]
    scored = build_bare_reward(config, RUN).score_all(episodes)
    assert [e.env_return for e in scored] == [2.0 + 0.5 + 10.0, 0.5, 0.0]
    assert "trl_none:math_only" not in scored[1].reward_parts
    metrics = reward_part_metrics(scored)
    assert metrics["reward/trl_none_math_only/mean"] == 0.5 and metrics["reward/trl_none_math_only/std"] == 0.5
    assert metrics["reward/trl_none_think_format/mean"] == pytest.approx(1 / 3, rel=1e-12)
    assert build_bare_reward(RewardConfig(source=sources[0]), RUN).score(episodes[1]).env_return == 0.0


def test_a_recipe_names_the_data_source_of_a_prompt():
    config = RewardConfig(
        source="combined",
        sources=("exact_match", "format"),
        recipe=("openai/gsm8k -> exact_match=1", "geometry* -> format=3"),
    )
    reward = build_bare_reward(config, RUN)
    text = "<think></think><answer>7</answer>"
    returns = [
        reward.score(text_episode(text, solution="7", data_source=source)).env_return
        for source in ("openai/gsm8k", "geometry3k", "other")
    ]
    assert returns == [1.0, 3.0, 2.0]


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "openai/gsm8k":
        return {"score": 1.0 if solution_str.endswith(ground_truth) else 0.0, "acc": 1}
    return 0.1 * extra_info["index"]
"""


def test_a_function_of_verl_scores_each_text(module):
    module("verl_reward", VERL)
    reward = build_bare_reward(RewardConfig(source="verl_reward:compute_score"), RUN)
    truth = {"style": "rule", "ground_truth": "7"}
    episodes = [
        text_episode("#### 7", data_source="openai/gsm8k", reward_model=truth),
        text_episode("#### 8", data_source="openai/gsm8k", reward_model=truth),
        text_episode("#### 8", data_source="geo", extra_info={"index": 4}),
    ]
    scored = [e.env_return for e in reward.score_all(episodes)]
    assert scored == pytest.approx([1.0, 0.0, 0.4], rel=1e-6)  # rewards are float32


CHANGING = """
def trl_pops(prompts, completions, steps, **kwargs):
    prompts[0][0]["content"].clear()
    return [float(len(each) + (each.pop() and 0)) + 10 * len(prompt[0]["content"]) for each, prompt in zip(steps, prompts)]

def verl_pops(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info.pop("index")
"""


def test_a_function_that_changes_what_it_gets_changes_it_for_no_other_member_of_the_group(module):
    """Members of a group have the same prompt object, in later iterations as well."""
    module("changing_rewards", CHANGING)
    first = text_episode("a", steps=[1, 2], extra_info={"index": 4})
    (step,) = first.transitions
    prompt = replace(step.observation.prompt, messages=({"role": "user", "content": [{"type": "text", "text": "?"}]},))
    shared = replace(first, transitions=(replace(step, observation=replace(step.observation, prompt=prompt)),))
    for name, expected in (("trl_pops", [2.0, 12.0]), ("verl_pops", [4.0, 4.0])):
        reward = build_bare_reward(RewardConfig(source=f"changing_rewards:{name}"), RUN)
        for _ in range(2):
            assert [e.env_return for e in reward.score_all([shared, shared])] == expected


def test_an_async_function_is_awaited_outside_of_any_loop(trl):
    async def inside():
        return trl("slow").score(text_episode("a")).env_return

    assert asyncio.run(inside()) == 3.0
