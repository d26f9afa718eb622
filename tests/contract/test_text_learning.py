"""A language model learns the answer of each prompt in the real loop: sampled, scored, trained on, saved.

A tiny Qwen2 is first trained to answer any prompt with one of four letters, at random. Which one is right, only the
reward says.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.kinds import FakePool, spec_of
from fakes.vlm_models import END, write_model
from test_decision_kinds import CPU, Kind, config_of, parts_of, session_of

from vlarl.config.schema import LoraConfig, PolicyConfig
from vlarl.decisions import Sampling
from vlarl.envs.base import NOTHING
from vlarl.loop import run
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.decisions import TextSample, text_decisions
from vlarl.policies.vlm.policy import VlmPolicy
from vlarl.rewards.outcome import SparseReward
from vlarl.rollout.engines.torch import TorchEngine
from vlarl.types import ChunkOutcome, Observation, Prompt

LETTERS = "abcd"
ANSWERS = {"the first": "a", "the third": "c", "the last": "d"}


class LetterPool(FakePool):
    """Each prompt wants one letter, and nothing after it."""

    def __init__(self) -> None:
        super().__init__(spec_of("letters", list(ANSWERS), 1))

    def _observe(self, slot):
        return prompted(self.spec.tasks[self._tasks[slot].task_id].instruction)

    def step_chunk(self, slots, actions, record=NOTHING):
        outcomes = []
        for slot, text in zip(slots, actions, strict=True):
            seen = self._observe(slot)
            won = text == ANSWERS[seen.instruction]
            outcomes.append(ChunkOutcome(np.float32([won]), 1, True, False, won, seen))
        return outcomes


def prompted(text: str) -> Observation:
    prompt = Prompt(({"role": "user", "content": text},))
    return Observation(np.zeros((0, 1, 1, 3), np.uint8), np.zeros(0, np.float32), text, prompt)


def given_letters(policy: VlmPolicy, letters: str):
    """Decisions that say these letters, one a row."""
    ids = torch.tensor([[policy.processor.tokenizer.encode(letter)[0], END] for letter in letters])
    sample = TextSample(ids, torch.full((len(ids),), 2), torch.ones(len(ids), dtype=torch.bool))
    return text_decisions(sample, torch.zeros(ids.shape))


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that answers with a letter at random."""
    root = tmp_path_factory.mktemp("letters")
    policy = read_policy(write_model("qwen2", root / "random"))
    prompts = [prompted(text) for text in ANSWERS for _ in LETTERS]
    inputs, decisions = policy.process(prompts), given_letters(policy, LETTERS * len(ANSWERS))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        (-policy.evaluate(inputs, decisions, 1.0).logprobs.mean()).backward()
        optimizer.step()
    policy.save(root / "guessing")
    return root / "guessing"


def probabilities(policy: VlmPolicy) -> torch.Tensor:
    """[3] of the right answer to each prompt."""
    inputs = policy.process([prompted(text) for text in ANSWERS])
    with torch.no_grad():
        found = policy.evaluate(inputs, given_letters(policy, "".join(ANSWERS.values())), 1.0)
    return found.logprobs.sum(dim=1).exp()


@pytest.mark.parametrize(
    ("algorithm", "lora", "lr"),
    [
        ({"name": "grpo"}, False, 2e-3),
        ({"name": "ppo", "gae_level": "token", "critic_hidden": (16,)}, False, 2e-3),
        ({"name": "grpo"}, True, 1e-2),
    ],
    ids=["grpo", "ppo-token", "grpo-lora"],
)
def test_the_answer_to_each_prompt_is_learned_in_the_real_loop(guessing, tmp_path, algorithm, lora, lr):
    @cache
    def make() -> VlmPolicy:
        policy = read_policy(guessing)
        policy.prepare_training(PolicyConfig(), LoraConfig(enabled=lora, rank=4), 0)
        return policy

    kind = Kind(make, LetterPool, SparseReward, lr, 0.0)
    before = probabilities(make())
    assert float(before.max()) < 0.5, "it guesses"
    config = config_of(
        kind,
        run={"iterations": 12, "seed": 2},
        optim={"lr": lr, "minibatches": 2, "microbatch_size": 48, "max_grad_norm": 1.0},
        critic={"lr": 1e-2},
        algorithm={"epochs": 2, "clip_low": 0.2, "clip_high": 0.2} | algorithm,
        kl={"coef": 0.001},
    )
    parts = parts_of(kind, config)
    summary = run(parts, session_of(config, parts, tmp_path))
    assert summary.success_after == 1.0
    after = probabilities(make())
    assert float(after.min()) > 0.9, f"{before.tolist()} -> {after.tolist()}"
    saved = read_policy(tmp_path / "run" / "checkpoints" / "final")
    torch.testing.assert_close(probabilities(saved), after, rtol=1e-5, atol=1e-6)
    inputs = saved.process([prompted(text) for text in ANSWERS])
    texts = TorchEngine(saved, CPU).generate(inputs, Sampling(0.0, max_tokens=4), [0, 0, 0])
    assert saved.act(texts) == list(ANSWERS.values())


def test_nothing_is_learned_at_a_learning_rate_of_zero(guessing, tmp_path):
    policy = read_policy(guessing)
    kind = Kind(lambda: policy, LetterPool, SparseReward, 0.0, 0.0)
    config = config_of(kind, run={"iterations": 2, "seed": 2}, optim={"lr": 0.0}, algorithm={"name": "grpo"})
    parts, before = parts_of(kind, config), probabilities(policy)
    run(parts, session_of(config, parts, tmp_path))
    assert torch.equal(probabilities(policy), before)


def test_a_second_dataset_is_imitated_while_the_reward_rises(guessing, tmp_path):
    """RL learns the letters, of which the dataset has none; the dataset has a word, which no reward is given for."""
    policy = read_policy(guessing)
    file = tmp_path / "imitated.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"greet {name}"}], "completion": "ho"} for name in ("bo", "al", "ed")
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    kind = Kind(lambda: policy, LetterPool, SparseReward, 2e-3, 0.0)
    config = config_of(
        kind,
        env={"suite": "prompts"},
        run={"iterations": 12, "seed": 2},
        optim={"lr": 2e-3, "minibatches": 2, "microbatch_size": 48, "max_grad_norm": 1.0},
        algorithm={"name": "grpo", "clip_low": 0.2, "clip_high": 0.2},
        ptx={"path": str(file), "coef": 0.2, "batch_size": 6},
    )
    parts = parts_of(kind, config)
    summary = run(parts, session_of(config, parts, tmp_path))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    losses, returns = (
        [row[name] for row in metrics if name in row] for name in ("train/ptx_loss", "rollout/success_rate")
    )
    assert summary.success_after == 1.0 and returns[0] < 0.5 < 0.9 < returns[-1]
    assert losses[0] > 1.0 > 0.2 > losses[-1], "in nats a token"
    greeting = policy.process([prompted("greet bo")])
    text = TorchEngine(policy, CPU).generate(greeting, Sampling(0.0, max_tokens=4), [0])
    assert policy.act(text) == ["ho"]
