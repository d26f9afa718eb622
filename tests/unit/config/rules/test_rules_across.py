"""Rules across sections, each with its remedy; and the light copies of names that other packages own."""

import pytest

from vlarl.config import Config, ConfigError, FinetuneConfig, load_config
from vlarl.config.known import (
    BUILTINS,
    KNOWN_SUITES,
    SUITES,
    TABLETOP_IMAGE_SIZE,
)
from vlarl.config.rules.across import check
from vlarl.policies.load import load_policy

SIZES = {"run.iterations": 20, "rollout.num_groups": 24, "rollout.group_size": 8}


def complaints(schema=Config, **overrides) -> list[str]:
    given = SIZES if schema is Config else {}
    given = given | {key.replace("__", "."): value for key, value in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        load_config("tabletop_base" if schema is FinetuneConfig else None, given, schema=schema)
    return [str(problem) for problem in caught.value.problems]


def test_the_defaults_have_no_problem():
    assert check(Config()) == [] and check(FinetuneConfig()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"algorithm__value_init_steps": 3},
            "algorithm.value_init_steps = 3 with algorithm.name = 'grpo': GRPO has no critic to train first; "
            "set it to 0, or algorithm.name to ppo",
        ),
        (
            {"algorithm__name": "ppo", "algorithm__value_init_steps": 5, "run__iterations": 5},
            "algorithm.value_init_steps = 5 with run.iterations = 5: the policy would never be trained; "
            "set it below run.iterations",
        ),
        (
            {"policy__path": "some/folder", "policy__decoder": "autoregressive", "policy__chunk_length": 8},
            "policy.chunk_length = 8 with an autoregressive decoder: it predicts one action at a time; set "
            "policy.chunk_length to 1, or use policy.decoder parallel with an OpenVLA-OFT checkpoint such as "
            "builtin:tiny-oft",
        ),
        (
            {"policy__path": "builtin:tiny-openvla", "policy__decoder": "parallel"},
            "policy.decoder = 'parallel' with policy.path = 'builtin:tiny-openvla': this policy decodes autoregressive; "
            "set policy.decoder to autoregressive or policy.path to builtin:tiny-oft",
        ),
        (
            {"policy__path": "builtin:tiny-otf"},
            "policy.path = 'builtin:tiny-otf': unknown built-in policy; did you mean 'builtin:tiny-oft'? "
            "Known: builtin:tiny-oft, builtin:tiny-openvla, builtin:tiny-smolvla, builtin:tiny-qwen2.5-vl",
        ),
        (
            {"optim__minibatches": 7},
            "optim.minibatches = 7: 192 episodes per iteration (rollout.num_groups 24 x rollout.group_size 8) can't be "
            "divided evenly; use 4 or 6 or 8 minibatches",
        ),
        (
            {"optim__minibatches": 500},
            "optim.minibatches = 500: 192 episodes per iteration (rollout.num_groups 24 x rollout.group_size 8) can't be "
            "divided evenly; use 64 or 96 or 192 minibatches",
        ),
        ({"env__task_ids": [3, 1, 3]}, "env.task_ids = [3, 1, 3]: task 3 given more than once; name each task once"),
        ({"env__task_ids": [10]}, "env.task_ids = [10]: no task 10; the suite has tasks 0 to 9"),
        ({"env__task_ids": []}, "env.task_ids = []: names no task; leave it out for all tasks"),
        (
            {"env__suite": "libero"},
            "env.suite = 'libero': names several suites; choose one: libero_spatial, libero_object, libero_goal, libero_10, "
            "libero_90",
        ),
        (
            {"env__suite": "liberospatial"},
            "env.suite = 'liberospatial': unknown suite; did you mean 'libero_spatial'? Known: "
            + ", ".join(KNOWN_SUITES),
        ),
        (
            {"env__cameras": ["agent", "wrist"]},
            "env.cameras = ['agent', 'wrist']: builtin:tiny-openvla reads one view: use [agent], or a checkpoint made for "
            "2 views",
        ),
        (
            {"env__cameras": ["wrist"]},
            "env.cameras = ['wrist']: the first view must be agent: use [agent] or [agent, wrist]",
        ),
        (
            {"env__cameras": ["agent", "agent"]},
            "env.cameras = ['agent', 'agent']: a view is given twice; name each once",
        ),
        (
            {"optim__warmup_iterations": 21},
            "optim.warmup_iterations = 21 with run.iterations = 20: the warm-up would never end; "
            "set it to run.iterations or less",
        ),
        (
            {"checkpoint__best_return_patience": 21},
            "checkpoint.best_return_patience = 21 with run.iterations = 20: the best policy would only be saved once; "
            "set it to run.iterations or less",
        ),
        (
            {"eval__states_per_task": 21},
            "eval.states_per_task = 21: a task has 20 evaluation states with env.protocol disjoint; use that many or fewer",
        ),
        ({"run__device": "gpu"}, "run.device = 'gpu': unknown device; use auto, cpu, cuda or cuda:N"),
        (
            {"run__name": "a/b"},
            "run.name = 'a/b': must be a folder's name: letters, digits and . _ + = - only; the folder above is run.root",
        ),
        (
            {"reward__source": "sparce"},
            "reward.source = 'sparce': unknown reward; did you mean 'sparse'? Known: sparse, dense, shaped, rules, model, remote, exact_match, number_match, choice, format, length, overlong, combined, or your own module:function",
        ),
    ],
)
def test_combinations_that_cannot_work(overrides, message):
    assert complaints(**overrides) == [message]


def test_combinations_that_work():
    load_config(overrides={"policy.path": "x", "env.cameras": ["agent", "wrist"], "policy.decoder": "parallel"})
    load_config(overrides={"reward.source": "mine.rewards:speed", "run.device": "cuda:1"})
    load_config("tabletop_ppo", {"rollout.group_size": 1})
    load_config(overrides=SIZES | {"optim.minibatches": 192})


def test_rules_of_finetune():
    assert complaints(FinetuneConfig, demos__suites=["tabletop_goals"]) == [
        "demos.suites = 'tabletop_goals': unknown suite; did you mean 'tabletop_goal'? Known: "
        + ", ".join(KNOWN_SUITES)
    ]
    assert complaints(FinetuneConfig, optim__steps=10, optim__warmup_steps=11) == [
        "optim.warmup_steps = 11 with optim.steps = 10: the warm-up would never end; set it to optim.steps or less"
    ]
    (message,) = complaints(FinetuneConfig, policy__path="init:huge")
    assert message.startswith("policy.path = 'init:huge': unknown built-in policy; ")


def test_the_suites_are_those_of_the_environment():
    from vlarl.envs.build import NO_DATA, build_prompts
    from vlarl.envs.libero.suites import libero_spec
    from vlarl.envs.metaworld.suites import metaworld_spec
    from vlarl.envs.tabletop import SUITES as TABLETOP

    specs = [suite.spec for suite in TABLETOP.values()]
    specs += [libero_spec(suite, None) for suite in SUITES if suite.startswith("libero_")]
    specs += [metaworld_spec(suite, None) for suite in SUITES if suite.startswith("metaworld_")]
    specs += [build_prompts(suite, NO_DATA).spec for suite in SUITES if suite.startswith("prompts_")]
    assert [spec.name for spec in specs] == list(SUITES)
    for spec in specs:
        facts = SUITES[spec.name]
        assert (len(spec.tasks), {task.max_steps for task in spec.tasks}) == (facts.num_tasks, {facts.max_steps})
        assert len(spec.eval_states) == facts.num_eval_states
        assert len(spec.benchmark_states) == facts.num_benchmark_states
        assert set(spec.train_states).isdisjoint(spec.eval_states)


@pytest.mark.parametrize("name", [name for name, facts in BUILTINS.items() if facts.chunk_length])
def test_the_builtin_sizes_are_those_of_the_policies(name):
    policy, facts = load_policy(f"builtin:{name}"), BUILTINS[name]
    assert policy.num_steps == facts.chunk_length
    assert policy.num_images == facts.num_views
    if facts.decoder:
        assert policy.config.decoder == facts.decoder
    if facts.home == "tabletop_":
        assert policy.image_size == TABLETOP_IMAGE_SIZE
