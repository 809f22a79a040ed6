"""Which tensor-parallel ranks a process computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks that this process computes: `held` of `degree`, from `first` on.

    If held is above 1, they are *virtual ranks*: hidden states then have a leading dimension of
    that size, [held, B, S, D] instead of [B, S, D].
    """

    degree: int = 1
    first: int = 0
    held: int = 1

    @property
    def processes(self) -> int:
        return self.degree // self.held

    @property
    def process(self) -> int:
        return self.first // self.held
