"""Figures of H200s that no record has: declared, or measured by hand (`benchmarks/machines.py`)."""

from __future__ import annotations

from ladder.config import model_config
from ladder.costs import BF16
from ladder.perf.machine import DECLARED as DEFAULTS
from ladder.perf.machine import STREAMS_TOGETHER, Curve, Value

POWER = (
    "measured by hand: products of 16384 rows, for a second, {}; "
    "2026-11-27-power-h200x4.txt (docs/predict-model.md)"
)
BOOST = Value(
    20.0,
    "fitted: prompts of 2 to 32 x 1024 tokens of half-8b (two H200s) and quarter-8b (one), the "
    "best of 10, 15, 20 and 30; 2026-11-30-formats-half-8b-h200x2.jsonl, "
    "2026-11-29-half-8b-ahead-h200x2.jsonl, 2026-11-28-half-8b-h200x2.jsonl, "
    "2026-11-30-formats-quarter-8b-h200.jsonl",
)
FOUR_BY_HAND = {
    "copies_to_all": Value(
        0.79,
        "measured by hand: the link of `ladder bench ops` on 4x H200, the better of NCCL and "
        "copies, all ranks to all at once, 301 GB/s, the median of 19 runs of 2026-11-27 and 28 "
        "(290 to 366); of 383 GB/s of copies of 64 MiB to one peer, 2026-11-27-machine-h200x4.json",
    ),
    "power_exponent": Value(
        0.53,
        POWER.format(
            "with pauses asleep for 11 to 21 % of the time, if sleep takes 0.17 of their power; "
            "least squares of three"
        ),
    ),
    "idle_power": Value(
        0.41,
        POWER.format("with pauses in which copies run, for 8 to 29 % of the time; mean of four"),
    ),
    "product_beside_copies": Value(
        0.77,
        POWER.format(
            "beside exchanges one after the other: what they lose for each, but for its landing "
            "alone, over its copies' time; mean of 32, 128 and 512 MiB (0.6, 0.89 and 0.81)"
        ),
    ),
}
ATTENTION_RATE = (
    "declared: {} of FlashAttention-3 as published for an H100, causal, heads of 128: 400, 500, "
    "560, 600 TFLOP/s at 1k, 2k, 4k, 8k tokens; cuDNN in a trace of half-8b at 1k: 372"
)
BESIDE_NCCL = (
    "{}: in traces of training steps at TP 4 NCCL takes 1.3 times as long beside products "
    "(2026-11-21-train-8b-again-h200x4.jsonl){}"
)
FITTED_BY_HAND = {
    "streams_together": Value(
        DEFAULTS["streams_together"],
        "fitted: steps of ladder and parallel on one and two H200s in bfloat16 and fp8, least "
        "squares; 2026-11-28-two-streams-h200.txt (8 of one H200), "
        "2026-11-28-chains-quarter-8b-h200.jsonl, 2026-11-28-half-8b-h200x2.jsonl, "
        "2026-11-28-fp8-half-8b-h200x2.jsonl, 2026-11-28-2b-class-h200x2.jsonl",
    ),
    "whole_row_us": Value(
        DEFAULTS["whole_row_us"],
        "fitted: decode steps of 4, 16 and 64 sequences, half-8b, standard, weights in fp8, TP 2, "
        "least squares; 2026-11-28-fp8-half-8b-h200x2.jsonl",
    ),
    "fp8_power": Value(
        DEFAULTS["fp8_power"],
        "fitted: prompts of 4, 16 and 64 x 1024 tokens, llama-3-8b, none, weights in fp8, TP 4, "
        "least squares; 2026-11-27-fp8-again-h200x4.jsonl, 2026-11-28-fp8-halves-h200x4.jsonl",
    ),
}
LADDERS = "fitted: what a ladder's steps of {} ask for, their mean; {}"
PAIR, SINGLE, WHOLE = "half-8b (two H200s)", "quarter-8b (one)", "llama-3-8b (four)"
OF_TWO = "2026-11-30-formats-half-8b-h200x2.jsonl"
OF_ONE = "2026-11-30-formats-quarter-8b-h200.jsonl"
OF_TODAY = "2026-11-30-today-quarter-8b-h200.jsonl"
QKV = "2026-11-30-qkv-quarter-8b-h200.jsonl"
IN_BLOCKS = "2026-11-30-block-pieces-quarter-8b-h200.jsonl"
IN_INT8 = "2026-11-30-int8-pieces-quarter-8b-h200.jsonl"
OF_FOUR = "2026-11-29-2b-class-cuts-h200x4.jsonl"
FP8_OF_FOUR = "2026-11-30-fp8-h200x4.jsonl"
MORE_OF_FOUR = "2026-11-30-eight-bits-h200x4.jsonl"
ASKED = {
    "bf16": (
        f"{PAIR}, {SINGLE} and, of one sequence, a 2b-class (four)",
        f"{OF_TWO}, {OF_ONE}, {OF_FOUR}",
    ),
    "fp8": (
        f"{PAIR}, of 4 and more {SINGLE}, of 2 and 16 {WHOLE}; of 64 that of {PAIR} with the cuts "
        f"before",
        f"{OF_TWO}, {QKV}, {OF_TODAY}, {FP8_OF_FOUR}, 2026-11-29-half-8b-ahead-h200x2.jsonl",
    ),
    "fp8-block": (
        f"{SINGLE}, {WHOLE} and, of one sequence, {PAIR}",
        f"{IN_BLOCKS}, {MORE_OF_FOUR}, {OF_TWO}",
    ),
    "int8": (f"{SINGLE} and {WHOLE}", f"{IN_INT8}, {MORE_OF_FOUR}"),
}
BOTH_STREAMS = tuple(
    Curve(
        "streams together", {"weights": weights}, points,
        LADDERS.format(*ASKED[weights]),
    )
    for weights, points in STREAMS_TOGETHER.items()
)  # fmt: skip
# By weights: points, and from where; with the kernels just before today's.
ASKED_THEN = (
    "fitted: what a ladder's steps of half-8b (two H200s) and quarter-8b (one) ask for, their "
    "mean; 2026-11-29-half-8b-ahead-h200x2.jsonl, 2026-11-29-quarter-8b-ahead-h200.jsonl"
)
STREAMS_THEN = {
    "bf16": (((1.0, 1.21), (4.0, 1.31), (16.0, 1.32), (32.0, 1.23), (64.0, 1.18)), ASKED_THEN),
    "fp8": (((1.0, 1.42), (4.0, 1.25), (16.0, 1.21), (32.0, 1.39), (64.0, 1.27)), ASKED_THEN),
    "fp8-block": (((1.0, 1.4), (4.0, 1.2)), "declared: nearly as in fp8"),
    "int8": (((1.0, 1.4), (4.0, 1.2)), "declared: nearly as in fp8"),
}
BOTH_STREAMS_THEN = tuple(
    Curve("streams together", {"weights": weights}, points, text)
    for weights, (points, text) in STREAMS_THEN.items()
)
DECLARED = {
    "boost_ms": Value(
        DEFAULTS["boost_ms"],
        "declared: between what batches 4 and 16 of llama-3-8b, none, TP 4 ask for, whose prefill "
        "is off by +1 and -3 % with it; 2026-11-21-figures-h200x4.jsonl",
    ),
    "idle_power": Value(
        0.64,
        "declared: half-8b, ladder and standard, batch 64, in traces of the engine of that time; "
        "2026-11-21-profile-half-8b-h200x2.txt",
    ),
    "power_exponent": Value(
        DEFAULTS["power_exponent"], "declared: power goes with the cube of the clock"
    ),
    "prompt_attention_tflop_s": Value(
        DEFAULTS["prompt_attention_tflop_s"], ATTENTION_RATE.format("the rate")
    ),
    "prompt_attention_half": Value(
        DEFAULTS["prompt_attention_half"], ATTENTION_RATE.format("the shape of the curve")
    ),
}
TOGETHER = {
    "nccl_beside_product": Value(
        DEFAULTS["nccl_beside_product"], BESIDE_NCCL.format("declared", "")
    ),
    "product_beside_nccl": Value(
        DEFAULTS["product_beside_nccl"],
        "measured by hand: layers of products on 4x H200 (torch 2.11, 2026-11-20) lose 0.40 to "
        "0.62 of the time of NCCL's all-reduces beside them, five shapes, 0.48 on average; "
        "1 - 0.48 x nccl_beside_product",
    ),
}
COPIES = {
    2: Value(
        0.87,
        "declared: in the trace of half-8b, ladder, batch 64, products take 3.1 % longer than in "
        "standard's, and copies run for 23 % of the time; 2026-11-21-profile-half-8b-h200x2.txt",
    ),
    4: Value(
        DEFAULTS["product_beside_copies"],
        "measured by hand: a product of 8192 rows takes 3650 us for 3533 while 409 us of copies "
        "run beside it on 4x H200 (torch 2.11, 2026-11-22), which is 0.71; rounded up",
    ),
}
PEERS = Curve(
    "peer copy",
    {},
    tuple((float(size), round(2 + size / 380e3, 2)) for size in (2**20, 2**24, 2**28)),
    "measured by hand: copy engines of 4x H200, all at once, read 369 GB/s and write 390 GB/s "
    "(torch 2.11, 2026-11-20); and 2 us for each copy, declared",
)
TRACES = "measured by hand: in the traces of half-8b, {}; 2026-11-21-profile-half-8b-h200x2.txt"
TURNS = {
    "barrier_us": Value(
        DEFAULTS["barrier_us"], TRACES.format("standard, batches 4 and 16, a barrier's kernel")
    ),
    "copy_turn_us": Value(
        DEFAULTS["copy_turn_us"],
        TRACES.format(
            "batch 4, the GPU idles 22.1 us longer for an exchange of standard's than for none's "
            "norm, of which 4.6 are 2 barriers', as other kernels', and 7.6 gaps of copies and "
            "landings; the rest, by 2"
        ),
    ),
}
NOTES = "benchmarks/results/README.md, `Block shapes of the decode kernels`"
# Microseconds of two products of one row at TP 4: QKV with the output projection, gate and up with
# down.
PAIRS = {"llama-3-8b": (6.5, 21.9), "llama-3-70b": (19.1, 78.1), "2b-class": (3.9, 8.3)}
# Layers of an 8B and of a 1B (linear layers and norms, no attention) as one graph on 4x H200, torch
# 2.11, 2026-11-20, microseconds a layer: no communication; the same as a ladder, whose two landings
# run under products; standard, whose two blocking pushes are in the products.
SKETCH = (
    "measured by hand: layers of products and norms on 4x H200 (torch 2.11, 2026-11-20) take 38.8 "
    "us (8B), 113.7 (70B), 18.1 (1B) without communication, {}"
)
LANDINGS = {2048: (18.1 - 16.4) / 2, 4096: (38.8 - 36.0) / 2}
WITH_PUSHES = (
    "and 41.8, 119.8, 21.1 with two pushes by products: 1.02 us each and 3.5 % of the time between "
    "them, least squares; "
)
PUSHES = {
    name: Value(DEFAULTS[name], text)
    for name, text in {
        "push_kernel_us": SKETCH.format(
            f"{WITH_PUSHES}an all-reduce of 8 KiB by push takes 2.72",
        ),
        "rank_spread": SKETCH.format(
            f"{WITH_PUSHES}of the slowest of four ranks, 1.05 standard deviations",
        ),
        "row_beside_nccl": (
            "measured by hand: as a ladder with NCCL on a stream of its own, a layer of products "
            "and norms takes 53.9 us for 44.4 (8B) and 129.7 for 123.2 (70B) on 4x H200 (torch "
            "2.11, 2026-11-20), with torch's one-shot 45.2 and 124.6: 0.74 and 0.84 while NCCL "
            "runs, 17 us"
        ),
    }.items()
}
FOUR = {4: 40.2, 16: 40.2, 32: 42.3, 64: 39.3}  # rows: us of the four products of an 8B's layer
COPY = 4.2  # TB/s read and written
ATTENTION = {2: 5.7, 128: 22.6}  # KV heads of all sequences: us over 1100 keys


def weights(model: str, tp: int) -> tuple[float, float]:
    """Mean bytes of a weight matrix in each pair of products."""
    shape = model_config(model)
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    attention = BF16 * shape.hidden_size * heads / tp / 2
    return attention, BF16 * 3 * shape.hidden_size * shape.intermediate_size / tp / 2


def kernels() -> list[Curve]:
    """Products and attention of a decode step on one GPU."""
    points = []
    for model, times in PAIRS.items():
        for size, us in zip(weights(model, 4), times, strict=True):
            points.append((size, us / 2))
    text = f"measured: half of the time of two products in a chain, by their mean bytes; {NOTES}"
    found = [Curve("product", {"rows": 1}, tuple(sorted(points)), text)]
    mean = sum(weights("llama-3-8b", 4)) / 2
    text = f"measured: a fourth of the four products of an 8B's layer at TP 4; {NOTES}"
    for rows, us in FOUR.items():
        found.append(Curve("product", {"rows": rows}, ((mean, us / 4),), text))
    text = SKETCH.format("36.0 (8B) and 16.4 (1B) if their two landings run under products")
    for hidden, us in LANDINGS.items():  # more rows also take the time of their bytes: 4 tensors
        more = 63 * 4 * BF16 * hidden / (1e6 * COPY)
        points = ((1, round(us, 3)), (64, round(us + more, 3)))
        found.append(Curve("landing", {"hidden": hidden}, points, text))
    text = f"measured: 4 query heads for each KV head, of 128; {NOTES}"
    return [*found, Curve("attention", {"keys": 1100}, tuple(sorted(ATTENTION.items())), text)]
