"""What a rank's CUDA streams do in one call of an overlapped operator, as plain data.

The *main* stream computes, the *copies* stream moves pieces to peers by copy engines. Products can
take turns between the main stream and the *second* one: then a product's tiles begin on the SMs
that the last tiles of the product before leave idle. A schedule is a list of steps in the order in
which the host enqueues them; each stream runs its own in order. The streams of a rank meet by
events (`Record`, `Follow`), the ranks by words of peer memory (`Await`, `Put`), and nowhere else:
there is no barrier.

Each rank has slots, memory for one piece of every rank, in several sets; a call uses one set, the
same on all ranks. Two kinds of words for each set and each pair of ranks go with them:

- `free` q, on the sender: the slots of rank q may be written. It is 1 at first.
- `arrived` p, on the receiver: the piece of rank p is in its slot.

A sender waits until `free` q is 1 and clears it, copies, and sets `arrived` on q. The receiver
waits for that and clears it; when it has read all slots of the set, it sets `free` on all senders.
So slots are written only after their last content was read, and read only after they were written,
whatever else happens: ranks that come late, calls of any shapes in a row, graphs of one call that
are replayed, all with any choice of the sets. Two sets in turn only mean that `free` is set long
before it is waited for.

Nothing waits for ever, as long as all ranks make the same calls in the same order: a call's copies
wait for nothing but the own rank's product and for `free` of the last call with this set, whose end
waits only for the copies of that call. (In a ring, a product also waits for that of another rank's
step before.) So the oldest call that has not ended can always go on.
"""

from __future__ import annotations

import functools

from ladder.ops.steps import (
    ALL,
    LANES,
    Await,
    Follow,
    Put,
    Record,
    Schedule,
    Step,
    Stream,
    Word,
    Work,
)
from ladder.ops.track import Program


def others(rank: int, world: int, step: int = 1) -> list[int]:
    """The other ranks, from `rank` + step on: at any time, each rank sends to another."""
    return [(rank + step * distance) % world for distance in range(1, world)]


def _send(
    rank: int, peer: int, chunk: int, flag: int, first: bool = True, action: str = "copy"
) -> list[Step]:
    """The copies stream moves a chunk into the slot on `peer`. first: its first chunk for it."""
    free = Word(rank, "free", peer)
    steps: list[Step] = [Await("copies", free), Put("copies", free, 0)] if first else []
    steps += [Work("copies", action, chunk), Put("copies", Word(peer, "arrived", flag), 1)]
    return steps


def _take(rank: int, flags: list[int], stream: Stream = "main") -> list[Step]:
    """The stream waits until these pieces have arrived."""
    words = [Word(rank, "arrived", flag) for flag in flags]
    return [*(Await(stream, word) for word in words), *(Put(stream, word, 0) for word in words)]


def _sum(rank: int, flags: list[int], waiting: bool) -> list[Step]:
    """The slots are added when these pieces have arrived. waiting: for which `sum` itself waits."""
    if not waiting:
        return [*_take(rank, flags), Work("main", "sum", rank)]
    words = tuple(Word(rank, "arrived", flag) for flag in flags)
    return [Work("main", "sum", rank, words), *(Put("main", word, 0) for word in words)]


def _fork(streams: int) -> list[Step]:
    """The second stream, if there is one, begins here."""
    return [Record("main", "forked"), Follow("second", "forked")] if streams > 1 else []


def _join(streams: int) -> list[Step]:
    """The main stream has what the second one has computed."""
    return [Record("second", "computed"), Follow("main", "computed")] if streams > 1 else []


def _release(rank: int, world: int, copied: bool = False) -> list[Step]:
    """Peers may write this rank's slots again; and what the copies read may be freed.

    copied: the copies read these slots, too, so they are free only when all copies have ended.
    """
    free = _free(rank, world)
    return [*_SENT, *free] if copied else [*free, *_SENT]


_SENT: tuple[Step, ...] = (Record("copies", "sent"), Follow("main", "sent"))


def _free(rank: int, world: int) -> list[Step]:
    return [Put("main", Word(q, "free", rank), 1) for q in others(rank, world)]


@functools.cache  # a call's schedule is the last call's
def all_gather(
    rank: int, world: int, waiting: bool = False, streams: int = 1, keeps: bool = False
) -> Schedule:
    """Each rank's shard to all peers, and the product of each as soon as it is there.

    The rank's own shard is first, then those of rank + 1, rank + 2, ...; so a rank sends to
    rank - 1 first, which needs it first. Actions: `copy` q sends this rank's shard to rank q,
    `product` q multiplies shard q. waiting: `own` puts the own shard into its slot, and one
    `product` multiplies all and waits for each shard by itself. streams: 1 or 2, of the products.
    keeps: `keep` q puts shard q into the caller's memory, by the copies stream, under the products.
    """
    steps: list[Step] = [Record("main", "begun"), Follow("copies", "begun")]
    for peer in others(rank, world, -1):
        steps += _send(rank, peer, peer, rank)
    steps += [Work("copies", "keep", rank)] if keeps else []
    if waiting:
        arrived = [Word(rank, "arrived", q) for q in others(rank, world)]
        steps += [Work("main", "own", rank), Work("main", "product", ALL, tuple(arrived))]
        for word in arrived if keeps else ():
            steps += [Await("copies", word), Work("copies", "keep", word.index)]
        steps += _SENT if keeps else ()  # before the words for which the copies wait are cleared
        return (*steps, *(Put("main", word, 0) for word in arrived), *_free(rank, world),
                *(() if keeps else _SENT))  # fmt: skip
    steps += [*_fork(streams), Work("main", "product", rank)]
    for number, q in enumerate(others(rank, world), start=1):
        lane = LANES[number % streams]
        steps += _take(rank, [q], lane)
        if keeps:
            here = f"shard {q}"
            steps += [Record(lane, here), Follow("copies", here), Work("copies", "keep", q)]
        steps.append(Work(lane, "product", q))
    return (*steps, *_join(streams), *_release(rank, world, keeps))


@functools.cache
def reduce_scatter(
    rank: int, world: int, waiting: bool = False, streams: int = 1, blocks: int = 1
) -> Schedule:
    """The product of each peer's chunk, sent while the next is computed; the own chunk is last.

    Each chunk is in blocks of rows. Chunk b x T + q is the rows of rank q in block b. Actions:
    `product` c; `copy` c sends it to its rank; and `sum` c adds the slots of this rank's chunk c,
    of which the own product is one, in the order of the ranks. The peers' chunks of all blocks come
    first. streams: 1 or 2, of the products and of the sums that follow them: a sum may then run
    beside the last tiles of the next block's product. waiting: `sum` waits for the slots by itself;
    for one block.
    """
    lanes = _lanes(blocks * world, streams)
    steps = [*_fork(streams), *_peers(rank, world, blocks, lanes)]
    if waiting:
        steps += [Work(lanes[-1], "product", rank), *_join(streams)]
        return (*steps, *_sum(rank, others(rank, world), waiting), *_release(rank, world))
    for block, lane in enumerate(lanes[-blocks:]):
        steps += _own(rank, world, block, lane)
    return (*steps, *_join(streams), *_release(rank, world))


@functools.cache
def all_reduce(
    rank: int, world: int, blocks: int, streams: int = 1, push: bool = False
) -> Schedule:
    """A reduce-scatter, and each block's sums to all ranks under the products that follow.

    Actions: as in `reduce_scatter`; `spread` c sends this rank's sum of a block to the rank of c;
    `take` c puts the sum of chunk c, which has arrived, to the others. push: nothing follows the
    last block, so one kernel, `push`, does what `sum`, `spread` and `take` do for the others.
    """
    lanes = _lanes(blocks * world, streams)
    steps = [*_fork(streams), *_peers(rank, world, blocks, lanes)]
    for block, lane in enumerate(lanes[-blocks:]):
        if push and block == blocks - 1:
            # Its programs hold the GPU while they wait for peers, who need all products of this
            # rank: these end before.
            chunk = block * world + rank
            steps += [Work(lane, "product", chunk), *_join(streams)]
            steps += [*_take(rank, _flags(rank, world, block)), Work("main", "push", chunk)]
            continue
        steps += _own(rank, world, block, lane)
        steps += _spread(rank, world, block, blocks * world, lane)
    for block in range(blocks - push):
        steps += _collect(rank, world, block, blocks * world)
    return (*steps, *_release(rank, world))


def _lanes(products: int, streams: int) -> list[Stream]:
    return [LANES[number % streams] for number in range(products)]


def _peers(rank: int, world: int, blocks: int, lanes: list[Stream]) -> list[Step]:
    """The products of the peers' chunks, block by block, each sent while the next is computed.

    All come before the own chunks, so what the peers send has arrived before these are done.
    """
    steps: list[Step] = []
    chunks = [(block, peer) for block in range(blocks) for peer in others(rank, world)]
    for (block, peer), lane in zip(chunks, lanes, strict=False):
        chunk = block * world + peer
        ready = f"product {chunk}"
        steps += [Work(lane, "product", chunk), Record(lane, ready), Follow("copies", ready)]
        steps += _send(rank, peer, chunk, block * world + rank, block == 0)
    return steps


def _own(rank: int, world: int, block: int, lane: Stream) -> list[Step]:
    """The own product of a block, and the sum of what has arrived."""
    chunk, flags = block * world + rank, _flags(rank, world, block)
    return [Work(lane, "product", chunk), *_take(rank, flags, lane), Work(lane, "sum", chunk)]


def _flags(rank: int, world: int, block: int) -> list[int]:
    return [block * world + peer for peer in others(rank, world)]


def _spread(rank: int, world: int, block: int, flags: int, lane: Stream) -> list[Step]:
    """This rank's sums of a block, which the lane has made, to all peers. flags: the first one.

    The main stream waits for the copies at the end, and so for the lane.
    """
    ready = f"sum {block}"
    steps: list[Step] = [Record(lane, ready), Follow("copies", ready)]
    for peer in others(rank, world):
        flag = flags + block * world + rank
        steps += _send(rank, peer, block * world + peer, flag, False, "spread")
    return steps


def _collect(rank: int, world: int, block: int, flags: int) -> list[Step]:
    """The peers' sums of a block, which `_spread` has sent, to where they belong, as they come.

    After all products: but for the last block's, it runs while that one's sums are on their way.
    """
    steps: list[Step] = []
    for peer in others(rank, world, -1):  # rank - 1 sends to this rank first
        chunk = block * world + peer
        steps += [*_take(rank, [flags + chunk]), Work("main", "take", chunk)]
    return steps


@functools.cache
def ring(rank: int, world: int, blocks: int, streams: int = 1, spread: bool = False) -> Schedule:
    """Chunks travel from rank to rank + 1 and grow: each product adds what has arrived (T3, 3).

    A chunk begins on the rank behind its owner and ends on its owner, so each rank computes the
    chunk of rank - 1 first, then that of rank - 2, ..., and its own last. Each chunk is in blocks
    of rows; with two or more, a block arrives under the products of others. Actions: `product`
    s x blocks + b, of block b in step s, is added to what has arrived, but in step 0; `copy` of the
    same number sends it on. It arrives in slot s + 1; `fetch` puts what arrives last to where the
    sum belongs, by the copies stream, under the products of other blocks. spread: each block of
    sums then goes to all ranks, as in `all_reduce`. streams: 1 or 2, of the products.
    """
    steps, peer, flags = _fork(streams), (rank + 1) % world, world * blocks
    # Slots are in the order of the steps, and not of the senders, so all peers' are waited for.
    free = [Word(rank, "free", q) for q in others(rank, world)]
    for number in range(world * blocks):
        lane, (step, block) = LANES[number % streams], divmod(number, blocks)
        if step == world - 1 > 0:
            steps.append(Follow(lane, f"fetched {number}"))
        elif step > 0:
            steps += _take(rank, [number], lane)
        steps.append(Work(lane, "product", number))
        if step < world - 1:
            ready = f"product {number}"
            steps += [Record(lane, ready), Follow("copies", ready)]
            if number == 0:
                steps += [Await("copies", word) for word in free]
                steps += [Put("copies", word, 0) for word in free]
            steps += _send(rank, peer, number, number + blocks, False)
            if step == world - 2:  # each rank sends a block before it waits for the same one
                steps += _take(rank, [number + blocks], "copies")
                steps.append(Work("copies", "fetch", number + blocks))
                steps.append(Record("copies", f"fetched {number + blocks}"))
        elif spread:
            steps += _spread(rank, world, block, flags, lane)
    steps += [] if spread else _join(streams)
    for block in range(blocks if spread else 0):
        steps += _collect(rank, world, block, flags)
    return (*steps, *_release(rank, world, copied=True))


def tracked(program: Program, world: int, waiting: bool = False) -> Schedule:
    """One product whose tiles count themselves; a copy of a block waits until its count is full.

    `copy` n moves block n of the program, whose slots are those of `all_to_all` in
    `ladder.ops.track_maps`. Other actions: as in `reduce_scatter`.
    """
    rank, steps = program.rank, _counted(program)
    steps += _sum(rank, _arriving(program), waiting)
    steps += [Put("main", Word(rank, "full", n), 0) for n in _kept(program)]
    return (*steps, *_release(rank, world))


def summing(program: Program, world: int, spread: bool = False) -> Schedule:
    """As `tracked`, but the product adds what has arrived to its own tiles, which are the last.

    Actions: `product` computes the peers' tiles, and `own` this rank's, which wait for what the
    peers send; one kernel does both where kernels run beside copies. spread: each block of sums
    goes to all ranks as soon as its count is full: `spread` b x T + q and `take` b x T + q, as in
    `all_reduce`, block b of the `pieces` that a rank's own tiles are in.
    """
    rank, flags, kept = program.rank, _arriving(program), _kept(program)
    words = tuple(Word(rank, "arrived", flag) for flag in flags)
    steps = [*_counted(program), Work("main", "own", rank, words)]
    behind = max(flags, default=-1) + 1  # the first flag of sums; each rank has as many before
    for piece, n in enumerate(kept if spread else ()):
        full = Word(rank, "full", n)
        steps += [Await("copies", full, program.blocks[n].count), Put("copies", full, 0)]
        for peer in others(rank, world):
            flag = behind + piece * world + rank
            steps += _send(rank, peer, piece * world + peer, flag, False, "spread")
    steps += [Put("main", word, 0) for word in words]
    steps += [Put("main", Word(rank, "full", n), 0) for n in (() if spread else kept)]
    for piece in range(len(kept) if spread else 0):
        steps += _collect(rank, world, piece, behind)
    return (*steps, *_release(rank, world))


def _counted(program: Program) -> list[Step]:
    """The product, and the copies of its blocks, each as soon as it is full."""
    rank = program.rank
    steps: list[Step] = [Record("main", "begun"), Follow("copies", "begun")]
    steps.append(Work("main", "product", ALL))
    sent: set[int] = set()
    for n, block in enumerate(program.blocks):
        if block.copy is None:
            continue
        full = Word(rank, "full", n)
        steps += [Await("copies", full, block.count), Put("copies", full, 0)]
        steps += _send(rank, block.copy.peer, n, block.copy.flag, block.copy.peer not in sent)
        sent.add(block.copy.peer)
    return steps


def _arriving(program: Program) -> list[int]:
    """The flags of the blocks that arrive."""
    return sorted({flag for block in program.blocks for flag in block.flags})


def _kept(program: Program) -> list[int]:
    """The blocks that stay on the rank that computes them."""
    return [n for n, block in enumerate(program.blocks) if block.copy is None and block.count > 0]
