"""Data parallelism: replicas of a model, or shards of it, by torch's FSDP2.

One mechanism covers DDP, FSDP and HSDP: parameters, gradients and optimiser state are sharded over
the `shard` dimension of the mesh (not at all if its size is 1) and replicated over `replicate`.
Gradients are reduced in float32 during the backward pass, module by module.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ladder.models.transformer import Transformer
from ladder.parallel.mesh import DATA_DIMS

# Outputs of virtual ranks may be views. That is safe: reducers sum them into new tensors.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def data_parallel(mesh: DeviceMesh | None) -> tuple[int, int]:
    """The number of data-parallel ranks, and this process's data-parallel rank."""
    size, rank = 1, 0
    for name in DATA_DIMS if mesh is not None else ():
        assert mesh is not None
        here = size_of(mesh, name)
        size, rank = size * here, rank * here + mesh.get_local_rank(name)
    return size, rank


def size_of(mesh: DeviceMesh, name: str) -> int:
    """The size of a dimension of the mesh. (`mesh[name]` would make a new mesh, which is slow.)"""
    assert mesh.mesh_dim_names is not None
    return mesh.size(mesh.mesh_dim_names.index(name))


def sum_over_data(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sum over the data-parallel ranks, in place."""
    for name in DATA_DIMS if mesh is not None else ():
        assert mesh is not None
        if size_of(mesh, name) > 1:
            dist.all_reduce(value, group=mesh.get_group(name))
    return value


def shard_over_data(model: Transformer, mesh: DeviceMesh) -> None:
    """Apply FSDP2 over `mesh` to a model that TP has sharded.

    Parameters may be on `meta`, and allocated by `to_empty` afterwards. The computation uses the
    runtime's compute_dtype, which must be set before. A layer's two sublayers are one FSDP unit,
    which costs the host less than a unit each. Norms, which reducers call, belong to the root unit
    and are unsharded during the whole forward and backward pass.
    """
    replicas = size_of(mesh, "replicate")
    policy = MixedPrecisionPolicy(
        param_dtype=model.runtime.compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    data = mesh["shard"] if replicas == 1 else mesh["replicate", "shard"]
    units: list[list[nn.Module]] = [list(layer.slots) for layer in model.model.layers]
    if not model.config.tie_embeddings:  # a tied matrix belongs to the root unit
        units = [[model.model.embed_tokens], *units, [model.lm_head]]
    shards = size_of(mesh, "shard") > 1  # otherwise there is nothing to gather again for backward
    for unit in units:
        fully_shard(unit, mesh=data, mp_policy=policy, reshard_after_forward=shards)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)


def let_go(model: Transformer) -> None:
    """Reshard parameters that a forward pass without a backward pass has left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_gradients(model: Transformer, now: bool) -> None:
    """Set whether the next backward pass reduces gradients; only the last one of a step should."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
