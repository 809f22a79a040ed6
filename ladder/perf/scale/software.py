"""The times of Ladder Residual's software on 8 H100, operation by operation, in microseconds.

It is gpt-fast under torch.compile: attention is computed over the cache's full length with keys and
values repeated for each query head, the head is not split, and a prompt computes the logits of all
its tokens. Its constants are set to rows without communication alone (`published.BARE`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ladder.costs import BF16, vocabulary_parameters
from ladder.models.config import ModelConfig
from ladder.models.plan import Plan
from ladder.perf.graph import Operation, forward
from ladder.perf.machine_files import FOLDER, read
from ladder.perf.scale.published import NEW, PROMPT
from ladder.perf.simulate import simulate

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
# Kernels of an operation: gate-up with its activation; rotary, two cache updates, scores, softmax
# and values.
KERNELS = {"gate-up": 2, "attention": 5}


@dataclass(frozen=True)
class Software:
    """hbm: bytes a second. flops: a second, of products of many rows. kernel: microseconds of a
    kernel beyond its bytes. rows: microseconds more, for a product of several rows in a decode
    step. repeated: the share of the bytes of repeated keys and values that memory delivers. score:
    bytes for each attention score of a prompt.
    """

    hbm: float
    flops: float = 530e12
    kernel: float = 2.5
    rows: float = 3.7
    repeated: float = 0.83
    score: float = 45.0


H100 = read(FOLDER / "h100x1.json")
SOFTWARE = Software(hbm=1e12 * H100.value("copy_tb_s"))


@dataclass(frozen=True)
class Work:
    """A phase of a model at a TP degree."""

    config: ModelConfig
    phase: Phase
    batch: int
    tp: int = 8

    @property
    def tokens(self) -> int:
        return self.batch * (PROMPT if self.phase == "prefill" else 1)

    @property
    def message(self) -> float:
        """Bytes of an all-reduce."""
        return float(BF16 * self.tokens * self.config.hidden_size)

    def parameters(self, part: str) -> float:
        """The parameters of a product on one GPU."""
        config = self.config
        heads = {
            "qkv": config.num_heads + 2 * config.num_kv_heads, "output": config.num_heads
        }  # fmt: skip
        if part in heads:
            return config.hidden_size * heads[part] * config.head_dim / self.tp
        widths = {"gate-up": 2, "down": 1}
        return widths[part] * config.hidden_size * config.intermediate_size / self.tp


class Cost:
    """Microseconds of an operation alone. reduce: microseconds of an all-reduce."""

    def __init__(self, work: Work, software: Software, reduce: float) -> None:
        self.work, self.software, self.reduce = work, software, reduce

    def __call__(self, operation: Operation) -> float:
        kind, software = operation.kind, self.software
        if kind == "all-reduce":
            return 0.0 if operation.part == "embedding" else self.reduce
        kernels = KERNELS.get(operation.part or kind, 1) * software.kernel
        if kind == "product":
            return kernels + self._product(self.work.parameters(operation.part))
        if kind == "head":
            return kernels + self._product(vocabulary_parameters(self.work.config))
        if kind == "attention":
            return kernels + self._attention()
        return kernels

    def _product(self, parameters: float) -> float:
        work, software = self.work, self.software
        if work.phase == "prefill":
            return 1e6 * 2 * work.tokens * parameters / software.flops
        several = software.rows if work.batch > 1 else 0.0
        return 1e6 * BF16 * parameters / software.hbm + several

    def _attention(self) -> float:
        work, software = self.work, self.software
        keys = work.tokens * work.config.num_heads / work.tp * (PROMPT + NEW)
        if work.phase == "prefill":
            return 1e6 * keys * software.score / software.hbm
        repeated = 2 * BF16 * keys * work.config.head_dim
        return 1e6 * software.repeated * repeated / software.hbm


def time(
    work: Work, plan: Plan, reduce: float, slowed: float, software: Software = SOFTWARE
) -> float:
    """Microseconds of the phase. reduce: microseconds of an all-reduce alone. slowed: the share of
    their speed that operations lose while an all-reduce runs beside them."""

    def beside(first: Operation, second: Operation) -> float:
        return 1 - slowed if second.reduces and not first.reduces else 1.0

    return simulate(forward(plan), Cost(work, software, reduce), beside).total


def bare(work: Work, software: Software = SOFTWARE) -> float:
    """Microseconds of the model's own plan without communication."""
    return time(work, work.config.plan.as_no_comm(), 0.0, 0.0, software)


def as_run(config: ModelConfig) -> ModelConfig:
    """The shape that the authors' code runs: its 3B has 32 heads of size 72, which 8 GPUs can
    split, instead of the 36 heads of size 64 of its training."""
    if config.num_heads % 8:
        return replace(config, num_heads=32, num_kv_heads=32, head_dim=config.hidden_size // 32)
    return config
