"""The least time that the hardware allows: measured bandwidth and rate of matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from ladder.costs import layer_weight_bytes, prefill_flops
from ladder.models.config import ModelConfig

COPY_BYTES = 2**31
GEMM = 8192  # rows, columns and depth of the matmul whose rate is the FLOPs' floor
REPEATS = 7


def bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy on the device, read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def matrix_rate(device: torch.device) -> float:
    """FLOPs per second of a large bf16 matmul, of random numbers, by cuBLAS."""
    a, b = torch.randn((2, GEMM, GEMM), dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return 2 * GEMM**3 / _seconds(lambda: torch.mm(a, b, out=out))


def _seconds(work: Callable[[], object]) -> float:
    """The median time of `work` over REPEATS runs, of which the first also warms up."""
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def prefill_floor_s(
    config: ModelConfig, tp: int, batch: int, prompt: int, speed: float, rate: float,
    weights: str = "bf16",
) -> float:  # fmt: skip
    """Seconds: FLOPs over `rate`, or reading the weights once at `speed`, whichever is longer.

    It is no floor for products in fp8 if `rate` is that of another type, as from `matrix_rate`.
    """
    flops = prefill_flops(config, tp, batch, prompt)
    return max(flops / rate, layer_weight_bytes(config, tp, weights) / speed)
