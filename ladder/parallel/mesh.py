"""The device mesh of a launch: data-parallel replicas, their shards, and TP.

Unlike ladder.parallel.launch, this module imports torch.distributed.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ladder.models.errors import UserError
from ladder.parallel import launch

DATA_DIMS = ("replicate", "shard")  # dimensions of data parallelism, see ladder.parallel.data


def make_mesh(device: torch.device, tp: int, dp_shard: int = 1) -> DeviceMesh | None:
    """A mesh with the dimensions `replicate`, `shard` and `tp`, tp innermost; None for one process.

    dp_shard: the size of `shard`; 0: all data-parallel ranks. Meshes are cached, since their groups
    keep threads and GPU memory until the process ends.
    """
    world = launch.world_size()
    if tp < 1 or world % tp:
        raise UserError(
            f"tp={tp} does not divide the number of processes, {world}; start it with --nproc "
            f"(or torchrun) and a multiple of {max(tp, 1)} processes"
        )
    data = world // tp
    if dp_shard < 0 or data % (dp_shard or data):
        raise UserError(
            f"dp_shard={dp_shard} does not divide the {data} data-parallel ranks ({world} "
            f"processes, tp={tp}); choose a divisor, or 0 for all of them"
        )
    if world == 1:
        return None
    shard = dp_shard or data
    return _mesh(dist.group.WORLD, device.type, (data // shard, shard, tp))


@functools.cache
def _mesh(world: dist.ProcessGroup, kind: str, shape: tuple[int, int, int]) -> DeviceMesh:
    """The mesh of a shape, cached for each world group."""
    override = {}
    if kind == "cuda":
        # Reduces overlap with matrix products: without priority, a reduce's blocks wait until all
        # blocks of an earlier product have been scheduled.
        nccl = dist.ProcessGroupNCCL  # only builds with CUDA have it
        override = {"tp": nccl.Options(is_high_priority_stream=True)}
    return init_device_mesh(
        kind,
        shape,
        mesh_dim_names=(*DATA_DIMS, "tp"),
        backend_override=override,
    )
