"""What a supervised run starts from: the policy to train, the sources of its demonstrations, their statistics.

All base models are made this way, including the built-in ones.

demos.py ─► DemoSet (frames, actions) ─► batches.py ─► training/sft.py, the policy's own loss ─► checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlarl.config.finetune import DemoConfig, FinetuneConfig, FinetunePolicyConfig
from vlarl.config.mixtures import is_named, parse_mixture
from vlarl.config.training_data import by_demonstrations
from vlarl.data.demo_set import DemoSet
from vlarl.data.demos import DemoSource, open_sources, refuse_mixed_sizes, refuse_other_robot
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.statistics import dataset_statistics
from vlarl.data.tabletop_demos import TABLETOP
from vlarl.envs.tabletop.geometry import PROPRIO_HIGH, PROPRIO_LOW
from vlarl.errors import UsageError
from vlarl.policies.fresh import FRESH, FreshSizes
from vlarl.policies.load import load_supervised
from vlarl.policies.supervised import SupervisedPolicy
from vlarl.policies.tiny import unit_statistics
from vlarl.policies.tiny_inputs import IMAGE_SIZE
from vlarl.training.prepare import refuse_compute_dtype


def start(
    config: FinetuneConfig, device: torch.device, deferred: bool = False
) -> tuple[SupervisedPolicy, list[DemoSource]]:
    """The policy to train, frozen and adapted as configured, and the sources of its demonstrations.

    A checkpoint defines how many views of which size it reads. A fresh model takes its sizes from the demonstrations.
    `deferred` weights are read when the policy is sharded; on the device `meta` it has none.
    """
    settings, seed = config.policy, config.run.seed
    if settings.path in FRESH:
        size = config.demos.image_size or IMAGE_SIZE
        sources = open_sources(config.demos, seed, size, settings.num_images or 1)
        policy = fresh_policy(settings, seed, sources[0], size).to(device)
    else:
        policy = load_supervised(settings, device, deferred)
        size = config.demos.image_size or policy.image_size
        sources = open_sources(config.demos, seed, size, policy.num_images)
    for source in sources:
        refuse_other_robot(policy, source)
    refuse_mixed_sizes(policy, sources)
    refuse_compute_dtype(policy, config.distributed)
    policy.prepare_supervised(settings, config.lora, seed)
    recorded = [source.suite for source in sources if isinstance(source, RecordedSource)]
    policy.training_data = policy.training_data.joined(by_demonstrations(config.demos, *recorded))
    return policy, sources


def fresh_policy(
    settings: FinetunePolicyConfig, seed: int, source: DemoSource, image_size: int = IMAGE_SIZE
) -> SupervisedPolicy:
    """The tiny model with fresh weights, sized for a source's robot; its statistics come with the demonstrations."""
    try:
        sizes = FreshSizes(
            settings.chunk_length,
            settings.num_images or 1,
            settings.use_proprio is not False,
            image_size,
            source.action_dim,
            source.proprio_dim,
        )
        return FRESH[settings.path](seed, sizes, False)
    except ValueError as error:
        raise UsageError(f"policy: {settings.path} can't be made: {error}") from error


def sampling_weights(config: DemoConfig, demos: Sequence[DemoSet]) -> list[float]:
    """How often each set is sampled: as often as it has frames, unless a mixture says otherwise."""
    frames = [float(len(part)) for part in demos]
    if not config.mixture:
        return frames
    weights = [dataset.weight for dataset in parse_mixture(config.mixture)]
    by_frames = (config.mixture_weights or ("frames" if is_named(config.mixture) else "datasets")) == "frames"
    return [weight * size if by_frames else weight for weight, size in zip(weights, frames, strict=True)]


def demo_statistics(demos: DemoSet) -> Mapping[str, Any]:
    """The normalisation statistics of a set's robot, measured; the tabletop's bounds are known."""
    measured = dataset_statistics(demos.actions, demos.proprio, len(demos.success), demos.action_mask)
    if demos.name == TABLETOP:
        known = unit_statistics(PROPRIO_LOW, PROPRIO_HIGH)
        return measured | {name: measured[name] | columns for name, columns in known.items()}
    return measured
