"""Sharding of parameters by their specs: local parts, initialisation, shared gradients."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Container, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ladder.models.errors import UserError, unknown
from ladder.models.parameters import chunk
from ladder.models.quantised import matrices, quantise_model
from ladder.models.ranks import Ranks
from ladder.models.reducer import Reducer
from ladder.models.seeds import spread
from ladder.models.storage import is_quantised
from ladder.models.transformer import Transformer
from ladder.parallel.choose import REDUCERS
from ladder.parallel.reducers import AsyncReducer

BEYOND_MEMORY = 4  # weights of more than this many times a CPU's memory are refused


def shard_model(
    model: Transformer,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    reducer: str | type[AsyncReducer] = "async",
    dtensors: bool = False,
) -> None:
    """Replace a whole model's parameters by this process's shards, on `device`.

    Shards are copied from the model, or left uninitialised if the model is on `meta`.
    mesh: one dimension, the TP processes; None for one process.
    T is tp_degree if the plan depends on it (the rest are virtual ranks), else the mesh's size.
    reducer: a name in REDUCERS, or a class with the same arguments.
    dtensors: make the parameters DTensors, by which other libraries' training loops clip gradients
    and gather weights. Ladder's own loop does not use them: they take host time in every step.
    Raises UserError if the weights alone exceed the device's memory.
    """
    for name in model.cut_parameters():
        raise ValueError(
            f"{name} is a part of {list(model.shapes[name])}: the model is sharded already; "
            f"call shard_model once, on a whole model"
        )
    if isinstance(reducer, str):
        if reducer not in REDUCERS or not REDUCERS[reducer].base:
            raise unknown("reducer", reducer, [n for n, each in REDUCERS.items() if each.base])
        make = REDUCERS[reducer].make
    else:
        make = reducer
    processes = mesh.size() if mesh is not None else 1
    degree = model.config.tp_degree or processes
    if degree % processes:
        model.check_degree(processes)  # raises, naming the plan
    held = degree // processes
    if mesh is None or processes == 1:  # even a collective of one rank takes time
        model.use(replace(model.runtime, reducer=Reducer(Ranks(degree, 0, degree))))
    else:
        ranks = Ranks(degree, mesh.get_local_rank() * held, held)
        model.use(replace(model.runtime, reducer=make(ranks, mesh.get_group())))
    ranks = model.reducer.ranks
    _check_memory(model, torch.device(device), dtype)

    def put(name: str, parameter: nn.Parameter) -> nn.Parameter:
        spec = model.specs[name]
        part = spec.slices(parameter.shape, ranks)
        kind = _dtype(name, parameter, dtype)
        if parameter.is_meta:
            local = torch.empty([s.stop - s.start for s in part], device=device, dtype=kind)
        else:
            local = parameter.detach()[part].to(device=device, dtype=kind, copy=True)
            local = local.contiguous()
        if mesh is None or processes == 1 or not dtensors:
            return nn.Parameter(local, requires_grad=not _kept(name, parameter))
        dim = spec.split_over(ranks.processes)
        placement = Replicate() if dim is None else Shard(dim)
        stride = torch.empty(parameter.shape, device="meta").stride()
        tensor = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=parameter.shape, stride=stride
        )
        return nn.Parameter(tensor)

    _replace_parameters(model, put)


def _dtype(name: str, parameter: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a parameter in a model of `dtype`: matrices in 8 bits and scales keep theirs."""
    return parameter.dtype if _kept(name, parameter) else dtype or parameter.dtype


def _kept(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix in 8 bits, or the scales of one."""
    return is_quantised(parameter.dtype) or name.endswith(".scales")


def _check_memory(
    model: Transformer, device: torch.device, dtype: torch.dtype | None, small: Container[str] = ()
) -> None:
    """Raise UserError where this process's part of the weights is larger than the device.

    small: the names of parameters that will have 8 bits; the others will have `dtype`. The model
    may be sharded already.
    """
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu":
        # A generous limit: there may be swap, and virtual machines whose memory grows on demand.
        room = BEYOND_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    needed = 0
    for name, parameter in model.named_parameters():
        part = model.specs[name].slices(model.shapes[name], model.reducer.ranks)
        count = math.prod(each.stop - each.start for each in part)
        needed += count * (1 if name in small else _dtype(name, parameter, dtype).itemsize)
    if needed > room:
        raise UserError(
            f"this process's weights take {needed / 1e9:,.1f} GB, more than the "
            f"{room / 1e9:,.1f} GB that fit on {device}: use a smaller model (hidden_size, "
            f"num_layers), or more processes (tp)"
        )


def _replace_parameters(model: nn.Module, put: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replace every parameter by `put(name, parameter)`; tied ones stay tied."""
    # The keys are the old parameters, which stay alive: an id could be reused.
    done: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in done:
                done[parameter] = put(f"{prefix}.{name}" if prefix else name, parameter)
            setattr(module, name, done[parameter])


def local_tensor(value: Tensor) -> Tensor:
    """This process's part of a tensor that may be a DTensor, outside autograd (no copy)."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


def local_parameters(model: Transformer) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
    """(name, local tensor, its slices of the full parameter), each parameter once, in order."""
    index, count = model.runtime.data_shard
    for name, parameter in model.named_parameters():
        rows, *rest = model.specs[name].slices(model.shapes[name], model.reducer.ranks)
        yield name, local_tensor(parameter), (chunk(rows, index, count), *rest)


def own_parts(
    model: Transformer, replica: int, replicas: int
) -> Iterator[tuple[str, tuple[slice, ...]]]:
    """The (name, slices) that this process saves; over all processes, each element once.

    Parameters are divided among the replicas by size; the first TP process saves those that TP does
    not shard. Every process computes the same division, without communication.
    """
    ranks = model.reducer.ranks
    loads = [0] * replicas
    for name, local, part in local_parameters(model):
        owner = loads.index(min(loads))
        loads[owner] += local.numel()
        first = ranks.process == 0 or not model.specs[name].shared(ranks.processes)
        if owner == replica and first and local.numel():
            yield name, part


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill the model's parameters from `seed`: the same model under every parallelism.

    Each parameter has a generator of its own, from the seed and its name; one full parameter is
    in memory at a time.
    """
    for name, local, part in local_parameters(model):
        generator = torch.Generator().manual_seed(
            (spread(seed) + zlib.crc32(name.encode())) % 2**63
        )
        full = torch.empty(model.shapes[name])
        model.initialise(full, name, generator)
        local.copy_(full[part])


@torch.no_grad()
def fill_in_8_bits(
    model: Transformer, kind: str, device: torch.device | str,
    fill: Callable[[str, Tensor, tuple[slice, ...]], object],
) -> None:  # fmt: skip
    """Allocate and fill on `device` a model whose shards are on `meta`; matrices are stored in 8
    bits.

    kind: see `quantise_model`. fill: called with the name, local tensor and slices of each
    parameter, as in `local_parameters`. Each matrix is stored as soon as it is filled, so that the
    whole model never takes memory in 16 bits.
    """
    later = {f"{name}.weight" for name, _ in matrices(model)}
    _check_memory(model, torch.device(device), None, later)
    found = {name: (local, part) for name, local, part in local_parameters(model)}

    def made(name: str) -> Tensor:
        shape, part = found[name]
        local = torch.empty_like(shape, device=device)
        fill(name, local, part)
        return local

    _replace_parameters(model, lambda name, old: old if name in later else nn.Parameter(made(name)))
    quantise_model(model, kind, made)


@torch.no_grad()
def sum_shared_gradients(model: Transformer) -> None:
    """Sum the gradients of the parameters that TP replicates (norms, output biases, K and V).

    Call it once per step, after the last backward (see ladder.models.reducer); it takes one
    all-reduce. The gradients of sharded parameters are complete already.
    """
    reducer = model.reducer
    if reducer.ranks.processes == 1:
        return
    shared = [
        local_tensor(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and model.specs[name].shared(reducer.ranks.processes)
    ]
    if shared:
        flat = reducer.sum_(torch.cat([grad.flatten() for grad in shared]))
        for grad, total in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
            grad.copy_(total.view_as(grad))
