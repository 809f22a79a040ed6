"""The memory of an engine's weights and prompts on one GPU, without torch, for predictions.

`ladder.perf.memory` says how near the estimates are to recorded runs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from ladder.costs import (
    BF16,
    CAPACITY_STEP,
    head_bytes,
    layer_weight_bytes,
    process_parameters,
)
from ladder.infer.prompts import padded_width
from ladder.kernels.limits import message_bytes
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.ranks import Ranks
from ladder.parallel.overlap import slot_bytes


def local_parameters(config: ModelConfig, tp: int) -> int:
    """The number of parameters of one of `tp` processes; tied ones count once.

    Counted for the plan `standard`: plans differ only in their norms, of large models by less than
    a thousandth.
    """
    config.check_divides(tp, "--tp")
    if config.has_usual_slots:
        return process_parameters(config, tp)
    plain = replace(config, plan="standard", tp_degree=None)  # type: ignore[arg-type]
    return specified_parameters(plain, tp)


@functools.lru_cache(maxsize=64)
def specified_parameters(config: ModelConfig, tp: int) -> int:
    """The number of parameters of the first of `tp` processes, by their specs: any sublayers."""
    from ladder.models.transformer import meta_model  # late: torch takes a second to import

    ranks = Ranks(tp, 0, 1)
    model = meta_model(config)
    found, seen = 0, set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        places = model.specs[name].slices(parameter.shape, ranks)
        found += math.prod(each.stop - each.start for each in places)
    return found


def held_ranks(config: ModelConfig, tp: int) -> int:
    """The number of the plan's T ranks that one of `tp` processes computes."""
    degree = config.tp_degree or tp
    if degree % tp:
        raise UserError(f"--tp={tp} does not divide tp_degree={degree} of the plan")
    return degree // tp


def weight_bytes(config: ModelConfig, tp: int, weights: str) -> float:
    """Bytes of the parameters of one process. weights: how matrices are stored (`ladder.costs`).

    In 8 bits a head that is tied to the embedding becomes a matrix of its own.
    """
    whole = BF16 * local_parameters(config, tp)
    if weights == "bf16":
        return whole
    head = 0.0 if config.tie_embeddings else head_bytes(config, tp)
    kept = whole - layer_weight_bytes(config, tp) - head
    return kept + layer_weight_bytes(config, tp, weights) + head_bytes(config, tp, weights)


def capacity(config: ModelConfig, length: int) -> int:
    """The number of cache positions of a session for `length` tokens. Raises UserError if they are
    more than the model's context."""
    if length > config.max_seq_len:
        raise UserError(
            f"{length} tokens are above the model's context of {config.max_seq_len}; lower "
            f"--context or --prompt"
        )
    return min(math.ceil(length / CAPACITY_STEP) * CAPACITY_STEP, config.max_seq_len)


def prompt_width(config: ModelConfig, prompt: int, length: int) -> int:
    """The padded width of prompts in a session for `length` tokens (`Session.prompt_width`)."""
    return min(padded_width(prompt), capacity(config, length))


def prompt_bytes(
    config: ModelConfig, tp: int, batch: int, width: int, gpu: str = "", rounds: bool = False,
    asked: bool = False,
) -> float:  # fmt: skip
    """Bytes of a pass over prompts of `width` tokens, besides weights and cache.

    gpu: the GPU's name, if fused operators, which have slots, may run prompts; else "". rounds:
    whether sums are in 8 bits. asked: whether the user asked for reducer=fused.
    """
    tokens = batch * width
    return (
        tokens * prompt_activations(config, tp)
        + 6 * batch * config.vocab_size / tp
        + (slot_bytes(config, gpu, tp, tokens, asked) if gpu else 0)
        + rounds * tokens * rounded_bytes(config.hidden_size)
    )


def prompt_activations(config: ModelConfig, tp: int) -> float:
    """Bytes for each token of a prompt: its residual, normed input and partial, the partials in
    flight with their sums, and the widest of a sublayer's own tensors."""
    held = held_ranks(config, tp)
    widths = config.hidden_size * held * (3 + 2 * config.plan.longest_flight)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inner = max(3 * config.intermediate_size, heads) / tp
    return BF16 * (widths + inner)


def rounded_bytes(size: int) -> int:
    """Bytes of each token in a sum in 8 bits (`ladder.parallel.eight_bits`): its message, two more
    for the ranks' messages, and the sum."""
    return 3 * message_bytes(size) + BF16 * size
