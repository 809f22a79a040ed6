"""What a rank's CUDA streams do in one call of an overlapped operator, as plain data.

The *main* stream computes, the *copies* streams move pieces to peers by copy engines. Products can
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
What a stream copies to a rank before a piece that is waited for needs no word of its own.
So slots are written only after their last content was read, and read only after they were written,
whatever else happens: ranks that come late, calls of any shapes in a row, graphs of one call that
are replayed, all with any choice of the sets. Two sets in turn only mean that `free` is set long
before it is waited for.

Nothing waits for ever, as long as all ranks make the same calls in the same order: a call's copies
wait for nothing but the own rank's products, for `free` of the last call with this set, whose end
waits only for the copies of that call, and, from the second block of an all-reduce on, for the sums
of the block before, and so for the peers' copies of that block. (In a ring, a product also waits
for that of another rank's step before.) So the oldest call that has not ended can always go on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ladder.ops.steps import (
    ALL,
    COPIES,
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


def others(rank: int, world: int, step: int = 1) -> list[int]:
    """The other ranks, from `rank` + step on: ranks that are as far send to different ones."""
    return [(rank + step * distance) % world for distance in range(1, world)]


def _way(rank: int, peer: int, world: int) -> Stream:
    """The stream of the copies to a peer. Each peer has its own, so that none holds up another;
    with more than four ranks peers share streams."""
    return COPIES[((peer - rank) % world - 1) % len(COPIES)]


def _ways(world: int) -> Sequence[Stream]:
    """The streams of the copies to all peers."""
    return COPIES[: world - 1]


def _send(
    rank: int, peer: int, chunk: int, flag: int, first: bool = True, action: str = "copy",
    stream: Stream = "copies",
) -> list[Step]:  # fmt: skip
    """The stream moves a chunk into the slot on `peer`. first: it is the peer's first chunk."""
    free = Word(rank, "free", peer)
    steps: list[Step] = [Await(stream, free), Put(stream, free, 0)] if first else []
    steps += [Work(stream, action, chunk), Put(stream, Word(peer, "arrived", flag), 1)]
    return steps


def _take(rank: int, flags: list[int], stream: Stream = "main") -> list[Step]:
    """The stream waits until these pieces have arrived."""
    words = [Word(rank, "arrived", flag) for flag in flags]
    return [*(Await(stream, word) for word in words), *(Put(stream, word, 0) for word in words)]


def _sum(rank: int, flags: list[int], waiting: bool) -> list[Step]:
    """The slots are added when these pieces have arrived. waiting: `sum` itself waits."""
    if not waiting:
        return [*_take(rank, flags), Work("main", "sum", rank)]
    words = tuple(Word(rank, "arrived", flag) for flag in flags)
    return [Work("main", "sum", rank, words), *(Put("main", word, 0) for word in words)]


def _fork(streams: int) -> list[Step]:
    """The second stream, if there is one, begins here."""
    return [Record("main", "forked"), Follow("second", "forked")] if streams > 1 else []


def _join(streams: int) -> list[Step]:
    """The main stream waits for what the second one computes."""
    return [Record("second", "computed"), Follow("main", "computed")] if streams > 1 else []


def _release(
    rank: int, world: int, copied: bool = False, ways: Sequence[Stream] = COPIES[:1]
) -> list[Step]:  # fmt: skip
    """Peers may write this rank's slots again; and what the copies read may be freed.

    copied: the copies read these slots, too, so they are free only when all copies have ended.
    ways: the streams of the copies.
    """
    free, sent = _free(rank, world), _sent(ways)
    return [*sent, *free] if copied else [*free, *sent]


def _sent(ways: Sequence[Stream]) -> list[Step]:
    """The main stream waits for what these streams send."""
    ends: list[Step] = []
    for way in ways:
        ends += [Record(way, f"sent by {way}"), Follow("main", f"sent by {way}")]
    return ends


def _free(rank: int, world: int) -> list[Step]:
    return [Put("main", Word(q, "free", rank), 1) for q in others(rank, world)]


@functools.cache  # later calls have the same schedule
def all_gather(
    rank: int, world: int, waiting: bool = False, streams: int = 1, keeps: bool = False
) -> Schedule:
    """Each rank's shard goes to all peers, and is multiplied there as soon as it has arrived.

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
        sent = _sent(COPIES[:1])
        steps += sent if keeps else []  # before the words for which the copies wait are cleared
        return (*steps, *(Put("main", word, 0) for word in arrived), *_free(rank, world),
                *([] if keeps else sent))  # fmt: skip
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
    rank: int, world: int, waiting: bool = False, streams: int = 1, blocks: int = 1,
    pairs: bool = False, beside: bool = False,
) -> Schedule:  # fmt: skip
    """The product of each peer's chunk, sent while the next is computed; the own chunk is last.

    Each chunk is in blocks of rows. Chunk b x T + q is the rows of rank q in block b. Actions:
    `product` c; `copy` c sends it to its rank; and `sum` c adds the slots of this rank's chunk c,
    of which the own product is one, in the order of the ranks. The peers' chunks of all blocks come
    first. streams: 1 or 2, of the products and of the sums that follow them: a sum may then run
    beside the last tiles of the next block's product. waiting: `sum` waits for the slots by itself;
    for one block. pairs: `both` c is the product of chunks c and c + 1, of ranks 2i and 2i + 1, if
    both are peers: two products of few rows take longer than one of both. For one block. beside:
    the action `beside` runs behind the last product and needs nothing of other ranks. For one
    block; `streams` is then for the sum alone, which may run in the midst of `beside`.
    """
    groups, ways = _groups(rank, world, pairs), _ways(world)
    if beside:
        return _beside(rank, world, groups, streams)
    steps = _fork(streams)
    lanes = _lanes(blocks * (len(groups) + 1), streams)
    for block in range(blocks):
        steps += _peers(rank, world, block, lanes[block * len(groups) :], groups)
    if waiting:
        steps += [Work(lanes[-1], "product", rank), *_join(streams)]
        flags = others(rank, world)
        return (*steps, *_sum(rank, flags, waiting), *_release(rank, world, ways=ways))
    for block, lane in enumerate(lanes[-blocks:]):
        steps += _own(rank, world, block, lane)
    return (*steps, *_join(streams), *_release(rank, world, ways=ways))


def _beside(rank: int, world: int, groups: Sequence[tuple[int, ...]], streams: int) -> Schedule:
    steps = _peers(rank, world, 0, _lanes(len(groups), 1), groups)
    steps += [Work("main", "product", rank), *_fork(streams), Work("main", "beside", rank)]
    lane = LANES[streams - 1]
    steps += [*_take(rank, _flags(rank, world, 0), lane), Work(lane, "sum", rank)]
    return (*steps, *_join(streams), *_release(rank, world, ways=_ways(world)))


@functools.cache
def all_reduce(
    rank: int, world: int, blocks: int, streams: int = 1, push: bool = False
) -> Schedule:
    """A reduce-scatter of each block, whose sums go to all ranks under the products of the next.

    Actions: as in `reduce_scatter`; `spread` c sends this rank's sum of a block to the rank of c;
    `take` c puts the sum of chunk c, which has arrived, to the others, beside the last block's
    exchange. push: nothing follows the last block, so one kernel, `push`, does what `sum`, `spread`
    and `take` do for the others.
    """
    lanes, ways, steps = _lanes(blocks * world, streams), _ways(world), _fork(streams)
    for block in range(blocks):
        mine = lanes[block * world :]
        steps += _peers(rank, world, block, mine)
        lane = mine[world - 1]
        if push and block == blocks - 1:
            # Its programs hold the GPU while they wait for peers, who need all products of this
            # rank: these end before.
            chunk = block * world + rank
            steps += [Work(lane, "product", chunk), *_join(streams)]
            steps += _take(rank, _flags(rank, world, block))
            if blocks > 1:
                steps += [Record("main", "last"), *(Follow(way, "last") for way in ways)]
            steps.append(Work("main", "push", chunk))
            continue
        steps += _own(rank, world, block, lane)
        steps += _spread(rank, world, block, blocks * world, lane, said=block == blocks - 1)
    # A peer's sums of a block are there before its part of the last block is, for which this rank
    # has waited. Beside `push` copies' streams take them, behind all that peers wait for: a copy
    # within a GPU may need what `push` holds.
    steps += _join(streams) if blocks > 1 and not push else []
    for block in range(blocks - 1):
        for peer in others(rank, world, -1):  # rank - 1 sends to this rank first
            lane = _way(rank, peer, world) if push else "main"
            steps.append(Work(lane, "take", block * world + peer))
    steps += [] if push else _collect(rank, world, blocks - 1, blocks * world)
    copied = blocks > 1 or not push
    return (*steps, *_release(rank, world, copied=copied, ways=ways))


@functools.cache
def blocked_all_reduce(rank: int, world: int, blocks: int, streams: int = 1) -> Schedule:
    """As `all_reduce`, but `product` b is that of block b, of all ranks' rows.

    A block's chunks go to their owners under the next block's product; behind that, or with two
    streams beside its end, `sum` adds them, and the sums go to all under the products that follow.
    One kernel, `push`, adds and sends the last block. Beside it copies' streams take the sums of
    the others, behind all that peers wait for: a copy within a GPU may need what `push` holds.
    streams: 1 or 2, of the products and their sums.
    """
    lanes, ways, steps = _lanes(blocks, streams), _ways(world), _fork(streams)
    for block, lane in enumerate(lanes):
        steps.append(Work(lane, "product", block))
        if block < blocks - 1:
            steps += _spread(rank, world, block, 0, lane, action="copy", first=block == 0)
        if block > 0:
            done, before = block - 1, lanes[block - 1]
            steps += _take(rank, _flags(rank, world, done), before)
            steps.append(Work(before, "sum", done * world + rank))
            steps += _spread(rank, world, done, blocks * world, before, said=block == blocks - 1)
    steps += [*_join(streams), Work("main", "push", blocks - 1)]
    if blocks == 1:
        return tuple(steps)
    # The sums of earlier blocks are there before those of the last one that is sent so.
    steps += _collect(rank, world, blocks - 2, blocks * world)
    for block in range(blocks - 2):
        for peer in others(rank, world, -1):
            steps.append(Work(_way(rank, peer, world), "take", block * world + peer))
    return (*steps, *_release(rank, world, copied=True, ways=ways))


def _lanes(products: int, streams: int) -> list[Stream]:
    return [LANES[number % streams] for number in range(products)]


def _groups(rank: int, world: int, pairs: bool = False) -> list[tuple[int, ...]]:
    """The peers whose chunks are one product, from rank + 1 on. pairs: 2i and 2i + 1 together."""
    peers = others(rank, world)
    if not pairs:
        return [(q,) for q in peers]
    last, own = world - world % 2, rank - rank % 2
    return [
        (q, q + 1) if q < last and q - q % 2 != own else (q,)
        for q in peers
        if q % 2 == 0 or q - 1 == own
    ]


def _peers(
    rank: int, world: int, block: int, lanes: list[Stream],
    groups: Sequence[tuple[int, ...]] | None = None,
) -> list[Step]:  # fmt: skip
    """The products of the peers' chunks of a block, each sent while the next is computed.

    groups: see `_groups`; None: each peer's chunk alone.
    """
    steps: list[Step] = []
    for peers, lane in zip(groups or _groups(rank, world), lanes, strict=False):
        first = block * world + peers[0]
        ready, action = f"product {first}", "product" if len(peers) == 1 else "both"
        steps += [Work(lane, action, first), Record(lane, ready)]
        for peer in peers:
            chunk, way = block * world + peer, _way(rank, peer, world)
            steps.append(Follow(way, ready))
            steps += _send(rank, peer, chunk, block * world + rank, block == 0, stream=way)
    return steps


def _own(rank: int, world: int, block: int, lane: Stream) -> list[Step]:
    """The own product of a block, and the sum of what has arrived."""
    chunk, flags = block * world + rank, _flags(rank, world, block)
    return [Work(lane, "product", chunk), *_take(rank, flags, lane), Work(lane, "sum", chunk)]


def _flags(rank: int, world: int, block: int) -> list[int]:
    return [block * world + peer for peer in others(rank, world)]


def _spread(
    rank: int, world: int, block: int, flags: int, lane: Stream, said: bool = True,
    action: str = "spread", first: bool = False,
) -> list[Step]:  # fmt: skip
    """Send this rank's sums of a block, made by `lane`, to all peers. flags: the first flag.

    said: peers are told. action, first: see `_send`; `copy` sends each peer's chunk, not the sums.
    The main stream waits for the copies at the end, and so for the lane.
    """
    ready, flag = f"{action} {block}", flags + block * world + rank
    steps: list[Step] = [Record(lane, ready)]
    steps += [Follow(way, ready) for way in _ways(world)]
    for peer in others(rank, world):
        chunk, way = block * world + peer, _way(rank, peer, world)
        sending = _send(rank, peer, chunk, flag, first, action, way)
        steps += sending if said else sending[:-1]
    return steps


def _collect(rank: int, world: int, block: int, flags: int) -> list[Step]:
    """Move the peers' sums of a block, sent by `_spread`, to their places as they arrive."""
    steps: list[Step] = []
    for peer in others(rank, world, -1):
        chunk, way = block * world + peer, _way(rank, peer, world)
        steps += [*_take(rank, [flags + chunk], way), Work(way, "take", chunk)]
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
    ways = _ways(world) if spread else COPIES[:1]
    return (*steps, *_release(rank, world, copied=True, ways=ways))
