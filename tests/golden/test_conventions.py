"""Each convention of the published checkpoints is broken once, and a golden comparison must turn red.

The comparison must pass before, so that it is the mutation alone that fails it.
"""

import pytest
from mutations import Mutation
from mutations.data import FRAMES, PROMPT, TOKENS_AND_STATISTICS
from mutations.model import COMPONENTS, LAYOUT, VISION
from mutations.smolvla import SMOLVLA

MUTATIONS = [*TOKENS_AND_STATISTICS, *PROMPT, *FRAMES, *VISION, *LAYOUT, *COMPONENTS, *SMOLVLA]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.breaks for m in MUTATIONS])
def test_a_broken_convention_turns_its_comparison_red(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.check()
    monkeypatch.setattr(mutation.owner, mutation.name, mutation.make(getattr(mutation.owner, mutation.name)))
    with pytest.raises(mutation.error):
        mutation.check()


def test_mutations_have_names_of_their_own() -> None:
    assert len({m.breaks for m in MUTATIONS}) == len(MUTATIONS)
