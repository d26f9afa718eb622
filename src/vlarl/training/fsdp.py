"""A policy whose weights are spread over ranks: FSDP2's `fully_shard`, layer by layer.

full     every rank keeps a part of each weight, of its gradient and of its moments
hybrid   the same within groups of `group_size` ranks (a machine, say), each group with a copy of its own
none     every rank keeps everything; gradients are added up once a minibatch

A weight is a DTensor then: the same name, a part of the numbers. Around each pass a layer's weights are gathered, and
dropped again, the root's too: outside of a pass `named_parameters` are always the parts. Gradients are summed, not
averaged, since the loss counts each token's share in the minibatch of all ranks.

A policy is loaded on the host and sharded from there, one layer at a time: the device never holds more of it than this
rank's part and the layers of the pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils import _pytree

from vlarl.errors import UsageError
from vlarl.policies.base import Policy, Scores
from vlarl.policies.openvla.heads import L1ActionHead, ProprioProjector, ValueHead
from vlarl.policies.openvla.model import Projector
from vlarl.policies.openvla.vision import Block, VisionTower
from vlarl.training.ranks import Ranks

# What is gathered at once. The embedding, the last norm and the head are read from outside the language model's own
# forward, so they stay with the root. The language model's layers come on top: their module loads transformers.
UNITS = (Block, VisionTower, Projector, ProprioProjector, ValueHead, L1ActionHead)
FLOAT32_HEADS = (ValueHead, L1ActionHead)  # computed in their own type, whatever the policy's
PASSES = ("score", "values", "decode", "regress")  # a policy's ways in; FSDP knows of `forward` alone
BUCKET_BYTES = 64 << 20  # gradients that are added up in one call

# FSDP gathers the root's weights again when a gradient comes to what a pass has returned, and must find tensors in it.
_pytree.register_dataclass(Scores)


@dataclass(frozen=True)
class Sharding:
    """How a policy's weights are spread over the ranks."""

    mode: Literal["none", "full", "hybrid"] = "none"
    group_size: int | None = None  # hybrid: ranks that share one copy
    cpu_offload: bool = False  # this rank's part waits on the host, where the optimizer steps, too
    compute_dtype: torch.dtype | None = None  # of gathered weights; None: as they were loaded

    def mesh(self, ranks: Ranks, device: torch.device) -> DeviceMesh:
        """The ranks in a row, or in rows of one group each."""
        if self.mode == "full":
            return init_device_mesh(device.type, (ranks.world_size,), mesh_dim_names=("shard",))
        group = self.group_size or 0
        if group < 1 or ranks.world_size % group:
            raise UsageError(
                f"sharding in groups of {self.group_size}: the {ranks.world_size} learner ranks can't be divided into "
                "such groups; choose a group size that divides them, a machine's GPUs for instance."
            )
        shape = (ranks.world_size // group, group)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard(policy: Policy, sharding: Sharding, mesh: DeviceMesh) -> None:
    """Spread a policy over the mesh, in place; it may live on the host, and goes to the mesh's device in parts."""
    from vlarl.policies.openvla.layers import DecoderLayer

    _refuse_quantized(policy)
    _part_from_others(policy)
    pinned = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if sharding.cpu_offload else OffloadPolicy()
    adapted = MixedPrecisionPolicy(_compute_dtype(policy, sharding), torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    units = (DecoderLayer, *UNITS)
    for unit in [m for m in reversed(list(policy.modules())) if isinstance(m, units)]:  # a tower after its blocks
        kind = exact if isinstance(unit, FLOAT32_HEADS) else adapted
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=kind, offload_policy=offload)
    fully_shard(policy, mesh=mesh, reshard_after_forward=True, mp_policy=adapted, offload_policy=offload)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in PASSES:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)
    # FSDP looks at what is trained when it first runs, which may be a pass of the reference, without the adapters.
    cast(Any, policy)._get_fsdp_state()._lazy_init()
    # What it warns of, writing into a layer's answer, is done nowhere here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _compute_dtype(policy: Policy, sharding: Sharding) -> torch.dtype | None:
    """The type that weights are gathered in: adapters, which are kept in float32, join a base in a smaller type."""
    if sharding.compute_dtype is not None:
        return sharding.compute_dtype
    frozen = {p.dtype for p in policy.parameters() if not p.requires_grad and p.is_floating_point()}
    return torch.bfloat16 if torch.bfloat16 in frozen else None


def _refuse_quantized(policy: Policy) -> None:
    packed = next((name for name, p in policy.named_parameters() if not p.is_floating_point()), None)
    if packed is not None:
        raise UsageError(
            f"policy.quantize: packed weights ({packed}) can't be sharded; use distributed.sharding none, or "
            "policy.dtype bfloat16 with lora.enabled."
        )


def _part_from_others(policy: Policy) -> None:
    """Frozen weights may be a critic's, too: moved to the device as they are, they would stay there whole for it."""
    aliases: dict[int, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                own = parameter.detach().contiguous()  # beside an adapter that has run, it is part of a wider one
                alias = aliases.setdefault(id(parameter), nn.Parameter(own, requires_grad=False))
                module._parameters[name] = alias


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be spread over ranks, all of which must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, spread as the example is; as it is, on the example's device, for others."""
    if not isinstance(example, DTensor):
        return tensor.to(example.device)
    local = example.to_local().device
    if tensor.ndim == 0:  # the optimizer's count of steps: the same everywhere
        return tensor.to(local)
    spread_out = distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)
    return spread_out.to(local) if spread_out.to_local().device != local else spread_out


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Shorten the gradient of all these parameters to the limit; returns its norm, the same on all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Add up what the ranks have accumulated, where each has all weights; sharded ones are summed in each pass."""
    if ranks.world_size == 1:
        return
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        ranks.sum(flat)
        for gradient, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors in a row of one type, together no more than fits into one call, or one that is larger."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        size = sum(t.nbytes for t in bucket) + tensor.nbytes
        if bucket and (size > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@contextmanager
def consolidated(policy: Policy, ranks: Ranks) -> Iterator[None]:
    """Inside the block, which all ranks enter, rank 0's policy has whole weights on its host: it can be saved.

    Only what a save writes is put together: everything, or, beside adapters, what is not the base's. Nobody may run
    the policy meanwhile.
    """
    places = [
        (module, name, parameter)
        for module in policy.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and isinstance(parameter, DTensor)
        if parameter.requires_grad or not policy.has_adapter
    ]
    try:
        for module, name, parameter in places:
            complete = whole(parameter.detach())
            if ranks.rank == 0:
                module._parameters[name] = nn.Parameter(complete.cpu(), parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
