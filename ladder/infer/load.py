"""Loading a model folder for inference on this process's device and ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from tokenizers import Tokenizer
from torch.distributed.device_mesh import DeviceMesh

from ladder.checkpoint import (
    WEIGHTS,
    TensorReader,
    load_model,
    newest,
    quantised_as,
    read_config,
    refuse_damage,
)
from ladder.config import DTYPES
from ladder.data.tokenizer import FILE, SENTENCEPIECE, load_tokenizer
from ladder.kernels.eight_bits import product_refusal
from ladder.models.errors import UserError, unknown
from ladder.models.layers import local
from ladder.models.quantised import (
    matrices,
    refuse_rounding,
    round_activations,
)
from ladder.models.storage import FP8_CAPABILITY, QUANTISED
from ladder.models.transformer import Transformer
from ladder.parallel import launch
from ladder.parallel.choose import INFERENCE, check_base, inference_base
from ladder.parallel.mesh import make_mesh
from ladder.parallel.prefill import FusedPrompts

ACTIVATIONS = ("auto", "fp8")
Result = TypeVar("Result")


def load_model_tokenizer(folder: Path) -> Tokenizer:
    """`load_tokenizer` of a model's folder, for which no other tokenizer will do."""
    if not any((folder / name).is_file() for name in (FILE, SENTENCEPIECE)):
        raise UserError(f"no tokenizer at {folder / FILE}; copy the model's own {FILE} there")
    return load_tokenizer(folder)


def check_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise UserError if the folder's tokenizer makes tokens that its model does not have.

    Added tokens do not count: some folders have a padding token beyond the vocabulary, which no
    text contains.
    """
    size = read_config(folder, quantised=True).vocab_size
    largest = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
    if largest >= size:
        raise UserError(
            f"{folder} has a tokenizer with a token of id {largest}, outside vocab_size={size}; "
            f"copy the model's own {FILE} there"
        )


def as_dtype(name: str) -> torch.dtype | None:
    """The dtype that `--dtype` names; None for `auto`, as stored."""
    if name != "auto" and name not in DTYPES:
        raise UserError(f"--dtype={name} must be auto, {' or '.join(DTYPES)}")
    return None if name == "auto" else getattr(torch, name)


def check_tp(tp: int) -> None:
    """Raise UserError unless tp is 0 or the number of processes."""
    processes = launch.world_size()
    if tp < 0:
        raise UserError(f"--tp={tp} must be 0 (all ranks) or more")
    if tp not in (0, processes):
        some = "1 process" if processes == 1 else f"{processes} processes"
        raise UserError(
            f"--tp={tp} with {some}: start {tp}, with --nproc {tp}, or a script of your own with "
            f"torchrun --nproc-per-node {tp}"
        )


def dtype_of(weights: str, dtype: str) -> str:
    """The `--dtype` that `--weights` implies. Raises UserError if the two disagree."""
    if weights not in ("auto", "bf16", *QUANTISED):
        raise unknown("type of --weights", weights, ("auto", "bf16", *QUANTISED))
    if weights != "bf16":
        return dtype
    if dtype not in ("auto", "bfloat16"):
        raise UserError(f"--weights=bf16 with --dtype={dtype}: leave one of the two out")
    return "bfloat16"


def kinds_of(
    weights: str, folder: Path, device: torch.device, activations: str
) -> tuple[str | None, str | None]:
    """The 8-bit type to convert a folder's matrices to, and the one that they are in; each or None.

    Raises UserError if the folder holds another type than `weights`, if the device cannot convert
    the type, and if the type has no products with `activations`.
    """
    stored = quantised_as(folder)
    if stored and weights not in ("auto", stored):
        raise UserError(
            f"--weights={weights}: {folder} holds {stored} weights; leave --weights out, or give "
            f"the folder that it was converted from"
        )
    kind = weights if weights in QUANTISED else None
    refuse_device(stored or kind, device)
    if activations == "fp8":
        refuse_rounding(stored or kind)
    return None if stored else kind, stored


def refuse_device(
    kind: str | None, device: torch.device, what: str = "weights", remedy: str = "--weights int8"
) -> None:
    """Raise UserError if a GPU cannot convert this 8-bit type. what: the tensors stored in it."""
    if kind in ("fp8", "fp8-block") and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < FP8_CAPABILITY:
            raise UserError(
                f"{kind} {what} need a GPU of compute capability 8.9 or more, and {device} has "
                f"{major}.{minor}: use {remedy}"
            )


def agreed(work: Callable[[], Result]) -> Result:
    """The result of `work`, which every rank runs; a UserError of one rank is raised on all."""
    given: list[Result] = []
    wrong = ""
    try:
        given.append(work())
    except UserError as error:
        wrong = str(error)
    if found := [each for each in launch.gathered(wrong) if each]:
        raise UserError(found[0])
    return given[0]


def load_stored(
    folder: Path, kind: str | None, mesh: DeviceMesh | None, **options: Any
) -> Transformer:
    """`load_model` with matrices stored in `kind`; a UserError is then raised on every rank."""
    load = functools.partial(load_model, folder, mesh, weights=kind, **options)
    return load() if kind is None else agreed(load)


def set_activations(model: Transformer, kind: str) -> None:
    """Set the type of activations in a sharded model's products of prompts.

    kind: a name in ACTIVATIONS. Raises UserError, on every rank, if the model's matrices or device
    have no such products.
    """

    def refuse() -> None:
        round_activations(model)
        dtype = model.runtime.dtype_of(local(model.model.embed_tokens.weight))
        for name, matrix in matrices(model):
            reason = product_refusal(local(matrix.weight), dtype) if matrix.rounds else None
            if reason is not None:
                raise UserError(f"--activations=fp8: {name}: {reason}; leave --activations out")

    check_activations(kind)
    if kind == "fp8":
        agreed(refuse)


def check_activations(kind: str) -> None:
    if kind not in ACTIVATIONS:
        raise unknown("type of --activations", kind, ACTIVATIONS)


def fuse_prompts(model: Transformer) -> None:
    """Let prompts run by fused operators; UserError if the plan or its ranks do not allow it."""
    plan, base = model.config.plan, model.reducer
    check_base("prefill", plan, base.ranks, "fused")
    model.use(replace(model.runtime, pick=FusedPrompts(base, plan)))


def load_for_inference(
    folder: str | Path,
    *,
    tp: int = 0,
    reducer: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    weights: str = "auto",
    activations: str = "auto",
) -> Transformer:
    """Load and shard the model of a run's folder, a checkpoint or a Hugging Face folder.

    tp: the number of processes; 0: all of them. reducer: a name in `INFERENCE`, or `auto` for the
    fastest that can run here. dtype: a name in `DTYPES`, or `auto` for the stored one. weights: the
    type of the matrices, `auto` (that dtype, or the folder's 8-bit type), `bf16`, or a name in
    QUANTISED. activations: the type of inputs in the products of prompts, `auto` (that dtype) or
    `fp8`. Raises UserError for options that cannot be met and for damaged weights. Every rank must
    call it.
    """
    wanted = as_dtype(dtype_of(weights, dtype))
    check_activations(activations)
    if reducer not in ("auto", *INFERENCE):
        raise unknown("reducer", reducer, ("auto", *INFERENCE))
    if reducer == "fused" and activations == "fp8":
        raise UserError(
            "--activations=fp8 with --reducer=fused, whose products take no 8 bits: leave one of "
            "the two out"
        )
    joined = launch.join(device)
    processes = launch.world_size()
    check_tp(tp)
    if processes == 1 and reducer not in ("auto", "async"):
        raise UserError(
            f"--reducer={reducer} with one process, which has nothing to reduce: leave it out, or "
            f"start more processes with --nproc or torchrun"
        )
    mesh = make_mesh(joined, processes)
    found = newest(Path(folder))
    launch.agree({"model": str(found)})
    kind, stored = kinds_of(weights, found, joined, activations)
    if reducer == "fused" and (kind or stored):
        given = f"--weights={kind}" if kind else f"the {stored} weights of {found}"
        raise UserError(
            f"{given} with --reducer=fused, whose products take no 8 bits: use another reducer"
        )
    reader = TensorReader(found, WEIGHTS, quantised=stored is not None)
    refuse_damage(reader, "use another checkpoint of the run")
    model = load_stored(
        found,
        kind,
        None if mesh is None else mesh["tp"],
        device=joined,
        dtype=wanted,
        reducer=inference_base(reducer, processes),
    )
    model.config.refuse_no_comm()
    if reducer == "fused":
        fuse_prompts(model)
    set_activations(model, activations)
    model.eval()
    return model
