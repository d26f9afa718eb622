"""The estimates against tensors that are really alive, in float32: on a CPU that is the arithmetic of a GPU's kernels
in bfloat16 with other bytes (there, PyTorch's norm of bfloat16 keeps copies that no GPU makes)."""

import gc
import math
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlarl.config.schema import LoraConfig, ModelConfig
from vlarl.policies.base import BaseCheckpoint
from vlarl.policies.family import MemoryEstimate
from vlarl.policies.load import load_policy
from vlarl.policies.openvla.config import OpenVLAConfig, parse_config
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.memory import Sizes, estimate_lora_update, estimate_rollout
from vlarl.policies.openvla.policy import OpenVLAPolicy

PROMPT = 12
RANK = 4

OPENVLA_7B: dict[str, Any] = {
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "use_fused_vision_backbone": True,
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "text_config": {"model_type": "llama", "vocab_size": 32064},
}


def small(layers: int = 4, depth: int = 4, vision: str = "dinosiglip-vit-so-224px", **text: int) -> OpenVLAConfig:
    """The proportions of the large model at a fraction of its width."""
    fused = vision.startswith("dino")
    tower = {"embed_dim": 64, "depth": depth, "num_heads": 4, "mlp_ratio": 4.0}
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 6}
    return parse_config(
        {
            "vision_backbone_id": vision,
            "use_fused_vision_backbone": fused,
            "timm_model_kwargs": [tower] * (1 + fused),
            "n_action_bins": 256,
            "pad_to_multiple_of": 64,
            "text_config": {"model_type": "llama", "vocab_size": 1088, "num_hidden_layers": layers, **sizes, **text},
        }
    )


CONFIGS = {
    "openvla": small(),
    "grouped queries": small(num_key_value_heads=2),
    "one tower, quick gelu": small(vision="clip-vit-l"),
    "oft, two images": small().with_decoder("parallel", 8, 2, True),
    "oft with film": small().with_decoder("parallel", 4, 1, True, True),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators made and that are still alive, and the most there were."""

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, Any] = {}
        self.now = self.most = 0
        for tensor in old:
            self._add(tensor)
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self.now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.most = max(self.most, self.now)


def build(config: OpenVLAConfig, tmp_path) -> OpenVLAPolicy:
    policy = OpenVLAPolicy(config, None)
    policy.base = BaseCheckpoint("base", tmp_path, "none")
    return policy


def adapted(config: OpenVLAConfig, tmp_path, **settings: Any) -> OpenVLAPolicy:
    policy = build(config, tmp_path)
    policy.prepare_training(ModelConfig(**settings), LoraConfig(enabled=True, rank=RANK), seed=0)
    return policy.train()


def inputs(config: OpenVLAConfig, batch: int) -> OpenVLAInputs:
    ids = torch.full((batch, PROMPT), 5)
    pixels = torch.zeros(batch, config.num_images, 3, config.image_size, config.image_size, dtype=torch.uint8)
    proprio = torch.zeros(batch, config.proprio_dim) if config.use_proprio else None
    return OpenVLAInputs(ids, torch.ones_like(ids, dtype=torch.bool), pixels, proprio)


def tensors(policy: OpenVLAPolicy, batch: OpenVLAInputs) -> list[torch.Tensor]:
    given = (batch.input_ids, batch.attention_mask, batch.proprio)  # pixels count: they come with every batch
    return [*policy.parameters(), *policy.buffers(), *(tensor for tensor in given if tensor is not None)]


def measure_rollout(policy: OpenVLAPolicy, batch: int) -> int:
    given = inputs(policy.config, batch)
    gc.collect()
    with LiveBytes(tensors(policy, given)) as live:
        policy.decode(given, lambda logits, _: logits.argmax(dim=-1))
    return live.most


def measure_update(policy: OpenVLAPolicy, batch: int) -> tuple[int, int]:
    """Bytes alive after the forward pass, and the most of forward and backward pass beside adapters' gradients."""
    given = inputs(policy.config, batch)
    tokens = torch.full((batch, policy.config.num_action_tokens), policy.config.first_action_id)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    gc.collect()
    with LiveBytes([*tensors(policy, given), *gradients, tokens]) as live:
        scores = policy.score(given, tokens)
        saved = live.now
        scores.logits.sum().backward()
    return saved, live.most


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_rollout_takes_what_is_estimated(name, batch, tmp_path):
    config = CONFIGS[name]
    estimate = estimate_rollout(config, batch, PROMPT, "float32")
    policy = build(config, tmp_path).eval()
    assert estimate.weights == sum(p.nbytes for p in policy.parameters())
    assert estimate.activations + estimate.cache == pytest.approx(measure_rollout(policy, batch), rel=0.05)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_takes_what_is_estimated(name, batch, recompute, tmp_path):
    config = CONFIGS[name]
    estimate = estimate_lora_update(config, batch, PROMPT, "float32", RANK, recompute)
    policy = adapted(config, tmp_path, gradient_checkpointing=recompute)
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert estimate.adapters == estimate.gradients == sum(p.nbytes for p in trained)
    assert estimate.optimizer == 2 * estimate.adapters
    assert estimate.weights == sum(p.nbytes for p in policy.parameters() if not p.requires_grad)
    _, most = measure_update(policy, batch)
    assert estimate.activations == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("recompute", [True, False])
def test_frozen_towers_have_neither_adapters_nor_activations(recompute, tmp_path):
    config = CONFIGS["openvla"]
    policy = adapted(config, tmp_path, freeze="vision", gradient_checkpointing=recompute)
    estimate = estimate_lora_update(config, 3, PROMPT, "float32", RANK, recompute, freeze_vision=True)
    assert estimate.adapters == sum(p.nbytes for p in policy.parameters() if p.requires_grad)
    assert estimate.activations == pytest.approx(measure_update(policy, 3)[1], rel=0.05)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", [6, 2])
def test_one_layer_more_saves_exactly_what_the_formula_says(batch, heads, tmp_path):
    three, four = (small(layers, num_key_value_heads=heads) for layers in (3, 4))
    grown = [measure_update(adapted(config, tmp_path), batch)[0] for config in (three, four)]
    sizes = Sizes(four, batch, PROMPT)
    assert grown[1] - grown[0] == sizes.saved_by_layer(sizes.columns, RANK, 4)


@pytest.mark.parametrize(
    ("vision", "tokens", "inner"),
    [
        ("dinosiglip-vit-so-224px", (256 + 5) + 256, 2),  # both towers
        ("clip-vit-l", 256 + 1, 3),  # the quick GELU keeps its sigmoid, too
    ],
)
def test_one_vision_block_more_saves_exactly_what_the_formula_says(vision, tokens, inner, tmp_path):
    grown = [measure_update(adapted(small(2, depth, vision), tmp_path), 2)[0] for depth in (4, 5)]
    # Eight tensors of a block's width, some of its MLP's, four of the rank; statistics of two norms and of four heads
    assert grown[1] - grown[0] == 2 * tokens * 4 * (8 * 64 + inner * 256 + 4 * RANK + 4 + 4)
    lower, higher = (
        estimate_lora_update(small(2, depth, vision), 2, PROMPT, "float32", RANK, False) for depth in (4, 5)
    )
    assert grown[1] - grown[0] == higher.activations - lower.activations


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_takes_what_is_estimated(bits):
    policy = load_policy("builtin:tiny-openvla", quantize=bits, dtype="bfloat16", use_proprio=False)
    estimate = estimate_rollout(policy.config, 1, PROMPT, "bfloat16", bits)
    assert estimate.weights == pytest.approx(sum(_stored_bytes(p) for p in policy.parameters()), rel=0.01)
    policy.prepare_training(ModelConfig(quantize=bits), LoraConfig(enabled=True, rank=RANK), seed=0)
    estimate = estimate_lora_update(policy.config, 8, PROMPT, "bfloat16", RANK, False, bits)
    assert estimate.weights == pytest.approx(
        sum(_stored_bytes(p) for p in policy.parameters() if not p.requires_grad), rel=0.01
    )
    assert estimate.activations == pytest.approx(measure_update(policy.train(), 8)[1], rel=0.15)


def _stored_bytes(parameter: Any) -> int:
    """With the scales of a weight in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    scales = 0 if state is None else state.absmax.nbytes + state.state2.absmax.nbytes
    return int(parameter.nbytes) + scales


def test_the_real_size():
    config = parse_config(OPENVLA_7B)
    rollout = estimate_rollout(config, 64, 32, "bfloat16", lora_rank=32)
    assert rollout.weights == 2 * 7_541_237_184
    # 64 rows x (256 patches, 32 tokens of the prompt, 6 of the action) x 32 layers x keys and values x 4096 x 2 bytes
    assert rollout.cache == 64 * 294 * 32 * 2 * 4096 * 2
    assert rollout.adapters == (4 + 2) * 32 * _sums_of_sides()  # float32, and the copies that products read
    assert estimate_rollout(config, 64, 32, "float32").cache == 2 * rollout.cache


@pytest.mark.parametrize(
    ("size", "recomputed", "bits", "measured_gib"),
    [
        *((1, True, None, 16.13), (8, True, None, 16.86), (32, True, None, 20.78)),
        *((1, False, None, 17.73), (4, False, None, 22.97), (8, False, None, 29.58)),
        *((8, True, 4, 8.96), (8, True, 8, 21.09)),
    ],
)
def test_updates_as_measured_on_a_gpu(size, recomputed, bits, measured_gib):
    """Peaks of benchmarks/openvla_7b.py on an H200, rank 32."""
    estimate = estimate_lora_update(parse_config(OPENVLA_7B), size, 32, "bfloat16", 32, recomputed, bits)
    assert estimate.total / 2**30 == pytest.approx(measured_gib, rel=0.05)


@pytest.mark.parametrize(
    ("size", "rank", "measured_gib"),
    [(1, None, 14.26), (16, None, 16.81), (64, None, 24.87), (1, 32, 14.90), (16, 32, 17.41), (64, 32, 25.48)],
)
def test_rollouts_as_measured_on_a_gpu(size, rank, measured_gib):
    estimate = estimate_rollout(parse_config(OPENVLA_7B), size, 32, "bfloat16", lora_rank=rank)
    assert estimate.total / 2**30 == pytest.approx(measured_gib, rel=0.02)


def _sums_of_sides() -> int:
    """Inputs and outputs of all linear layers of OpenVLA-7B that training reaches."""
    llama = 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    dino = 23 * ((1024 + 3072) + (1024 + 1024) + 2 * (1024 + 4096))
    siglip = 26 * ((1152 + 3456) + (1152 + 1152) + 2 * (1152 + 4304))
    projector = (2176 + 8704) + (8704 + 4096) + (4096 + 4096)
    return llama + dino + siglip + projector


def test_parts_add_up():
    estimate = MemoryEstimate(weights=1, adapters=2, gradients=4, optimizer=8, activations=16, cache=32)
    assert estimate.total == 63 and estimate.lasting == 14
    assert math.prod(estimate.parts.values()) == 2**15
