"""Collectives on a torus in closed form. Bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Torus:
    """A torus of rows x columns nodes: each has a link in both directions of both dimensions.

    bandwidth: bytes a second of a link in one direction. latency: seconds of a hop. Rows or columns
    of one are no dimension. What a collective does in one dimension runs under what it does in the
    other, in many small parts.
    """

    rows: int
    columns: int
    bandwidth: float
    latency: float

    @property
    def nodes(self) -> int:
        return self.rows * self.columns

    @property
    def _lengths(self) -> list[int]:
        return [each for each in (self.rows, self.columns) if each > 1]

    def exchange(self, sent: float) -> float:
        """Seconds in which the busiest links move an all-to-all: every node sends `sent` bytes, as
        many to every node and itself.

        In a ring of k nodes a message takes k / 4 hops on average, or (k^2 - 1) / 4k for odd k, and
        each node has 2 links to send by; all bytes pass both dimensions.
        """
        longest = max(((k * k - k % 2) / (8 * k) for k in self._lengths), default=0.0)
        return sent * longest / self.bandwidth

    @property
    def delay(self) -> float:
        """Seconds of latency to the farthest node."""
        return self.latency * sum(k // 2 for k in self._lengths)

    def all_reduce(self, size: float) -> float:
        """A sum of `size` bytes: a ring's reduce-scatter in one dimension, an all-reduce of the
        shards in the other, an all-gather in the first; half of it in the other order, so that both
        dimensions are used, and each ring in both directions."""
        if not self._lengths:
            return 0.0
        share = 2 * (1 - 1 / self.nodes) / (2 * len(self._lengths))
        return size * share / self.bandwidth + self.latency * sum(
            2 * (k - 1) for k in self._lengths
        )
