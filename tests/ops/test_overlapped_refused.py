"""Overlapped products: what is refused, and where blocks end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

import ladder.ops
from ladder.comm import capture
from ladder.models.errors import UserError
from ladder.operator_names import GATHER_BACKWARD, SCATTER_BACKWARD
from ladder.ops.blocks import Blocks
from ladder.ops.registry import ANOTHER, OPERATORS
from tests.distributed import Pools
from tests.kernels.support import _poisoned_memory, on  # noqa: F401  (a fixture)
from tests.ops.everyone import check_refused
from tests.ops.everyone import world as group_name
from tests.ops.overlapped import (
    EVERY,
    FEW_ROWS,
    IMPLEMENTATIONS,
    IN_BLOCKS,
    arguments,
    lands,
    run_of,
)
from tests.ops.streams import Everyone, Group, Machine


def asked(rank: int, world_size: int) -> None:
    A, B = torch.ones(4, 3), torch.ones(3, 5)
    for op, name in EVERY + IN_BLOCKS + FEW_ROWS:
        args: tuple[Any, ...] = arguments(op, A, B, False, world_size)
        args = (A, [B], 0) if op == "all_gather_matmul" else args
        with ladder.ops.use(op, name):
            words = rf"{op} by '{name}' cannot run here: it"
            check_refused(words, getattr(torch.ops.ladder, op), *args, group_name())


def test_without_gpus_they_are_refused_by_name(pools: Pools) -> None:
    pools(2).run(asked)


def test_blocks_of_rows_that_are_no_whole_words_of_16_bytes() -> None:
    """The table has blocks for such shapes, whose sizes it rounds up."""
    for n, name in ((12288, "blocked"), (12280, "blocked"), (12287, "staged"), (12292, "staged")):
        choice = ladder.ops.explain(
            "matmul_all_reduce", [(4096, 12288), (12288, n)], ranks=4, device="NVIDIA H200",
            mode="captured",
        )  # fmt: skip
        assert choice.implementation == name, (n, choice)
        if name != "blocked":
            assert f"of {n} columns, are no multiples of 16 bytes" in dict(choice.others)["blocked"]


def test_what_cannot_run_is_refused_and_nothing_is_picked_unmeasured() -> None:
    for op, names in IMPLEMENTATIONS.items():
        shapes: Any = [(512, 256), (256, 512)]
        if op in ("all_gather_matmul", GATHER_BACKWARD):
            shapes = [(512, 256), [(256, 512)]]
        choice = ladder.ops.explain(op, shapes, ranks=4, device="NVIDIA H200")
        assert choice.implementation == "staged"
        others = dict(choice.others)
        for name in names:
            ordered = OPERATORS[op].implementations[name].ordered
            assert ("not measured as faster" if ordered else ANOTHER) in others[name]
        wide = ladder.ops.explain(op, shapes, ranks=4, device="NVIDIA H200", dtype=torch.float32)
        refused = {name for name, why in wide.others if "not float32" in why}
        assert refused == set(names) - {"chunked", "ring"}
        empty = [(0, 256), *shapes[1:]]
        why = dict(ladder.ops.explain(op, empty, ranks=4, device="NVIDIA H200").others)
        assert all("a size is 0" in why[name] for name in names)
        alone = dict(ladder.ops.explain(op, shapes, ranks=1, device="NVIDIA H200").others)
        assert all("one rank" in alone[name] for name in names)
        if lands(op):
            shapes = [(512, 256), (256, 16385)]
            why = dict(ladder.ops.explain(op, shapes, ranks=4, device="NVIDIA H200").others)
            assert all("rows of up to 16384 columns" in why[name] for name in names)
    given: Any = (SCATTER_BACKWARD, [(512, 256), (256, 512)])
    about: Any = {"ranks": 4, "device": "NVIDIA H200", "any_order": True}
    setting = "allow_bf16_reduced_precision_reduction"
    allowed = getattr(torch.backends.cuda.matmul, setting)
    words = f"torch.backends.cuda.matmul.{setting}=False forbids"
    try:
        for value in (True, False, True):  # also after calls that were chosen before
            setattr(torch.backends.cuda.matmul, setting, value)
            why = dict(ladder.ops.explain(*given, **about).others)["chunked"]
            assert (words in why) != value
    finally:
        setattr(torch.backends.cuda.matmul, setting, allowed)
    for op, name in FEW_ROWS:
        for rows, dtype, words in (
            (64, torch.bfloat16, "not measured as faster"),
            (2**15, torch.bfloat16, "not measured as faster"),
            (2**15 + 4, torch.bfloat16, "it is for partials of up to 16 MiB"),
            (64, torch.float16, "not measured as faster"),
            (64, torch.float64, "not float64"),
        ):
            given = {"ranks": 4, "device": "NVIDIA H200", "dtype": dtype}
            gathers = op == "all_gather_matmul"
            shapes = [(rows // 4, 256), [(256, 256)]] if gathers else [(rows, 256), (256, 256)]
            choice = ladder.ops.explain(op, shapes, **given)
            words = words.replace("partials", "rows of all ranks" if gathers else "partials")
            if name == "pushing" and rows > 64:
                words = "its product is for up to 64 rows"
            assert words in dict(choice.others)[name]


def test_a_wrong_tile_is_refused() -> None:
    A, B = torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    for name, given in (("waiting", (A, [B], 0, False)), ("tracked", (A, B, "sum", 0))):
        op = "all_gather_matmul" if name == "waiting" else "matmul_reduce_scatter"
        for tile in ("128x256", "128x250x64", "8x8x8", "axbxc"):
            words = rf"tile='{tile}'; expected rows x columns x depth"
            check_refused(words, run_of(op, name), Group(0, Everyone(2)), *given, tile=tile)
    tracked = run_of("matmul_reduce_scatter", "tracked")
    check_refused("pieces=0; expected 1", tracked, None, A, B, "sum", 0, pieces=0)
    check_refused("group_m=0; expected 1", tracked, None, A, B, "sum", 0, group_m=0)


def test_wrong_options_are_refused() -> None:
    words = "unknown key 'shots' of options of matmul_reduce_scatter by 'pushed'; known: none"
    with (
        pytest.raises(UserError, match=words),
        ladder.ops.use("matmul_reduce_scatter", "pushed", shots=2),
    ):
        pass
    A, B, group = torch.ones(8, 8), torch.ones(8, 8), Group(0, Everyone(2))
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    for op, name, given in (
        (gather, "chunked", (A, [B], 0, False)), (scatter, "chunked", (A, B, "sum", 0)),
        (scatter, "ring", (A, B, "sum", 0)), ("matmul_all_reduce", "chunked", (A, B)),
        ("matmul_all_reduce", "ring", (A, B)),
    ):  # fmt: skip
        for streams in (0, 3):
            words = rf"streams={streams}; expected 1 to 2"
            check_refused(words, run_of(op, name), group, *given, streams=streams)
    words = "push='maybe'; expected true or false"
    check_refused(words, run_of("matmul_all_reduce", "chunked"), group, A, B, push="maybe")
    for options, words in (
        ({"blocks": 0}, "blocks=0; expected 1 to 8"), ({"blocks": 9}, "blocks=9; expected 1 to 8"),
        ({"ratio": 0}, "ratio=0; expected 1 to 8"), ({"ratio": 9}, "ratio=9; expected 1 to 8"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            Blocks(8, 2, **{"blocks": 1, "ratio": 1, **options})


def test_blocks_share_all_rows_and_end_at_whole_tiles() -> None:
    for rows, world, blocks, ratio in (
        (4096, 2, 2, 2), (4096, 2, 3, 2), (4096, 4, 1, 1), (100, 3, 8, 8), (1, 4, 3, 2),
        (8191, 2, 2, 1), (1000, 2, 2, 4),
    ):  # fmt: skip
        cut = Blocks(rows, world, blocks, ratio)
        every = [cut.part(block, rank) for block in range(blocks) for rank in range(world)]
        assert [row for part in every for row in range(part.start, part.stop)] == list(range(rows))
        for rank in range(world):
            own = [cut.place(block, rank) for block in range(blocks)]
            assert all(a.stop <= b.start for a, b in pairwise(own))
            assert own[-1].stop <= cut.height
    assert Blocks(4096, 2, 2, 2).starts == [0, 1408, 2048]  # 11 and 5 tiles of 128 rows
    assert Blocks(4096, 2, 4, 1).starts == [0, 512, 1024, 1536, 2048]


def test_memory_cannot_be_made_in_a_capture() -> None:
    """Refused with the remedy, on any rank alike; what is there already is used."""
    machine = Machine(2, lambda n: n % 2)
    A, B, wide = (
        torch.ones(*shape, dtype=torch.bfloat16) for shape in ((8, 8), (8, 8), (8, 2**11))
    )
    tall = torch.ones(2**12, 8, dtype=torch.bfloat16)
    group: Any = Group(0, Everyone(2))
    chunked, tracked = (run_of("matmul_reduce_scatter", name) for name in ("chunked", "tracked"))
    with machine.recording():
        with mock.patch.object(capture, "capturing", return_value=True):
            check_refused("matmul_reduce_scatter needs new memory", chunked, group, A, B, "sum", 0)
        chunked(group, A, B, "sum", 0)
        with mock.patch.object(capture, "capturing", return_value=True):
            chunked(group, A[:4], B, "sum", 0)
            check_refused("MiB.*run it once with these", chunked, group, tall, wide, "sum", 0)
            check_refused("tables of tiles", tracked, group, A, B, "sum", 0)
