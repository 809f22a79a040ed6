"""Embedding bags by one kernel that pushes: on ranks that share memory, in Triton's interpreter."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.comm import capture
from ladder.kernels import bags as kernels
from ladder.ops import workspace
from ladder.ops.bags import pool, spread
from ladder.ops.mailbox import MAX_TABLES, addresses, mailbox
from ladder.ops.registry import OPERATORS
from tests.distributed import Pools
from tests.kernels.support import on
from tests.ops.everyone import TOLERANCE, check_refused
from tests.ops.pushed_inputs import Lookup, lookup, pooled
from tests.ops.pushes import check_same, pushing
from tests.samples import relative_error

OP = "embedding_bag_all_to_all"
RUN = OPERATORS[OP].implementations


# Samples of a rank, tables of a rank (more on each odd one), dim, longest bag, programs, the rest.
CALLS: list[tuple[int, int, int, int, int, dict[str, Any]]] = [
    (3, 2, 5, 6, 2, {}),
    (3, 1, 16, 3, 3, {"order": "oblivious"}),
    (2, 1, 8, 0, 1, {"order": "tables"}),
    (5, 2, 3, 9, 2, {"order": "tables"}),
    (1, 1, 4, 4, 3, {}),  # fewer items than programs
    (3, 2, 20, 2, 1, {"order": "oblivious"}),
]


def on_ranks(rank: int, ranks: int, folder: str, dtype: torch.dtype) -> list[str]:
    """Calls of several shapes, orders and numbers of programs, one right after the other."""
    group: Any = dist.group.WORLD
    made = []
    for call, (share, tables, dim, longest, programs, options) in enumerate(CALLS):
        counts = [tables + q % 2 * (call != 1) for q in range(ranks)]
        each = [
            lookup(q, call, share * ranks, counts[q], dim, dtype, longest) for q in range(ranks)
        ]
        mode = ("sum", "mean")[call % 2]
        weights = [w.t().contiguous().t() if call == 3 else w for w in each[rank].weights]
        given = weights, each[rank].indices, each[rank].offsets, mode, counts
        whole = torch.cat([pooled(one, mode) for one in each], dim=1).chunk(ranks)[rank]
        made.append((given, {"programs": programs, **options}, whole))
    with (
        pushing(rank, ranks, folder) as ran,
        # Blocks of few bags, rows in several tiles.
        mock.patch.object(kernels, "MOST_BAGS", 2), mock.patch.object(kernels, "WIDEST", 8),
    ):  # fmt: skip
        found = [RUN["pushed"].run(group, *given, **options) for given, options, _ in made]
        for call, (out, (_, _, wanted)) in enumerate(zip(found, made, strict=True)):
            check_same(out, wanted, (call, rank))  # later calls have written to the same slots
        for call, (given, options, wanted) in enumerate(made[:ranks]):
            out = RUN["pushed"].run(group, *given, **options, lent=True)
            if rank == call % ranks:
                time.sleep(0.05)  # the others are ahead, and must not write to what is lent
            check_same(out, wanted, (call, rank, "lent"))
    return ran


@pytest.mark.parametrize(
    ("device", "ranks", "dtype"),
    [on("interpreter", 2, torch.float32), on("interpreter", 4, torch.bfloat16, slow=True)],
)
def test_bags_are_pooled_in_order_and_reach_their_ranks(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, ranks: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Bit for bit; without a wait, a word that is cleared, or with stores before `open`, it fails.

    So do an order that misses an item, bags of another rank's offsets, and rows that are added
    twice.
    """
    for ran in pools(ranks).run(on_ranks, str(tmp_path), dtype):
        assert ran == ["_push_bags_kernel"]
        interpreted += ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", [on("interpreter"), on("cuda")])
def test_bags_of_one_gpu_are_pooled_in_order(device: str, dtype: torch.dtype) -> None:
    """Bit for bit, in any number of tables, also views; rows in several tiles; means; all empty."""
    for call, (batch, tables, dim, longest) in enumerate(
        [(5, 3, 20, 25), (3, 1, 600, 11), (4, 2, 8, 0), (50, 2, 6, 3)]
    ):
        each = lookup(0, call, batch, tables, dim, dtype, longest)
        mode = ("sum", "mean")[call % 2]
        weights = [weight.t().contiguous().t().to(device) for weight in each.weights]
        given = each.indices.to(device), each.offsets.to(device), mode
        check_same(kernels.pool_bags(weights, *given).cpu(), pooled(each, mode), call)
        if device == "cuda":
            found = pool(weights, *given)
            assert found.shape == (batch, tables, dim)
            check_same(found.flatten(1).cpu(), pooled(each, mode), call)
            check_spread(each, mode)


@pytest.mark.parametrize("sms", [78, 132, 148])
def test_by_default_no_more_programs_run_than_there_are_words_for(sms: int) -> None:
    """Rows of few numbers have tiles of one warp, and so many programs."""
    found = SimpleNamespace(multi_processor_count=sms)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=found):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for dim in (1, 3, 4, 5, 64, 100, 256, 600, 4096):
                weight = torch.empty(2, dim, dtype=dtype, device="meta")
                assert sms <= kernels.default_programs(weight) <= kernels.MAX_PROGRAMS


def check_spread(each: Lookup, mode: str) -> None:
    """The gradient of the first table on a GPU, of its bags in float64."""
    ends = each.offsets[: (len(each.offsets) - 1) // len(each.weights) + 1]
    table, indices = each.weights[0].double().requires_grad_(), each.indices[: ends[-1]]
    grad = torch.randn(len(ends) - 1, table.shape[1]).to(each.weights[0].dtype)
    pool([table], indices, ends, mode)[:, 0].backward(grad.double())
    found = spread(grad.cuda(), indices.cuda(), ends.cuda(), len(table), mode)
    assert table.grad is not None
    assert relative_error(found.cpu(), table.grad) < TOLERANCE[grad.dtype]


def asked(rank: int, ranks: int, folder: str) -> list[str]:
    """What is wrong, what a capture cannot make, and tables of addresses, which do not pile up."""
    group: Any = dist.group.WORLD
    each = lookup(rank, 0, 2 * ranks, 2, 4, torch.float32, 3)
    given = *each, "sum", [2] * ranks
    with pushing(rank, ranks, folder) as ran:
        for options, words in (
            ({"order": "remotely"}, r"unknown order 'remotely' \(did you mean 'remote'\?\)"),
            ({"programs": 0}, "programs=0; expected 1 to 4096"),
            ({"lent": "maybe"}, "lent='maybe'; expected true or false"),
            ({"programs": 5000}, "programs=5000; expected 1 to 4096"),
        ):
            check_refused(words, RUN["pushed"].run, group, *given, **options)
        with mock.patch.object(capture, "capturing", return_value=True):
            check_refused(f"{OP} needs new memory", RUN["pushed"].run, group, *given)
        RUN["pushed"].run(group, *given)
        moved = [weight.clone() for weight in each.weights], *given[1:]
        with mock.patch.object(capture, "capturing", return_value=True):
            RUN["pushed"].run(group, *given)
            words = r"needs new memory \(a table of its tensors' addresses\)"
            check_refused(words, RUN["pushed"].run, group, *moved)
            turned = [each.weights[0], each.weights[1].t().contiguous().t()], *given[1:]
            words = r"weights\[1\] is not contiguous, .* call \.contiguous\(\) once"
            check_refused(words, RUN["pushed"].run, group, *turned)
        tables = workspace.workspace(group, OP, each.indices.device).made["addresses"]
        made = [mailbox(group, OP, each.indices, size, 8) for size in (20_000, 9, 40_000, 20_000)]
        assert [one is made[0] for one in made] == [True, False, False, True]  # 9 bytes: the first
        with mock.patch.object(capture, "capturing", return_value=True):
            assert mailbox(group, OP, each.indices, 40_000, 8) is made[2]
            check_refused("needs new memory .* MiB", mailbox, group, OP, each.indices, 50_000, 8)
        captured = addresses(group, OP, each.weights)
        others = [torch.zeros(1) for _ in range(2 * MAX_TABLES)]
        for other in others:
            addresses(group, OP, [other])
        assert len(tables) == MAX_TABLES + 1
        assert addresses(group, OP, each.weights) is captured
        assert addresses(group, OP, others[:1]).tolist() == [others[0].data_ptr()]
    return ran


@pytest.mark.parametrize(("device", "ranks"), [on("interpreter", 2)])
def test_what_cannot_run_is_refused(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, ranks: int
) -> None:
    interpreted += pools(ranks).run(asked, str(tmp_path))[0]
