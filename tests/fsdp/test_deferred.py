"""Ranks that read only their parts of a checkpoint: the weights of a whole copy to the bit, and the memory of a part."""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.memory import peak_rss, reset_peak_rss
from fakes.vlm_models import TEXT_SIZES, TEXT_TEMPLATE, byte_tokenizer, write_model
from rank_cases import CPU, Case, build, in_ranks, small_policy
from transformers import Qwen2Config, Qwen2ForCausalLM

from vlarl.errors import UsageError
from vlarl.policies.deferred import stored_weight
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.config import parse_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import initialize, tiny_config
from vlarl.policies.tiny_inputs import build_tiny_tokenizer
from vlarl.training.critic import copy_sharing_frozen
from vlarl.training.fsdp import Sharding, shard, whole
from vlarl.training.learner import Learner
from vlarl.training.ranks import Ranks, SingleRank

LORA = {"enabled": True, "rank": 4}
PPO = {"name": "ppo", "critic_hidden": (16,)}
CASES = {
    "full": Case("parallel", {"kl": {"coef": 0.1}}),
    "tied": Case("autoregressive", {"algorithm": PPO}),
    "offloaded": Case("parallel", {}, Sharding("full", cpu_offload=True)),
    "fresh adapters": Case("parallel", {"lora": LORA}),
    "adapters on bfloat16": Case("parallel", {"lora": LORA, "policy": {"dtype": "bfloat16"}}),
    "separate critic": Case("parallel", {"algorithm": PPO, "critic": {"kind": "separate"}}),
    "critic with adapters": Case("autoregressive", {"algorithm": PPO, "critic": {"kind": "separate"}, "lora": LORA}),
    "frozen vision": Case("parallel", {"policy": {"freeze": "vision"}}),
}
MB = 1 << 20


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights of all networks, and of the reference where it is a copy."""
    networks = {"policy": learner.policy} | ({} if learner.critic is None else {"critic": learner.critic})
    found = {f"{net}.{name}": p.detach() for net, policy in networks.items() for name, p in policy.named_parameters()}
    if learner.reference is not None and learner.reference.weights is not None:
        found |= {f"reference.{name}": weight for name, weight in learner.reference.weights.items()}
        learner.reference_at_start()  # read again, as in a resumed run
        assert learner.reference.weights is not None
        found |= {f"again.{name}": weight for name, weight in learner.reference.weights.items()}
    return {name: whole(weight).clone() for name, weight in found.items()}


def shard_damaged(ranks: Ranks, damaged: Path) -> str:
    policy = load_policy(damaged, deferred=True)
    try:
        shard(policy, Sharding("full"), Sharding("full").mesh(ranks, CPU))
    except UsageError as error:
        return str(error)
    return "nothing"


def work_of_two(ranks: Ranks, folder: Path, bases: Path) -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """The weights of every case, and what this rank says of weights that are not finite."""
    found = {name: weights_of(build(case, bases, ranks)[0]) for name, case in CASES.items()}
    return found, shard_damaged(ranks, bases / "damaged")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for decoder in ("parallel", "autoregressive"):
        small_policy(decoder).save(folder / decoder)  # type: ignore[arg-type] - it is one of them
    damaged = small_policy("parallel")
    with torch.no_grad():  # in the part of the last rank
        damaged.model.language_model.model.layers[0].self_attn.q_proj.weight[-1, -1] = torch.nan
    damaged.save(folder / "damaged")
    return folder


@pytest.fixture(scope="module")
def two(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, dict[str, torch.Tensor]], str]]:
    return in_ranks(2, partial(work_of_two, bases=bases), tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", list(CASES))
def test_parts_are_those_of_a_whole_copy_to_the_bit(bases, two, name):
    expected = weights_of(build(CASES[name], bases, SingleRank())[0])
    for of_rank, _ in two:
        found = of_rank[name]
        assert found.keys() == expected.keys()
        assert [n for n in expected if found[n].dtype != expected[n].dtype] == []
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []
    assert any(weight.abs().max() > 0 for weight in expected.values())


def test_weights_wait_on_disk_until_the_policy_is_sharded(bases):
    policy = load_policy(bases / "parallel", deferred=True)
    unread = {name for name, p in policy.named_parameters() if stored_weight(p) is not None}
    assert len(unread) > 30 and all(name.startswith("model.") for name in unread)
    memory = sum(p.untyped_storage().nbytes() for p in policy.model.parameters())
    assert memory < sum(p.nbytes for p in policy.model.parameters()) / 100
    critic = copy_sharing_frozen(policy)
    of_critic = dict(critic.named_parameters())
    assert all(stored_weight(of_critic[name]) == stored_weight(p) for name, p in policy.named_parameters())
    trained = [name for name, p in policy.named_parameters() if p.requires_grad and name in unread]
    assert trained and all(of_critic[name] is not dict(policy.named_parameters())[name] for name in trained)


def test_weights_that_are_not_finite_are_found_where_they_are_read(two):
    first, second = (said for _, said in two)
    assert first == "nothing"
    assert (
        "1 of its weights hold NaN or infinity, the first is language_model.model.layers.0.self_attn.q_proj" in second
    )


# Memory


def save_large_text_model(folder: Path) -> int:
    """The same for a model that writes texts."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 64}
    config = Qwen2Config(**TEXT_SIZES | shape | {"num_attention_heads": 8, "num_key_value_heads": 8})
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEXT_TEMPLATE, encoding="utf-8")
    return sum(p.nbytes for p in model.parameters())


def save_large(folder: Path) -> int:
    """A policy whose layers take some 200 MB in float32; returns their bytes."""
    raw = dict(tiny_config("parallel", chunk_length=2).raw)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    raw["text_config"] = {**raw["text_config"], **shape, "num_attention_heads": 8, "num_key_value_heads": 8}
    policy = OpenVLAPolicy(parse_config(raw), build_tiny_tokenizer())
    initialize(policy, torch.Generator().manual_seed(3))
    policy.save(folder)
    return sum(p.nbytes for p in policy.model.parameters())


def peaks(ranks: Ranks, folder: Path, small: Path, large: Path) -> dict[bool, tuple[int, int]]:
    """By how much the memory of this process rose at most, and what it kept, with and without a whole copy."""
    found: dict[bool, tuple[int, int]] = {}
    mesh = Sharding("full").mesh(ranks, CPU)
    shard(load_policy(small, deferred=True), Sharding("full"), mesh)  # imports take memory, too
    for deferred in (True, False):
        gc.collect()
        before = reset_peak_rss()
        policy: Any = load_policy(large, deferred=deferred)
        shard(policy, Sharding("full"), mesh)
        kept = sum(p._local_tensor.nbytes for p in policy.parameters())
        found[deferred] = peak_rss() - before, kept
        del policy
    return found


@pytest.mark.parametrize("save", [save_large, save_large_text_model])
def test_a_rank_takes_the_memory_of_its_part_and_one_tensor(bases, tmp_path, save):
    size = save(tmp_path / "large")
    small = bases / "parallel" if save is save_large else write_model("qwen2", tmp_path / "small")
    for of_rank in in_ranks(2, partial(peaks, small=small, large=tmp_path / "large"), tmp_path / "two"):
        peak, kept = of_rank[True]
        assert kept == pytest.approx(size / 2, rel=0.02)
        with_copy, _ = of_rank[False]
        print(f"{size / MB:.0f} MB: a part {kept / MB:.0f}, peak {peak / MB:.0f}, with a copy {with_copy / MB:.0f} MB")
        assert peak < kept + size / 3, f"{peak / MB:.0f} MB for {kept / MB:.0f} MB"  # the allocator's own included
        assert with_copy > size, f"{with_copy / MB:.0f} MB: the comparison must see a whole copy of {size / MB:.0f} MB"
