"""`ladder bench ops`: its points and checks, the command, and a whole run."""

from __future__ import annotations

import json
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
from ladder.cli import main
from ladder.models.errors import UserError
from ladder.ops import use
from ladder.ops.registry import OPERATORS, Call
from ladder.ops.table import VARIABLE, read_table
from tests.bench.records import OP, registered, timed
from tests.commands import Start
from tests.distributed import Pools

CPU = torch.device("cpu")
POINT = OpPoint(OP, "tiny o", 6, 8, 4, 2, "float32")


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
        ("all_gather_matmul_backward", "llama-3-8b:backward qkv", 4096, 6144),
        ("all_gather_matmul_backward", "llama-3-8b:backward gate-up", 4096, 28672),
        ("matmul_reduce_scatter_backward", "llama-3-8b:backward o", 4096, 4096),
        ("matmul_reduce_scatter_backward", "llama-3-8b:backward down", 14336, 4096),
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
    with registered("fast", lambda group, chunk=None: None):
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
        (["--implementations", "chunked:pairs=maybe"], "pairs='maybe' must be true or false"),
        (["--implementations", "chunked:streams=two"], "streams='two' must be a whole number"),
        (["--implementations", "chunked:streams=true"], "streams=True must be a whole number"),
        (["--implementations", "chunked:streams=3"], "streams=3 must be 1 to 2"),
        (["--implementations", "pushed:order=no"], "unknown order 'no'; known: remote, oblivious"),
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


def interrupted(rank: int, world_size: int, folder: str) -> str:
    given = options(implementations=None, budget=None, tune=False, records=None, write_table=None)
    given = SimpleNamespace(**vars(given), out=folder, nproc=1, device="cpu")
    with pytest.raises(UserError) as error:
        command.main(given)
    return str(error.value)


def test_a_file_with_an_interrupted_line_is_refused_before_the_work(
    pools: Pools, tmp_path: Path
) -> None:
    """And not when the page is made of it, after everything has been measured."""
    file = tmp_path / "ops.jsonl"
    file.write_text('{"point": {}}\n{"poi')
    for said in pools(2).run(interrupted, str(tmp_path)):
        assert said.startswith(f"line 2 of {file} is not JSON")
        assert said.endswith("its writing was interrupted; remove the line")


def test_the_table_is_written_whatever_becomes_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(records: Any) -> str:
        raise UserError("no page")

    monkeypatch.setattr(command, "write_page", fails)
    monkeypatch.setattr(command, "read_results", lambda file: [])
    staged = timed("staged", "operator", 9.0, variant=Variant("staged"))
    found = summarise([staged, timed("alone", "alone", 1.0), timed("gloo", "collective", 5.0)], 0.0)
    call = Call(OP, "cpu", torch.float32, 2, (8, 8, 8), exact=(8, 8, 8))
    about = {"gpu": "none", "ranks": 2, "torch": "2", "date": "today"}
    given = SimpleNamespace(out=tmp_path, write_table=tmp_path / "table.json")
    with pytest.raises(UserError, match="no page"):
        command._finish(given, [(call, found)], records(POINT, found, about), about)
    assert {each["implementation"] for each in read_table(given.write_table)} == {"staged"}


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


@pytest.mark.slow
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
