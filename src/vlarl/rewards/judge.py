"""Language and vision-language models as judges: one reads a prompt and its response, and writes a text with a score.

    template, filled in ──► the model's own chat template ──► its text, greedily ──► the last match of a pattern

A judge is loaded and sampled like a policy. It is not trained. A text without a score is a failed reward, not a 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError, excerpt
from vlarl.policies.load import load_policy
from vlarl.rewards.base import Scoring
from vlarl.rewards.model import ModelReward, state_after
from vlarl.solutions import find_solution
from vlarl.types import Observation, Prompt, Trajectory, UInt8Array

TEMPLATE = """Rate the response to the prompt on a scale from 0 to 10.

Prompt:
{prompt}

Response:
{response}

End with one line: Score: N"""
PATTERN = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)"
PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class JudgeOptions:
    """What a judge is given, and how its score is found."""

    template: str  # with {prompt}, {response}, {solution} or {column} where these stand
    pattern: str  # regular expression of the score, or of a text whose first group is the score
    max_tokens: int  # of the judge's text


class JudgeReward(ModelReward):
    """A generative model: the score that its text gives."""

    def __init__(self, path: str, device: torch.device, scoring: Scoring, batch_size: int, judge: JudgeOptions) -> None:
        try:
            policy = load_policy(path, dtype=stored_dtype(path), device=device)
        except UsageError as error:
            raise UsageError(f"reward.model: {str(error).removeprefix('the policy ')}") from error
        if "max_tokens" not in policy.sampling_options:
            raise UsageError(f"reward.model: {path} writes no texts, so it can't judge. Use a language model.")
        super().__init__(path, policy, device, scoring, batch_size)
        self.reads_images = policy.num_images > 0
        self.options = judge
        self.sampling = Sampling(0.0, max_tokens=judge.max_tokens)
        policy.check_sampling(self.sampling)

    def score_states(self, states: Sequence[tuple[Trajectory, int]]) -> torch.Tensor:
        """[N] the score that each text gives; NaN without one, which is an error for a state by itself."""
        texts = self.judgements([self._shown(trajectory, done) for trajectory, done in states])
        scores = [found_score(text, self.options.pattern) for text in texts]
        if len(scores) == 1 and not math.isfinite(scores[0]):
            raise VlarlError(
                f"the text of the judge {self.path} has no score that reward.judge_pattern finds: "
                f"{excerpt(repr(texts[0]), 200)}."
            )
        return torch.tensor(scores)

    def judgements(self, shown: Sequence[Observation]) -> list[str]:
        """What the judge writes, greedily."""
        policy = self.model
        noise = policy.noise([0] * len(shown), self.sampling)
        decisions = policy.sample(policy.process(shown).to(self.device), noise.to(self.device), self.sampling)
        return [str(text) for text in policy.act(decisions)]

    def _shown(self, trajectory: Trajectory, num_decisions: int) -> Observation:
        """The filled template as a prompt, after the images of the prompt, or the views of the robot."""
        transition = trajectory.transitions[num_decisions - 1]
        prompt = transition.observation.prompt
        images: tuple[UInt8Array, ...] = ()
        videos: tuple[UInt8Array, ...] = ()
        if transition.text is None or prompt is None:
            seen = state_after(trajectory, num_decisions)
            text = filled(self.options.template, {"prompt": seen.instruction})
            images = tuple(seen.images)
        else:
            named = {"prompt": prompt.conversation, "response": transition.text}
            solution = find_solution(prompt.columns)
            named |= {} if solution is None else {"solution": solution}
            text = filled(self.options.template, dict(prompt.columns) | named)
            images, videos = prompt.images, prompt.videos
        if not self.reads_images:
            images, videos = (), ()
        parts = [*({"type": "image"} for _ in images), *({"type": "video"} for _ in videos)]
        message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        return Observation.of_prompt(Prompt((message,), images, videos))


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with a value in place of each {name}; other braces stay.

    >>> filled('Is {response} right? {"score": 1}', {"response": "7"})
    'Is 7 right? {"score": 1}'
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise VlarlError(
                f"reward.judge_template names {{{name}}}, which this episode does not have; it has {', '.join(values)}."
            )
        return str(values[name])

    return PLACEHOLDER.sub(value, template)


def found_score(text: str, pattern: str) -> float:
    """The number of the last match; NaN without one.

    >>> found_score("Score: 3, no, Score: 4.5", r"Score: ([\\d.]+)")
    4.5
    """
    matches = list(re.finditer(pattern, text))
    try:
        return float(matches[-1][1] if matches[-1].re.groups else matches[-1][0])
    except (IndexError, TypeError, ValueError):  # no match, a group without one, or no number in it
        return math.nan


def stored_dtype(path: str) -> Any:
    """float32, or bfloat16 for weights that are stored in half precision."""
    import transformers

    try:
        stored = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False).dtype
    except (OSError, ValueError, KeyError):  # reported when the model is loaded
        stored = None
    return "bfloat16" if stored in (torch.bfloat16, torch.float16) else "float32"
