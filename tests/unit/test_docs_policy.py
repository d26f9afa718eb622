"""docs/adding-a-policy.md: its code runs, and its interfaces are those of the contracts in policies/."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fakes.decisions import split

from vlarl.decisions import Decisions, TensorRows
from vlarl.policies.base import Policy
from vlarl.policies.family import Family
from vlarl.policies.supervised import SupervisedPolicy

PAGE = (Path(__file__).parents[2] / "docs" / "adding-a-policy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
EXAMPLE, INTERFACE = BLOCKS[:2]
(SUPERVISED,) = (block for block in BLOCKS[2:] if "SupervisedPolicy" in block)
(FAMILY,) = (block for block in BLOCKS[2:] if "Family" in block)


@pytest.fixture
def example() -> dict:
    names: dict = {"__name__": __name__}  # where dataclasses look types up
    exec(compile(EXAMPLE, "adding-a-policy.md", "exec"), names)
    return names


def test_the_example_makes_decisions(example):
    points = torch.arange(12.0).reshape(2, 2, 3)
    decisions = example["decisions_of"](points, -torch.ones(2, 6))
    assert isinstance(decisions, Decisions) and len(decisions) == 2
    assert decisions.step.tolist() == [[0, 0, 0, 1, 1, 1]] * 2 and decisions.mask.all()
    assert torch.equal(split(decisions)[1].sample.point, points[1:])
    short = example["decisions_of"](points[:1, :1], -torch.ones(1, 3))
    joined = Decisions.cat([short, decisions])
    assert joined.mask.sum(dim=1).tolist() == [3, 6, 6] and joined.sample.point.shape == (3, 2, 3)


def test_its_inputs_are_rows(example):
    states = example["States"](torch.arange(6.0).reshape(3, 2))
    assert isinstance(states, TensorRows) and states.rows(torch.tensor([2, 0])).state.tolist() == [[4, 5], [0, 1]]


def test_the_table_names_the_fields_of_decisions():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == [field.name for field in fields(Decisions)]


def test_the_interface_is_that_of_the_policy():
    described, methods = interface(INTERFACE)
    names = {node.target.id for node in described.body if isinstance(node, ast.AnnAssign)}
    assert methods.keys() | {"image_size", "num_images"} == Policy.__abstractmethods__
    assert names == {"num_steps", "action_dim", "image_size", "num_images", "model"}
    check_signatures(methods, Policy)
    assigned = {node.targets[0].id for node in described.body if isinstance(node, ast.Assign)}
    assert assigned == {"sampling_options", "extras"} and all(hasattr(Policy, name) for name in assigned)


def test_the_interface_of_a_family_is_that_of_the_contract():
    described, methods = interface(FAMILY)
    assert methods.keys() == Family.__abstractmethods__ | {"training_warning", "has_regression_head"}
    check_signatures(methods, Family)
    assert [node.targets[0].id for node in described.body if isinstance(node, ast.Assign)] == ["supported"]


def interface(code: str) -> tuple[ast.ClassDef, dict[str, ast.arguments]]:
    """The class that a piece of the page describes, and its methods."""
    (described,) = ast.parse(code).body
    assert isinstance(described, ast.ClassDef)
    return described, {node.name: node.args for node in described.body if isinstance(node, ast.FunctionDef)}


def check_signatures(methods: dict[str, ast.arguments], contract: type) -> None:
    """The methods have the contract's parameters and defaults."""
    for name, given in methods.items():
        parameters = inspect.signature(getattr(contract, name)).parameters
        assert [arg.arg for arg in (*given.args, *given.kwonlyargs)] == list(parameters), name
        defaults = [ast.literal_eval(node) for node in (*given.defaults, *given.kw_defaults)]
        assert defaults == [p.default for p in parameters.values() if p.default is not p.empty], name


def test_the_interface_on_demonstrations_is_that_of_the_supervised_policy():
    _, methods = interface(SUPERVISED)
    assert methods.keys() | {"proprio_dim"} == SupervisedPolicy.__abstractmethods__ - Policy.__abstractmethods__
    check_signatures(methods, SupervisedPolicy)
