"""`ladder bench ops`: its points and checks, the table that it writes, and a whole run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.bench.ops import command, measure
from ladder.bench.ops.cases import make_case, plain
from ladder.bench.ops.command import measure_point
from ladder.bench.ops.derive import records, summarise
from ladder.bench.ops.points import (
    BAGS,
    OF_EXPERTS,
    OPS,
    OpPoint,
    Variant,
    accepts,
    expand,
    recorded,
    sizes_of,
    variants,
)
from ladder.bench.ops.table import entries, picked_by, write_table
from ladder.cli import main
from ladder.models.errors import UserError
from ladder.ops import choice, explain, registry, use
from ladder.ops.registry import OPERATORS, Call, bucket
from ladder.ops.table import VARIABLE, read_table
from tests.bench.records import timed
from tests.commands import Start
from tests.distributed import Pools

CPU = torch.device("cpu")
OP = "matmul_all_reduce"
POINT = OpPoint(OP, "tiny o", 6, 8, 4, 2, "float32")
STAGED, FAST = Variant("staged"), Variant("fast", (("chunk", 3),))
BACKEND = Variant("collective")


# -- the table --------------------------------------------------------------------------------


def call(m: int, op: str = OP) -> Call:
    return Call(op, "H", torch.bfloat16, 4, bucket((m, 8, 8)), exact=(m, 8, 8))


def measured(m: int, **modes: dict[Variant, float]) -> Any:
    each = [timed("alone", "alone", 1.0, mode) for mode in modes]
    each += [timed("NCCL", "collective", 50.0, mode) for mode in modes]
    each += [
        timed(str(variant), "operator", us, mode, variant=variant)
        for mode, times in modes.items()
        for variant, us in times.items()
    ]
    return call(m), summarise(each, 0.5)


@pytest.mark.parametrize(
    ("points", "picked"),
    [
        (
            [{"captured": {STAGED: 9, FAST: 8}, "eager": {STAGED: 19, FAST: 18}}],
            {"captured": FAST, "eager": FAST},
        ),
        ([{"captured": {STAGED: 9, FAST: 9}}], {"captured": STAGED}),
        ([{"captured": {STAGED: 9, FAST: 10}}], {"captured": STAGED}),
        # Slower in one mode: it is taken in the other.
        (
            [{"captured": {STAGED: 9, FAST: 2}, "eager": {STAGED: 19, FAST: 20}}],
            {"captured": FAST, "eager": STAGED},
        ),
        (
            [{"captured": {STAGED: 9}, "eager": {STAGED: 19, FAST: 2}}],
            {"captured": STAGED, "eager": FAST},
        ),
        # Slower at one m of the same bucket, or not there: it is not taken.
        ([{"eager": {STAGED: 9, FAST: 2}}, {"eager": {STAGED: 9, FAST: 10}}], {"eager": STAGED}),
        ([{"eager": {STAGED: 9, FAST: 2}}, {"eager": {STAGED: 9}}], {"eager": STAGED}),
        ([{"eager": {STAGED: 9, FAST: 10}}, {"eager": {STAGED: 9, FAST: 2}}], {"eager": STAGED}),
        # No graph holds staged: it counts as it is without one.
        (
            [{"captured": {FAST: 2}, "eager": {STAGED: 19, FAST: 30}}],
            {"captured": FAST, "eager": STAGED},
        ),
        ([{"eager": {FAST: 2}}], {}),  # staged was wrong, so nothing is known to be as fast
    ],
)
def test_nothing_slower_than_staged_enters_the_table(
    points: Any, picked: dict[str, Variant]
) -> None:
    with registered("fast", None):
        given = [measured(64 - n, **point) for n, point in enumerate(points)]
        found = entries(given, "a test")
    assert {each["mode"]: (each["implementation"], each["options"]) for each in found} == {
        mode: (each.name, dict(each.options)) for mode, each in picked.items()
    }
    assert len(found) == len(picked)


def test_an_entry_has_what_was_measured() -> None:
    """The sizes, the time and that of what would run without it, by mode; and how long the host
    may take: the longest call that waited for it, or else the shortest."""
    with registered("fast", None, surplus=lambda call, options: 0.0):
        points = [
            measured(40, captured={STAGED: 90, FAST: 80}, eager={STAGED: 95, FAST: 85}),
            measured(50, captured={STAGED: 70, FAST: 20}, eager={STAGED: 75, FAST: 35}),
            measured(200, captured={STAGED: 70, FAST: 20}, eager={STAGED: 75, FAST: 50}),
        ]
        captured, eager, *more = entries(points, "a test")
        assert [each["sizes"] for each in more] == [[256, 8, 8]] * 2
        assert [each["sizes"] for each in eager["measured"]] == [[40, 8, 8], [50, 8, 8]]
        assert captured["measured"][1] == {"sizes": [50, 8, 8], "us": 20, "instead_us": 70}
        assert (captured["host_us"], eager["host_us"]) == (0, 50)
        (_, alone) = entries(points[:1], "a test")
        assert alone["host_us"] == 85
        call, timed_ways = points[0]  # newer records say it themselves
        recorded = [(each, replace(result, host_us=33.0)) for each, result in timed_ways]
        assert entries([(call, recorded)], "a test")[1]["host_us"] == 33


@pytest.mark.parametrize(
    ("points", "picked"),
    [
        # Where any order is allowed, what is picked is never slower than `collective`.
        ([{"captured": {STAGED: 9, BACKEND: 6, FAST: 8}}], [("ranks", FAST), ("any", BACKEND)]),
        ([{"captured": {STAGED: 9, BACKEND: 9, FAST: 8}}], [("ranks", FAST), ("any", FAST)]),
        ([{"captured": {STAGED: 9, BACKEND: 6}}], [("ranks", STAGED), ("any", BACKEND)]),
        ([{"captured": {STAGED: 5, BACKEND: 6}}], [("ranks", STAGED), ("any", STAGED)]),
    ],
)  # fmt: skip
def test_the_backends_sums_have_entries_of_their_own(
    points: Any, picked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered("fast", None):
        found = entries([measured(64, **point) for point in points], "a test")
        assert [(each["order"], each["implementation"]) for each in found] == [
            (order, variant.name) for order, variant in picked
        ]
        file = tmp_path / "table.json"
        write_table(file, entries([measured(64, eager={STAGED: 9, BACKEND: 8})], "before"))
        write_table(file, found)
        assert read_table(file) == found
        monkeypatch.setenv(VARIABLE, str(file))
        for any_order, (_, variant) in ((False, picked[0]), (True, picked[-1])):
            picked = explain(
                OP, [(64, 8), (8, 8)], ranks=4, device="H", any_order=any_order, mode="captured"
            )
            assert picked.implementation == variant.name


def test_a_lent_result_enters_no_table(tmp_path: Path) -> None:
    """It is the fastest, and the caller may keep it only until the next call."""
    lent, kept = (Variant("pushed", (("lent", flag),)) if flag else Variant("pushed")
                  for flag in (True, False))  # fmt: skip
    bags = Call(BAGS, "H", torch.float32, 4, (8, 8, 8))
    _, found = measured(64, eager={STAGED: 9, kept: 5, lent: 3})
    (entry,) = entries([(bags, found)], "a test")
    assert (entry["implementation"], entry["options"]) == ("pushed", {})
    file = tmp_path / "table.json"
    write_table(file, [entry])
    file.write_text(file.read_text().replace("{}", '{"lent": true}'))
    with pytest.raises(UserError, match="'lent'"):
        read_table(file)


@contextlib.contextmanager
def registered(name: str, run: Any, **about: Any) -> Iterator[None]:
    more = {name: registry.Implementation(name, run, options=("chunk",), **about)}
    with mock.patch.dict(OPERATORS[OP].implementations, more):
        choice._choose.cache_clear()
        yield
    choice._choose.cache_clear()


def test_the_table_is_extended_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    shapes = [(64, 8), (8, 8)]
    with registered("fast", None):
        first = entries([measured(64, eager={STAGED: 9, FAST: 10}), measured(
            128, eager={STAGED: 9})], "one")  # fmt: skip
        write_table(file, first)
        second = entries([measured(64, eager={STAGED: 9, FAST: 5})], "two")
        write_table(file, second)
        assert read_table(file) == [first[1], *second]
        monkeypatch.setenv(VARIABLE, str(file))
        picked = explain(OP, shapes, ranks=4, device="H")
        assert (picked.implementation, dict(picked.options)) == ("fast", {"chunk": 3})
        assert picked.why == "table.json: two; 5.0 us, 9.0 without it"
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


# -- checks ------------------------------------------------------------------------------------


def refused(rank: int, world_size: int) -> None:
    """What is wrong on one rank, in one element, is called for its check alone."""
    calls = 0

    def wrong(group: Any, A: torch.Tensor, B: torch.Tensor, addend: None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        with torch.no_grad():
            total = A @ B
            dist.all_reduce(total, group=group)
        if rank == 1:
            total[3, 5] += 1.0
        return total

    def broken(group: Any, A: torch.Tensor, B: torch.Tensor, addend: None) -> torch.Tensor:
        raise RuntimeError("no such kernel\nat line 3")

    assert dist.group.WORLD is not None
    with (
        registered("wrong", wrong), registered("broken", broken),
        mock.patch.object(measure, "ROUNDS", 1),
    ):  # fmt: skip
        (_, found), _, errors = measure_point(POINT, CPU, dist.group.WORLD, None, (1e9, 1e9), False)
    assert calls == measure.CHECKS
    error, failed = errors
    assert failed == f"{POINT} by broken, eager: no such kernel; it is not timed"
    assert error.startswith(f"{POINT} by wrong, eager: its error is 0.")
    assert error.endswith("above 1e-05; it is not timed")
    names = [each.name for each, _ in found]
    alone = ["alone", "alone, B contiguous", "alone, in chunks"]
    assert names == [*alone, "gloo", "staged", "collective"]
    assert [each.name for each, result in found if result.picked] == ["staged"]
    assert [each.name for each, result in found if result.picked_any] == ["collective"]
    assert all(result.us > 0 and each.error < 1e-5 for each, result in found)


def failed(rank: int, world_size: int, folder: str) -> int:
    """The command, where an implementation that would be the fastest computes nothing."""
    given = options(
        ops=[OP], shapes=["tiny"], m=[64, 128], implementations=None, budget=None, tune=False,
        records=None,
    )  # fmt: skip
    files = {"out": folder, "write_table": Path(folder) / "table.json"}
    given = SimpleNamespace(**vars(given), **files, nproc=1, device="cpu")
    with registered("empty", lambda group, A, B, addend: A.new_zeros(len(A), B.shape[1])):
        return command.main(given)


def test_a_wrong_implementation_is_not_timed(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(refused)
    assert pools(2).run(failed, str(tmp_path)) == [1, 1]
    found = [
        json.loads(line)["point"] for line in (tmp_path / "ops.jsonl").read_text().splitlines()
    ]
    assert "empty" not in {point["way"] for point in found}
    table = read_table(tmp_path / "table.json")
    assert [each["implementation"] for each in table if each["order"] == "ranks"] == ["staged"] * 4
    assert {each["implementation"] for each in table} <= {"staged", "collective"}


def correct(rank: int, world_size: int, dtype: str) -> None:
    """Of every operator: the baseline and `staged` are right, and the product runs alone."""
    group, T = dist.group.WORLD, world_size
    assert group is not None
    for op in OPS:
        point = OpPoint(op, "x", 4 * T, 3 * T, 5 * T, T, dtype)
        if op == BAGS:
            point = OpPoint(op, "x", 2 * T, 2 * T * 256, 256, T, dtype, 0, 2, 3)
        elif op in OF_EXPERTS:
            point = OpPoint(op, "x", 4 * T, 6, 5, T, dtype, 2 * T)
        case = make_case(point, group, CPU)
        for way in (*case.collective.values(), case.operator):
            with use(op, "staged"):
                error = measure.compare(case.outputs(way()), case.expected)
            assert error < measure.TOLERANCE[dtype], (op, error)
        for form in case.alone.values():
            form()
        assert case.link_bytes > 0
        assert measure.pick(case, CPU).call.exact == sizes_of(point)
        assert measure.pick(case, CPU).implementation == "staged"
        assert measure.pick(case, CPU, any_order=True).implementation == plain(op)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_operator_has_a_case(pools: Pools, dtype: str) -> None:
    pools(2).run(correct, dtype)


# -- points -----------------------------------------------------------------------------------


def options(**changes: Any) -> Any:
    given = dict.fromkeys(("ops", "shapes", "m", "dtype"))
    return SimpleNamespace(**{**given, "tables": None, "pooling": None, **changes})


def test_points() -> None:
    """FLUX's shapes before they are split; what a model multiplies by; dtypes and default rows."""
    points, left_out = expand(options(), 4, cpu=False)
    flux = {(p.op, p.m, p.n, p.k) for p in points}
    assert {p.m for p in points if p.op == OP} == {1, 8, 64, 512, 1024, 2048, 4096, 8192}
    assert ("all_gather_matmul", 8192, 49152, 12288) in flux
    assert ("matmul_reduce_scatter", 64, 12288, 49152) in flux
    assert {p.m for p in points if p.op == "linear_all_reduce"} == {1, 8, 64}
    assert not left_out
    llama, _ = expand(options(shapes=["llama-3-8b"], m=[1, 64]), 4, cpu=False)
    gather = [(p.shape, p.m, p.n, p.k) for p in llama if p.op == "all_gather_matmul"]
    assert gather == [("llama-3-8b qkv", 64, 6144, 4096), ("llama-3-8b gate-up", 64, 28672, 4096)]
    assert {p.k for p in llama if p.op == OP} == {4096, 14336}
    back, _ = expand(options(shapes=["llama-3-8b:backward"], m=[64]), 4, cpu=False)
    assert {(p.op, p.shape, p.n, p.k) for p in back} == {
        ("matmul_reduce_scatter", "llama-3-8b:backward qkv", 4096, 6144),
        ("all_gather_matmul", "llama-3-8b:backward o", 4096, 4096),
        ("matmul_reduce_scatter", "llama-3-8b:backward gate-up", 4096, 28672),
        ("all_gather_matmul", "llama-3-8b:backward down", 14336, 4096),
    }
    few, _ = expand(options(shapes=["gemv"]), 4, cpu=False)
    assert {(p.op, p.m, p.k) for p in few} == {("linear_all_reduce", m, 8192) for m in (1, 8, 64)}
    assert {p.n for p in few} == {8192, 16384, 32768, 65536}
    ((bags, *_), _) = expand(options(shapes=["dlrm"]), 4, cpu=False)
    assert (bags.m, bags.n, bags.tables, bags.dtype) == (512, 4 * 256 * 256, 256, "float32")
    ((moe, *_), _) = expand(options(shapes=["mixtral-8x7b"]), 4, cpu=False)
    assert (moe.m, moe.experts, moe.dtype) == (2048, 8, "bfloat16")
    with pytest.raises(UserError, match=r"no case is left: matmul_all_to_all.*give another"):
        expand(options(shapes=["deepseek-v3"], m=[3]), 4, cpu=False)
    with pytest.raises(UserError, match="--shapes dlrm has none of --ops"):
        expand(options(shapes=["dlrm"], ops=[OP]), 4, cpu=False)


def test_options_of_implementations() -> None:
    with registered("fast", None):
        words = ["fast", "fast:chunk=3", "fast:chunk=0.5", "fast:chunk=true", "fast:chunk=128x64"]
        values = [dict(each.options).get("chunk") for each in variants(words, [OP]) or ()]
        assert values == [None, 3, 0.5, True, "128x64"]
        for each in variants(words, [OP]) or ():
            assert recorded(str(each), OP) == each
        assert recorded("fast:chunk=True", OP) == recorded(
            "fast:chunk=true", OP
        )  # of older records


def test_tuning_tries_every_option_that_an_implementation_has() -> None:
    ops = OPS
    found = variants(None, ops, tune=True) or []
    assert len(set(found)) == len(found)
    assert variants(None, ops) is None
    for op in ops:
        for name, each in OPERATORS[op].implementations.items():
            tried = [v for v in found if v.name == name and accepts(each, v)]
            assert Variant(name) in tried
            assert {key for v in tried for key, _ in v.options} == set(each.options), (op, name)


# -- the best of each point -------------------------------------------------------------------


def test_what_a_new_table_picks() -> None:
    """In either order of sums; what was not measured in it is left out."""
    with registered("fast", None):
        points = [
            measured(64, captured={STAGED: 9, BACKEND: 6, FAST: 8}),
            measured(128, captured={STAGED: 60, BACKEND: 60, FAST: 70}),
        ]
        found = picked_by(points, entries(points, "a test"))
    assert found == [
        f"{OP}, captured -0.20 to 0.86 (below 0, slower than the baseline: 1 of 2)",
        f"{OP} in any order, captured -0.20 to 0.90 (below 0, slower than the baseline: 1 of 2)",
    ]


# -- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ops", "matmul"], "unknown --ops 'matmul'; known: all_gather_matmul, "),
        (["--shapes", "llama-3-9b"], "unknown --shapes 'llama-3-9b' (did you mean 'llama-3-8b'?)"),
        (["--m", "64", "0"], "--m=0 must be 1 or more"),
        (["--tables", "-1"], "--tables=-1 must be 1 or more"),
        (["--dtype", "int8"], "unknown --dtype 'int8'; known: bfloat16, float16, float32, float64"),
        (["--implementations", "stagedd"], "unknown --implementations 'stagedd' (did you mean"),
        (["--implementations", "staged:x=1"], "'x=1' is no option; staged has none"),
        (["--tune", "--implementations", "staged"], "--tune with --implementations: leave one"),
        (["--budget", "0"], "--budget=0.0 must be above 0 minutes"),
        (["--write-table", "{}/no/table.json"], "name a file in a folder that exists"),
        (["--write-table", "{}"], "name a file in a folder that exists"),
        (["--write-table", __file__], "give another --write-table"),
        (["--tables", "3"], "--tables=3 is of embedding bags; add --shapes dlrm"),
        (["--records", __file__], "--records without --write-table: name the table to write"),
        (
            ["--records", __file__, "--write-table", "{}/t.json", "--m", "64"],
            "--m with --records, which measures nothing: leave one out",
        ),
        (
            ["--records", __file__, "--write-table", "{}/t.json", "--nproc", "2"],
            "--records on several ranks: one derives the table; leave --nproc out",
        ),
        (
            ["--records", "{}/no.jsonl", "--write-table", "{}/t.json"],
            "/no.jsonl: there is no such file",
        ),
        (
            ["--records", __file__, "--write-table", "{}/t.json"],
            "is not JSON",
        ),
        (["--pooling", "3", "5"], "--pooling=3 5 is of embedding bags; add --shapes dlrm"),
        ([], "--nproc=1: a rank alone has nothing to exchange; start 2 or more"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(tmp_path) for word in arguments]
    out = str(tmp_path / "out")
    assert main(["bench", "ops", "--device", "cpu", "--out", out, *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("op", "gone"), ("dtype", "bfloat17"), ("mode", "graph"), ("", "")],
)
def test_records_of_another_kind_leave_the_table_as_it_is(
    field: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"gpu": "H", "ranks": 2, "torch": "2", "date": "today"}
    found = summarise([timed("staged", "operator", 9.0), timed("alone", "alone", 1.0),
                       timed("NCCL", "collective", 5.0)], 0.0)  # fmt: skip
    made = [
        {**each, "point": {**each["point"], field: value}}
        for each in records(POINT, found, about)
        if field
    ]
    file, table = tmp_path / "ops.jsonl", tmp_path / "table.json"
    file.write_text("\n".join(map(json.dumps, made)))
    table.write_text("[]")
    words = ["bench", "ops", "--records", str(file), "--write-table", str(table)]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (f"has one that is unknown ({value!r})" if field else "they are empty") in line
    assert "name files that `ladder bench ops` has written" in line
    assert table.read_text() == "[]"


def test_a_whole_run(start: Start, tmp_path: Path) -> None:
    """Two ranks, from the command to the page: a table, records, the registry's table."""
    table, out = tmp_path / "table.json", tmp_path / "out"
    started = start(main, [
        "bench", "ops", "--nproc", "2", "--device", "cpu", "--shapes", "tiny", "dlrm",
        "--ops", "all_gather_matmul", "linear_all_reduce", BAGS, "--m", "7", "8", "--tables", "2",
        "--pooling", "3", "--out", str(out), "--write-table", str(table),
    ])  # fmt: skip
    result = started.result()
    assert result.returncode == 0, result.stderr
    # Torch's own, m 7 three times, and the implementations that need GPUs, each once.
    assert result.stderr.count("left out: ") == 10
    gathers = [("all_gather_matmul", name) for name in ("chunked", "waiting", "pushed")]
    for op, name in (*gathers, ("linear_all_reduce", "pushed"), (BAGS, "pushed")):
        assert result.stderr.count(f"left out: {op} by {name}: it") == 1
    assert "2 ranks do not divide m 7; give other ranks or another --m" in result.stderr
    assert "torch's fused operators, which need peer memory: it needs GPUs" in result.stderr
    *_, said, following = result.stdout.splitlines()
    # m 7 and 8 of linear_all_reduce are of the same entry.
    kept = read_table(table)
    words = f"{table}: {len(kept)} entries, 0 of overlapped ways; set {VARIABLE} to it"
    assert said.startswith(words)
    assert following == "next: ladder doctor"  # the other benchmarks need GPUs
    assert "all_gather_matmul, eager, float32, 2 ranks, microseconds (E)" in result.stdout
    found = [json.loads(line) for line in (out / "ops.jsonl").read_text().splitlines()]
    ways = {(r["point"]["op"], r["point"]["way"]) for r in found}
    assert {way for op, way in ways if op == BAGS} == {
        "alone", "alone, by table", "gloo", "gloo, by table", "staged"
    }  # fmt: skip
    assert len(found) == 6 * 5 + 5 + 4  # and linear_all_reduce by `collective`
    assert all(r["result"]["us"] > 0 and r["machine"]["ranks"] == 2 for r in found)
    in_order = [each["implementation"] for each in kept if each["order"] == "ranks"]
    assert in_order == ["staged"] * 5
    assert "Fused computation and communication" in (out / "ops.html").read_text()
