"""Collectives on a torus in closed form. Bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Torus:
    """A torus of rows x columns nodes: each has a link in both directions of both dimensions.

    bandwidth: bytes a second of a link in one direction. latency: seconds of a hop. A single row or
    column is no dimension. A collective works in many small parts, so that it uses both dimensions
    at the same time.
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
        """Seconds in which the busiest links move an all-to-all. Every node sends `sent` bytes, the
        same number to every node including itself.

        In a ring of k nodes a message takes k / 4 hops on average, or (k^2 - 1) / 4k for odd k, and
        each node sends over 2 links. All bytes pass both dimensions.
        """
        longest = max(((k * k - k % 2) / (8 * k) for k in self._lengths), default=0.0)
        return sent * longest / self.bandwidth

    @property
    def delay(self) -> float:
        """Seconds of latency to the farthest node."""
        return self.latency * sum(k // 2 for k in self._lengths)

    def all_reduce(self, size: float) -> float:
        """Seconds of an all-reduce of `size` bytes. It is a ring's reduce-scatter in one dimension,
        an all-reduce of the shards in the other, and an all-gather in the first. Half of the bytes
        go in the other order, so that both dimensions are used, and each ring in both directions.
        """
        if not self._lengths:
            return 0.0
        share = 2 * (1 - 1 / self.nodes) / (2 * len(self._lengths))
        return size * share / self.bandwidth + self.latency * sum(
            2 * (k - 1) for k in self._lengths
        )
