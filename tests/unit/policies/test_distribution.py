import math

import pytest
import torch

from vlarl.policies import distribution


def test_logprobs_and_entropy_have_known_values():
    logits = torch.tensor([[[0.0, math.log(3.0)]]])
    places = torch.tensor([[1]])
    assert distribution.token_logprobs(logits, places, 1.0).item() == pytest.approx(math.log(0.75))
    # At T = 0.5 the odds are squared: 9 to 1.
    assert distribution.token_logprobs(logits, places, 0.5).item() == pytest.approx(math.log(0.9))
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert distribution.token_entropy(logits, 1.0).item() == pytest.approx(expected)
    assert distribution.token_entropy(torch.zeros(1, 1, 256), 1.6).item() == pytest.approx(math.log(256))


def test_bfloat16_logits_are_lifted_to_float32():
    logits = torch.randn(2, 3, 256).bfloat16()
    out = distribution.token_logprobs(logits, torch.zeros(2, 3, dtype=torch.int64), 1.6)
    assert out.dtype == torch.float32


def test_sampling_frequencies_match_probabilities_at_the_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(200_000, 1, 4)
    uniforms = torch.rand(200_000, 1, generator=torch.Generator().manual_seed(0))
    places = distribution.sample(logits, 1.6, uniforms)
    frequencies = torch.bincount(places.flatten(), minlength=4) / 200_000
    assert (frequencies - (logits[0, 0] / 1.6).softmax(0)).abs().max() < 5e-3


def test_a_row_depends_on_its_own_uniforms_alone():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 5, 256, generator=generator)
    uniforms = torch.rand(8, 5, generator=generator)
    together = distribution.sample(logits, 1.6, uniforms)
    alone = torch.cat([distribution.sample(logits[i : i + 1], 1.6, uniforms[i : i + 1]) for i in range(8)])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("uniform", [0.0, 1e-12, 0.5, 1.0 - 2**-24, 1.0])
def test_extreme_uniforms_never_choose_impossible_places(uniform):
    logits = torch.full((1, 1, 256), -math.inf)
    logits[..., 100:103] = torch.tensor([0.0, 1.0, 0.0])
    place = distribution.sample(logits, 1.0, torch.full((1, 1), uniform)).item()
    assert 100 <= place <= 102
    peaked = torch.full((1, 1, 256), -200.0)
    peaked[..., 7] = 0.0
    assert distribution.sample(peaked, 1.0, torch.full((1, 1), uniform)).item() == 7


def test_uniform_logits_with_rounding_at_the_top():
    logits = torch.zeros(1000, 1, 255)  # 1/255 is not exact, so the sum ends off 1
    uniforms = torch.linspace(0.999, 1.0, 1000).unsqueeze(1)
    places = distribution.sample(logits, 1.0, uniforms)
    assert places.max() == 254
    assert places.min() == 254


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature 0"):
        distribution.sample(torch.zeros(1, 1, 4), 0.0, torch.zeros(1, 1))
