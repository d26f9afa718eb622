"""Names that the flags of `vlarl eval` have in training and in other systems."""

import pytest

from vlarl.cli import arguments as args
from vlarl.cli.evaluate import _parser, _with_own_names


@pytest.mark.parametrize(
    ("written", "understood"),
    [
        ("--checkpoint x --n-episodes 5", "x --episodes 5"),
        ("--model=tiny --num_episodes=5", "init:tiny-oft --episodes=5"),
        ("--model tiny-openvla", "init:tiny-openvla"),
        ("--pretrained_checkpoint x --task_suite_name libero_goal --task-ids 0 1", "x --suite libero_goal --tasks 0 1"),
        ("--policy.path x --eval.states_per_task 3 --eval.temperature 1", "x --episodes 3 --temperature 1"),
        ("x --output_dir y --policy.actions l1", "x --out y --policy.actions l1"),
    ],
)
def test_names_of_training_and_of_other_systems(written, understood):
    assert _with_own_names(written.split()) == understood.split()


def test_hyphens_and_underscores_are_alike():
    given, rest = _parser().parse_known_args(["x", "--num_envs", "4", "--env.max_steps", "9"])
    assert given.num_envs == 4 and rest == ["--env.max_steps", "9"]
    parser = args.Parser("test", "A test.")
    parser.add_argument("--batch-size", type=int)
    assert parser.parse_args(["--batch_size=3"]).batch_size == 3


def test_a_suite_in_any_spelling():
    assert _parser().parse_known_args(["x", "--suite", "LIBERO-Long"])[0].suite == ("libero_10",)
