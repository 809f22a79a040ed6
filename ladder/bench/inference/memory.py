"""The memory that a point of `ladder bench inference` takes on each GPU. Without torch, since
`ladder predict` asks, too, before it prints a command.

A point takes the most at one of three times: while its model is made, while the plain modules
compute its reference in float32, and while its engine is checked and timed.
"""

from __future__ import annotations

from ladder.costs import (
    BF16,
    FP32,
    GRAPHED_PROMPT_TOKENS,
    WORKSPACES,
    cache_bytes,
    prefill_flops,
)
from ladder.infer.memory import capacity, held_ranks, prompt_bytes, prompt_width, weight_bytes
from ladder.infer.refusals import shape_refusals
from ladder.models.config import ModelConfig
from ladder.parallel.choose import ROUNDING

STEPS = 4  # the check's decode steps after the prompt
FLOAT32_FLOPS = 2e14  # most of each rank's reference: some seconds without tensor cores
# Bytes of each attention score in float32, for which torch's fused kernels do not support heads
# that share keys: scores, softmax, softmax without rows that see nothing, and a mask of these rows.
SCORE = 3 * FP32 + 1
LOGITS = 6  # tensors of all logits in float32 that the reference and the check hold at once


def sequences(config: ModelConfig, tp: int, batch: int, prompt: int) -> int:
    """The number of distinct sequences of the reference, limited by FLOAT32_FLOPS."""
    each = prefill_flops(config, tp, 1, prompt)
    return max(1, min(batch, int(FLOAT32_FLOPS / each)))


def point_bytes(
    config: ModelConfig, tp: int, batch: int, prompt: int, new_tokens: int, reducer: str,
    weights: str = "bf16", cache: str = "bf16", gpu: str = "",
) -> float:  # fmt: skip
    """The bytes of a point on each process. gpu: the GPU's name, if prompts may need slots."""
    count, steps = sequences(config, tp, batch, prompt), min(STEPS, new_tokens)
    largest = config.hidden_size * max(config.vocab_size, config.intermediate_size)
    making = BF16 * largest * (1 + 1 / tp)  # a matrix is drawn whole, and then sliced
    logits = FP32 * (steps + 1) * count * config.vocab_size  # of the reference
    kept = cache_bytes(config, tp, count * (prompt + steps), cache)
    passing = FP32 * largest / tp + _plain_pass(config, tp, count, prompt, FP32)
    exact = kept * (FP32 / BF16 if cache == "bf16" else 1) + max(passing, LOGITS * logits)

    width = prompt_width(config, prompt, prompt + new_tokens)
    slots = gpu if reducer in ("push", "fused") and weights == "bf16" else ""
    rounds = tp > 1 and reducer in ROUNDING
    prefill = prompt_bytes(config, tp, batch, width, slots, rounds, reducer == "fused")
    if shape_refusals(config):  # the engine runs the plain modules
        prefill = max(prefill, _plain_pass(config, tp, batch, width, BF16))
    check = LOGITS * FP32 * batch * config.vocab_size
    # A graph keeps its memory, and the check comes on top; without one they follow each other.
    graphed = batch * width <= GRAPHED_PROMPT_TOKENS
    engine = cache_bytes(config, tp, batch * capacity(config, prompt + new_tokens), cache)
    engine += logits + (prefill + check if graphed else max(prefill, check))
    return weight_bytes(config, tp, weights) + max(making, exact, engine) + WORKSPACES


def _plain_pass(config: ModelConfig, tp: int, batch: int, prompt: int, itemsize: int) -> float:
    """Bytes of the plain modules' pass over prompts, besides weights and cache: the residual, the
    normed input, the partials, and the largest of the tensors inside a sublayer."""
    held = held_ranks(config, tp)
    widths = config.hidden_size * held * (4 + 2 * config.plan.longest_flight)
    mlp = 4 * config.intermediate_size / tp  # gate, up, silu(gate), and their product
    # Queries, rotated, scaled, and the result; keys and values, repeated for each of their queries.
    attention = 8 * config.num_heads * config.head_dim / tp
    heads = config.num_heads // (tp * held), max(1, config.num_kv_heads // (tp * held))
    shared = itemsize == FP32 and heads[0] != heads[1]
    scores = shared * SCORE * prompt * config.num_heads / tp
    return batch * prompt * (itemsize * widths + max(itemsize * mlp, itemsize * attention + scores))
