"""Rules of `vlarl finetune` that span several options."""

from __future__ import annotations

from collections.abc import Iterator

from vlarl.config.derive import world_size
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.known import GYM, KNOWN_SUITES, SUITES, is_prompts
from vlarl.config.mixtures import NAMED, parse_mixture
from vlarl.config.problems import Problem, shown
from vlarl.config.rules.env import check_suite, check_task_ids
from vlarl.config.run_checkpoints import is_flow

Problems = Iterator[Problem]

MAX_VIEWS = 3  # primary, wrist and secondary
PATCH_SIZE = 14  # of the built-in model's towers


def check_demos(config: FinetuneConfig) -> Problems:
    """Suites and their tasks exist and have experts, unless recorded episodes are imitated."""
    demos = config.demos
    if demos.path is not None:
        yield from _check_recorded(config)
        if demos.task_ids is not None:
            remedy = "a recording is imitated as a whole; leave out demos.task_ids, or demos.path to use experts"
            yield Problem(f"demos.task_ids with demos.path = {shown(demos.path)}", remedy, ("demos.task_ids",))
        return
    for suite in demos.suites:
        yield from check_suite(suite, "demos.suites")
        if suite == GYM:
            remedy = "your environment has no scripted expert; give demos.path, a folder of recorded episodes"
            yield Problem(f"demos.suites = {shown(demos.suites)}", remedy, ("demos.suites", "demos.path"))
        if is_prompts(suite):
            remedy = "prompts have no demonstrations of a robot; name a suite of the tabletop or of a simulator"
            yield Problem(f"demos.suites = {shown(demos.suites)}", remedy, ("demos.suites",))
        elif suite in SUITES:
            yield from check_task_ids(demos.task_ids, SUITES[suite], "demos.task_ids")
    if not demos.suites or len(set(demos.suites)) < len(demos.suites):
        known = ", ".join(suite for suite in KNOWN_SUITES if suite != GYM and not is_prompts(suite))
        yield Problem(
            f"demos.suites = {shown(demos.suites)}", f"name each suite once; known suites: {known}", ("demos.suites",)
        )


def _check_recorded(config: FinetuneConfig) -> Problems:
    """A mixture and the views of recorded datasets."""
    demos = config.demos
    try:
        parse_mixture(demos.mixture)
    except ValueError as error:
        remedy = f"{error}; ready mixtures: {', '.join(NAMED)}"
        yield Problem(f"demos.mixture = {shown(demos.mixture)}", remedy, ("demos.mixture",))
    count = config.policy.num_images
    if demos.views is not None:
        subject = f"demos.views = {shown(demos.views)}"
        if not demos.views or len(set(demos.views)) < len(demos.views):
            yield Problem(subject, "name at least one view, and each once", ("demos.views",))
        elif count is not None and count != len(demos.views):
            remedy = f"name {count}, or leave one of the two options out"
            yield Problem(f"{subject} with policy.num_images = {count}", remedy, ("demos.views", "policy.num_images"))
    elif count is not None and count > MAX_VIEWS:
        remedy = f"recorded episodes have at most {MAX_VIEWS} views"
        yield Problem(f"policy.num_images = {count} with demos.path", remedy, ("policy.num_images", "demos.path"))


def check_reward_training(config: FinetuneConfig) -> Problems:
    """A reward model has labels to be trained on, and a model to begin from."""
    reward, base = config.reward, config.policy.path
    if reward.labels in ("pairs", "steps") and reward.path is None:
        remedy = "name the file with the rows: JSON lines, Parquet, or a folder that save_to_disk wrote"
        subject = f"reward.path = null with reward.labels = {shown(reward.labels)}"
        yield Problem(subject, remedy, ("reward.path", "reward.labels"))
    if reward.labels != "none" and base.startswith("init:"):
        remedy = (
            "fresh policies of robots give no scores; begin from a vision-language model, such as "
            "builtin:tiny-qwen2.5-vl, or for texts from a language model or a sequence classifier"
        )
        subject = f"policy.path = {shown(base)} with reward.labels = {shown(reward.labels)}"
        yield Problem(subject, remedy, ("policy.path", "reward.labels"))
    if reward.labels != "none" and config.distributed.backend == "ray":
        remedy = "a reward model is trained in one process; leave the backend out"
        subject = f"distributed.backend = 'ray' with reward.labels = {shown(reward.labels)}"
        yield Problem(subject, remedy, ("distributed.backend", "reward.labels"))


def check_fresh_images(config: FinetuneConfig) -> Problems:
    """The size of a fresh model's images fits its patches."""
    size = config.demos.image_size
    if size is not None and size % PATCH_SIZE and config.policy.path.startswith("init:"):
        near = max(1, round(size / PATCH_SIZE)) * PATCH_SIZE
        subject = f"demos.image_size = {size} with policy.path = {shown(config.policy.path)}"
        remedy = f"must be a multiple of {PATCH_SIZE}, the side of a patch; use {near}"
        yield Problem(subject, remedy, ("demos.image_size", "policy.path"))


def check_warmup(config: FinetuneConfig) -> Problems:
    """The warm-up ends before the training does."""
    optim = config.optim
    if optim.warmup_steps > optim.steps:
        subject = f"optim.warmup_steps = {optim.warmup_steps} with optim.steps = {optim.steps}"
        paths = ("optim.warmup_steps", "optim.steps")
        yield Problem(subject, "the warm-up would never end; set it to optim.steps or less", paths)


def check_batch(config: FinetuneConfig) -> Problems:
    """Ranks have equal parts of a batch, and a pass reads no more than there is."""
    optim, ranks = config.optim, world_size(config)
    if not ranks:  # which is refused already
        return
    size, part = f"optim.batch_size = {optim.batch_size}", optim.batch_size // ranks
    if optim.batch_size % ranks:
        near = max(1, round(optim.batch_size / ranks)) * ranks
        learners = f"distributed.learners_per_node = {shown(config.distributed.learners_per_node)}"
        remedy = f"each of the {ranks} learners has the same part of a batch; use a multiple of {ranks}, such as {near}"
        yield Problem(f"{size} with {learners}", remedy, ("optim.batch_size", "distributed.learners_per_node"))
    elif optim.microbatch_size is not None and optim.microbatch_size > part:
        subject = f"optim.microbatch_size = {optim.microbatch_size} with {size}"
        remedy = "a batch is split into passes; set it to optim.batch_size or less"
        if ranks > 1:
            remedy = f"each of the {ranks} learners splits its part of a batch into passes; set it to {part} or less"
        yield Problem(subject, remedy, ("optim.microbatch_size", "optim.batch_size"))


def check_crops(config: FinetuneConfig) -> Problems:
    """Images that are cropped at random are not cropped before, and are for policies that crop them when they act."""
    augment = config.augment
    if augment.enabled and augment.crop_area < 1 and is_flow(config.policy.path):
        remedy = "SmolVLA has no center crop to act with (policy.center_crop); set augment.crop_area to 1"
        subject = f"augment.enabled with augment.crop_area = {augment.crop_area}"
        yield Problem(subject, remedy, ("augment.crop_area", "augment.enabled", "policy.path"))
    elif augment.enabled and augment.crop_area < 1 and config.policy.center_crop:
        remedy = (
            "the images would be cropped twice; leave policy.center_crop out, and set it in `vlarl eval` and `vlarl "
            "train` of the result"
        )
        subject = f"policy.center_crop with augment.enabled and augment.crop_area = {augment.crop_area}"
        yield Problem(subject, remedy, ("policy.center_crop", "augment.enabled", "augment.crop_area"))
