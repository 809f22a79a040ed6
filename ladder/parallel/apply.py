"""The one function that makes a model parallel for training, and in which order.

TP (or sequence parallelism) shards the parameters; activation checkpointing and compilation wrap
each sublayer's forward; FSDP2 shards what is then there. Sublayers are the unit of all of them:
tensors in, tensors out, with no communication inside.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ladder.config import CHECKPOINTING
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.models.layers import local
from ladder.models.loss import Passes, scaled_probabilities, sum_exp
from ladder.models.reducer import Ranks
from ladder.models.transformer import Transformer, meta_model
from ladder.parallel.data import data_parallel, shard_over_data
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sequence import SequenceReducer
from ladder.parallel.sharded import sharded_refusal
from ladder.parallel.sharding import shard_model

aten = torch.ops.aten
# What selective checkpointing keeps: computed once, at a price. The rest is elementwise.
KEPT = (
    aten.mm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
KEPT_NAME = "torch_attn::_varlen_attn"  # registered when it is first used: ladder.models.documents


def make_model(
    config: ModelConfig,
    compute_dtype: torch.dtype,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    sequence_parallel: bool = False,
    activation_checkpointing: str = "none",
    compile: bool = False,
    reducer: type[AsyncReducer] | None = None,
) -> Transformer:
    """The model on this mesh (see `make_mesh`), its parameters in float32, not yet filled.

    sequence_parallel: the stream is sharded by tokens over the TP ranks. activation_checkpointing:
    a name in CHECKPOINTING: `full` keeps a sublayer's input and computes the rest again in the
    backward pass, `selective` keeps the results of matrix products and attention too. compile:
    each sublayer by torch.compile. reducer: in place of AsyncReducer or SequenceReducer.

    Raises UserError where the plan, or the lack of TP, allows no sequence parallelism.
    """
    model = meta_model(config)
    model.compute_dtype = compute_dtype
    shares = mesh is not None and data_parallel(mesh)[0] > 1
    first = "meta" if shares else device  # no rank makes whole what it will hold a share of
    tp = None if mesh is None else mesh["tp"]
    processes = 1 if tp is None else tp.size()
    if sequence_parallel:
        check_sequence_parallel(config, processes)
    reducer = reducer or (SequenceReducer if sequence_parallel else AsyncReducer)
    shard_model(model, tp, device=first, dtype=torch.float32, reducer=reducer)
    wrap_sublayers(model, activation_checkpointing, compile)
    if mesh is not None and shares:
        shard_over_data(model, mesh)
        model.to_empty(device=device)
    return model


def check_sequence_parallel(config: ModelConfig, tp: int) -> None:
    """Raise UserError where the model's stream cannot be sharded by tokens over `tp` processes."""
    held = (config.tp_degree or tp) // tp
    refusal = sharded_refusal(config.plan, Ranks(tp * held, 0, held))
    if refusal:
        raise UserError(
            f"sequence_parallel=true with tp={tp} and plan {config.plan.name!r}: {refusal}; set it "
            f"to false"
        )


def wrap_sublayers(model: Transformer, activation_checkpointing: str, compile: bool) -> None:
    """Checkpoint and compile the forward of each sublayer; compile the loss.

    Their `forward` is replaced, and no module is put around them: names of parameters stay, and
    FSDP2's hooks stay outside.
    """
    if activation_checkpointing not in CHECKPOINTING:
        raise unknown("activation_checkpointing", activation_checkpointing, CHECKPOINTING)
    if compile:
        # Attention and MLP, with and without gradients, whole and last batches: beyond the limit,
        # 8 by default, torch would run them uncompiled.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, 64)
        model.passes = Passes(
            torch.compile(sum_exp, dynamic=False),
            torch.compile(scaled_probabilities, dynamic=False),
        )
    for layer in model.model.layers:
        for sublayer in (layer.self_attn, layer.mlp):
            _wrap(sublayer, activation_checkpointing, compile)


def _wrap(sublayer: nn.Module, activation_checkpointing: str, compile: bool) -> None:
    forward: Callable[..., Any] = sublayer.forward
    if compile:
        bare = copy.copy(sublayer)  # FSDP2's hooks, added later, must not be its hooks, too
        bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()
        forward = functools.partial(functional_call, bare)
    if activation_checkpointing != "none":
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if activation_checkpointing == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
        forward = functools.partial(checkpoint, forward, **options)
    if compile:
        forward = _on_local_parameters(sublayer, torch.compile(forward, dynamic=False))
    sublayer.forward = forward


def _on_local_parameters(sublayer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of (parameters, arguments): plain tensors, for compiled code fails on DTensors."""

    # Found once: FSDP2 puts other parameters in these places, and the host has little time.
    places = [
        (f"{prefix}.{name}" if prefix else name, module._parameters, name)
        for prefix, module in sublayer.named_modules()
        for name in module._parameters
    ]

    def run(*args: Any) -> Any:
        held = {full: parameters[name] for full, parameters, name in places}
        return forward({name: local(each) for name, each in held.items() if each is not None}, args)

    return run


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in KEPT or operation.name() == KEPT_NAME
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
