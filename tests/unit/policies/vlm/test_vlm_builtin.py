"""The shipped Qwen2.5-VL: a folder of the hub's layout that plain transformers reads, and a base that responds badly."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from vlarl.config.training_data import read_training_data
from vlarl.decisions import Sampling
from vlarl.envs.prompts.arithmetic import ArithmeticPrompts
from vlarl.envs.prompts.shapes import ShapePrompts
from vlarl.policies.load import load_policy
from vlarl.policies.locate import checkpoint_folder
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.policies.vlm.processor import load_processor
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.solutions import matches
from vlarl.types import Observation

NAME = "builtin:tiny-qwen2.5-vl"
SOURCES = (ShapePrompts(), ArithmeticPrompts())
GREEDY, SAMPLED = Sampling(0.0, max_tokens=16), Sampling(1.0, max_tokens=16)

RECIPE = Path(__file__).parents[4] / "scripts" / "prompts_base.py"
_spec = importlib.util.spec_from_file_location("prompts_base", RECIPE)
recipe = importlib.util.module_from_spec(_spec)
sys.modules["prompts_base"] = recipe  # dataclasses look their module up
_spec.loader.exec_module(recipe)


@pytest.fixture(scope="module")
def policy() -> VlmPolicy:
    return load_policy(NAME)


def held_out(source, count: int):
    """The first prompts of each task that are never trained on."""
    tasks = range(len(source.spec.tasks))
    return [source.prompt(task_id, state) for task_id in tasks for state in source.spec.eval_states[:count]]


def texts_of(policy, prompts, sampling):
    inputs = policy.process([Observation.of_prompt(prompt) for prompt in prompts])
    return policy.act(TorchEngine(policy, torch.device("cpu")).generate(inputs, sampling, range(len(prompts))))


@torch.no_grad()
def test_plain_transformers_writes_the_same_greedy_texts(policy):
    folder = checkpoint_folder(NAME)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = load_processor(folder, "qwen2_5_vl", True)
    prompts = [prompt for source in SOURCES for prompt in held_out(source, 3)]
    found = texts_of(policy, prompts, GREEDY)
    for prompt, text in zip(prompts, found, strict=True):
        rendered = processor.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
        images = [Image.fromarray(image) for image in prompt.images] or None
        inputs = processor(text=[rendered], images=images, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(ids, skip_special_tokens=True) == text, prompt.text
    assert len(set(found)) > len(found) / 3, "texts depend on their prompts"


def test_any_text_can_be_encoded_and_each_digit_is_a_token(policy):
    tokenizer = policy.processor.tokenizer
    text = "ünïcode 漢字\n\t<tag> 1024"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([index]) for index in tokenizer.encode("1024")] == list("1024")
    assert len(tokenizer) <= policy.access.vocabulary


def test_it_was_trained_on_training_states_only():
    data = read_training_data(checkpoint_folder(NAME))
    assert data.unknown == () and [run.suite for run in data.runs] == [source.spec.name for source in SOURCES]
    for source, run in zip(SOURCES, data.runs, strict=True):
        assert run.states == source.spec.train_states and set(run.states).isdisjoint(source.spec.eval_states)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.spec.name)
def test_it_sees_well_and_responds_badly(policy, source):
    prompts = held_out(source, 40)
    solutions = [prompt.columns["solution"] for prompt in prompts]

    def accuracy(texts):
        return np.mean([matches(text, right, "exact") for text, right in zip(texts, solutions, strict=True)])

    assert accuracy(texts_of(policy, prompts, GREEDY)) <= 0.1
    assert 0.05 <= accuracy(texts_of(policy, prompts, SAMPLED)) <= 0.25
    inputs = policy.process([Observation.of_prompt(prompt) for prompt in prompts])

    @torch.no_grad()
    def logprobs(texts):
        return policy.evaluate(inputs, policy.decisions_of(texts), 1.0).logprobs.sum(dim=1)

    wrong = [recipe.wrong(each) for each in solutions]
    right_sentence, wrong_sentence = (
        logprobs([recipe.SENTENCE.format(each) for each in said]) for said in (solutions, wrong)
    )
    assert (right_sentence > wrong_sentence).float().mean() >= 0.8, "in a sentence it says what it sees"
    behind = torch.maximum(right_sentence, logprobs(wrong)) - logprobs(solutions)
    assert behind.median() > np.log(2), "too close to the solution: noise would repair the response"


def test_the_log_is_that_of_the_recipe():
    lines = (checkpoint_folder(NAME) / "training_log.jsonl").read_text().splitlines()
    assert {json.loads(line)["phase"] for line in lines} == {"see", "respond"}


def test_one_bad_response_in_eight_is_right_and_most_are_sentences():
    rng = np.random.default_rng(0)
    for source in SOURCES:
        for task_id in range(len(source.spec.tasks)):
            prompt = source.prompt(task_id, 5)
            solution = prompt.columns["solution"]
            given = [recipe.badly(prompt, rng) for _ in range(2000)]
            sentence = recipe.SENTENCE.format(solution)
            (wrong,) = set(given) - {solution, sentence}
            assert not any(matches(fault, solution, "exact") for fault in (sentence, wrong))
            for response, expected in ((solution, 0.12), (sentence, 0.68), (wrong, 0.2)):
                error = np.sqrt(expected * (1 - expected) / len(given))
                assert abs(given.count(response) / len(given) - expected) < 4 * error, response
