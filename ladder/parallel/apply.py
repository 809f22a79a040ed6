"""The one function that makes a model parallel for training, and in which order.

TP (or sequence parallelism) shards the parameters; activation checkpointing and compilation wrap
each sublayer's forward; FSDP2 shards the result over the data-parallel ranks. All of them work on
sublayers: tensors in, tensors out, with no communication inside.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ladder.config import CHECKPOINTING
from ladder.jit import device_name
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.models.forward_pass import Norm, Operators, add_norm
from ladder.models.layers import RMSNorm, local
from ladder.models.loss import LossFunctions, scaled_probabilities, sum_exp
from ladder.models.ranks import Ranks
from ladder.models.runtime import AddNorm
from ladder.models.sublayers import Call, Context, Sublayer
from ladder.models.transformer import Transformer, meta_model
from ladder.operator_names import GATHER, SCATTER
from ladder.parallel.choose import choose_training
from ladder.parallel.data import data_parallel, shard_over_data, size_of
from ladder.parallel.overlap import Overlap
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.refusals import sharded_refusal
from ladder.parallel.sharding import shard_model

aten = torch.ops.aten
MOST_FACTORS = 16  # distinct factors of own partials up to which landings are compiled
# The operations whose results selective checkpointing keeps. The others are elementwise, so cheap.
KEPT = (
    aten.mm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
# Operators registered on first use, so by name: ladder.models.documents, ladder.parallel.fused.
KEPT_NAMES = (
    "torch_attn::_varlen_attn",
    f"ladder::{GATHER}",
    f"ladder::{SCATTER}",
)


def make_model(
    config: ModelConfig,
    compute_dtype: torch.dtype,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    sequence_parallel: bool = False,
    activation_checkpointing: str = "none",
    compile: bool = False,
    reducer: str | type[AsyncReducer] = "auto",
    shape: tuple[int, int] = (0, 0),
) -> Transformer:
    """The model on this mesh (see `make_mesh`), with uninitialised float32 parameters.

    sequence_parallel: shards the residual by tokens over the TP ranks. activation_checkpointing:
    a name in CHECKPOINTING: `full` keeps a sublayer's input and recomputes the rest in the backward
    pass, `selective` also keeps the results of matrix products and attention. compile: compile each
    sublayer, landing and norm. reducer: see `choose_training`; or a class, for benchmarks. shape:
    for reducer="auto": [sequences, tokens of each] of a data-parallel rank, if a step is one pass.

    Raises UserError if the plan, or the lack of TP, does not allow sequence parallelism, and if the
    reducer cannot train.
    """
    model = meta_model(config)
    shares = mesh is not None and data_parallel(mesh)[0] > 1
    first = "meta" if shares else device  # FSDP allocates only each rank's share
    tp = None if mesh is None else mesh["tp"]
    processes = 1 if tp is None else tp.size()
    if sequence_parallel:
        check_sequence_parallel(config, processes)
    if isinstance(reducer, str):
        overlaps: Callable[[int], bool] | None = None
        # Operators: not timed with data parallelism, and not faster with a second forward pass.
        once = not shares and activation_checkpointing != "full"
        if tp is not None and device.type == "cuda" and once:
            overlaps = _overlaps(config, device, compute_dtype, tp.get_group())
        reducer = choose_training(
            config.plan, _ranks(config, processes), shape, reducer,
            sequence_parallel=sequence_parallel, overlaps=overlaps,
        ).reducer  # fmt: skip
    shard_model(model, tp, device=first, dtype=torch.float32, reducer=reducer)
    if compile:
        # Attention and MLP are compiled with and without gradients, for full and last batches.
        # Above the limit, 8 by default, torch would run them uncompiled.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, 64)
    runtime = replace(
        model.runtime,
        compute_dtype=compute_dtype,
        call=sublayer_call(model, activation_checkpointing, compile),
        add_norm=_compiled_add_norm(config) if compile else model.runtime.add_norm,
        losses=_compiled_losses() if compile else model.runtime.losses,
    )
    if mesh is not None and shares:
        shard = mesh.get_local_rank("shard"), size_of(mesh, "shard")
        runtime = replace(runtime, data_shard=shard)
    model.use(runtime)
    if mesh is not None and shares:
        shard_over_data(model, mesh)
        model.to_empty(device=device)
    return model


def _overlaps(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> Callable[[int], bool]:
    """A function of a training pass's number of tokens: whether fused operators overlap, and the
    host keeps up with them, on all ranks. All ranks must call it together."""
    found = Overlap(config, device_name(device), group.size(), dtype, group, training=True)

    def overlaps(tokens: int) -> bool:
        from ladder.ops.replay import keeps_memory  # late: 0.1 s, for `auto` alone

        mine = keeps_memory() and found(tokens, "eager")
        everyone = torch.tensor([mine], dtype=torch.int32, device=device)
        dist.all_reduce(everyone, dist.ReduceOp.MIN, group)
        return bool(everyone.item())

    return overlaps


def check_sequence_parallel(config: ModelConfig, tp: int) -> None:
    """Raise UserError if `tp` processes cannot shard the model's residual by tokens."""
    refusal = sharded_refusal(config.plan, _ranks(config, tp))
    if refusal:
        raise UserError(
            f"sequence_parallel=true with tp={tp} and plan {config.plan.name!r}: {refusal}; set it "
            f"to false"
        )


def _ranks(config: ModelConfig, processes: int) -> Ranks:
    """The ranks of process 0: at least one, since T below `processes` is refused only later."""
    held = max(1, (config.tp_degree or processes) // processes)
    return Ranks(processes * held, 0, held)


def sublayer_call(model: Transformer, activation_checkpointing: str, compile: bool) -> Call | None:
    """The function that runs each sublayer, compiled, checkpointed or both; None: neither.

    FSDP2's hooks stay outside of it, since they wrap a sublayer's `forward`, which calls it.
    """
    if activation_checkpointing not in CHECKPOINTING:
        raise unknown("activation_checkpointing", activation_checkpointing, CHECKPOINTING)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if activation_checkpointing == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        if activation_checkpointing == "none":
            return function
        return functools.partial(checkpoint, function, **options)

    if compile:
        compiled = {slot: _compiled(slot, wrap) for slot in model.slots}
        return lambda sublayer, x, context: compiled[sublayer](x, context)
    if activation_checkpointing == "none":
        return None
    return lambda sublayer, x, context: wrap(sublayer.compute)(x, context)


def _compiled_losses() -> LossFunctions:
    return LossFunctions(
        torch.compile(sum_exp, dynamic=False),
        torch.compile(scaled_probabilities, dynamic=False),
    )


def _compiled_add_norm(config: ModelConfig) -> AddNorm:
    """`add_norm`, compiled: with virtual ranks, landings move most of a step's bytes.

    Norms that are not the model's own (another class, eps or hooks) run uncompiled. So do all
    landings of a plan with many factors, since each factor would be compiled anew.
    """
    bare = RMSNorm(config.hidden_size, config.norm_eps)
    if len({each.own for read in config.plan.landings for each in read}) > MOST_FACTORS:
        return add_norm

    def compute(
        weight: Tensor, residual: Tensor, values: list[Tensor], factors: list[float]
    ) -> tuple[Tensor, Tensor]:
        addends = list(zip(values, factors, strict=True))
        return add_norm(residual, addends, lambda x: functional_call(bare, {"weight": weight}, x))

    compiled = torch.compile(compute, dynamic=False)

    def run(
        residual: Tensor, addends: list[tuple[Tensor, float]], norm: Norm
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(norm, RMSNorm) or not _is_plain(norm, config.norm_eps):
            return add_norm(residual, addends, norm)
        values, factors = [value for value, _ in addends], [factor for _, factor in addends]
        return compiled(local(norm.weight), residual, values, factors)

    return run


def _is_plain(norm: RMSNorm, eps: float) -> bool:
    hooks = norm._forward_hooks or norm._forward_pre_hooks
    return type(norm) is RMSNorm and norm.eps == eps and not hooks


def _compiled(
    sublayer: Sublayer, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Tensor, Context], Any]:
    """A sublayer's computation, wrapped and compiled: its parameters and tensors are the inputs."""
    bare = copy.copy(sublayer)  # without FSDP2's hooks, which are added later
    bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()

    def compute(
        parameters: dict[str, Tensor], x: Tensor, tables: Tensor, mask: Any, last: Tensor | None,
        operators: Operators,
    ) -> Any:  # fmt: skip
        context = Context(tables, operators, mask, last=last)
        return functional_call(bare, parameters, (x, context))

    forward = _on_local_parameters(sublayer, torch.compile(wrap(compute), dynamic=False))

    def run(x: Tensor, context: Context) -> Any:
        assert context.cache is None, "compiled sublayers are for training"
        return forward(x, context.tables, context.mask, context.last, context.operators)

    return run


def _on_local_parameters(sublayer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `forward` with plain tensors, since compiled code cannot take DTensors."""

    # The attributes are found once, to save host time: FSDP2 replaces the parameters in them.
    found = [
        (f"{prefix}.{name}" if prefix else name, module._parameters, name)
        for prefix, module in sublayer.named_modules()
        for name in module._parameters
    ]

    def run(*args: Any) -> Any:
        held = {full: parameters[name] for full, parameters, name in found}
        mine = {name: local(each) for name, each in held.items() if each is not None}
        return forward(mine, *args)

    return run


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT or operation.name() in KEPT_NAMES
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
