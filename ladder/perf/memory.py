"""The memory of one GPU: what inference or training takes, part by part, and whether it fits.

The bytes of weights and caches come from `ladder.costs`; those of weights in other sublayers than
the usual ones come from the sublayers' specs (`ladder.infer.memory`). `reserve` is what the other
parts leave out: NCCL's buffers, libraries, fragmentation.

Errors against the recorded `memory_gib` (tests/perf/test_memory.py): training within 1.0 % (virtual
ranks 3.8 %), inference within 1.6 % (small models with 4 graphed prompts up to 14 % too little:
their graphs hold more than one prefill's tensors). Which tensors count was decided by the records
of two GPUs; those of four are held out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ladder.bench.training.points import parse_layout
from ladder.costs import (
    BF16,
    FP32,
    HEADROOM,
    WORKSPACES,
    cache_bytes,
)
from ladder.infer.memory import (
    capacity,
    held_ranks,
    local_parameters,
    prompt_bytes,
    prompt_width,
    weight_bytes,
)
from ladder.models.config import ModelConfig
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


def inference(
    config: ModelConfig, tp: int, batch: int, prompt: int, length: int, weights: str = "bf16",
    gpu: str = "", rounds: bool = False, asked: bool = False, cache: str = "bf16",
) -> Memory:  # fmt: skip
    """Memory of an engine's session. length: tokens in the cache of each sequence. weights, cache:
    how they are stored (`ladder.costs`). gpu, rounds, asked: see `prompt_bytes`."""
    width = prompt_width(config, prompt, length)
    return Memory(
        weights=weight_bytes(config, tp, weights),
        cache=cache_bytes(config, tp, batch * capacity(config, length), cache),
        activations=prompt_bytes(config, tp, batch, width, gpu, rounds, asked),
        reserve=WORKSPACES,
    )


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
