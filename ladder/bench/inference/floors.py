"""What the hardware could do at best: bytes and FLOPs of a point, measured bandwidth and rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from ladder.bench.inference.points import InferencePoint
from ladder.models.config import ModelConfig

COPY_BYTES = 2**31
GEMM = 8192  # rows, columns and depth of the matmul whose rate is the FLOPs' floor
REPEATS = 7
BF16 = 2  # bytes
WORKSPACES = 3 * 2**30  # NCCL's buffers, cuBLAS' workspaces, CUDA's own, captured graphs


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
    """Median over REPEATS; the first also warms up."""
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def layer_parameters(config: ModelConfig) -> int:
    """Of one layer's matrices."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * heads
    return attention + 3 * config.hidden_size * config.intermediate_size


def local_kv_heads(config: ModelConfig, tp: int) -> float:
    """KV heads on each process (replicated where tp exceeds them)."""
    return max(1, config.num_kv_heads / tp)


def decode_bytes(config: ModelConfig, point: InferencePoint) -> float:
    """Bytes that a rank must read for one decode step, halfway through the new tokens (bf16)."""
    context = point.prompt + point.new_tokens / 2
    heads = local_kv_heads(config, point.tp)
    cache = 2 * heads * config.head_dim * context * point.batch
    vocabulary = config.vocab_size * config.hidden_size / point.tp
    return BF16 * (config.num_layers * (layer_parameters(config) / point.tp + cache) + vocabulary)


def prefill_flops(config: ModelConfig, point: InferencePoint) -> float:
    """FLOPs of a rank to read the prompts: matmuls, causal attention, one place's logits each.

    Of the last layer the cache wants all keys and values; all else is wanted of one place alone.
    """
    batch, tokens, whole = point.batch, point.batch * point.prompt, config.num_layers - 1
    layer, size = layer_parameters(config), config.num_heads * config.head_dim
    kept = 2 * config.hidden_size * config.num_kv_heads * config.head_dim
    matmuls = 2 * ((whole * layer + kept) * tokens + (layer - kept) * batch)
    # two products of [P, head_dim] x [head_dim, P], the lower half of them; of one place its row
    attention = whole * 2 * size * tokens * point.prompt + 4 * size * batch * point.prompt
    head = 2 * config.vocab_size * config.hidden_size * batch
    return (matmuls + attention + head) / point.tp


def prefill_floor_s(config: ModelConfig, point: InferencePoint, speed: float, rate: float) -> float:
    """Seconds: FLOPs over `rate`, or reading the weights once at `speed`, whichever is longer."""
    weights = BF16 * config.num_layers * layer_parameters(config) / point.tp
    return max(prefill_flops(config, point) / rate, weights / speed)


def estimated_bytes(config: ModelConfig, point: InferencePoint) -> float:
    """Memory that a point takes on each process, estimated on the safe side.

    Weights, the largest matrix whole (it is made whole and cut), the cache, the activations of a
    prefill, and workspaces.
    """
    size, tp = config.hidden_size, point.tp
    held = max(1, (config.tp_degree or tp) // tp)  # virtual ranks
    copies = 1 if config.tie_embeddings else 2
    vocabulary = copies * config.vocab_size * size
    weights = (config.num_layers * layer_parameters(config) + vocabulary) / tp
    largest = max(config.vocab_size * size, size * config.intermediate_size)
    length = point.prompt + point.new_tokens + 256  # the engine rounds up
    heads = held * max(1, config.num_kv_heads / (tp * held))
    cache = 2 * config.num_layers * heads * config.head_dim * length * point.batch
    tokens = point.batch * point.prompt
    inner = (4 * config.intermediate_size + 6 * config.num_heads * config.head_dim) / tp
    activations = tokens * (8 * size * held + inner)
    logits = 6 * point.batch * config.vocab_size
    return BF16 * (weights + largest + cache + activations + logits) + WORKSPACES
