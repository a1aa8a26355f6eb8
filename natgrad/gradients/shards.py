"""Parameters of which every process has a shard: FSDP2, HSDP, tensor parallelism, and products of these.

``DTensor`` says which part of a parameter a process has. What is done number by number (AdamW, momentum, the update) is
done on the shards. A direction needs whole matrices: gradient and momentum are gathered, every process computes the
direction, and takes its part of it. Statistics are those of whole gradients, and the same in all processes.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor


def is_sharded(t: Tensor) -> bool:
    """Whether this process has a part of the tensor. (By name: the import would take longer than all else here.)"""
    return type(t).__name__ == "DTensor"


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process has, in its memory."""
    return cast(Any, t).to_local() if is_sharded(t) else t


def gradient_of(p: Tensor) -> Tensor:
    """The part of its gradient that this process has, divided as p is."""
    g = cast(Any, p.grad)
    return cast(Tensor, g.redistribute(placements=cast(Any, p).placements).to_local()) if is_sharded(p) else g


def whole(part_of_p: Tensor, p: Tensor) -> Tensor:
    """What all processes have of a tensor that is divided as p is."""
    if not is_sharded(p):
        return part_of_p
    from torch.distributed.tensor import DTensor

    like = cast(Any, p)
    mesh, placements = like.device_mesh, like.placements
    t = DTensor.from_local(part_of_p, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())
    return t.full_tensor()


def shard(t: Tensor, p: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of p."""
    if not is_sharded(p):
        return t
    from torch.distributed.tensor import DTensor, Replicate

    like = cast(Any, p)
    everywhere = [Replicate()] * like.device_mesh.ndim
    same = DTensor.from_local(t, like.device_mesh, everywhere, run_check=False)
    return same.redistribute(placements=like.placements).to_local()


def total_over_shards(norm: Tensor, p: Tensor) -> Tensor:
    """Σ of a number over the processes that share p: it is finite only if it is so in all of them."""
    mesh = cast(Any, p).device_mesh
    for axis in range(mesh.ndim):
        dist.all_reduce(norm, group=mesh.get_group(axis))
    return norm
