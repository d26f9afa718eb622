"""Random states by rank: each rank gets its own back, and one without a state gets its own seed."""

import torch

from vlarl.training.random_states import default_generators, own_keys, random_states, restore_random_states
from vlarl.training.ranks import SingleRank


class FakeGenerator:
    """A generator whose state is one number."""

    def __init__(self, state: int) -> None:
        self.state = state
        self.seeded: int | None = None

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.state], dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> None:
        (self.state,) = new_state.tolist()

    def manual_seed(self, seed: int) -> None:
        self.seeded = seed


class FakeRanks(SingleRank):
    """One rank of several, that knows what the others give."""

    def __init__(self, rank: int, everything: list[dict[str, torch.Tensor]]) -> None:
        self.rank = rank
        self.world_size = len(everything)
        self.everything = everything

    def gather(self, own):
        assert own == self.everything[self.rank]
        return self.everything


def first_values(states: dict[str, torch.Tensor]) -> dict[str, int]:
    return {key: int(state) for key, state in states.items()}


def test_every_rank_and_kind_has_a_key_of_its_own():
    everything = [{kind: torch.tensor([10 * rank + n]) for n, kind in enumerate(("cpu", "cuda"))} for rank in (0, 1)]
    for rank in (0, 1):
        own = {"cpu": FakeGenerator(10 * rank), "cuda": FakeGenerator(10 * rank + 1)}
        found = first_values(random_states(own, FakeRanks(rank, everything)))
        assert found == {"rng.cpu.0": 0, "rng.cuda.0": 1, "rng.cpu.1": 10, "rng.cuda.1": 11}


def restored(stored: dict[str, int], rank: int, seed: int = 5) -> dict[str, FakeGenerator]:
    own = {"cpu": FakeGenerator(99), "cuda": FakeGenerator(99)}
    restore_random_states(own, {k: torch.tensor([v], dtype=torch.uint8) for k, v in stored.items()}, rank, seed)
    return own


def test_each_rank_gets_its_own_states_back():
    stored = {"rng.cpu.0": 1, "rng.cuda.0": 2, "rng.cpu.1": 3, "rng.cuda.1": 4}
    for rank, expected in ((0, (1, 2)), (1, (3, 4))):
        own = restored(stored, rank)
        assert (own["cpu"].state, own["cuda"].state) == expected
        assert own["cpu"].seeded is None and own["cuda"].seeded is None


def test_a_rank_without_a_state_is_seeded_by_run_seed_rank_and_kind():
    stored = {"rng.cpu.0": 1, "rng.cuda.0": 2}
    seeds = {(rank, kind): g.seeded for rank in (1, 2) for kind, g in restored(stored, rank).items()}
    assert len(set(seeds.values())) == 4 and None not in seeds.values()
    assert seeds == {(rank, kind): g.seeded for rank in (1, 2) for kind, g in restored(stored, rank).items()}
    assert restored(stored, 1, seed=6)["cpu"].seeded != seeds[1, "cpu"]


def test_an_older_checkpoint_has_the_first_ranks_state_alone():
    assert restored({"rng.cpu": 7}, 0)["cpu"].state == 7
    assert restored({"rng.cpu": 7}, 0)["cuda"].seeded is not None
    assert restored({"rng.cpu": 7}, 1)["cpu"].seeded is not None
    assert own_keys({"cpu": FakeGenerator(0)}, 1, ["rng.cpu"]) == {}


def test_torchs_generator_of_the_host_is_the_one_that_passes_use():
    own = default_generators(torch.device("cpu"))
    assert own.keys() == {"cpu"}
    states = random_states(own, SingleRank())
    drawn = torch.rand(3)
    torch.rand(5)
    restore_random_states(own, states, 0, 0)
    assert torch.equal(torch.rand(3), drawn)
    restore_random_states(own, {}, 1, 0)
    seeded = torch.rand(3)
    restore_random_states(own, {}, 1, 0)
    assert torch.equal(torch.rand(3), seeded)
