"""A TrackMap executed in plain Python: its meaning, and what tests run in any order of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ladder.ops.track import Block, Op, Program


class StuckError(AssertionError):
    """Nothing can go on, and a block has not become full."""


@dataclass(frozen=True)
class Fired:
    """A block of `rank` was found full, with these values at its positions."""

    rank: int
    block: Block
    values: tuple[Any, ...]


@dataclass
class Execution:
    """Ranks that compute their tiles and copy their full blocks, in an order that `pick` chooses.

    products: for each rank, the value of each tile, of any type that can be added. pick: given how
    many can go on, the index of the one that does. one_stream: a rank's copies run one after the
    other, as on one CUDA stream; otherwise each as soon as it can. After `run`: memory: by rank and
    position; fired: in order.

    A tile is written, and only later counted; a copy moves tile by tile, and only later sets its
    flag: anything may happen between.
    """

    programs: Sequence[Program]
    products: Sequence[Sequence[Any]]
    pick: Callable[[int], int]
    one_stream: bool = True
    memory: list[dict[int, Any]] = field(init=False)
    fired: list[Fired] = field(init=False, default_factory=list)

    def run(self) -> Execution:
        world = len(self.programs)
        self.memory = [{} for _ in range(world)]
        self.counters = [[0] * len(program.blocks) for program in self.programs]
        self.counts = [program.count.tolist() for program in self.programs]
        self.flags: list[set[int]] = [set() for _ in range(world)]
        ready: list[Iterator[tuple[int, int] | None]] = []
        for program in self.programs:
            ready += [self._tile(program, tile) for tile in program.order.tolist()]
            blocks = range(len(program.blocks))
            copies = [n for n in blocks if program.blocks[n].copy is not None]
            streams = [copies] if self.one_stream else [[n] for n in copies]
            streams += [[n] for n in blocks if program.blocks[n].copy is None]
            ready += [self._stream(program, stream) for stream in streams]
        waiting: dict[tuple[int, int], Iterator[tuple[int, int] | None]] = {}
        while ready:
            n = self.pick(len(ready))
            ready[n], ready[-1] = ready[-1], ready[n]
            each = ready.pop()
            try:
                awaited = next(each)
            except StopIteration:
                awaited = None
            else:
                if awaited is None:
                    ready.append(each)
                else:
                    waiting[awaited] = each
            full = [key for key in waiting if self._full(*key)]
            ready += [waiting.pop(key) for key in full]
        if waiting:
            raise StuckError(f"blocks that never become full, as (rank, number): {list(waiting)}")
        return self

    def _full(self, rank: int, n: int) -> bool:
        """Whether a block is full. Equal, not at least: a late CUDA stream would wait for ever."""
        full = self.counters[rank][n] == self.counts[rank][n]
        return full and self.flags[rank].issuperset(self.programs[rank].blocks[n].flags)

    def _update(self, rank: int, position: int, value: Any, op: Op) -> None:
        memory = self.memory[rank]
        memory[position] = memory[position] + value if op == "add" and position in memory else value

    def _tile(self, program: Program, tile: int) -> Iterator[None]:
        chunk = int(program.chunk[tile])
        peer = int(program.peer[chunk])
        op: Op = "add" if program.add[chunk] else "store"
        self._update(peer, int(program.target[tile]), self.products[program.rank][tile], op)
        yield
        self.counters[peer][int(program.counter[tile])] += 1

    def _stream(self, program: Program, numbers: Sequence[int]) -> Iterator[tuple[int, int] | None]:
        """The copies of these blocks in turn; for a block without one, its reader."""
        memory = self.memory[program.rank]
        for n in numbers:
            yield program.rank, n
            block = program.blocks[n]
            values = tuple(memory.get(position) for position in block.positions)
            self.fired.append(Fired(program.rank, block, values))
            if block.copy is None:
                continue
            for source, target in zip(block.positions, block.copy.positions, strict=True):
                yield None
                self._update(block.copy.peer, target, memory.get(source, 0), block.copy.op)
            yield None
            self.flags[block.copy.peer].add(block.copy.flag)
