"""Syncs the learner's weights to an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vlarl.rollout.engines.base import Engine
from vlarl.training.base import Trainer


def publish_weights(learner: Trainer, engine: Engine) -> None:
    """Send the engine the learner's current weights and their version; a colocated engine copies nothing."""
    learner.publish(engine)
    if engine.version != learner.version:
        raise RuntimeError(f"the engine runs version {engine.version} after a sync to version {learner.version}")


@contextmanager
def evaluated_weights(learner: Trainer, engine: Engine) -> Iterator[None]:
    """Inside the block the engine has the weights used for evaluations: the newest, or their average."""
    if learner.average is None or not learner.config.eval.use_ema:
        yield
        return
    with learner.average.in_place():
        publish_weights(learner, engine)
        yield
    publish_weights(learner, engine)
