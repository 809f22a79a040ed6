"""Which of the recorded results the shipped machine files are made from (`machines.py`)."""

from __future__ import annotations

FILES = (
    "2026-11-21-figures-h200x4.jsonl",
    "2026-11-21-half-8b-h200x2.jsonl",
    "2026-11-21-inference-h200x4.jsonl",
    "2026-11-21-p2p-off-h200x4.jsonl",
    "2026-11-21-quality-latency-h200x4.jsonl",
    "2026-11-21-table1-h200x4.jsonl",
    "2026-11-22-accumulate-h200x2.jsonl",
    "2026-11-22-frame-after-2b-h200x2.jsonl",
    "2026-11-22-frame-after-h200x4.jsonl",
    "2026-11-22-rare-reduces-half-8b-h200x2.jsonl",
    "2026-11-22-table1-h200x2.jsonl",
    "2026-11-22-virtual-ranks-h200x2.jsonl",
    "2026-11-23-quarter-8b-h200.jsonl",
    "2026-11-24-decode-h200.jsonl",
    "2026-11-24-quarter-8b-before-h200.jsonl",
    "2026-11-24-quarter-8b-h200.jsonl",
)
COMM = {2: "2026-11-22-comm-h200x2.jsonl", 4: "2026-11-21-comm-h200x4.jsonl"}
CALIBRATION = (
    "2026-11-21-inference-h200x4.jsonl",
    "2026-11-21-figures-h200x4.jsonl",
    "2026-11-22-frame-before-h200x4.jsonl",
    "2026-11-22-frame-after-h200x4.jsonl",
    "2026-11-21-train-ahead-h200x4.jsonl",
    "2026-11-21-train-8b-again-h200x4.jsonl",
)
# H100s, described as by a user: a whole file of `ladder bench machine`, and records to calibrate
# by.
H100S = {
    1: (
        "2026-11-24-machine-h100x1.json",
        "2026-11-24-inference-h100.jsonl",
        "2026-11-26-fp8-h100.jsonl",
    ),
    2: (
        "2026-11-26-machine-h100x2.json",
        "2026-11-26-inference-h100x2.jsonl",
        "2026-11-26-train-8b-h100x2.jsonl",
    ),
}
# Records of today's kernels on one GPU.
TODAY = (
    "2026-11-24-eight-bits-few-rows-h200.jsonl",
    "2026-11-24-int8-h200.jsonl",
    "2026-11-24-quarter-8b-h200.jsonl",
)
# Four H200s: files of `ladder bench machine`, the parts that are taken from each, and records to
# calibrate by.
FOUR_MEASURED = "2026-11-27-machine-h200x4.json"
FOUR_PARTS = "exchange", "product_beside_direct", "direct_beside_product"
PEERS_MEASURED, PEERS_PARTS = "2026-11-29-machine-peer-h200x4.json", ("peer-copy",)
FOUR_CALIBRATION = (
    "2026-11-27-inference-again-h200x4.jsonl",
    "2026-11-27-fp8-again-h200x4.jsonl",
    "2026-11-27-train-again-h200x4.jsonl",
)
# Today's products and attention, on one GPU; and records to calibrate their steps on four by.
STEPS_MEASURED, STEPS_PARTS = "2026-11-27-machine-steps-h200x1.json", ("product", "attention")
STEPS_CALIBRATION = (
    "2026-11-27-inference-keys-h200x4.jsonl",
    "2026-11-27-inference-keys-64-h200x4.jsonl",
    "2026-11-27-fp8-again-h200x4.jsonl",
)
# Attention over long contexts and over a cache in fp8, with the kernels from commit 48081be on.
LONG_MEASURED, LONG_KEYS = "2026-11-30-machine-attention-h200x1.json", 4096
# Today's products, attention and landings, on one GPU, and records to calibrate their steps on
# four by.
CUTS_MEASURED = "2026-11-30-machine-products-h200x1.json"
CUTS_PARTS = "product", "attention", "landing"
CUTS_CALIBRATION = (
    "2026-11-30-inference-h200x4.jsonl",
    "2026-11-30-fp8-h200x4.jsonl",
    "2026-11-30-eight-bits-h200x4.jsonl",
)
# Products in int8 and fp8-block by pieces, on one GPU.
INT8_MEASURED = "2026-11-30-machine-int8-h200x1.json"
BLOCK_MEASURED = "2026-11-30-machine-block-h200x1.json"
# Records to calibrate prompts on four by, of several hosts, and training.
PROMPTS_CALIBRATION = (
    "2026-11-27-inference-again-h200x4.jsonl",
    "2026-11-28-inference-apart-h200x4.jsonl",
    "2026-11-29-inference-h200x4.jsonl",
    "2026-11-29-inference-cuts-h200x4.jsonl",
)
TRAINING_CALIBRATION = ("2026-11-27-train-again-h200x4.jsonl",)
# Records to calibrate steps with weights in fp8 by, whose products O and down take float16 inputs.
HALVES_CALIBRATION = (*STEPS_CALIBRATION[:2], "2026-11-28-fp8-halves-h200x4.jsonl")

# Files of `ladder bench machine` in results/, and the parts that are taken from each, named as for
# --only. Rates are not taken: a file has the rate of one run, the records the median of many.
# The other parts are not taken, for these reasons:
# - prompt-attention: it has heads of 128 values, and half of the recorded models have heads of 64.
# - matrix: it predicts prompts and training better, but operators worse: their chunks then have the
#   rate of a whole product of as few rows, with its waves of tiles.
# - all-gather, reduce-scatter: by these curves 96 of 64 MiB take 16 ms, as in `ladder bench ops`.
#   But a recorded training step of TP 2 with SP takes only 6 ms more than without them. Half of an
#   all-reduce stands for each.
# - beside: an all-reduce that begins in the middle of a product waits for its end, so there was one
#   for each product: 397 and 386 us, against 144 and 347 us alone. In a model it begins where a
#   product ends. The curves of decode steps lack the time of stream changes, which row_beside_nccl
#   includes. Copies slow products below the power limit by 3 %, and more where the copies' power is
#   missing, as in the trace that COPIES is from.
MEASURED: dict[str, tuple[str, ...]] = {
    "2026-11-23-machine-h200x2.json": (
        "values",
        "all-reduce",
        "peer-copy",
        "exchange",
        "copy",
    ),
    "2026-11-24-machine-h200x1.json": ("product", "landing"),
    "2026-11-24-attention-h200x1.json": ("attention",),
}
# Values of the taken parts that are left out, and why.
LEFT_OUT = {
    "2026-11-23-machine-h200x2.json": {
        "launch_us": "stands for changes of streams and for room on a multiprocessor, too",
        "host_launch_us": "that of one host; hosts of the records differ",
    },
}
