"""Made up: records of `ladder bench inference`; times and implementations of `ladder bench ops`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

from ladder.bench.inference.points import InferencePoint, counterpart
from ladder.bench.ops.derive import Timed
from ladder.ops import choice, registry
from ladder.ops.registry import OPERATORS

POINT = InferencePoint("tiny", "standard", "push", 4, 2, 8, 4, 4)
OP = "matmul_all_reduce"


def record(
    point: InferencePoint, prefill: float = 10.0, decode: float = 2.0, total: float = 100.0
) -> Any:
    bare = counterpart(point, point.reducer)
    return {
        "point": asdict(point),
        "result": {
            "prefill_ms": prefill,
            "prefill_floor_ms": 5.0,
            "decode_ms": decode,
            "decode_p99_ms": 2.5,
            "floor_ms": 1.0,
            "total_ms": total,
            "memory_gib": 1.5,
            "picked": {"8192": "push"},
            "chosen": {"prefill": "sharded, copy (16 tokens)", "decode": "decode (2 sequences)"},
        },
        "check": {},
        "no_comm": None if bare is None else [bare.plan, bare.no_comm],
        "machine": {"gpu": "none"},
    }


def timed(name: str, role: str, us: float, mode: str = "eager", **more: Any) -> Timed:
    return Timed(name, role, mode, [us - 1, us, us + 1], 0.0, **more)


@contextlib.contextmanager
def registered(name: str, run: Any, **about: Any) -> Iterator[None]:
    """Another implementation of OP."""
    more = {name: registry.Implementation(name, run, options=("chunk",), **about)}
    with mock.patch.dict(OPERATORS[OP].implementations, more):
        choice._choose.cache_clear()
        yield
    choice._choose.cache_clear()
