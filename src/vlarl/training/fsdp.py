"""A policy whose weights are sharded over ranks: FSDP2's `fully_shard`, layer by layer.

full     every rank keeps a part of each weight, of its gradient and of its optimizer state
hybrid   the same within groups of `group_size` ranks (such as a machine), each group with its own copy
none     every rank keeps everything; gradients are summed once a minibatch

A sharded weight is a DTensor: the same name, a part of the values. A layer's weights are gathered for each pass and
dropped afterwards, the root's too: outside of a pass `named_parameters` are always the parts. Gradients are summed, not
averaged, since the loss already weights each token within the minibatch of all ranks.

A policy is sharded before its weights are read (policies/deferred.py): each rank reads its part of one weight after
the other. One that is on the host already is sharded from there, one layer at a time: the device never holds more of it
than this rank's part and the layers of the pass.
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
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # the public API has no offsets
from torch.utils import _pytree

from vlarl.errors import UsageError
from vlarl.policies.base import Evaluation, Policy
from vlarl.policies.deferred import StoredWeight, stored_weight
from vlarl.policies.supervised import Saved
from vlarl.training.ranks import Ranks

# A policy's entry points: FSDP hooks only `forward`.
PASSES = ("evaluate", "values", "sample", "supervised_loss", "imitation_errors")
BUCKET_BYTES = 64 << 20  # gradients that are summed in one call

# FSDP gathers the root's weights again when a gradient reaches the output of a pass, and must find tensors in it.
_pytree.register_dataclass(Evaluation)


@dataclass(frozen=True)
class Sharding:
    """How a policy's weights are distributed over the ranks."""

    mode: Literal["none", "full", "hybrid"] = "none"
    group_size: int | None = None  # hybrid: ranks that share one copy
    cpu_offload: bool = False  # keep this rank's part on the host, where the optimizer runs, too
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
    """Shard a policy over the mesh, in place; it may be on the host, and is moved to the mesh's device in parts."""
    _refuse_quantized(policy)
    unread = _without_placeholders(policy)
    _part_from_others(policy)
    pinned = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pinned) if sharding.cpu_offload else OffloadPolicy()
    adapted = MixedPrecisionPolicy(_compute_dtype(policy, sharding), torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    units, in_float32 = policy.fsdp_units, policy.float32_units
    for unit in [m for m in reversed(list(policy.modules())) if isinstance(m, units)]:  # a tower after its blocks
        kind = exact if isinstance(unit, in_float32) else adapted
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=kind, offload_policy=offload)
    fully_shard(policy, mesh=mesh, reshard_after_forward=True, mp_policy=adapted, offload_policy=offload)
    _read_parts(unread, torch.device("cpu" if sharding.cpu_offload else mesh.device_type))
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in PASSES:
        if hasattr(policy, name):
            register_fsdp_forward_method(policy, name)
    # FSDP determines what is trained in its first pass, which may be the reference's, without the adapters.
    cast(Any, policy)._get_fsdp_state()._lazy_init()
    # It warns about in-place changes of a layer's output, which don't occur here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _compute_dtype(policy: Policy, sharding: Sharding) -> torch.dtype | None:
    """The type that weights are gathered in: float32 adapters are cast to the base's lower precision."""
    if sharding.compute_dtype is not None:
        return sharding.compute_dtype
    frozen = {p.dtype for p in policy.parameters() if not p.requires_grad and p.is_floating_point()}
    return torch.bfloat16 if torch.bfloat16 in frozen else None


def _refuse_quantized(policy: Policy) -> None:
    packed = next((name for name, p in policy.named_parameters() if not p.is_floating_point()), None)
    if packed is not None:
        raise UsageError(
            f"policy.quantize: quantised weights ({packed}) can't be sharded; use distributed.sharding none, or "
            "policy.dtype bfloat16 with lora.enabled."
        )


@dataclass
class _Unread:
    """A weight that is still on disk, and the modules that have it under a name, several if they are tied."""

    stored: StoredWeight
    owners: list[tuple[nn.Module, str]]


def _without_placeholders(policy: Policy) -> list[_Unread]:
    """Put weights that are not read yet on the device `meta`, where FSDP leaves them; returns them."""
    found: dict[int, _Unread] = {}
    empty: dict[int, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (stored := stored_weight(parameter)) is not None:
                found.setdefault(id(parameter), _Unread(stored, [])).owners.append((module, name))
                meta = nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
                )
                module._parameters[name] = empty.setdefault(id(parameter), meta)
    return list(found.values())


def _read_parts(unread: Sequence[_Unread], device: torch.device) -> None:
    """Read this rank's rows of each weight."""
    broken: list[str] = []
    for weight in unread:
        module, name = weight.owners[0]
        sharded: Any = module._parameters[name]
        part = _read_part(weight.stored, sharded, device)
        if not part.to_local().isfinite().all():
            broken.append(weight.stored.name)
        filled = nn.Parameter(part, sharded.requires_grad)
        for owner, own_name in weight.owners:
            owner._parameters[own_name] = filled
    if broken:
        raise UsageError(
            f"the policy can't be used: {len(broken)} of its weights hold NaN or infinity, the first is {broken[0]}. "
            "Use an earlier checkpoint."
        )


def _read_part(stored: StoredWeight, example: DTensor, device: torch.device) -> DTensor:
    """This rank's rows of a stored weight, sharded like the example."""
    shape, offset = compute_local_shape_and_global_offset(example.shape, example.device_mesh, example.placements)
    if tuple(shape[1:]) != tuple(example.shape[1:]):
        raise RuntimeError(f"{stored.name} is not sharded by rows")
    local = stored.rows(offset[0], shape[0]).to(device)
    return DTensor.from_local(
        local, example.device_mesh, example.placements, run_check=False, shape=example.shape, stride=example.stride()
    )


def _part_from_others(policy: Policy) -> None:
    """Frozen weights may be shared with a critic: moved to the device as they are, they would stay there unsharded."""
    aliases: dict[int, nn.Parameter] = {}
    for module in policy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                own = parameter.detach().contiguous()  # after an adapter has run, it is a view of a wider tensor
                alias = aliases.setdefault(id(parameter), nn.Parameter(own, requires_grad=False))
                module._parameters[name] = alias


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A full tensor from one that may be sharded over ranks; all ranks must call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full tensor, sharded like the example; if the example is not sharded, the tensor itself on
    the example's device."""
    if not isinstance(example, DTensor):
        return tensor.to(example.device)
    local = example.to_local().device
    if (stored := stored_weight(tensor)) is not None:
        return _read_part(stored, example, local)
    if tensor.ndim == 0:  # the optimizer's count of steps: the same everywhere
        return tensor.to(local)
    sharded = distribute_tensor(tensor, example.device_mesh, example.placements, src_data_rank=None)
    return sharded.to(local) if sharded.to_local().device != local else sharded


def clip_gradients(parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clip the gradient norm of all these parameters to the limit; returns the norm, the same on all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)


def sum_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Sum the ranks' accumulated gradients if each rank has all weights; sharded ones are summed in each pass."""
    if ranks.world_size == 1:
        return
    for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        ranks.sum(flat)
        for gradient, total in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of consecutive tensors of one type that fit into one call, or a single larger tensor."""
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
def consolidated(policy: Saved, ranks: Ranks) -> Iterator[None]:
    """Inside the block, which all ranks enter, rank 0's policy has full weights on its host: it can be saved.

    Only the weights that a save writes are gathered: all of them or, with adapters, those that are not the base's. The
    policy must not be run meanwhile.
    """
    sharded = [
        (module, name, parameter)
        for module in policy.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and isinstance(parameter, DTensor)
        if parameter.requires_grad or not policy.has_adapter
    ]
    try:
        for module, name, parameter in sharded:
            complete = whole(parameter.detach())
            if ranks.rank == 0:
                module._parameters[name] = nn.Parameter(complete.cpu(), parameter.requires_grad)
        yield
    finally:
        for module, name, parameter in sharded:
            module._parameters[name] = parameter
