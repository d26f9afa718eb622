"""Checkpoints: atomic replacement, retention, an exact way back, damage that is named."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from fakes.decisions import annotated_update
from safetensors.torch import load_file, save_file

from vlarl.algorithms import build_algorithm
from vlarl.errors import DivergedError, UsageError, VlarlError
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny
from vlarl.training.checkpoint import COUNTERS, TENSORS, CheckpointStore, restore
from vlarl.training.learner import Learner
from vlarl.training.retention import size_of
from vlarl.training.state import TrainerState


class NotePolicy(torch.nn.Module):
    """Stands in for a policy: writes one line, or fails half-way."""

    def __init__(self, text: str, error: Exception | None = None) -> None:
        super().__init__()
        self.text = text
        self.error = error

    def save(self, folder: Path, dtype=None) -> None:
        (folder / "weights").write_text(self.text)
        if self.error is not None:
            raise self.error
        (folder / "more").write_text(self.text)


def store_at(folder: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(folder, keep)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name != "metadata.json"}


# Replacement (interrupted at every step: test_checkpoint_crashes.py)


def test_a_crash_while_writing_leaves_the_old_one_whole(tmp_path):
    store_at(tmp_path).save_policy("best_return", NotePolicy("old"), {"step": 1})
    with pytest.raises(RuntimeError, match="pulled the plug"):
        store_at(tmp_path).save_policy("best_return", NotePolicy("new", RuntimeError("pulled the plug")), {"step": 2})
    assert contents(tmp_path / "best_return") == {"weights": "old", "more": "old"}
    store = store_at(tmp_path)  # the next start tidies up
    assert [path.name for path in tmp_path.iterdir()] == ["best_return"]
    store.save_policy("best_return", NotePolicy("new"), {"step": 2})
    assert contents(tmp_path / "best_return") == {"weights": "new", "more": "new"}
    assert json.loads((tmp_path / "best_return" / "metadata.json").read_text()) == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["best_return"]


def test_leftovers_of_the_same_process_do_not_stop_the_next_save(tmp_path):
    store = store_at(tmp_path)
    store.save_policy("final", NotePolicy("one"), {})
    for leftover in (".old-final", ".new-final"):
        (tmp_path / leftover / "deep").mkdir(parents=True)
    store.save_policy("final", NotePolicy("two"), {})
    assert contents(tmp_path / "final") == {"weights": "two", "more": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_full_disk_is_a_message_with_a_remedy(tmp_path):
    import errno

    store = store_at(tmp_path)
    store.save_policy("final", NotePolicy("old"), {})
    with pytest.raises(
        VlarlError, match=r"cannot write .*final: the disk is full \([\d,.]+ MiB free in .*\): free some space"
    ):
        store.save_policy("final", NotePolicy("new", OSError(errno.ENOSPC, "No space left on device")), {})
    assert contents(tmp_path / "final") == {"weights": "old", "more": "old"}


# Whole checkpoints


@pytest.fixture
def config(configure):
    return configure(
        algorithm={"name": "ppo", "epochs": 1, "critic_hidden": (16,)},
        optim={"lr": 1e-3, "schedule": "linear", "minibatches": 2},
    )


@pytest.fixture
def learner(config) -> Learner:
    return make_learner(init_tiny("parallel", seed=3), config)


def make_learner(policy: OpenVLAPolicy, config) -> Learner:
    algorithm = build_algorithm(config.algorithm, config.rollout.temperature, config.kl)
    return Learner(policy, algorithm, config, torch.device("cpu"))


def test_retention_keeps_the_newest_the_best_and_the_final_one(tmp_path, learner):
    store = store_at(tmp_path, keep=2)
    store.save_policy("best_return", learner.policy, {})
    store.save("final", learner, TrainerState(iteration=1))
    for iteration in (2, 3, 10):
        store.save(f"step_{iteration:06d}", learner, TrainerState(iteration=iteration))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best_return", "final", "step_000003", "step_000010"]
    assert store.latest() == tmp_path / "step_000010"


def test_retention_by_size_removes_the_oldest_and_never_the_newest(tmp_path, learner, caplog):
    open_store = partial(CheckpointStore, tmp_path, 10)
    open_store().save_policy("best_return", learner.policy, {})
    best = size_of(tmp_path)
    for iteration in (1, 2, 3):
        open_store().save(f"step_{iteration:06d}", learner, TrainerState(iteration=iteration))
    one = size_of(tmp_path / "step_000003")
    assert size_of(tmp_path) == best + 3 * one, "all checkpoints have the same size"
    fits_two = open_store(max_total_gib=(best + 2.5 * one) / 2**30)
    fits_two.save("step_000004", learner, TrainerState(iteration=4))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best_return", "step_000003", "step_000004"]
    assert "max_total_gib" not in caplog.text
    open_store(max_total_gib=one / 2 / 2**30).save("step_000005", learner, TrainerState(iteration=5))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best_return", "step_000005"]
    assert "more than checkpoint.max_total_gib" in caplog.text


def test_the_size_of_a_link_is_not_that_of_its_target(tmp_path):
    (tmp_path / "large").write_bytes(bytes(1000))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "link").symlink_to(tmp_path / "large")
    (tmp_path / "checkpoints" / "step_000001").mkdir()
    (tmp_path / "checkpoints" / "step_000001" / "weights").write_bytes(bytes(10))
    link = len(str(tmp_path / "large"))
    assert size_of(tmp_path / "checkpoints") == 10 + link


def test_the_newest_checkpoint_is_the_one_furthest_on(tmp_path, learner):
    store = store_at(tmp_path)
    assert store.latest() is None
    store.save_policy("best_return", learner.policy, {})
    assert store.latest() is None, "the best policy alone can't be trained on"
    store.save("step_000004", learner, TrainerState(iteration=4))
    store.save("final", learner, TrainerState(iteration=6))
    assert store.latest() == tmp_path / "final"
    store.save("step_000008", learner, TrainerState(iteration=8))
    assert store.latest() == tmp_path / "step_000008"


def test_a_restored_learner_continues_bit_for_bit(tmp_path, learner, config, act, policy_batch):
    """Weights, critic, optimizer state, counters and random numbers."""
    batches = [policy_batch(learner.policy, act(learner.policy)) for _ in range(1)]
    annotated_update(learner, batches[0], 1)
    torch.manual_seed(7)
    torch.rand(3)
    state = TrainerState(1, 100, 8, 2, 0.5, 0.4, 1)
    folder = store_at(tmp_path).save("step_000001", learner, state)
    drawn = torch.rand(2)
    expected = annotated_update(learner, batches[0], 2)

    torch.manual_seed(99)
    other = make_learner(load_policy(folder), config)
    assert restore(other, folder) == state
    assert torch.equal(torch.rand(2), drawn)
    assert (other.version, other.policy_updates) == (1, 1)
    result = annotated_update(other, batches[0], 2)
    assert result == expected
    for (name, ours), (_, theirs) in zip(
        other.policy.named_parameters(), learner.policy.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    for mine, yours in zip(other.optimizers(), learner.optimizers(), strict=True):
        for p, q in zip(mine.param_groups[0]["params"], yours.param_groups[0]["params"], strict=True):
            assert mine.state[p].keys() == yours.state[q].keys()
            assert all(torch.equal(mine.state[p][key], yours.state[q][key]) for key in mine.state[p])


def test_critic_average_and_coefficient_continue_bit_for_bit(tmp_path, configure, build, learner_batch, act):
    """A separate critic, an average of the weights, an adaptive KL coefficient and the reference it is measured by."""
    init_tiny("parallel", seed=3).save(tmp_path / "base")
    config = configure(
        policy={"path": str(tmp_path / "base")},
        algorithm={"name": "ppo", "epochs": 1, "critic_hidden": (16,), "gae_level": "step"},
        optim={"lr": 1e-3, "minibatches": 2},
        critic={"kind": "separate", "lr": 1e-3, "schedule": "linear"},
        ema={"beta": 0.9},
        kl={"coef": 0.1, "target": 0.01, "horizon": 50},
    )
    learner = build(load_policy(tmp_path / "base"), config)
    episodes = act(learner.policy)

    def advance(learner: Learner, iteration: int):
        return annotated_update(learner, learner_batch(learner, episodes), iteration)

    advance(learner, 1)
    store = store_at(tmp_path / "checkpoints")
    folder = store.save("step_000001", learner, TrainerState(iteration=1))
    averaged = load_policy(tmp_path / "checkpoints" / "ema")
    for name, parameter in averaged.named_parameters():
        average = learner.average.weights.get(name)
        assert average is None or torch.equal(parameter, average), name
    note = json.loads((tmp_path / "checkpoints" / "ema" / "metadata.json").read_text())
    assert note == {"beta": 0.9, "checkpoint": "step_000001", "training_step": 1, "policy_updates": 1}
    assert store.latest() == folder and learner.kl.coef != 0.1
    assert learner.average.num_updates == 2 == json.loads((folder / COUNTERS).read_text())["ema_updates"]
    drawn = torch.get_rng_state()
    expected = advance(learner, 2)
    assert expected.metrics["kl_ref"] > 0

    other = build(load_policy(folder), config)
    restore(other, folder)
    assert torch.equal(torch.get_rng_state(), drawn), "loading the reference does not advance the generators"
    assert advance(other, 2) == expected
    assert other.average.num_updates == 4
    assert other.kl.coef == learner.kl.coef
    theirs = {name: (parameter, optimizer) for name, parameter, optimizer in learner.named_trained()}
    assert any(name.startswith("critic.value_head.") for name in theirs)
    for name, parameter, optimizer in other.named_trained():
        twin, twins = theirs[name]
        assert torch.equal(parameter, twin), name
        assert all(torch.equal(v, twins.state[twin][key]) for key, v in optimizer.state[parameter].items()), name
    assert all(torch.equal(average, learner.average.weights[n]) for n, average in other.average.weights.items())


@pytest.mark.parametrize(("before", "after"), [("head", "separate"), ("separate", "head")])
def test_a_run_keeps_its_kind_of_critic(tmp_path, configure, build, before, after):
    ppo = {"name": "ppo", "critic_hidden": (16,)}
    learner = build(init_tiny("parallel", seed=3), configure(algorithm=ppo, critic={"kind": before}))
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    other = build(load_policy(folder), configure(algorithm=ppo, critic={"kind": after}))
    with pytest.raises(UsageError, match=f"written with '{before}', and a run keeps its"):
        restore(other, folder)


def test_an_average_may_begin_on_the_way(tmp_path, configure, build):
    folder = store_at(tmp_path).save("step_000001", build(init_tiny("parallel", seed=3), configure()), TrainerState(1))
    other = build(load_policy(folder), configure(ema={"beta": 0.9}))
    restore(other, folder)
    own = dict(other.policy.named_parameters())
    assert other.average.num_updates == 0
    assert all(torch.equal(average, own[name]) for name, average in other.average.weights.items())


def as_written_before(folder: Path) -> None:
    """Turn a checkpoint into one of before averages were counted, tasks had returns and all ranks had random states."""
    counters = json.loads((folder / COUNTERS).read_text())
    for name in ("ema_updates", "return_sums", "return_weights", "best_returns", "unfinished"):
        del counters[name]
    (folder / COUNTERS).write_text(json.dumps(counters))
    tensors = load_file(folder / TENSORS)
    tensors["rng.cpu"] = tensors.pop("rng.cpu.0")
    save_file(tensors, folder / TENSORS)


def test_an_older_checkpoint_is_resumed(tmp_path, configure, build, learner_batch, act):
    """Its average counts as one of as many updates as the run had optimizer steps."""
    config = configure(ema={"beta": 0.9}, optim={"lr": 1e-3, "minibatches": 2}, algorithm={"epochs": 1})
    learner = build(init_tiny("parallel", seed=3), config)
    annotated_update(learner, learner_batch(learner, act(learner.policy)), 1)
    torch.manual_seed(7)
    state = TrainerState(iteration=1, optimizer_steps=2, ema_return=0.5, best_ema_return=0.5, best_iteration=1)
    folder = store_at(tmp_path).save("step_000001", learner, state)
    drawn = torch.rand(2)
    as_written_before(folder)
    other = build(load_policy(folder), config)
    (folder / "checksums.json").unlink()
    assert restore(other, folder) == state
    assert torch.equal(torch.rand(2), drawn)
    assert other.average.num_updates == 2
    assert all(torch.equal(average, learner.average.weights[n]) for n, average in other.average.weights.items())


class FakeGenerator:
    """A device's generator: its state is two values."""

    def __init__(self, state: tuple[int, int]) -> None:
        self.state = list(state)
        self.seeded: int | None = None

    def get_state(self) -> torch.Tensor:
        return torch.tensor(self.state, dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> None:
        self.state = new_state.tolist()

    def manual_seed(self, seed: int) -> None:
        self.seeded = seed


def test_the_gpus_generator_is_saved_and_restored(tmp_path, learner, config):
    gpu = FakeGenerator((3, 4))
    store = CheckpointStore(tmp_path, 2, generators=lambda device: {"cpu": torch.default_generator, "cuda": gpu})
    folder = store.save("step_000001", learner, TrainerState(iteration=1))
    gpu.state = [9, 9]
    store.restore(make_learner(load_policy(folder), config), folder)
    assert gpu.state == [3, 4] and gpu.seeded is None


def test_a_checkpoint_of_a_cpu_resumed_on_a_gpu_seeds_the_gpu(tmp_path, learner, config):
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    gpu = FakeGenerator((3, 4))
    restore(
        make_learner(load_policy(folder), config),
        folder,
        lambda device: {"cpu": torch.default_generator, "cuda": gpu},
    )
    assert gpu.state == [3, 4] and gpu.seeded is not None


def test_a_nan_coefficient_of_an_older_version_is_not_restored(tmp_path, learner, config):
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    counters = json.loads((folder / COUNTERS).read_text())
    (folder / COUNTERS).write_text(json.dumps(counters | {"kl_coef": float("nan")}))
    other = make_learner(load_policy(folder), config)
    other.kl.coef = 0.25
    restore(other, folder)
    assert other.kl.coef == 0.25


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "not finite"),
        (float("-inf"), "not finite"),
        (-3e9, r"absurd, up to 3e\+09"),
        (2e6, "absurd, up to 2e.06"),
    ],
)
def test_weights_that_are_not_finite_or_absurd_are_never_saved(tmp_path, learner, value, says):
    store = store_at(tmp_path, keep=1)
    kept = store.save("step_000001", learner, TrainerState(iteration=1))
    with torch.no_grad():
        next(learner.policy.parameters()).view(-1)[0] = value
    for name in ("step_000002", "step_000001", "final"):
        with pytest.raises(DivergedError, match=rf"{says} .* not saved.*Lower optim.lr"):
            store.save(name, learner, TrainerState(iteration=2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    load_policy(kept)


def test_nothing_in_a_checkpoint_is_pickled(tmp_path, learner, act, policy_batch):
    annotated_update(learner, policy_batch(learner.policy, act(learner.policy)), 1)
    folder = store_at(tmp_path).save("final", learner, TrainerState(iteration=1))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert {"model.safetensors", "value_head.safetensors", TENSORS, COUNTERS} <= {path.name for path in files}
    for path in files:
        pickles = [bytes([0x80, protocol]) for protocol in range(2, 6)]
        assert not path.read_bytes().startswith((b"PK", *pickles)), path  # torch.save's zip, and pickle
    load_policy(folder)  # usable by itself


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"iteration": null}', '{"version": 1}', "\x00\x01", '{"iteration": 1, "color": 2}']
)
def test_damaged_counters_are_named(tmp_path, learner, text):
    store = store_at(tmp_path)
    folder = store.save("step_000001", learner, TrainerState(iteration=1))
    (folder / COUNTERS).write_text(text)
    with pytest.raises(UsageError, match=r"step_000001 is damaged"):
        restore(learner, store.latest() or folder)


@pytest.mark.parametrize("keep_bytes", [0, 5, 2000])
def test_truncated_optimizer_state_is_named(tmp_path, learner, act, policy_batch, keep_bytes):
    annotated_update(learner, policy_batch(learner.policy, act(learner.policy)), 1)
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    path = folder / TENSORS
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(UsageError, match=r"step_000001 is damaged"):
        restore(learner, folder)
    path.unlink()
    with pytest.raises(UsageError, match=r"step_000001 is damaged"):
        restore(learner, folder)


def rewritten(folder: Path, change) -> Path:
    """The checkpoint with other tensors of the trainer, and no list of checksums."""
    tensors = load_file(folder / TENSORS)
    change(tensors)
    save_file(tensors, folder / TENSORS)
    (folder / "checksums.json").unlink()
    return folder


def first(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(ending))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda t: t.update({first(t, "exp_avg"): t[first(t, "exp_avg")].double()}),
            r"exp_avg is float64\[.*needs float32",
        ),
        (
            lambda t: t.update({first(t, "exp_avg"): torch.zeros(1)}),
            r"exp_avg is float32\[1\], and this run needs float32",
        ),
        (
            lambda t: t.update({first(t, ".step"): torch.zeros(3)}),
            r"step is float32\[3\], and this run needs float32\[\]",
        ),
        (lambda t: t.pop(first(t, "exp_avg_sq")), "trainer.safetensors lacks exp_avg_sq of "),
        (lambda t: t[first(t, "exp_avg")].fill_(float("nan")), "exp_avg holds NaN or infinity"),
        (
            lambda t: t.update({"optimizer.arm.exp_avg": torch.zeros(2)}),
            "optimizer state of arm, which this run does not",
        ),
        (lambda t: t.update({"rng.cpu.0": torch.zeros(4)}), r"rng.cpu.0 is float32\[4\], and this run needs uint8"),
    ],
)
def test_optimizer_state_that_does_not_fit_is_named(tmp_path, learner, act, policy_batch, change, reason):
    annotated_update(learner, policy_batch(learner.policy, act(learner.policy)), 1)
    folder = rewritten(store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1)), change)
    with pytest.raises(UsageError, match=rf"step_000001 is damaged \(.*{reason}.*move it away"):
        restore(learner, folder)


@pytest.mark.parametrize(
    ("counter", "value"),
    [
        ("version", "1"),
        ("policy_updates", -1),
        ("env_steps", None),
        ("sampler", []),
        ("ema_return", "good"),
        ("episodes", 0.5),
    ],
)
def test_counters_of_another_kind_are_named(tmp_path, learner, counter, value):
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    counters = json.loads((folder / COUNTERS).read_text())
    (folder / COUNTERS).write_text(json.dumps(counters | {counter: value}))
    with pytest.raises(UsageError, match=rf"step_000001 is damaged \({counter} in trainer.json is .*, which must be"):
        restore(learner, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "value_head.safetensors", TENSORS])
def test_one_wrong_bit_in_the_weights_is_noticed(tmp_path, learner, name):
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    restore(learner, folder)
    load_policy(folder)
    content = bytearray((folder / name).read_bytes())
    content[-9] ^= 1
    (folder / name).write_bytes(content)
    read = (lambda: restore(learner, folder)) if name == TENSORS else (lambda: load_policy(folder))
    with pytest.raises(
        UsageError, match=rf"{name} is not what was written, by its checksum in checksums.json. Copy it"
    ):
        read()
    (folder / "checksums.json").unlink()
    read()


def test_a_list_of_checksums_that_is_not_one_is_named(tmp_path, learner):
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    for text in ("{", "[]", '{"model.safetensors": 1}', "\x00"):
        (folder / "checksums.json").write_text(text)
        with pytest.raises(UsageError, match="checksums.json can't be read"):
            load_policy(folder)


def test_weights_that_are_written_again_into_a_folder_have_no_old_checksums(tmp_path, learner):
    folder = store_at(tmp_path).save("final", learner, TrainerState(iteration=1))
    learner.policy.save(folder)
    assert not (folder / "checksums.json").exists()
    load_policy(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "value_head.safetensors", "config.json", "tokenizer.json"])
def test_truncated_policies_are_named(tmp_path, learner, name):
    folder = store_at(tmp_path).save("step_000001", learner, TrainerState(iteration=1))
    (folder / name).write_bytes((folder / name).read_bytes()[:40])
    with pytest.raises(UsageError, match=r"step_000001"):
        load_policy(folder)
