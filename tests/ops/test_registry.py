"""Which implementation runs a call: the table, `use`, `explain`, and what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ladder.ops
from ladder.models.errors import UserError
from ladder.ops import choice, explain, registry, use
from ladder.ops.registry import ANOTHER, OPERATORS, Call, bucket
from ladder.ops.table import PACKAGED, VARIABLE, read_table
from tests.distributed import Pools
from tests.ops.everyone import world

ENTRY: dict[str, Any] = {
    "op": "all_reduce", "device": "H", "dtype": "bfloat16", "ranks": 4, "sizes": [4096],
    "mode": "eager", "implementation": "fast", "options": {"chunk": 3}, "source": "a test",
}  # fmt: skip
BACKENDS = f"{ANOTHER}, which ladder.ops.allow_any_order allows"
SHAPE = [(4, 1000)]  # 4000 elements: the bucket 4096


def refusal(call: Call) -> str | None:
    return "it has no 8; take 4" if call.ranks == 8 else None


def fast(group: Any, x: Tensor, chunk: int = 1) -> Tensor:
    return x * 0 + chunk


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """`all_reduce` has a second implementation, `fast`."""
    more = {"fast": registry.Implementation("fast", fast, refusal, ("chunk",))}
    with mock.patch.dict(OPERATORS["all_reduce"].implementations, more):
        yield
    choice._choose.cache_clear()


@pytest.fixture
def _fast() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that LADDER_OPS_TABLE names."""
    path = tmp_path / "table.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_every_operator_has_staged_and_the_shipped_table_is_valid() -> None:
    read_table(PACKAGED)
    for operator in OPERATORS.values():
        assert registry.DEFAULT in operator.implementations, operator.name
        assert hasattr(torch.ops.ladder, operator.name)


def test_sizes_are_rounded_up_to_powers_of_two() -> None:
    assert bucket((0, 1, 2, 3, 4, 5, 1024, 1025)) == (0, 1, 2, 4, 4, 8, 1024, 2048)
    found = explain("all_gather_matmul", [(3, 8), [(8, 5), (8, 6)]], ranks=3, device="H")
    assert found == explain("all_gather_matmul", [(3, 8), ((8, 5), (8, 6))], ranks=3, device="H")
    assert found.call.sizes == (16, 16, 8)  # 9 rows, 11 columns


@pytest.mark.usefixtures("_fast")
def test_the_table_decides_and_explain_says_why(table: Path) -> None:
    table.write_text(json.dumps([ENTRY, {**ENTRY, "ranks": 8}]))
    picked = explain("all_reduce", SHAPE, ranks=4, device="H")
    assert (picked.implementation, dict(picked.options)) == ("fast", {"chunk": 3})
    assert str(picked) == (
        "all_reduce, eager: fast chunk=3 (table.json: a test)\n"
        f"  not collective: {BACKENDS}\n"
        "  not staged: not measured as faster"
    )
    for other in (
        {"ranks": 2}, {"device": "cpu"}, {"dtype": torch.float16},
    ):  # fmt: skip
        left = explain("all_reduce", SHAPE, **{"ranks": 4, "device": "H", **other})
        assert left.implementation == "staged", other
        assert "no measurement for" in left.why
        assert left.others == (("collective", BACKENDS), ("fast", "not measured as faster"))
    assert explain("all_reduce", [(4097,)], ranks=4, device="H").implementation == "staged"
    # What the table picks and this machine cannot run is said, and not run.
    eight = explain("all_reduce", SHAPE, ranks=8, device="H")
    assert eight.implementation == "staged"
    assert eight.why == "table.json has 'fast', which cannot run here: it has no 8; take 4"


def backend(group: Any, x: Tensor) -> Tensor:
    return x * 0 + 11


@contextlib.contextmanager
def with_backend() -> Iterator[None]:
    """`all_reduce` has a third implementation, which adds in the backend's order."""
    more = {"collective": registry.Implementation("collective", backend, refusal, ordered=False)}
    with registered(), mock.patch.dict(OPERATORS["all_reduce"].implementations, more):
        yield


def test_the_backends_order_is_picked_only_where_it_is_allowed(table: Path) -> None:
    """Without an entry, by an entry of either order, and where the entry's cannot run."""
    given: dict[str, Any] = {"ranks": 4, "device": "H"}
    with with_backend():
        table.write_text("[]")
        kept = explain("all_reduce", SHAPE, **given)
        assert (kept.implementation, kept.ordered) == ("staged", True)
        assert dict(kept.others)["collective"] == BACKENDS
        free = explain("all_reduce", SHAPE, any_order=True, **given)
        assert (free.implementation, free.ordered) == ("collective", False)
        assert "; it adds in another order than that of the ranks)" in str(free)
        assert explain("all_reduce", SHAPE, any_order=True, ranks=8, device="H").ordered
        with use("all_reduce", "collective"):  # who asks for it by name allows it
            assert explain("all_reduce", SHAPE, **given).implementation == "collective"

        backends = {**ENTRY, "implementation": "collective", "options": {}, "order": "any"}
        older = [ENTRY]  # without an order
        for entries, free_name in (
            ([backends, {**ENTRY, "order": "ranks"}], "collective"), (older, "fast")
        ):  # fmt: skip
            rewrite(table, entries)
            assert explain("all_reduce", SHAPE, **given).implementation == "fast"
            free = explain("all_reduce", SHAPE, any_order=True, **given)
            assert free.implementation == free_name
        for order, words in (("ranks", 'set order="any"'), ("random", "unknown order in")):
            rewrite(table, [{**backends, "order": order}])
            with pytest.raises(UserError, match=words):
                explain("all_reduce", SHAPE, **given)


def rewrite(table: Path, entries: list[dict[str, Any]]) -> None:
    table.write_text(json.dumps(entries))
    read_table.cache_clear()
    choice._choose.cache_clear()


def test_a_group_whose_ranks_are_apart_stages_its_calls() -> None:
    """Whatever this machine has, and what the packaged table names."""
    call = registry.call_of(
        "matmul_reduce_scatter", "NVIDIA H200", torch.bfloat16, 2, (8192, 4096, 14336), False,
        "eager", "ranks are on two hosts",
    )  # fmt: skip
    found = choice.choose(call)
    assert found.implementation == "staged"
    assert "which cannot run here: ranks are on two hosts" in found.why
    with mock.patch.object(ladder.ops.refusals, "push_refusal", side_effect=AssertionError):
        near = choice.choose(dataclasses.replace(call, apart=""))
    assert near.implementation == choice.listed(call)[0] != "staged"


def test_an_implementation_may_be_added_after_a_choice() -> None:
    def others() -> dict[str, str]:
        return dict(explain("all_reduce", SHAPE, ranks=4, device="H").others)

    assert "fast" not in others()
    with registered():
        assert others()["fast"] == "not measured as faster"
    assert "fast" not in others()


def test_an_implementation_that_is_defined_again_replaces_itself() -> None:
    def choose() -> choice.Choice:
        with use("all_reduce", "mine"):
            return explain("all_reduce", SHAPE, ranks=4, device="H")

    def define(refusal: Any) -> Any:
        def mine(group: Any, x: Tensor) -> Tensor:
            return x

        return registry.implement("all_reduce", "mine", refusal)(mine)

    with mock.patch.dict(OPERATORS["all_reduce"].implementations):
        define(registry.always)
        assert choose().implementation == "mine"
        again = define(lambda call: "it has changed")
        assert OPERATORS["all_reduce"].implementations["mine"].run is again
        with pytest.raises(UserError, match="it has changed"):  # and the choice is not remembered
            choose()
        with pytest.raises(UserError, match=r"'mine' of all_reduce is .*\.mine already; give"):
            registry.implement("all_reduce", "mine")(fast)
    choice._choose.cache_clear()


def test_a_partial_and_a_function_of_any_options_are_implementations() -> None:
    def mine(group: Any, x: Tensor, **options: Any) -> Tensor:
        return x

    with mock.patch.dict(OPERATORS["all_reduce"].implementations):
        registry.implement("all_reduce", "mine", options=("blocks",))(mine)
        part = functools.partial(mine, blocks=2)
        registry.implement("all_reduce", "part")(part)
        registry.implement("all_reduce", "part")(part)  # and it replaces itself
    choice._choose.cache_clear()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"op": "all_redduce"}, r"unknown operator 'all_redduce' \(did you mean 'all_reduce'"),
        ({"options": ("chunks",)}, r"options=\('chunks',\) must be a tuple of .*fast"),
        ({"options": "chunk"}, "options='chunk' must be a tuple of parameters of .*fast"),
        ({"insisted": ["chunk"]}, r"insisted=\['chunk'\] must be a tuple of parameters of .*fast"),
        ({"refusal": "no"}, "'fast' of all_reduce: refusal='no' must be a function of a call"),
    ],
)
def test_a_wrong_implementation_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        registry.implement(**{"op": "all_reduce", "name": "fast", **given})(fast)
    assert "fast" not in OPERATORS["all_reduce"].implementations


@pytest.mark.usefixtures("_fast")
def test_what_is_insisted_on_runs_or_is_refused(table: Path) -> None:
    table.write_text(json.dumps([ENTRY]))
    with use("all_reduce", "staged"):
        with use("all_reduce", "fast"):
            assert explain("all_reduce", SHAPE, ranks=2, device="H").implementation == "fast"
            with pytest.raises(UserError, match=r"all_reduce by 'fast' cannot run here: it has no"):
                explain("all_reduce", SHAPE, ranks=8, device="H")
        assert explain("all_reduce", SHAPE, ranks=4, device="H").why == "it was asked for"
    assert explain("all_reduce", SHAPE, ranks=4, device="H").implementation == "fast"
    with use("all_reduce", "fast", chunk=5):
        assert explain("all_reduce", SHAPE, ranks=4, device="H").options == (("chunk", 5),)
    with pytest.raises(
        UserError, match=r"unknown key '.*' of options of all_reduce by 'fast'.*'chunk'"
    ):
        use("all_reduce", "fast", chunks=5).__enter__()
    with pytest.raises(UserError, match=r"by 'fast': chunk='two' must be a whole number"):
        use("all_reduce", "fast", chunk="two").__enter__()
    with pytest.raises(UserError, match=r"pairs=1 must be true or false"):
        use("matmul_reduce_scatter", "chunked", pairs=1).__enter__()
    with pytest.raises(UserError, match=r"unknown implementation of all_reduce 'fastt'.*'fast'"):
        use("all_reduce", "fastt").__enter__()
    with pytest.raises(UserError, match="unknown operator 'reduce'"):
        use("reduce", "fast").__enter__()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"op": "all_redduce"}, "unknown operator in the table .*'all_redduce'.*'all_reduce'"),
        ({"implementation": "fused"}, "unknown implementation of all_reduce in the table"),
        (
            {"options": {"chunks": 1}},
            "unknown key 'chunks' of options in the table.*did you mean 'chunk'",
        ),
        ({"options": {"chunk": True}}, "in the table .*: chunk=True must be a whole number"),
        ({"dtype": "int8"}, "unknown dtype in the table"),
        ({"sizes": [4000]}, r"sizes=\[4000\] must be powers of two, \[elements\]"),
        ({"sizes": [4096, 1]}, r"sizes=\[4096, 1\] must be powers of two"),
        ({"sizes": ["a"]}, r"must be powers of two"),
        ({"ranks": "4"}, "ranks='4' is no int"),
        ({"rank": 4}, "unknown key 'rank' of the table"),
        ({"mode": "graph"}, "mode='graph'; give captured or eager, or remove the file"),
        ({"mode": None}, "mode=None; give captured or eager"),
        (
            {"measured": [{"sizes": [4000], "us": 1.0}]},
            "measured has .*; give sizes, us, instead_us",
        ),
        (
            {"measured": [{"sizes": [40, 1], "us": 1.0, "instead_us": 2.0}]},
            "measured has .*; give sizes, us, instead_us",
        ),
        ({"measured": [{"sizes": [40], "us": 0, "instead_us": 2.0}]}, "measured has"),
        *(
            (
                {"measured": [{"sizes": [size], "us": 1.0, "instead_us": 2.0}]},
                "measured has .*with sizes that round up to the entry's",
            )
            for size in ("4000", None, 4000.0, 2048, 4097)
        ),
        ({"measured": [{"sizes": [4000], "us": math.nan, "instead_us": 2.0}]}, "measured has"),
        ({"host_us": "1"}, "host_us='1' is no number"),
        *(
            ({"host_us": us}, f"host_us={us} must be a time in microseconds, 0 or more")
            for us in (-1, math.nan, math.inf, True)
        ),
        *(({"ranks": n}, f"ranks={n} must be a whole number, 1 or more") for n in (0, -2, True)),
        (
            {
                "op": "matmul_all_reduce",
                "sizes": [1, 1, 1],
                "implementation": "pushed",
                "options": {"shots": 9},
            },
            "options in the table of operators .*: shots=9 must be 1 to 2",
        ),
    ],
)
@pytest.mark.usefixtures("_fast")
def test_a_wrong_table_is_refused(table: Path, entry: dict[str, Any], words: str) -> None:
    table.write_text(json.dumps([{**ENTRY, **entry}]))
    with pytest.raises(UserError, match=words) as raised:
        explain("all_reduce", SHAPE, ranks=4, device="H")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("op", "name", "options", "words"),
    [
        ("matmul_reduce_scatter", "chunked", {"streams": 7}, "streams=7 must be 1 to 2"),
        ("matmul_reduce_scatter", "chunked", {"blocks": 0}, "blocks=0 must be 1 to 8"),
        ("matmul_reduce_scatter", "tracked", {"pieces": 0}, "pieces=0 must be 1 or more"),
        ("all_gather_matmul", "waiting", {"tile": "foo"}, "tile='foo'; expected rows x columns"),
        ("all_gather_matmul", "waiting", {"tile": (128, 256)}, r"tile='\(128, 256\)'; expected"),
        ("embedding_bag_all_to_all", "pushed", {"programs": -3}, "programs=-3 must be 1 to"),
        ("embedding_bag_all_to_all", "pushed", {"order": "nope"}, "unknown order 'nope'; known: r"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_before_a_call(
    op: str, name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"options of {op} by '{name}': {words}"):
        use(op, name, **options).__enter__()


def test_a_table_that_is_none_is_refused(table: Path) -> None:
    for text in (None, "[", "{}", "[1]"):
        if text is not None:
            table.write_text(text)
        with pytest.raises(UserError, match="the table of operators"):
            explain("all_reduce", SHAPE, ranks=4, device="H")
        read_table.cache_clear()


def test_a_device_is_named_as_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def name(device: torch.device) -> str:
        if device.index == 7:
            raise RuntimeError("invalid device")
        return f"GPU {device.index}"

    def asked(device: Any) -> str:
        return explain("all_reduce", SHAPE, ranks=4, device=device).call.device

    monkeypatch.setattr(choice, "device_name", name)
    found = [asked(each) for each in ("cuda:1", torch.device("cuda:1"), "cuda", "cpu", "H")]
    assert found == ["GPU 1", "GPU 1", "GPU None", "cpu", "H"]
    for device, words in (
        (3, 'device=3 must be the name of a GPU, such as "NVIDIA H200"'),
        ("cuda:7", "device='cuda:7': this machine has no such GPU; give the name of one"),
        ("cuda:x", "device='cuda:x': this machine has no such GPU"),
    ):
        with pytest.raises(UserError, match=words):
            asked(device)


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("H200", "; did you mean 'NVIDIA H200'?"),
        ("nvidia h200", "; did you mean 'NVIDIA H200'?"),
        ("NVIDIA H100", "; did you mean 'NVIDIA H100 80GB HBM3'?"),
        ("NVIDIA B200", ""),
        ("H", ""),
    ],
)
def test_a_devices_name_may_be_meant_otherwise(device: str, hint: str) -> None:
    found = explain("all_reduce", SHAPE, ranks=4, device=device)
    why = f"no measurement for {device}, bfloat16, 4 ranks, elements 4000 [4096]"
    assert found.why == why + hint


def test_wrong_questions_are_refused() -> None:
    for options, words in (
        ({"op": "matmul"}, "unknown operator 'matmul'"),
        ({"shapes": [(4, 5)]}, r"takes 2 to 3 shapes \(A, B, addend\), 1 was given"),
        ({"shapes": [(4, 3), 2]}, r"takes 2 to 3 shapes \(A, B, addend\), 1 was given"),
        ({"shapes": [(4, 3), (3, 2), 2]}, "give the shapes of A, B"),
        ({"shapes": None}, "shapes=None must be a list"),
        ({"ranks": 2.5}, "ranks=2.5 must be a whole number, 1 or more"),
        ({"ranks": True}, "ranks=True must be a whole number"),
        ({"rank": 2}, r"unknown key 'rank' of explain for matmul_all_reduce"),
        ({"shapes": [(4, 3), None]}, "give the shapes of A, B"),
        ({"shapes": [(), (3,)]}, r"A has shape \[\]; expected two dimensions or more"),
        ({"shapes": [(3, 5), (6, 7)]}, r"B has shape \[6, 7\]; expected \[5, n\]"),
        ({"shapes": [(-4, 3), (3, 2)]}, "in whole numbers from 0 on"),
        ({"shapes": [(4.0, 3), (3, 2)]}, "in whole numbers from 0 on"),
        ({"dtype": torch.int32}, r"A is torch.int32; expected bfloat16"),
        ({"ranks": 0}, "ranks=0 must be a whole number, 1 or more"),
        ({"dtype": torch.int8}, "unknown dtype"),
        ({"ranks": None}, "ranks=None without a process group"),
    ):
        given: dict[str, Any] = {"op": "matmul_all_reduce", "shapes": [(4, 3), (3, 2)], "ranks": 2}
        with pytest.raises(UserError, match=words):
            explain(**{**given, **options})


@pytest.mark.parametrize(
    ("op", "shapes", "arguments", "words"),
    [
        ("matmul_reduce_scatter", [(4095, 8), (8, 2)], {}, "A has 4095 rows in dimension 0, which"),
        ("matmul_reduce_scatter", [(3, 8, 5), (5, 2)], {}, ""),  # along the second dimension
        ("reduce_scatter", [(6, 2)], {}, "x has 6 rows in dimension 0, which 4 ranks"),
        ("all_gather_matmul", [(3, 8), []], {}, "Bs is empty"),
        ("all_gather_matmul", [(3, 8), [(8, 2), (9, 2)]], {}, r"Bs\[1\] has shape \[9, 2\]"),
        ("linear_all_reduce", [(3, 8), (8, 2)], {}, r"shape \[8, 2\]; expected \[n, 8\]"),
        ("all_gather", [(3,)], {}, "expected two dimensions or more"),
        ("matmul_reduce_scatter_backward", [(6, 8), (8, 2)], {}, "which 4 ranks do not divide"),
        ("all_gather_matmul_backward", [(6, 8), [(8, 2)]], {}, "whole has 6 rows"),
        (
            "matmul_reduce_scatter_add_rms_norm", [(8, 3), (3, 2), (8, 2), (2,)], {},
            r"residual has shape \[8, 2\]; expected \[2, 2\]",
        ),
        ("matmul_reduce_scatter_add_rms_norm", [(4, 8, 3), (3, 2), (4, 2, 2), (2,)], {}, ""),
        (
            "matmul_all_reduce_add_rms_norm", [(8, 3), (3, 2), (8, 2), (3,)], {},
            r"weight has shape \[3\]; expected \[2\]",
        ),
        ("all_to_all_rows", [(8, 3)], {"capacity": 0}, "capacity=0; expected 1 row or more"),
        ("return_rows", [(3, 8, 2)], {}, "a piece for each of 4 ranks"),
        ("matmul_all_to_all", [(8, 3), (2, 4, 5)], {"capacity": 4}, r"W has shape \[2, 4, 5\]"),
        ("embedding_bag_all_to_all", [[(9, 4)], (10,)], {}, "a B that 4 ranks divide"),
        (
            "matmul_all_to_all_backward", [(4, 9, 6), (3, 8), (2, 8, 5)], {},
            r"grad has shape \[4, 9, 6\]; expected \[4, 9, 5\]",
        ),
        ("matmul_all_to_all_backward", [(3, 9, 5), (3, 8), (2, 8, 5)], {}, r"expected \[4, 9, 5\]"),
        ("matmul_all_to_all_backward", [(9, 5), (3, 8), (2, 8, 5)], {}, "expected 3 dimensions"),
        ("matmul_all_to_all_backward", [(4, 9, 5), (3, 8), (2, 8, 5)], {}, ""),
        ("embedding_bag_all_to_all_backward", [(9,)], {}, r"grad has shape \[9\]; expected 2"),
        ("embedding_bag_all_to_all_backward", [(9, 4, 2)], {}, "expected 2 dimensions"),
        ("embedding_bag_all_to_all_backward", [(9, 4)], {}, ""),
        ("embedding_bag_all_to_all", [[()], (9,)], {}, r"weights\[0\] has shape \[\]; expected 2"),
        ("all_to_all_rows", [(8, 3)], {"capacity": "4"}, "capacity='4' must be a whole number, 1"),
        ("all_to_all_rows", [(8, 3)], {"capacity": 4.0}, "capacity=4.0 must be a whole number"),
        (
            "embedding_bag_all_to_all", [[(9, 4)], (9,)], {"table_counts": "1111"},
            "table_counts='1111' must be a list",
        ),
        ("all_to_all_rows", [(8, 3), 4], {}, ""),  # as `ladder bench ops` asks
        ("all_to_all_rows", [(8, 3)], {}, "all_to_all_rows needs capacity, too; give capacity="),
        (
            "all_to_all_rows", [(8, 3), (8,)], {"capacity": 4},
            r"all_to_all_rows takes 1 shape \(x\), 2 were given",
        ),
        ("return_rows", [(4, 8, 2), (8,)], {}, r"takes 1 shape \(rows\), 2 were given"),
        (
            "matmul_all_to_all", [(8, 3), (2, 3, 5), (3,), (8,)], {"capacity": 4},
            r"takes 2 shapes \(h, W\), 4 were given",
        ),
        (
            "matmul_reduce_scatter_backward", [(2, 2), (8, 8), (8, 2)], {},
            r"takes 2 shapes \(A, B\), 3 were given",
        ),
        (
            "all_gather_matmul_backward", [(8, 8), [(8, 2)], [(8, 2)]], {},
            r"takes 2 shapes \(whole, Bs\), 3 were given",
        ),
        (
            "embedding_bag_all_to_all", [[(10, 4)], (8,), (5,)], {},
            r"takes 2 shapes \(weights, offsets\), 3 were given",
        ),
        ("embedding_bag_all_to_all", [(10, 4), (9,)], {}, "a list of shapes for a list of tensors"),
        (
            "embedding_bag_all_to_all", [[(9, 4)], (9,)], {"table_counts": [1, 2]},
            r"table_counts=\[1, 2\]; expected 4 numbers",
        ),
    ],
)  # fmt: skip
def test_what_the_operator_refuses_is_not_explained(
    op: str, shapes: list[Any], arguments: dict[str, Any], words: str
) -> None:
    given: dict[str, Any] = {"ranks": 4, "device": "H", **arguments}
    if words:
        with pytest.raises(UserError, match=words):
            explain(op, shapes, **given)
    else:
        assert explain(op, shapes, **given).call.op == op


def test_sizes_are_printed_as_they_are() -> None:
    """With the bucket, by which tables are asked, where it is another."""
    found = explain("matmul_all_reduce", [(3, 5), (5, 8)], ranks=2, device="H")
    assert "no measurement for H, bfloat16, 2 ranks, m 3 [4], n 8, k 5 [8]" in str(found)


def called(rank: int, world_size: int, path: str) -> None:
    x = torch.ones(8, 512)
    call = torch.ops.ladder.all_reduce
    with registered(), mock.patch.dict("os.environ", {VARIABLE: path}):
        assert torch.equal(call(x, world()), x * 7)  # the table's, with its option
        with use("all_reduce", "staged"):
            assert torch.equal(call(x, world()), x * 2)
    assert torch.equal(call(x, world()), x * 2)


def allowed(rank: int, world_size: int) -> None:
    """A group that allows it, until it does not; another group is another matter."""
    x, call = torch.ones(8, 3), torch.ops.ladder.all_reduce
    other = dist.new_group()
    with with_backend():
        ladder.ops.allow_any_order(world())
        assert torch.equal(call(x, world()), x * 11)
        assert explain("all_reduce", [x.shape], dtype=x.dtype).implementation == "collective"
        assert torch.equal(call(x, other.group_name), x * world_size)
        ladder.ops.allow_any_order(world(), False)
        assert torch.equal(call(x, world()), x * world_size)
    with pytest.raises(UserError, match="group_name='no' names no process group"):
        ladder.ops.allow_any_order("no")
    group: Any = dist.group.WORLD
    with pytest.raises(UserError, match=r"group_name=.* is no name; give group\.group_name"):
        ladder.ops.allow_any_order(group)


def test_a_group_allows_any_order(pools: Pools) -> None:
    pools(2).run(allowed)


def test_operators_run_what_is_picked(pools: Pools, tmp_path: Path) -> None:
    cpu = {**ENTRY, "device": "cpu", "dtype": "float32", "ranks": 2, "options": {"chunk": 7}}
    path = tmp_path / "table.json"
    path.write_text(json.dumps([cpu]))
    pools(2).run(called, str(path))


def test_the_package_offers_what_it_says() -> None:
    assert set(ladder.ops.__all__) <= set(vars(ladder.ops))
