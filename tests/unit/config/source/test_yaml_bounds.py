"""Files that no configuration is: each is refused in one line, at once, whatever it would make of itself."""

import pytest

from vlarl.config import load_config
from vlarl.config.source.yaml_file import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_value
from vlarl.errors import UsageError


def laughs(levels: int) -> str:
    """Anchors that stand for ten times as many values at each level."""
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int) -> str:
    lines = ["a0: &a0 {x0: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], x{n}: 1}}" for n in range(1, levels)]
    return "\n".join(lines)


def chain(links: int) -> str:
    """Anchors of one value, each in the next one."""
    return "\n".join(["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, links))])


REFUSED = {
    "control character": ("run:\n  name: a\x01b\n", "not valid YAML: the control character U+0001"),
    "zero byte": ("run: \x00\n", "not valid YAML: the control character U+0000"),
    "no boolean": ("logging:\n  wandb: !!bool maybe\n", "not valid YAML: 'maybe' is neither true nor false"),
    "a list as a boolean": ("logging:\n  wandb: !!bool [true]\n", "not valid YAML: "),
    "a mapping as a number": ("run:\n  seed: !!int {a: 1}\n", "not valid YAML: "),
    "a tag of ours with an exponent": ("run:\n  seed: !whole 1e99999999\n", "an integer of too many digits"),
    "no time": ("run:\n  seed: !!timestamp ''\n", "line 2, column 9: not valid YAML: the value does not fit its tag"),
    "a word as a time": ("run:\n  seed: !!timestamp maybe\n", "does not fit its tag !!timestamp; delete the tag"),
    "a month that is not there": ("run:\n  seed: !!timestamp 2024-99-01\n", "does not fit its tag !!timestamp"),
    "a mapping as a time": ("run:\n  seed: !!timestamp {!!value a: 1}\n", "does not fit its tag !!timestamp"),
    "a word as a number": (
        "run:\n  seed: !!int x\n",
        "line 2, column 9: not valid YAML: the value does not fit its tag",
    ),
    "an empty number": ("optim:\n  lr: !!float ''\n", "does not fit its tag !!float"),
    "a set": ("!!set {run}\n", "must hold sections with options"),
    "an object": ("run: !!python/object:os.system ls\n", "could not determine a constructor"),
    "five thousand digits": (f"run:\n  seed: {'9' * 5000}\n", "not valid YAML: an integer of 5000 digits"),
    "billion laughs": (laughs(9), f"more than {MAX_VALUES} values, with those that its anchors stand for"),
    "billion merges": (merges(9), f"more than {MAX_VALUES} values, with those that its anchors stand for"),
    "an anchor in itself": ("a: &a [*a]\n", "an anchor holds itself"),
    "a mapping merged into itself": ("a: &a {<<: *a}\n", "an anchor holds itself"),
    "a long chain of anchors": (chain(3000), f"more than {MAX_DEPTH} levels"),
    "deep lists": ("a: " + "[" * 5000, f"more than {MAX_DEPTH} levels"),
    "deep mappings": ("a: " + "{a: " * 5000, f"more than {MAX_DEPTH} levels"),
    "many values": ("a: [" + "1, " * (MAX_VALUES + 1) + "1]", f"more than {MAX_VALUES} values"),
    "a large file": ("#" * (MAX_BYTES + 1), f"larger than {MAX_BYTES // 1000} kB"),
    "a list as a key": ("? [a, b]\n: 1\n", "not valid YAML: found unhashable key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_is_refused_in_one_line(name, tmp_path):
    text, message = REFUSED[name]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and message in said and "\n" not in said
    assert len(said) < 500 + len(str(path))


@pytest.mark.parametrize("name", REFUSED)
def test_the_same_as_the_value_of_a_flag_is_a_message_too(name):
    with pytest.raises(UsageError) as caught:
        load_config(overrides=["--gym.kwargs", REFUSED[name][0]])
    assert len(str(caught.value)) < 1000


def test_anchors_and_merges_in_reason_are_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optim: &rates\n  lr: 1e-5\nalgorithm: {name: ppo}\ncritic:\n  lr: 1e-4\n")
    assert load_config(path).optim.lr == 1e-5
    assert parse_value("[&a [1, 2], *a]") == ((1, 2), (1, 2))


def test_not_all_of_many_mistakes_are_listed(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optim:\n" + "".join(f"  learning_rate_{n}: 1\n" for n in range(5000)))
    with pytest.raises(UsageError) as caught:
        load_config(path)
    said = str(caught.value)
    assert said.startswith("5000 problems") and said.endswith("and 4970 more") and len(said.splitlines()) == 32


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("run.num_threads", "100000", "must be an integer > 0 and <= 1024 or null"),
        ("env.image_size", "100000", "must be an integer > 0 and <= 4096 or null"),
        ("lora.rank", "1e30", "must be an integer > 0 and <= 10000"),
        ("lora.rank", "9" * 4000, "must be an integer > 0 and <= 10000"),
        ("run.iterations", "1e30", "must be an integer > 0 or null, and 1000000000000 at most"),
        ("optim.microbatch_size", "9" * 30, "must be an integer > 0 or null, and 1000000000000 at most"),
        ("optim.lr", "9" * 400, "must be a number >= 0"),
        ("rollout.temperature", "1e999", "must be a number > 0"),
        ("policy.chunk_length", "1000000", "must be an integer > 0 and <= 1024 or null"),
        ("algorithm.critic_hidden", "1000000000", "must be a list of integers > 0 and <= 65536"),
        ("run.name", "x" * 300, "must be 200 bytes or shorter"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_allocated(flag, value, message):
    with pytest.raises(UsageError) as caught:
        load_config(overrides=[f"--{flag}", value])
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_ten_thousand_tasks_are_checked_at_once():
    tasks = ",".join(["0"] * 10_000 + [str(n) for n in range(5000)])
    with pytest.raises(UsageError) as caught:
        load_config(overrides=[f"--env.task_ids={tasks}"])
    assert "task 0 given more than once" in str(caught.value) and len(str(caught.value)) < 1500
