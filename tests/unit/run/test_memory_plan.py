"""Which sizes of passes a plan chooses: for a model of round sizes, and for OpenVLA-7B beside what was measured on it."""

from dataclasses import replace

import pytest

from vlarl.policies.family import MemoryEstimate
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.memory import estimate_lora_update, estimate_rollout
from vlarl.run.memory_plan import GIB, MARGIN, SLACK, Estimates, Wanted, plan_memory

KEPT = 10 * GIB + SLACK


def update(size, recompute):
    """Ten GiB stay; a decision keeps one GiB for the backward pass, or a quarter of it."""
    return MemoryEstimate(7 * GIB, GIB, GIB // 2, 3 * GIB // 2, activations=size * GIB // (4 if recompute else 1))


def rollout(batch):
    """Half a GiB for each decision, of which most is cached keys and values."""
    return MemoryEstimate(7 * GIB, activations=batch * GIB // 8, cache=batch * 3 * GIB // 8)


ROUND = Estimates(rollout, update)


def plan(gib, slots=64, estimates=ROUND, **wanted):
    return plan_memory(round(gib * GIB), estimates, Wanted(slots, **wanted))


@pytest.mark.parametrize(
    ("gib", "size", "recomputed"),
    [
        (200, 128, False),  # everything: 10.25 + 1.1 x 128 = 151
        (151, 64, False),
        (45.5, 32, False),  # 10.25 + 35.2; larger microbatches with recomputed layers would hardly be faster
        (45.4, 64, True),  # 16 without would keep the GPU less busy
        (14.7, 16, True),  # 10.25 + 4.4; 4 without
        (10.6, 1, True),  # 10.25 + 0.275
    ],
)
def test_the_largest_microbatch_that_fits_and_recomputed_layers_where_it_would_be_too_small(gib, size, recomputed):
    found = plan(gib)
    assert (found.microbatch_size, found.gradient_checkpointing) == (size, recomputed)
    assert found.kept == KEPT
    assert found.update == pytest.approx(KEPT + MARGIN * size * GIB / (4 if recomputed else 1))


def test_given_sizes_stay():
    assert plan(45.4, gradient_checkpointing=False).microbatch_size == 16
    assert plan(200, gradient_checkpointing=True).gradient_checkpointing
    small = plan(20, microbatch_size=8)
    assert (small.microbatch_size, small.gradient_checkpointing) == (8, False), "recomputing would only cost time"
    large = plan(20, microbatch_size=16)
    assert (large.microbatch_size, large.gradient_checkpointing, large.fits) == (16, True, True)
    assert plan(20, microbatch_size=16, gradient_checkpointing=False).fits is False
    assert plan(20, batch_size=32).batch_size == 32 and not plan(20, batch_size=32).fits
    tokens = plan(200, by_tokens=True)
    assert tokens.microbatch_size is None and not tokens.gradient_checkpointing
    assert "microbatches as optim.microbatch_tokens says, layers not recomputed: at least 11.3 GiB" in tokens.lines()[1]


@pytest.mark.parametrize(
    ("gib", "slots", "batch"),
    [
        (200, 64, None),
        (45.5, 64, None),  # 10.25 + 1.1 x 32
        (45.4, 64, 32),
        (45.5, 40, None),  # padded to 64
        (45.4, 40, 32),
        (45.4, 32, None),
        (11, 64, 1),
    ],
)
def test_the_largest_pass_of_decisions_that_fits(gib, slots, batch):
    found = plan(gib, slots)
    assert found.batch_size == batch and found.fits
    assert plan(gib, slots, recorded=False).batch_size == (None if slots == 40 else batch), (
        "plain passes have no padding"
    )


def test_recordings_stay_where_they_fit_beside_update_and_rollout():
    """10.25 with the update's 140.8, and 35.2 of recordings; or 35.2 of a rollout and as much of recordings."""
    kept, released = plan(186.3), plan(186.2)
    assert (kept.recorded, released.recorded) == ("kept", "released")
    assert kept.recordings == released.recordings == pytest.approx(MARGIN * 32 * GIB)
    assert kept.rollout == released.rollout + kept.recordings == pytest.approx(KEPT + 2 * MARGIN * 32 * GIB)
    small = {"microbatch_size": 1}
    assert (plan(80.7, **small).recorded, plan(80.6, **small).recorded) == ("kept", "released")
    assert plan(200, recorded=False).recorded == "none" and plan(200, recorded=False).recordings == 0


def test_a_separate_critic_keeps_its_activations_and_its_own_adapters():
    apart = replace(ROUND, copies=3 * GIB, networks=2)
    found = plan(200, estimates=apart)
    assert found.kept == KEPT + 3 * GIB and found.microbatch_size == 64
    assert found.update == pytest.approx(found.kept + 2 * MARGIN * 64 * GIB)


def test_more_memory_never_means_smaller_passes_and_the_plan_stays_below_the_limit():
    last = (0, 0)
    for quarter in range(44, 800):
        found = plan(quarter / 4)
        assert found.fits and max(found.update, found.rollout) <= found.limit
        assert found.recorded == "released" or found.update + found.recordings <= found.limit
        rows = found.microbatch_size * (1 if found.gradient_checkpointing else 1.5)
        assert (min(rows, 32), found.batch_size or 64) >= last
        last = (min(rows, 32), found.batch_size or 64)


def test_what_does_not_fit_says_so():
    found = replace(plan(10), advice=("buy one", "rent one"))
    assert found.is_hopeless and not found.fits and (found.microbatch_size, found.batch_size) == (1, 1)
    assert found.lines()[-1] == "by estimate that does not fit: buy one, or rent one"
    assert not plan(10.4).is_hopeless and not plan(10.4).fits


def openvla_7b(decoder="autoregressive", bits=None):
    config = parse_config(
        {
            "vision_backbone_id": "dinosiglip-vit-so-224px",
            "use_fused_vision_backbone": True,
            "n_action_bins": 256,
            "pad_to_multiple_of": 64,
            "text_config": {"model_type": "llama", "vocab_size": 32064},
        }
    )
    if decoder == "parallel":
        config = config.with_decoder("parallel", 8, 1, False)
    acting = "bfloat16" if bits is None else "float32"
    return Estimates(
        lambda batch: estimate_rollout(config, batch, 32, acting, bits),
        lambda size, recompute: estimate_lora_update(config, size, 32, "bfloat16", 32, recompute, bits),
    )


def test_openvla_7b_on_a_card_of_24_gb_is_planned_above_the_measured_peaks():
    """docs/performance.md: microbatches of 32, recomputed, peaked at 20.78 GiB; 32 decisions at about 20."""
    found = plan(23, 128, openvla_7b())
    assert (found.microbatch_size, found.gradient_checkpointing, found.batch_size) == (32, True, 32)
    assert found.recorded == "released" and found.fits
    assert 20.78 * GIB * 1.04 < found.update <= 23 * GIB
    kept = plan(23, 128, openvla_7b(), microbatch_size=4, gradient_checkpointing=False)
    assert not kept.fits, "it peaked at 22.97 GiB, which leaves nothing for gaps between tensors"


def test_openvla_7b_in_other_settings():
    oft = plan(23, 128, openvla_7b("parallel"))
    assert (oft.microbatch_size, oft.batch_size, oft.recorded) == (32, None, "released")
    packed = plan(15, 128, openvla_7b("parallel", bits=4))
    assert (packed.microbatch_size, packed.batch_size, packed.fits) == (16, 64, True)
    assert plan(15, 128, openvla_7b("parallel")).is_hopeless, "without 4 bits"
    large = plan(139, 128, openvla_7b("parallel"))
    assert (large.microbatch_size, large.gradient_checkpointing, large.recorded) == (32, False, "kept")
