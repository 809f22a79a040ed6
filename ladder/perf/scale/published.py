"""The numbers of Ladder Residual (arXiv 2501.06589) that are calibrated on or predicted.

Improvements of latency over `standard` are in %, as in Tables 2 and 6: 100 (1 - new / old).
Constants are set to rows without communication and of `standard` alone. What the paper only draws
or leaves out comes from the authors' repository, ladder-residual-inference: Figures 2 and 3 from
tools/plot-*.py, milliseconds from logs/arxiv and logs/11_25 in its history.
"""

from __future__ import annotations

from dataclasses import dataclass

NVLINK, NO_NVLINK = "NVLink", "no NVLink"
LINKS = (NVLINK, NO_NVLINK)
PROMPT, NEW = 1024, 512  # tokens


@dataclass(frozen=True)
class Improvement:
    """The improvement of prefill and decode latency, in %."""

    prefill: float
    decode: float

    def of(self, phase: str) -> float:
        return self.prefill if phase == "prefill" else self.decode


@dataclass(frozen=True)
class Table:
    """A table with both phases. bound: by link. rows: by link and plan."""

    number: int
    model: str
    batch: int
    bound: dict[str, Improvement]
    rows: dict[str, dict[str, Improvement]]


TABLE_2 = Table(
    2, "llama-3-70b", 1,
    {NVLINK: Improvement(30.54, 30.00), NO_NVLINK: Improvement(35.84, 52.71)},
    {
        NVLINK: {"parallel": Improvement(5.42, 18.04), "ladder": Improvement(5.78, 23.71)},
        NO_NVLINK: {"parallel": Improvement(14.92, 28.73), "ladder": Improvement(6.94, 37.71)},
    },
)  # fmt: skip
# The same case as the authors logged it (logs/arxiv), from the milliseconds of each phase.
LOGGED_2 = Table(
    2, "llama-3-70b", 1,
    {NVLINK: Improvement(25.66, 30.24), NO_NVLINK: Improvement(35.84, 52.71)},
    {
        NVLINK: {"parallel": Improvement(8.22, 18.27), "ladder": Improvement(6.57, 24.11)},
        NO_NVLINK: {"parallel": Improvement(14.92, 28.74), "ladder": Improvement(10.68, 33.57)},
    },
)  # fmt: skip
TABLE_6 = Table(
    6, "llama-3-8b", 64,
    {NVLINK: Improvement(25.43, 27.22), NO_NVLINK: Improvement(31.60, 51.95)},
    {
        NVLINK: {
            "ladder": Improvement(9.93, 18.70),
            "desync-2x": Improvement(8.40, 12.03), "desync-4x": Improvement(17.07, 16.53),
        },
        NO_NVLINK: {
            "ladder": Improvement(15.07, 26.26),
            "desync-2x": Improvement(13.36, 24.36), "desync-4x": Improvement(22.11, 37.73),
        },
    },
)  # fmt: skip
# Table 1: tokens/s of ladder over standard, batch 4.
TABLE_1 = {
    "paper-1b": {NVLINK: 1.56, NO_NVLINK: 1.39},
    "paper-3b": {NVLINK: 1.57, NO_NVLINK: 1.50},
    "llama-3-8b": {NVLINK: 1.46, NO_NVLINK: 1.40},
    "codellama-34b": {NVLINK: 1.44, NO_NVLINK: 1.47},
    "llama-3-70b": {NVLINK: 1.29, NO_NVLINK: 1.59},
    "bloom-176b": {NVLINK: 1.35, NO_NVLINK: 1.54},
    "llama-3.1-405b": {NVLINK: 1.31, NO_NVLINK: 1.57},
}
TABLE_1_BATCH = 4
# The same ratio in the authors' logged run of a 34B (logs/arxiv, llama-3-34b), and its vocabulary.
LOGGED_34B = {NVLINK: 560.76 / 436.76, NO_NVLINK: 459.28 / 292.40}
VOCABULARY_34B = 128256
TWO_NODES = "llama-3.1-405b"  # TP 16; TP 8 elsewhere


@dataclass(frozen=True)
class Row:
    """Milliseconds without communication: a prefill of PROMPT tokens, and a decode step."""

    model: str
    batch: int
    prefill: float
    decode: float


# The rows without communication to which the software's constants are set.
BARE = {
    "70B, batch 1": Row("llama-3-70b", 1, 59.2, 9.06),
    "70B, batch 4": Row("llama-3-70b", 4, 209.0, 10.63),
    "70B, batch 64": Row("llama-3-70b", 64, 3390.0, 19.14),
    "8B, batch 128": Row("llama-3-8b", 128, 1080.0, 6.40),
}
# tokens/s without communication over those of standard, batch 4: Figure 2 (70B), Figure 3 (405B).
FIGURE_2 = {NVLINK: 355.8 / 258.56, NO_NVLINK: 360.43 / 173.62}
FIGURE_3 = {NVLINK: 1.5119, NO_NVLINK: 2.2747}
