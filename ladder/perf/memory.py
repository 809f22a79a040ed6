"""The memory of one GPU: what inference or training takes, part by part, and whether it fits.

Weights and caches come from `ladder.costs`, but for weights of other sublayers than the usual ones,
whose specs are asked. What the parts leave out is `reserve`: NCCL's buffers, libraries,
fragmentation.

Against `memory_gib` of the records of this code (tests/perf/test_memory.py): training within 1.0 %
(virtual ranks 3.8 %), inference within 1.6 % (small models with 4 graphed prompts up to 14 % too
little: their graphs hold more than one prefill's tensors). Which tensors count was decided by the
records of two GPUs; those of four are held out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, replace

from ladder.bench.training.points import parse_layout
from ladder.costs import (
    BF16,
    CAPACITY_STEP,
    FP32,
    GRAPHED_PROMPT_TOKENS,
    HEADROOM,
    WORKSPACES,
    cache_bytes,
    head_bytes,
    layer_weight_bytes,
    process_parameters,
)
from ladder.kernels.limits import message_bytes
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.ranks import Ranks
from ladder.parallel.overlap import slot_bytes
from ladder.perf.machine import Machine

GIB = 2**30
MOMENTS = 2  # of AdamW, in float32


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU. activations: at the peak. reserve: what no formula knows."""

    weights: float
    cache: float = 0.0
    optimiser: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    reserve: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{k} {v / GIB:.1f}" for k, v in asdict(self).items() if v)
        return f"{self.total / GIB:.1f} GiB ({parts})"


def local_parameters(config: ModelConfig, tp: int) -> int:
    """The parameters of one process of `tp`; tied ones once.

    Those of the plan `standard`: plans differ in their norms alone, by less than a thousandth.
    """
    config.check_divides(tp, "--tp")
    if config.has_usual_slots:
        return process_parameters(config, tp)
    plain = replace(config, plan="standard", tp_degree=None)  # type: ignore[arg-type]
    return specified_parameters(plain, tp)


@functools.lru_cache(maxsize=64)
def specified_parameters(config: ModelConfig, tp: int) -> int:
    """The parameters of the first of `tp` processes by their specs, whatever the sublayers are."""
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
    """The ranks of the plan's T that one of `tp` processes computes."""
    degree = config.tp_degree or tp
    if degree % tp:
        raise UserError(f"--tp={tp} does not divide tp_degree={degree} of the plan")
    return degree // tp


def prompt_activations(config: ModelConfig, tp: int) -> float:
    """Bytes for each token of a prompt: its residual, normed input and partial, the partials in
    flight with their sums, and the widest of a sublayer's own tensors."""
    held = held_ranks(config, tp)
    widths = config.hidden_size * held * (3 + 2 * config.plan.longest_flight)
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inner = max(3 * config.intermediate_size, heads) / tp
    return BF16 * (widths + inner)


def weight_bytes(config: ModelConfig, tp: int, weights: str) -> float:
    """Bytes of the parameters of one process. weights: how matrices are stored, see `ladder.costs`;
    in 8 bits a head that is tied to the embedding is a matrix of its own."""
    whole = BF16 * local_parameters(config, tp)
    if weights == "bf16":
        return whole
    head = 0.0 if config.tie_embeddings else head_bytes(config, tp)
    kept = whole - layer_weight_bytes(config, tp) - head
    return kept + layer_weight_bytes(config, tp, weights) + head_bytes(config, tp, weights)


def inference(
    config: ModelConfig, tp: int, batch: int, prompt: int, length: int, weights: str = "bf16",
    gpu: str = "", rounds: bool = False,
) -> Memory:  # fmt: skip
    """Memory of an engine's session. length: tokens in the cache of each sequence. weights: as
    stored, see `ladder.costs`. gpu: its name, by which prompts may run by fused operators. rounds:
    whether the sums of prompts are in 8 bits."""
    capacity = min(math.ceil(length / CAPACITY_STEP) * CAPACITY_STEP, config.max_seq_len)
    if length > config.max_seq_len:
        raise UserError(
            f"{length} tokens are above the model's context of {config.max_seq_len}; lower "
            f"--context or --prompt"
        )
    return Memory(
        weights=weight_bytes(config, tp, weights),
        cache=cache_bytes(config, tp, batch * capacity),
        activations=batch * prompt * prompt_activations(config, tp)
        + 6 * batch * config.vocab_size / tp
        + slot_bytes(config, gpu, tp, batch * prompt)
        + rounds * batch * prompt * rounded_bytes(config.hidden_size),
        reserve=WORKSPACES,
    )


def rounded_bytes(size: int) -> int:
    """What a sum in 8 bits holds of a token (`ladder.parallel.eight_bits`): its message, two more
    of the ranks, and the sum."""
    return 3 * message_bytes(size) + BF16 * size


def held_by_session(config: ModelConfig, tp: int, batch: int, prompt: int, length: int) -> float:
    """Bytes that a session keeps, as `memory_gib` of recorded inference counts them.

    A prefill's activations are kept only where it is a CUDA graph, which small ones are.
    """
    found = inference(config, tp, batch, prompt, length)
    graphed = batch * prompt <= GRAPHED_PROMPT_TOKENS
    return found.weights + found.cache + (found.activations if graphed else 0.0)


def saved_activations(config: ModelConfig, tp: int, sequence_parallel: bool, kept: str) -> float:
    """Bytes that the forward pass keeps for the backward one, for each token and the whole model.

    Every sublayer keeps its residual (1 / tp of it under sequence parallelism) and its normed
    input. kept: `none` keeps in addition queries, keys, values and the result of attention, and
    gate, up and their product; `full` recomputes them. `selective` counts as `none`: it keeps less.
    """
    held = held_ranks(config, tp)
    total = 0.0
    for record in config.plan.sublayers:
        total += config.hidden_size * held * (1 + (1 / tp if sequence_parallel else 1))
        if kept == "full":
            continue
        if "attention" in record.kind:
            heads = 2 * config.num_heads + 2 * config.num_kv_heads
            total += heads * config.head_dim / tp
        if "mlp" in record.kind:
            total += 3 * config.intermediate_size / tp
    return BF16 * total


def training(
    config: ModelConfig, layout: str, ranks: int, seq_len: int, batch: int, micro_batch: int = 0,
    activation_checkpointing: str = "none",
) -> Memory:  # fmt: skip
    """Memory of a training step in bfloat16 with AdamW, compiled.

    layout: a name such as tp4+sp+fsdp. batch: sequences of each data-parallel rank.

    The peak is where the backward pass begins. Gradients exist there only if an earlier micro-batch
    has left them. Where the backward pass ends they all do, and no activations.
    """
    found = parse_layout(layout)
    _, shards = found.data_parallel(ranks)
    parameters = local_parameters(config, found.tp)
    micro = micro_batch or batch
    tokens = micro * seq_len
    logits = 2 * BF16 * tokens * config.vocab_size / found.tp  # and their gradient
    saved = tokens * saved_activations(
        config, found.tp, found.sequence_parallel, activation_checkpointing
    )
    gradients = FP32 * parameters / shards
    activations = saved + logits
    if batch <= micro:  # one micro-batch: gradients come as activations go
        activations = max(activations - gradients, 0.0)
    return Memory(
        weights=FP32 * parameters / shards + BF16 * parameters,
        optimiser=MOMENTS * FP32 * parameters / shards,
        gradients=gradients,
        activations=activations,
        reserve=WORKSPACES,
    )


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether it fits a GPU of the machine, with room for what the allocator cannot use."""
    return memory.total <= HEADROOM * GIB * machine.value("memory_gib")
