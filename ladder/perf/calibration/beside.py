"""Slowdowns: of a large product and of a decode step's products beside collectives and copies, and
of these beside the products.

cuBLAS's thread blocks stay on their multiprocessors until the whole product is done, so an
all-reduce that comes in the middle of it waits for its end. In a model it comes when a product has
ended. Messages here take many times as long as a product, so that this wait is a small part of what
is measured: by how much both are slower while both run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ladder.comm.transports import TRANSPORTS
from ladder.comm.two_shot import TwoShotAllReduce
from ladder.kernels.carveout import DRIVERS, carveout
from ladder.perf.calibration.collectives import to_next
from ladder.perf.calibration.exchanges import exchange
from ladder.perf.calibration.sizes import Part, Point, Sizes, pairs, random
from ladder.perf.calibration.timing import turn_of
from ladder.perf.calibration.together import Turn, speed_beside

PRODUCTS, REDUCES, COPIES = 12, 4, 20  # calls of a turn, which takes a millisecond or two
URGENT = -1  # the priority of the streams of our all-reduces and of copies in prompts


def parts(
    sizes: Sizes, group: dist.ProcessGroup, device: torch.device, push: bool
) -> Iterator[Part]:
    """push: whether the ranks can write to peer memory."""
    message = sizes.together.message
    others: dict[str, Callable[[], Turn]] = {
        "nccl": partial(_reduces, sizes, message, group, device)
    }
    if push:
        others["copies"] = partial(_copies, sizes, group, device)
        others["push"] = partial(_two_shots, sizes, message, group, device)
        others["direct"] = partial(_landings, sizes, group, device)
    for name, other in others.items():
        yield Part(f"product beside {name}", {}, partial(_both, sizes, name, other, device))
    yield Part("decode beside nccl", {}, partial(_steps, sizes, False, group, device))
    yield Part("nccl beside decode", {}, partial(_steps, sizes, True, group, device))


def _both(
    sizes: Sizes, name: str, other: Callable[[], Turn], device: torch.device
) -> dict[str, float]:
    """The speed of a product beside the other work, and that of the other work beside it."""
    rows, outputs, inputs = sizes.together.product
    x, weight = (random(size, inputs, dtype=sizes.dtype, device=device) for size in (rows, outputs))
    product = Turn(turn_of([partial(F.linear, x, weight)], PRODUCTS, device))
    made = other()
    return {
        f"product_beside_{name}": speed_beside(product, made, device),
        f"{name}_beside_product": speed_beside(made, product, device),
    }


def _reduces(
    sizes: Sizes, nbytes: int, group: dist.ProcessGroup, device: torch.device, calls: int = 0
) -> Turn:
    """The backend's all-reduces, with the priority of a model's communication stream."""
    source = torch.zeros(nbytes // sizes.dtype.itemsize, dtype=sizes.dtype, device=device)
    work = partial(dist.all_reduce, source, group=group)
    return Turn(turn_of([work], calls or REDUCES, device))


def _two_shots(sizes: Sizes, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Turn:
    """Our all-reduces for messages of prompts. They are launched one by one, since a graph keeps
    the priorities of its capture and ignores that of the stream on which it runs. They have no
    dependent launch: in a model other work between them prevents it. Here the thread blocks of the
    next all-reduces would take all multiprocessors, and no product would begin."""
    source = torch.zeros(nbytes // sizes.dtype.itemsize, dtype=sizes.dtype, device=device)
    work = partial(TwoShotAllReduce(nbytes, group, device), source, True)
    return Turn(turn_of([work], REDUCES, device, captured=False), URGENT)


def _landings(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> Turn:
    """Exchanges by landings over links, in a graph, like the prompts that use them. In the graph
    they are on a stream with priority, since a graph's kernels keep the priority of their capture.
    """
    rows = sizes.together.landed // sizes.dtype.itemsize // sizes.hidden
    mine = random(rows, sizes.hidden, dtype=sizes.dtype, device=device)
    gain = torch.ones(sizes.hidden, dtype=sizes.dtype, device=device)
    work = partial(exchange, TRANSPORTS["direct"](group, 1), mine, gain, group)
    urgent = torch.cuda.Stream(device, priority=URGENT)

    def turn() -> None:
        main = torch.cuda.current_stream(device)
        urgent.wait_stream(main)
        with torch.cuda.stream(urgent):
            for _ in range(COPIES):
                work()
        main.wait_stream(urgent)

    return Turn(turn_of([turn], 1, device), URGENT)


def _copies(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> Turn:
    """Copies by copy engines, launched one by one as in prompts."""
    work = to_next(sizes, sizes.together.copied, group, device)
    return Turn(turn_of([work], COPIES, device, captured=False), URGENT)


def _steps(
    sizes: Sizes, turned: bool, group: dist.ProcessGroup, device: torch.device
) -> list[Point]:
    """The speed of decode products beside the backend's all-reduces, by the bytes of a message.

    turned: instead, the speed of the all-reduces beside the products.
    """
    found: list[Point] = []
    for rows in sizes.together.steps:
        nbytes = rows * sizes.hidden * sizes.dtype.itemsize
        works = pairs(sizes, rows, sizes.together.outputs, device)
        with carveout(DRIVERS):  # as in steps with NCCL
            products = Turn(turn_of(works, max(sizes.together.calls, len(works)), device))
        reduces = _reduces(sizes, nbytes, group, device, sizes.together.calls)
        timed, other = (reduces, products) if turned else (products, reduces)
        found.append((nbytes, speed_beside(timed, other, device)))
    return found
