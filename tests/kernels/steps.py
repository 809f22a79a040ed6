"""Prompts and decode steps of engines on a stand-in for a GPU (tests.kernels.standin).

What an engine launches for a Llama-3 8B's shape, of a few layers: the shapes and options of every
kernel are those of real use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ladder.bench.inference.points import load_shape
from ladder.comm import symmetric, transports
from ladder.infer import halves
from ladder.infer.fused import fuse
from ladder.infer.sampling import Sampling
from ladder.infer.session import Session
from ladder.kernels.attention import decode_attention
from ladder.kernels.choice import GreedyChoice
from ladder.kernels.gemm import Tiling, gemm
from ladder.kernels.limits import MAX_ADDENDS
from ladder.kernels.norm import add_rms_norm
from ladder.models import Transformer, resolve_plan
from ladder.models.presets import PlanSpec
from ladder.models.quantised import declare_quantised
from ladder.models.storage import QUANTISED
from ladder.parallel import reducers
from ladder.parallel.sharding import shard_model
from tests.kernels.standin import Gpu

LAYERS = 4
FP16, FP32 = torch.float16, torch.float32


@dataclass(frozen=True)
class Step:
    """A batch of one model on `world` GPUs.

    weights: of 8 bits. qwen: with biases and norms of queries and keys. context: positions of the
    cache. prompt: the tokens of a prefill before the step; 0: none.
    """

    plan: PlanSpec
    world: int
    batch: int
    dtype: torch.dtype = torch.bfloat16
    weights: str | None = None
    qwen: bool = False
    context: int = 2048
    prompt: int = 0


# To machine code, without spilled registers.
HOT = (Step("ladder", 4, 1, prompt=512), Step("standard", 2, 16))
# By the front end alone; in the slow test to machine code.
OTHERS = (
    Step("ladder", 1, 1, prompt=48, qwen=True),
    Step("ladder", 2, 64, prompt=256),
    Step("ladder", 4, 1, context=8192),
    Step("ladder", 8, 1, prompt=64),
    Step("standard", 4, 1),
    Step("standard", 1, 64),
    Step("standard", 4, 64),  # programs share tiles of QKV
    Step("parallel", 1, 1),
    Step("parallel", 4, 1),
    Step("desync-4x", 4, 2, qwen=True),
    Step("accumulate-2x-lag1", 2, 1),
    Step("dtp-2", 4, 1),
    *(
        Step("ladder", world, batch, weights=kind)
        for kind in QUANTISED
        for world, batch in ((4, 1), (2, 16))
    ),
    # Their landings make pieces of a row in turns.
    *(Step("ladder", 8, 2, weights=kind) for kind in ("fp8", "int8")),
    *(Step("ladder", 2, 64, weights=kind) for kind in ("fp8", "fp8-block")),
    *(Step("ladder", 2, batch, dtype) for dtype in (FP16, FP32) for batch in (1, 16)),
)
# Those of the slow test alone, as HOT.
MORE = (
    *(
        Step(plan, world, batch)
        for plan in ("ladder", "standard")
        for world in (1, 2, 4)
        for batch in (1, 2, 16, 64)
    ),
    *(Step("ladder", 2, 1, weights=kind) for kind in QUANTISED),
    *(Step("ladder", 2, 32, weights=kind) for kind in QUANTISED),
    Step("ladder", 2, 64, weights="int8"),
    *(Step(plan, 2, 32) for plan in ("ladder", "standard")),
    *(Step("ladder", 8, batch) for batch in (4, 16, 64)),
    *(Step("ladder", world, 16, FP32) for world in (4, 8)),
)


@dataclass(frozen=True)
class Long:
    """Attention of a token of each of `batch` sequences: what one rank has of the heads. e4m3: the
    cache. extras: biases and norms of queries and keys."""

    group: int
    kv_heads: int
    context: int
    e4m3: bool = False
    dtype: torch.dtype = torch.bfloat16
    size: int = 128
    extras: bool = False
    batch: int = 1


# As HOT: 32 splits, 64 and 128, of which one program combines some heads at a time; and one, of
# programs that fill a GPU.
LONG = (
    Long(8, 2, 2048), Long(8, 2, 8192), Long(4, 1, 32768, e4m3=True), Long(4, 2, 2048, batch=64),
    Long(4, 2, 2048, dtype=FP32), Long(4, 2, 2048, dtype=FP32, batch=64),
)  # fmt: skip
LONGER = tuple(
    Long(group, kv, context, e4m3, dtype, size, extras=group > 4 and size == 64)
    for kv, context in ((2, 2048), (2, 8192), (1, 32768))
    for group in (1, 4, 7, 8)
    for e4m3 in (False, True)
    for dtype in (torch.bfloat16, FP16)
    for size in (64, 128)
)


@contextlib.contextmanager
def ranks(world: int, rank: int) -> Iterator[None]:
    """One of `world` ranks, whose peers never answer."""
    with contextlib.ExitStack() as patched:

        def patch(where: Any, **stand_ins: Any) -> None:
            for name, stand_in in stand_ins.items():
                patched.enter_context(mock.patch.object(where, name, stand_in))

        def allocate(shape: Any, dtype: Any, *_: Any, **__: Any) -> symmetric.SymmetricTensor:
            parts = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(world)]
            addresses = torch.empty(world, dtype=torch.int64, device="meta")
            return symmetric.SymmetricTensor(rank, parts, addresses, mock.MagicMock())

        patch(symmetric, allocate=allocate)
        patch(halves, _exponent=lambda bound: 0)  # of weights without values
        patch(reducers, push_refusal=lambda processes: None)
        patch(transports, push_refusal=lambda processes: None)
        patch(
            torch.cuda,
            Stream=mock.MagicMock(),
            Event=mock.MagicMock(),
            current_stream=mock.MagicMock(),
            stream=lambda stream: contextlib.nullcontext(),
        )
        patch(
            torch.distributed,
            get_rank=lambda group=None: rank,
            get_world_size=lambda group=None: world,
            all_reduce=mock.MagicMock(),
        )
        yield


@torch.inference_mode()
def run(step: Step) -> None:
    """A prompt and a decode step, as `Session` runs them, with the choice of a token."""
    rank = step.world - 1
    degree = step.world if resolve_plan(step.plan, LAYERS, step.world).depends_on_tp else None
    changes = {"qkv_bias": step.qwen, "qk_norm": step.qwen, "plan": step.plan, "tp_degree": degree}
    config = replace(load_shape("llama-3-8b", LAYERS), **changes)
    mesh: Any = SimpleNamespace(
        size=lambda: step.world, get_local_rank=lambda: rank, get_group=lambda: None
    )
    with torch.device("meta"), ranks(step.world, rank):
        model = Transformer(config)
        if step.weights is not None:
            declare_quantised(model, step.weights)
        shard_model(model, mesh, device="meta", dtype=step.dtype, reducer="push")
        session = Session(fuse(model), step.batch, step.context, Sampling(), True, False)
        session.greedy = GreedyChoice(step.batch, rank, step.world, None, torch.device("meta"))
        if step.prompt:
            session._prefill(torch.zeros(step.batch, step.prompt, dtype=torch.int64))
        session._step()


def sides() -> None:
    """What no step takes: many addends, and products that TMA cannot read."""
    with torch.device("meta"):
        x, gain = torch.empty(2, 4096), torch.empty(4096)
        add_rms_norm(x, [(x, 1.0)] * MAX_ADDENDS, gain, 1e-5)
        a, b = torch.empty(256, 512, dtype=FP16), torch.empty(512, 513, dtype=FP16)[:, :512]
        gemm(a, b, torch.empty(4, dtype=torch.int32), tiling=Tiling(halves=False))


def attend(case: Long) -> None:
    kv, size, heads = case.kv_heads, case.size, case.group * case.kv_heads
    width = (heads + 2 * kv) * size
    stored = torch.float8_e4m3fn if case.e4m3 else case.dtype
    with torch.device("meta"):
        bias, gains = torch.empty(width, dtype=case.dtype), torch.empty(2, size, dtype=case.dtype)
        exponents = torch.empty(2, case.batch, kv, case.context, dtype=torch.uint8)
        decode_attention(
            torch.empty(case.batch, width, dtype=case.dtype), torch.empty(case.context, size),
            torch.empty(case.batch, dtype=torch.int64),
            *torch.empty(2, case.batch, kv, case.context, size, dtype=stored), heads, size**-0.5,
            torch.empty(case.batch * kv, dtype=torch.int32), bias if case.extras else None,
            (gains[0], gains[1]) if case.extras else None, 1e-5,
            (exponents[0], exponents[1]) if case.e4m3 else None,
        )  # fmt: skip


def run_all(gpu: Gpu, everything: bool) -> None:
    """The launches of hot steps are called so: see `tests.kernels.test_compiled`."""
    steps = [*HOT, *OTHERS, *(MORE if everything else ())]
    for step in steps:
        hot = step not in OTHERS
        gpu.case, gpu.whole = f"{'hot ' if hot else ''}{step}", everything or hot
        run(step)
    for case in (*LONG, *(LONGER if everything else ())):
        gpu.case, gpu.whole = f"hot {case}", True
        attend(case)
    gpu.case = "sides"
    sides()
