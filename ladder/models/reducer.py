"""How partials become outputs: the interface that the model's loop talks to, and one process.

A Reducer is all that a `Transformer` knows of communication. It is handed over after the model is
built (`Transformer.use`), so the choice of one is configuration and never an edit to the model.

Gradients follow one rule for every plan: a rank's gradient is that of its own copy. So each
all-reduce is its own adjoint (forward it sums partials, backward it sums the gradients of the
copies), the backward pass issues the forward's collectives in reverse, with the same overlap, and
what ranks share (norm weights, replicated K and V, output biases) is summed over the ranks once,
at the end of a step. The loss is counted once although every rank computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ladder.models.plan import Landing, Sublayer

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Ranks:
    """Which of the T tensor-parallel ranks this process computes: `held` of them, from `first`.

    More than one held rank are *virtual ranks*: hidden states then carry a leading dimension of
    that size, [held, B, S, D] in place of [B, S, D].
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


def add_norm(
    stream: Tensor, addends: list[tuple[Tensor, float]], norm: Norm
) -> tuple[Tensor, Tensor]:
    """Add (tensor, factor) pairs to the stream, in order, and norm it: (stream, normed)."""
    for value, factor in addends:
        stream = stream + value if factor == 1 else torch.add(stream, value, alpha=factor)
    return stream, norm(stream)


@dataclass
class Pending:
    """An output on its way: the handle of its reduce, and this rank's own partial if needed."""

    handle: Any
    own: Tensor | None


@dataclass
class Arrived:
    """In place of a handle: the sum itself, which has been waited for."""

    total: Tensor


def places(x: Tensor, last: Tensor) -> Tensor:
    """Of x [..., B, S, D] the place `last` [B] of each sequence: [..., B, 1, D]."""
    return x[..., torch.arange(len(last), device=last.device), last, :].unsqueeze(-2)


class Reducer:
    """The Reducer of one process, which holds all T ranks: sums over virtual ranks, no waiting."""

    def __init__(self, ranks: Ranks = Ranks()) -> None:
        self.ranks = ranks
        self.add_norm = add_norm  # a fused kernel of the same signature may be handed over,
        self.picker: Callable[[torch.Size], Reducer] | None = None  # and what `pick` is to return

    def pick(self, shape: torch.Size) -> Reducer:
        """The Reducer for a forward pass over tokens of this shape, [B, S]."""
        return self if self.picker is None else self.picker(shape)

    # -- the sublayers' reduces ---------------------------------------------------------------

    def buffer(self, shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
        """Where the next partial [B, S, D] may be written by who computes it, once; or None.

        like: a tensor of its dtype and device.
        """
        return None

    def output(self, partial: Tensor, stream: Tensor, record: Sublayer, keep_own: bool,
               blocking: bool) -> Pending:  # fmt: skip
        """Take over a sublayer's partial ([B, S, D], or [held, B, S, D]) and start its reduce.

        stream: what the sublayer read, before its norm. keep_own: this rank's own partial will be
        landed apart from the sum. blocking: a hint that the sum is waited for before anything else
        is launched.
        """
        own = partial if keep_own else None
        if record.reduce == "none":
            return Pending(None, own)
        if record.reduce == "stream":
            partial = torch.add(partial, stream, alpha=1 / self.ranks.degree)
        elif own is not None and self.ranks.held == 1:
            partial = partial.clone()  # `post` may overwrite what it is given
        return Pending(self.post(partial, blocking), own)

    def post(self, partial: Tensor, blocking: bool = False) -> Any:
        """Start summing `partial` over all T ranks; returns a handle at once."""
        return self.sum_held(partial)

    def wait(self, handle: Any) -> Tensor:
        """The sum that `post` started, [B, S, D]. Each handle is waited for exactly once."""
        assert isinstance(handle, Tensor)
        return handle

    def begin_landing(
        self, stream: Tensor, arrivals: Sequence[tuple[Landing, Pending]], norm: Norm
    ) -> Any:
        """Start to land `arrivals` for a read; returns what `finish_landing` takes.

        Called as early as the plan allows: with a lag before the sublayer beneath which the
        arrivals travel. This one only remembers; others land on a stream of their own, or inside
        that sublayer's first kernel.
        """
        return stream, arrivals, norm

    def finish_landing(self, begun: Any) -> tuple[Tensor, Tensor]:
        """Wait for the arrivals, add them to the stream, and norm it: (stream, normed).

        A reducer may fuse, shard or reorder this in its own way; what it returns is for itself
        and for the modules that were made for it.
        """
        stream, arrivals, norm = begun
        addends: list[tuple[Tensor, float]] = []
        for landing, pending in arrivals:
            if landing.summed:
                arrived = isinstance(pending.handle, Arrived)
                total = pending.handle.total if arrived else self.wait(pending.handle)
                pending.handle = None  # its own part may land later
                if landing.replaces:
                    stream, addends = total.expand_as(stream), []
                else:
                    addends.append((total, 1.0))
            if landing.own:
                assert pending.own is not None
                addends.append((pending.own, landing.own))
        return self.add_norm(stream, addends, norm)

    def narrow(
        self, stream: Tensor, pending: Mapping[int, Pending], last: Tensor
    ) -> tuple[Tensor, dict[int, Pending], Reducer]:
        """Go on with one place of each sequence, `last` [B]: nothing later looks at the others.

        Returns the stream and the outputs on their way, which are all waited for, at those places,
        and the Reducer for the rest of the pass.
        """

        def at(each: Pending) -> Pending:
            total = None if each.handle is None else self.wait(each.handle)
            handle = None if total is None else Arrived(places(total, last))
            return Pending(handle, None if each.own is None else places(each.own, last))

        return places(stream, last), {n: at(each) for n, each in pending.items()}, self

    # -- what is communicated beside the sublayers --------------------------------------------

    def start_stream(self, partial: Tensor) -> Tensor:
        """The stream that sublayers are added to, from the embedding's partial [B, S, D]."""
        return self.sum(partial)

    def sum(self, partial: Tensor) -> Tensor:
        """Sum over the processes, waited for. Differentiable."""
        return partial

    def sum_(self, value: Tensor) -> Tensor:
        """Sum over the processes in place, outside autograd."""
        return value

    def max_(self, value: Tensor) -> Tensor:
        """Maximum over the processes in place, outside autograd."""
        return value

    def gather(self, logits: Tensor, size: int) -> Tensor:
        """Join each process's [..., V_local] into [..., size]. The gradient is each one's slice."""
        return logits

    def sum_held(self, partial: Tensor) -> Tensor:
        """Sum over the virtual ranks held here: [held, B, S, D] -> [B, S, D]."""
        return partial.sum(0) if self.ranks.held > 1 else partial
