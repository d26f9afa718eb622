"""The Python interface: its names, what it makes of its arguments, and what it says of wrong ones."""

import ast
import doctest
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

import vlarl
import vlarl.api
import vlarl.evaluation.run
import vlarl.loop
import vlarl.run.finetune
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.source.load import to_yaml
from vlarl.errors import UsageError, VlarlError
from vlarl.evaluation.request import Saving
from vlarl.python_messages import in_python
from vlarl.types import EvalResult

FUNCTIONS = ("train", "evaluate", "compare", "finetune", "load_config", "load_policy")


def quick(trajectory):
    return float(trajectory.success)


def make_env():
    return gymnasium.make("CartPole-v1")


@pytest.fixture
def trained(monkeypatch):
    """The configuration, the folder and the callbacks that training is started with, in place of training."""
    calls = []
    monkeypatch.setattr(vlarl.loop, "train", lambda *arguments: calls.append(arguments))
    return calls


def test_the_package_lists_its_names():
    assert set(FUNCTIONS) < set(dir(vlarl)) == set(vlarl.__all__)
    for name in dir(vlarl):
        assert getattr(vlarl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        vlarl.trian  # noqa: B018


# Docstrings


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_an_example_that_fits_it(name):
    """Examples that take long are not run, but their calls must fit the signatures."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(vlarl, name)))
    assert examples
    calls = [node for e in examples for node in ast.walk(ast.parse(e.source)) if isinstance(node, ast.Call)]
    own = [call for call in calls if isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "vlarl"]
    for call in own:
        signature = inspect.signature(getattr(vlarl, call.func.attr))
        signature.bind(*call.args, **{word.arg: word.value for word in call.keywords})
    assert own or name == "load_config"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_examples_that_cost_little_run(name):
    function = getattr(vlarl, name)
    (test,) = [t for t in doctest.DocTestFinder(recurse=False).find(function, name, globs={name: function})]
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0


# Training


def test_a_preset_with_options(trained):
    vlarl.train("tabletop_ppo", {"run.seed": 5}, on_iteration=print, on_episode=quick)
    ((config, folder, checkpoint, callbacks),) = trained
    assert (config.algorithm.name, config.run.seed, folder, checkpoint) == ("ppo", 5, None, None)
    assert (callbacks.on_iteration, callbacks.on_episode) == (print, quick)


def test_a_file_flags_a_configuration_or_nothing(trained, tmp_path):
    (tmp_path / "mine.yaml").write_text("run: {seed: 7}")
    vlarl.train(tmp_path / "mine.yaml", ["--optim.lr", "0.5"])
    vlarl.train(trained[0][0], {"run.seed": 8})
    vlarl.train()
    configs = [config for config, *_ in trained]
    assert [(c.run.seed, c.optim.lr) for c in configs[:2]] == [(7, 0.5), (8, 0.5)]
    assert configs[2] == vlarl.load_config("tabletop_grpo")


def test_without_a_source_it_is_the_preset_of_the_suite(trained):
    vlarl.train(overrides={"env.suite": "libero_spatial"})
    ((config, *_),) = trained
    assert config == vlarl.load_config("libero_spatial_grpo_oft")
    assert "a run starts from the preset of the suite" in " ".join(inspect.getdoc(vlarl.train).split())


def test_a_reward_and_an_environment_as_callables(trained):
    vlarl.train(reward=quick)
    vlarl.train(env=make_env, overrides={"gym.instructions": ["balance"], "policy.path": "init:tiny-oft"})
    vlarl.train(reward="sparse")
    rewarded, in_env, named = (config for config, *_ in trained)
    assert rewarded.reward.given[rewarded.reward.source].function is quick
    assert rewarded.optim.lr == vlarl.load_config("tabletop_grpo").optim.lr
    assert (in_env.env.suite, in_env.gym.env) == ("gym", f"python:{__name__}.make_env")
    assert in_env.gym.given[in_env.gym.env].function is make_env
    assert in_env.optim == vlarl.Config().optim, "the tabletop's preset is not for another environment"
    assert named.reward.source == "sparse"


@pytest.mark.parametrize("which", ["name", "folder", "checkpoint"])
def test_a_run_is_resumed_by_name_folder_or_checkpoint(trained, tmp_path, monkeypatch, which):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "first"
    (run / "checkpoints" / "final").mkdir(parents=True)
    (run / "checkpoints" / "final" / "trainer.json").write_text('{"iteration": 3}')
    (run / "config.yaml").write_text(to_yaml(vlarl.load_config(None, {"run.name": "first", "reward.source": quick})))
    resume = {"name": "first", "folder": run, "checkpoint": run / "checkpoints" / "final"}[which]
    vlarl.train(resume=resume, overrides={"run.iterations": 50}, reward=quick)
    ((config, folder, checkpoint, _),) = trained
    assert Path(folder).resolve() == run.resolve() and config.run.iterations == 50
    assert checkpoint == (run / "checkpoints" / "final" if which == "checkpoint" else None)
    assert config.reward.given[config.reward.source].function is quick


def test_a_resumed_run_reads_no_preset(trained):
    with pytest.raises(UsageError, match="resume reads the run's own configuration"):
        vlarl.train("tabletop_grpo", resume="first")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"seed": 1}, r"vlarl.train: unknown argument 'seed'; .*overrides: \{'run.seed': ...\}"),
        ({"lr": 1}, r"\{'optim.lr': ...\} or \{'critic.lr': ...\}"),
        ({"lora_rank": 8}, r"\{'lora.rank': ...\}"),
        ({"optim_lr": 1}, r"go into the overrides: \{'optim.lr': ...\}$"),
        ({"optim__lr": 1}, r"\{'optim.lr': ...\}$"),
        ({"env_suite": "tabletop_goal"}, r"\{'env.suite': ...\}$"),
        ({"model": "x"}, r"\{'policy.path': ...\}$"),
        ({"policy": "x"}, r"\{'policy.path': ...\}$"),
        ({"algorithm": "ppo"}, r"\{'algorithm.name': ...\}$"),
        ({"optim": {"lr": 1}}, r"\{'optim': \{...\}\}$"),
        ({"output_dir": "x"}, "here it is run.root and run.name"),
        ({"batch_size": 8}, "split into optim.minibatches optimizer steps"),
        (
            {"env": "tabletop_goal"},
            r"env = 'tabletop_goal': a suite of tasks is chosen by \{'env.suite': 'tabletop_goal'",
        ),
        ({"env": "LIBERO-Spatial"}, r"\{'env.suite': 'libero_spatial'\}"),
        ({"overrides": 3}, r"overrides cannot be read from int: give options as a mapping, such as \{'run.seed': 1\}"),
        ({"reward_fn": quick}, "did you mean 'reward'"),
        ({"resum": "x"}, "did you mean 'resume'"),
        ({"qqq": 1}, "; arguments: source, overrides, resume"),
        ({"reward": 3}, "reward: give a function that takes a Trajectory .*, not int"),
        ({"reward": lambda a, b: 1.0}, r"reward: the function takes \(a, b\), but is called with one argument"),
        ({"resume": True}, "resume = True: give the name or folder of a run"),
        ({"overrides": ["--optim.lr", 1e-4]}, "overrides: 0.0001 in a list of flags is not text"),
        ({"on_iteration": 3}, "on_iteration: give a function .*, not int"),
        ({"overrides": "run.seed=1"}, "overrides cannot be read from str: give options as a mapping"),
        ({"reward": quick, "overrides": {"reward.source": "dense"}}, "reward.source: given by an argument and in"),
    ],
)
def test_wrong_arguments_of_train(trained, arguments, said):
    with pytest.raises(UsageError, match=said):
        vlarl.train(**arguments)
    assert trained == []


def test_an_unknown_argument_is_a_type_error_too():
    with pytest.raises(TypeError):
        vlarl.train(seed=1)


def test_an_environment_that_is_made_already_is_refused(trained):
    with pytest.raises(UsageError, match="env: give a function or class that makes the environment, not "):
        vlarl.train(env=make_env())


# The words of Python


def parameters(name="train"):
    return inspect.signature(getattr(vlarl, name)).parameters


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--optim.lr must be above 0", "optim.lr must be above 0"),
        ("set --env.num_envs 4", "set {'env.num_envs': 4}"),
        (
            "set --vllm.num_engines 1 and --distributed.backend ray; docs",
            "set {'vllm.num_engines': 1} and {'distributed.backend': 'ray'}; docs",
        ),
        ("say --policy.path builtin:tiny-oft to train", "say {'policy.path': 'builtin:tiny-oft'} to train"),
        ("with --policy.path, or without", "with policy.path, or without"),
        ("--optim.minibatches optimizer steps", "optim.minibatches optimizer steps"),
        ("--rollout.accuracy_bounds LOW HIGH, as", "{'rollout.accuracy_bounds': [LOW, HIGH]}, as"),
        ("--gym.kwargs '{render_mode: rgb_array}', or", "{'gym.kwargs': {'render_mode': 'rgb_array'}}, or"),
        ("choose another `--run.name`", "choose another `run.name`"),
        ("set --demos.path DIR.", "set {'demos.path': DIR}."),
        (
            "add --trust; or give these options yourself on the command line",
            "add trust=True; or give these options yourself",
        ),
        ("go on by `--resume runs/first`, or", "go on by `resume='runs/first'`, or"),
        ("go on by `--resume first`, or", "go on by `resume='first'`, or"),
        ("write --resume RUN, with", "write resume=RUN, with"),
        ("then go on with --resume", "then go on with resume="),
        ("--root DIR names the folder", "{'run.root': DIR} names the folder"),
        ("must be a number > 0 or null", "must be a number > 0 or None"),
        ("must be true or false", "must be True or False"),
        ("`vlarl finetune --policy.actions l1` trains it", "`vlarl finetune --policy.actions l1` trains it"),
        ("run: vlarl finetune x --run.name x", "run: vlarl finetune x --run.name x"),
        ("run: vlarl finetune x", "run: vlarl.finetune('x')"),
        ("go on by `vlarl train --resume runs/mine`, or", "go on by `vlarl.train(resume='runs/mine')`, or"),
        ("an option of `vlarl train`, where", "an option of `vlarl.train`, where"),
        ("since vlarl finetune imitates", "since vlarl finetune imitates"),
        ("  hf download a/b --repo-type dataset", "  hf download a/b --repo-type dataset"),
        ("--gpu: unknown option", "--gpu: unknown option"),
    ],
)
def test_flags_are_translated_to_python(text, said):
    assert in_python(text, parameters()) == said
    assert in_python(said, parameters()) == said, "translating a message again changes nothing"


def test_flags_of_an_evaluation_are_its_arguments():
    text = "--episodes = 50: take --tasks (of x: 0 to 3), or name the protocol (--protocol benchmark)"
    said = "episodes = 50: take tasks= (of x: 0 to 3), or name the protocol (protocol='benchmark')"
    assert in_python(text, parameters("evaluate")) == said


def test_the_interface_speaks_so(trained, tmp_path):
    with pytest.raises(UsageError, match=r"with policy.path, .*or say \{'policy.path': 'builtin:tiny-openvla'\} to"):
        vlarl.train("tabletop_grpo", {"env.suite": "libero_spatial"})
    with pytest.raises(UsageError, match="kl.target = -1: must be a number > 0 or None"):
        vlarl.load_config("tabletop_grpo", {"kl.target": -1})
    foreign = tmp_path / "config.yaml"
    foreign.write_text(
        "env: {suite: gym}\ngym: {env: 'subprocess:call', instructions: [go]}\npolicy: {path: 'init:tiny-oft'}"
    )
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="add trust=True; or give these options yourself. See"):
        vlarl.load_config(foreign)
    assert vlarl.load_config(foreign, trust=True).gym.env == "subprocess:call"


def test_functions_of_the_commands_too_are_sent_by_name():
    for function in (vlarl.load_config, vlarl.load_policy, vlarl.train):
        assert pickle.loads(pickle.dumps(function)) is function


def test_a_configuration_is_not_changed():
    config = vlarl.load_config("tabletop_grpo")
    with pytest.raises(UsageError, match=r"optim.lr: .* with vlarl.load_config\(config, \{'optim.lr': 0.5\}\)"):
        config.optim.lr = 0.5
    with pytest.raises(AttributeError, match="demos.path"):
        vlarl.load_config("tabletop_base", schema=FinetuneConfig).demos.path = "x"
    assert vlarl.load_config(config, {"optim.lr": 0.5}).optim.lr == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "fp16"}, "dtype = 'fp16': must be one of float32, bfloat16"),
        ({"chunk_length": 0}, "chunk_length = 0: must be an integer > 0 and <= 1024 or None"),
        ({"device": "gpu"}, "device: 'gpu' can't be used here: .*; try `cpu`"),
        ({"lr": 1}, "vlarl.load_policy: unknown argument 'lr'; arguments: path, decoder"),
    ],
)
def test_wrong_arguments_of_load_policy(arguments, said):
    with pytest.raises(UsageError, match=said):
        vlarl.load_policy("builtin:tiny-oft", **arguments)


# Evaluation


@pytest.fixture
def evaluated(monkeypatch):
    """The requests and folders that evaluations are started with."""
    calls = []

    def run(request, folder, on_result):
        calls.append((request, folder))
        return type("Record", (), {"result": EvalResult(())})()

    monkeypatch.setattr(vlarl.evaluation.run, "run_evaluation", run)
    return calls


def test_the_names_of_the_command_line(evaluated, tmp_path):
    vlarl.evaluate(
        "builtin:tiny-oft",
        suite="tabletop_goal",
        tasks=[0, 3],
        episodes=5,
        temperature=1,
        num_envs=2,
        videos="failures",
        out=tmp_path / "x",
        device="cpu",
        seed=4,
        protocol="benchmark",
        save="lerobot",
        save_filter="successes",
        save_every=2,
        save_fps=10,
        overrides={"policy.center_crop": True, "env.max_steps": 9},
    )
    ((request, folder),) = evaluated
    assert request.saving == Saving("lerobot", "successes", 2, 10)
    assert (request.env.suite, request.env.task_ids, request.env.num_envs) == ("tabletop_goal", (0, 3), 2)
    assert (request.env.protocol, request.env.max_steps, request.policy.center_crop) == ("benchmark", 9, True)
    assert (request.states_per_task, len(request.init_states), request.temperature) == (5, 5, 1.0)
    assert (request.videos, request.device, request.seed, folder) == ("failures", "cpu", 4, tmp_path / "x")


def test_a_run_stands_for_its_final_checkpoint(evaluated, tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(vlarl.load_config(None, {"env.suite": "tabletop_long"})))
    with pytest.raises(UsageError, match="first has no checkpoint yet"):
        vlarl.evaluate("first")
    (folder / "checkpoints" / "final").symlink_to(checkpoint)
    vlarl.evaluate("first", episodes=1)
    vlarl.evaluate(folder, episodes=1)
    assert [Path(request.checkpoint) for request, _ in evaluated] == [
        Path("runs/first/checkpoints/final"),
        folder / "checkpoints/final",
    ]


def test_an_environment_as_a_callable(evaluated):
    options = {"gym.instructions": ["balance"]}
    vlarl.evaluate("builtin:tiny-oft", env=make_env, overrides=options)
    ((request, _),) = evaluated
    assert request.env.suite == "gym" and request.gym.given[request.gym.env].function is make_env


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"epsiodes": 3}, "did you mean 'episodes'"),
        ({"task_ids": [0]}, "did you mean 'tasks'"),
        ({"against": "x"}, r"vlarl.compare\(FIRST, SECOND\)"),
        ({"model": "x"}, "did you mean 'checkpoint'"),
        ({"env": "tabletop_goal"}, "a suite of tasks is chosen by suite='tabletop_goal'"),
        ({"overrides": {"env.sute": "x"}}, "env.sute: unknown option; did you mean env.suite"),
        ({"unnorm_key": "x"}, r"overrides=\{'policy.unnorm_key': ...\}"),
        ({"tasks": 3}, r"tasks = 3: give a list of task ids"),
        ({"tasks": [99]}, r"^tasks = \[99\]: no task 99"),
        ({"episodes": 0}, "episodes = 0: must be an integer above 0"),
        ({"episodes": 2.5}, "episodes = 2.5"),
        ({"temperature": -1}, "temperature = -1: must be 0"),
        ({"seed": "x"}, "seed = 'x'"),
        ({"videos": "some"}, "videos = 'some': must be all, failures, none or a count"),
        ({"videos": 2}, "videos = 2: name the new folder"),
        ({"save": "hdf5"}, "save = 'hdf5': must be one of none, rlds, lerobot"),
        ({"save": "rlds"}, "save = 'rlds': name the new folder that episodes are written to with out="),
        ({"save": "lerobot", "out": "x"}, "a LeRobot dataset says how many steps a second has: give save_fps=."),
        ({"save_every": 0}, "save_every = 0: must be an integer above 0"),
        ({"save_every": 2}, "^save_filter=, save_every= and save_fps= say how episodes are saved: add save=.*rlds"),
        ({"suite": "tabletop_gaol"}, "tabletop_goal"),
        (
            {"overrides": {"optim.lr": 1.0}},
            "optim.lr: an evaluation reads options of env, gym, prompts, policy, rollout, vllm, distributed only",
        ),
    ],
)
def test_wrong_arguments_of_evaluate(evaluated, arguments, said):
    with pytest.raises(UsageError, match=said):
        vlarl.evaluate("builtin:tiny-oft", **arguments)
    assert evaluated == []


def test_two_checkpoints_on_the_same_episodes():
    """The two built-in ones differ on task 3 of the goals."""
    comparison = vlarl.compare(
        "builtin:tiny-oft", "builtin:tiny-oft", suite="tabletop_goal", tasks=[3], episodes=1, device="cpu"
    )
    assert [e.task for e in comparison.a.episodes] == [e.task for e in comparison.b.episodes]
    assert comparison.in_words() == "A and B had the same outcome on the one episode."


def test_a_callback_that_fails_names_itself():
    def broken(record):
        raise ValueError("too slow")

    with pytest.raises(
        VlarlError, match=r"the callback on_episode \(.*broken\) raised ValueError: too slow \(test_api.py"
    ):
        vlarl.evaluate(
            "builtin:tiny-oft", suite="tabletop_goal", tasks=[3], episodes=1, device="cpu", on_episode=broken
        )


# Fine-tuning


def test_finetune_takes_presets_and_options(monkeypatch):
    configs = []
    monkeypatch.setattr(vlarl.run.finetune, "finetune", configs.append)
    vlarl.finetune("tabletop_base_openvla", {"optim.steps": 300})
    vlarl.finetune()
    assert configs[0].optim.steps == 300 and configs[0].policy.path != configs[1].policy.path
    with pytest.raises(UsageError, match=r"vlarl.finetune: unknown argument 'steps'; .*\{'optim.steps': ...\}"):
        vlarl.finetune(steps=3)


def test_python_m_vlarl_is_the_program():
    done = subprocess.run([sys.executable, "-m", "vlarl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"vlarl {vlarl.__version__}\n"
