"""Data parallelism: replicas of a model, or shards of it, by torch's FSDP2.

One mechanism for DDP, FSDP and HSDP: parameters, gradients and optimiser state are sharded over the
`shard` dimension of the mesh (of size 1: not at all) and replicated over `replicate`. Gradients are
reduced in float32 while backward goes on, module by module.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ladder.models.transformer import Transformer
from ladder.parallel.mesh import DATA_DIMS

# Virtual ranks' outputs may be views. Reducers sum them to new tensors, and write to none in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def data_parallel(mesh: DeviceMesh | None) -> tuple[int, int]:
    """(how many data-parallel ranks there are, this one's number)."""
    size, rank = 1, 0
    for name in DATA_DIMS if mesh is not None else ():
        assert mesh is not None
        here = size_of(mesh, name)
        size, rank = size * here, rank * here + mesh.get_local_rank(name)
    return size, rank


def size_of(mesh: DeviceMesh, name: str) -> int:
    """The size of a dimension of the mesh. (`mesh[name]` makes a new mesh each time, slowly.)"""
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
    """Make a model that TP has sharded data-parallel over `mesh`.

    Parameters may be on `meta`, to be made by `to_empty` afterwards. Computation is in the model's
    compute_dtype, set before. A layer's two sublayers, which the model's loop calls, are one unit:
    a unit each costs the host a third more. Norms, which reducers call in their own way, belong to
    the model itself and are whole while it runs.
    """
    replicas = size_of(mesh, "replicate")
    policy = MixedPrecisionPolicy(
        param_dtype=model.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    data = mesh["shard"] if replicas == 1 else mesh["replicate", "shard"]
    units = [[layer.self_attn, layer.mlp] for layer in model.model.layers]
    if not model.config.tie_embeddings:  # one matrix for both lives in the model's own unit
        units = [[model.model.embed_tokens], *units, [model.lm_head]]
    shards = size_of(mesh, "shard") > 1  # else there is nothing to gather again for backward
    for unit in units:
        fully_shard(unit, mesh=data, mp_policy=policy, reshard_after_forward=shards)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)
    model.data_shard = mesh.get_local_rank("shard"), size_of(mesh, "shard")


def let_go(model: Transformer) -> None:
    """Shard again what a forward pass without a backward one has left whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_gradients(model: Transformer, now: bool) -> None:
    """Whether the next backward pass reduces gradients: only a step's last one is to."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
