"""Steps of stochastic denoising against arrays computed from the published formulas, in float64."""

import numpy as np
import pytest
import torch
from fakes.golden_arrays import Arrays, assert_close, load_arrays, unnoticed
from fakes.golden_folder import golden_folder

from vlarl.policies.flow import Denoising, gaussian_logprobs

FOLDER = golden_folder("smolvla-tiny")
KINDS = ("sde", "cps")
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return load_arrays(FOLDER / "flow_math.npz")


def problems(arrays: Arrays) -> list[str]:
    return sorted({name.split("/")[0] for name in arrays})


def check_problem(arrays: Arrays, problem: str, kind: str) -> None:
    """Every step of a chain: its mean and std, the state that unit noise leads to, and the log-prob of that state."""

    def named(*parts: object) -> torch.Tensor:
        return torch.from_numpy(np.asarray(arrays["/".join(str(part) for part in (problem, *parts))]))

    denoising = Denoising(int(named("K")), kind, float(named("a")))  # type: ignore[arg-type]
    states, velocities, unit = named("x"), named("v"), named("z")
    steps, dimensions = named("executed").tolist()
    for k in range(len(states)):
        index = torch.full((len(states[k]),), k)
        mean, std = denoising.gaussian(states[k], velocities[k], index)
        following = mean + std * unit[k]
        assert_close(mean, named(kind, k, "mean").numpy(), TOLERANCE)
        assert_close(std.expand(len(mean), 1, 1)[0, 0, 0], named(kind, k, "std").numpy(), TOLERANCE)
        assert_close(following, named(kind, k, "next").numpy(), TOLERANCE)
        if k < denoising.num_choices:
            logprobs = gaussian_logprobs(named(kind, k, "next"), mean, std)
            assert_close(logprobs, named(kind, k, "logprob").numpy(), TOLERANCE)
            executed = logprobs[:, :steps, :dimensions].sum((1, 2))
            assert_close(executed, named(kind, k, "logprob_executed").numpy(), TOLERANCE)
        else:
            assert f"{problem}/{kind}/{k}/logprob" not in arrays, "a step that has no noise has no density"


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_published_formulas(arrays, kind):
    for problem in problems(arrays):
        check_problem(arrays, problem, kind)


def test_every_golden_array_is_compared(arrays):
    for problem in problems(arrays):
        own = {name: array for name, array in arrays.items() if name.startswith(f"{problem}/")}
        checks = [lambda a, p=problem, k=kind: check_problem(a, p, k) for kind in KINDS]
        assert unnoticed(own, checks) == []
