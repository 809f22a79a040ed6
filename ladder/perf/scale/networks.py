"""Collectives in closed form: on a torus, and over nodes of GPUs. Bytes and seconds."""

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


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `per_node` GPUs of each of `nodes` nodes, by NCCL's rings.

    inside, outside: bytes a second that a GPU sends to its node and to another one. step_inside,
    step_outside: seconds of a ring's step there. base: seconds of any collective.

    Each GPU has a network card; with several of a node in the group, a ring crosses by each card.
    """

    per_node: int
    nodes: int
    inside: float
    outside: float
    step_inside: float
    step_outside: float
    base: float

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    @property
    def bandwidth(self) -> float:
        """Bytes a second through each GPU of a ring, or of several side by side."""
        rates = [self.inside] if self.per_node > 1 else []
        if self.nodes > 1:
            rates.append(self.outside * self.per_node)
        return min(rates)

    def gather(self, size: float) -> float:
        """An all-gather to `size` bytes, or a reduce-scatter of `size` bytes."""
        if self.ranks == 1:
            return 0.0
        within = (self.ranks - self.nodes) * self.step_inside
        steps = within + (self.nodes - 1) * self.step_outside
        return self.base + steps + size * (1 - 1 / self.ranks) / self.bandwidth

    def all_reduce(self, size: float) -> float:
        return max(0.0, 2 * self.gather(size) - self.base)
