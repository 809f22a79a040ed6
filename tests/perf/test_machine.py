"""Descriptions of machines: what the shipped files say, curves, and files that are refused."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.models import UserError
from ladder.perf import machine as module
from ladder.perf.grid import matrix_rate
from ladder.perf.links import fit_link
from ladder.perf.machine import IN_8_BITS, Curve, Estimate, Machine, Value, with_links_of
from ladder.perf.machine_files import OLDER, from_dict, load, read, shipped, write
from ladder.perf.nodes import for_degree, with_former_kernels, with_uncut_kernels
from ladder.perf.rows import CONVERTED, converting, product
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import machine_parts
import machines as records

POINTS = ((8.0, 2.0), (16.0, 3.0), (64.0, 5.0))
CURVES = (
    Curve("all-reduce", {"algorithm": "push"}, POINTS, "measured: here"),
    Curve("product", {"rows": 1}, ((10.0, 1.0), (20.0, 2.0)), "measured: here"),
    Curve("product", {"rows": 4}, ((10.0, 4.0), (20.0, 5.0)), "measured: here"),
)
MACHINE = Machine("m", "a GPU", 2, {"memory_gib": Value(80.0, "declared: data sheet")}, CURVES)


def test_the_shipped_files_are_what_the_records_say() -> None:
    """Fails for a value that was edited by hand, or that no record supports."""
    made = [*map(records.h100s, (1, 2)), *map(records.machine, (1, 2)), records.four_today()]
    names = ["h100x1", "h100x2", "h200x1", "h200x2", "h200x4"]
    assert shipped() == [each.name for each in made] == names
    for each in made:
        assert load(each.name).to_dict() == json.loads(json.dumps(each.to_dict()))
    for name, each in records.kept().items():
        assert read(OLDER / f"{name}.json").to_dict() == json.loads(json.dumps(each.to_dict()))


def test_a_measured_file_comes_in_place_of_older_records() -> None:
    """All of a family of one GPU, also for other numbers of GPUs; collectives and slowdowns for its
    own number alone, and those that it lacks stay."""
    push = Curve("all-reduce", {"algorithm": "push"}, ((8.0, 1.0), (16.0, 1.5)), "measured: new")
    product = Curve("product", {"rows": 2}, ((10.0, 3.0),), "measured: new")
    values = {
        "launch_us": Value(1.5, "measured: new"),
        "copy_tb_s": Value(9.0, "measured: new"),
        "product_beside_nccl": Value(0.5, "measured: new"),
    }
    file = Machine("new", "a GPU", 2, values, (push, product))
    nccl = Curve("all-reduce", {"algorithm": "nccl"}, POINTS, "measured: here")
    old = replace(
        MACHINE,
        values={**MACHINE.values, "copy_tb_s": Value(4.0, "measured: old")},
        curves=(*CURVES, nccl),
    )
    for gpus in (1, 2, 4):
        found = records.with_measured(replace(old, gpus=gpus), [("new.json", file)])
        own = gpus == 2
        assert found.value("launch_us") == 1.5
        assert found.value("copy_tb_s") == 4.0
        assert found.value("product_beside_nccl") == (0.5 if own else 0.64)
        assert [dict(each.where) for each in found.family("product")] == [{"rows": 2}]
        assert found.curve("all-reduce", algorithm="nccl") == nccl
        points = found.curve("all-reduce", algorithm="push").points
        assert points == (push.points if own else POINTS)
        assert found.values["launch_us"].provenance == "measured: new; new.json"
    assert records.with_measured(old, []) == old


def test_of_several_measured_files_the_nearest_that_has_a_family_counts() -> None:
    """Of as near ones the last; what is between GPUs is of as many."""

    def file(gpus: int, us: float, *names: str) -> tuple[str, Machine]:
        curves = tuple(Curve(name, {}, ((8.0, us),), "measured") for name in names)
        return f"{us}.json", Machine("m", "a GPU", gpus, {}, curves)

    files = [
        file(4, 1.0, "copy", "peer copy"),
        file(2, 2.0, "copy", "nccl hidden", "peer copy"),
        file(2, 3.0, "peer copy"),
    ]
    for gpus, expected in (
        (1, {"copy": 2.0}),
        (2, {"copy": 2.0, "nccl hidden": 2.0, "peer copy": 3.0}),
        (4, {"copy": 1.0, "peer copy": 1.0}),
    ):
        found = records.with_measured(Machine("m", "a GPU", gpus, {}), files)
        assert {each.name: each.points[0][1] for each in found.curves} == expected
    (found,) = records.with_measured(Machine("m", "a GPU", 4, {}), files[1:]).curves
    assert (found.name, found.points[0][1]) == ("copy", 2.0)


def test_only_the_named_parts_of_a_measured_file_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {name: Value(1.0, "measured") for name in ("launch_us", "product_beside_nccl")}
    file = Machine("new", "a GPU", 2, values, CURVES)
    write(file, tmp_path / "new.json")
    monkeypatch.setattr(machine_parts, "RESULTS", tmp_path)
    for families, names, kept in (
        (("product", "beside"), ["product_beside_nccl"], ["product", "product"]),
        (("values", "all-reduce"), ["launch_us"], ["all-reduce"]),
    ):
        monkeypatch.setattr(records, "MEASURED", {"new.json": families})
        ((name, found),) = records.measured()
        assert name == "new.json"
        assert list(found.values) == names
        assert [each.name for each in found.curves] == kept


def test_chosen_curves_of_a_newer_file_replace_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tuple(replace(each, points=((1.0, 9.0),)) for each in CURVES)
    other = Curve(IN_8_BITS, {"rows": 1, "weights": "int8"}, ((1.0, 9.0),), "measured: here")
    write(replace(MACHINE, curves=(*newer, other)), tmp_path / "new.json")
    monkeypatch.setattr(machine_parts, "RESULTS", tmp_path)
    found = records.with_newer(MACHINE, "new.json", "product", lambda each: each["rows"] == 4)
    assert {str(each): each.points[0][1] for each in found.curves} == {
        "all-reduce (algorithm=push)": 2.0, "product (rows=1)": 1.0, "product (rows=4)": 9.0,
        str(other): 9.0,
    }  # fmt: skip


def test_what_a_measured_file_says_of_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name; and a barrier of two GPUs is that of four, which have none of their own."""
    names = ("barrier_us", "product_beside_nccl", "product_beside_copies")
    file = Machine("new", "a GPU", 2, {name: Value(0.9, "measured") for name in names}, CURVES)
    write(file, tmp_path / "new.json")
    monkeypatch.setattr(machine_parts, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "MEASURED", {"new.json": ("beside", "exchange", "product")})
    without = {"product_beside_nccl": "it waits", "product": "of other kernels"}
    monkeypatch.setattr(records, "LEFT_OUT", {"new.json": without})
    files = records.measured()
    ((_, found),) = files
    assert list(found.values) == ["barrier_us", "product_beside_copies"]
    assert not found.curves
    one, two, four = (records.with_measured(replace(MACHINE, gpus=n), files) for n in (1, 2, 4))
    assert two.value("product_beside_nccl") == 0.64  # declared
    assert two.value("product_beside_copies") == 0.9
    assert four.value("product_beside_copies") == 0.75  # declared
    assert four.value("barrier_us") == two.value("barrier_us") == 0.9
    assert "barrier_us" not in one.values


def test_what_is_left_out_of_measured_files_is_in_them() -> None:
    assert records.LEFT_OUT.keys() <= records.MEASURED.keys()
    for file, without in records.LEFT_OUT.items():
        found = read(records.RESULTS / file)
        assert without.keys() <= {*found.values, *(each.name for each in found.curves)}


def test_shipped_machines_name_what_is_missing() -> None:
    found = load("h200x4")
    assert any(each.startswith("matrix") for each in found.missing)
    assert "fitted" in found.values["boost_ms"].provenance  # and so is not recorded
    assert not any(each.startswith(("copy_tb_s", "all-reduce")) for each in found.missing)
    with pytest.raises(UserError, match=r"h200x4.*host_launch_us.*ladder bench machine --nproc 4"):
        found.value("host_launch_us")
    with pytest.raises(UserError, match=r"no 'all-gather algorithm=nccl'"):
        found.curve("all-gather", algorithm="nccl")
    for name, where in (("peer copy", {}), ("all-reduce", {"algorithm": "nccl"})):  # of two GPUs
        with pytest.raises(UserError, match=r"h100x1.*ladder bench machine --nproc 2 "):
            load("h100x1").curve(name, **where)


@pytest.mark.parametrize(
    ("x", "us", "basis"),
    [
        (16, 3.0, "measured"),
        (12, 2.5, "interpolated"),
        (40, 4.0, "interpolated"),
        (112, 7.0, "extrapolated"),
        (1, 2.0, "extrapolated"),
    ],
)
def test_a_curve_says_how_it_knows(x: float, us: float, basis: str) -> None:
    found = MACHINE.curve("all-reduce", algorithm="push").at(x)
    assert (found.us, found.basis) == (pytest.approx(us), basis)


@pytest.mark.parametrize(
    ("rows", "x", "us", "basis"),
    [
        (1, 20, 2.0, "measured"),
        (4, 15, 4.5, "interpolated"),
        (2, 20, 3.0, "interpolated"),
        (2, 30, 4.0, "extrapolated"),
        (64, 20, 5.0, "extrapolated"),
    ],
)
def test_between_the_curves_of_a_family(rows: float, x: float, us: float, basis: str) -> None:
    found = MACHINE.between("product", "rows", rows, x)
    assert (found.us, found.basis) == (pytest.approx(us), basis)


def test_a_rate_of_products_is_between_those_of_the_shapes() -> None:
    """The rates of 1024 x 1024 to 4096 x 4096 are 1, 2, 3 and 4 FLOPs a microsecond."""
    curves = [
        Curve("matrix", {"outputs": outputs, "inputs": inputs},
              ((8.0, 16 * outputs * inputs / rate), (16.0, 32 * outputs * inputs / rate)), "here")
        for (outputs, inputs), rate in zip(
            ((1024, 1024), (1024, 4096), (4096, 1024), (4096, 4096)), (1, 2, 3, 4), strict=True
        )
    ]  # fmt: skip
    whole = replace(MACHINE, curves=tuple(curves))
    for shape, rate in {
        (1024, 1024): 1.0,
        (2048, 1024): 2.0,  # halfway, in logarithms
        (1024, 2048): 1.5,
        (2048, 2048): 2.5,
        (128, 512): 1.0,
        (2**20, 2048): 3.5,
    }.items():
        assert matrix_rate(whole, 12.0, *shape) == pytest.approx(rate)
    part = replace(MACHINE, curves=tuple(curves[:3]))
    assert matrix_rate(part, 8.0, 3000, 1100) == pytest.approx(3.0)  # the nearest of three
    assert matrix_rate(MACHINE, 8.0, 1024, 1024) is None


def test_a_link_is_found_from_an_all_reduce() -> None:
    """4 GPUs send 3/2 of a message: with 10 us and 300 GB/s, 2 MB take 20 us."""
    points = tuple((size, 10 + 1.5 * size / 300e3) for size in (1e4, 1e6, 2e6, 1e8))
    found = fit_link("NVLink", Curve("all-reduce", {"algorithm": "nccl"}, points, "measured"), 4)
    assert (found.alpha_us, found.beta_gb_s) == (10.0, 300.0)


def test_at_another_degree_only_what_is_between_gpus_is_another_machines() -> None:
    values = {"memory_gib": Value(80.0, "here"), "product_beside_nccl": Value(0.5, "here")}
    others = {"memory_gib": Value(90.0, "there"), "product_beside_copies": Value(0.9, "there")}
    push = Curve("all-reduce", {"algorithm": "push"}, ((8.0, 9.0),), "there")
    four = Machine("four", "a GPU", 4, others, (push, replace(CURVES[1], provenance="there")))
    found = with_links_of(replace(MACHINE, values=values), four)
    assert (found.name, found.gpus) == ("four", 4)
    assert found.value("memory_gib") == 80.0
    assert found.value("product_beside_copies") == 0.9
    assert found.value("product_beside_nccl") == 0.64  # declared: there it was not measured
    assert found.curves == (*CURVES[1:], push)


def test_a_file_gives_the_machine_back(tmp_path: Path) -> None:
    write(MACHINE, tmp_path / "m.json")
    assert load(str(tmp_path / "m.json")).to_dict() == MACHINE.to_dict()


def wrong(change: Any) -> dict[str, Any]:
    data = copy.deepcopy(MACHINE.to_dict())
    change(data)
    return data


CASES = {
    "version 7, and this ladder reads 1": lambda d: d.update(version=7),
    "version None": lambda d: d.pop("version"),
    "unknown key 'speed' of the machine": lambda d: d.update(speed=1),
    "unknown key 'memory_gb' of values.*did you mean": lambda d: d["values"].update(memory_gb={}),
    "value 'memory_gib' lacks 'provenance'": lambda d: d["values"]["memory_gib"].pop("provenance"),
    "memory_gib' is -1": lambda d: d["values"]["memory_gib"].update(value=-1),
    "unknown curve 'sum'": lambda d: d["curves"][0].update(name="sum"),
    "unknown algorithm": lambda d: d["curves"][0]["where"].update(algorithm="nicl"),
    "each x above": lambda d: d["curves"][0]["points"].reverse(),
    "there twice": lambda d: d["curves"].append(d["curves"][0]),
    "gpus=0": lambda d: d.update(gpus=0),
    "gpus=1180591620717411303424 must be .* 1 to 65,536": lambda d: d.update(gpus=2**70),
    "a link lacks": lambda d: d["links"].append({"tier": "x"}),
}


@pytest.mark.parametrize("message", CASES)
def test_a_wrong_file_is_one_line_with_the_remedy(tmp_path: Path, message: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(wrong(CASES[message])))
    with pytest.raises(UserError, match=f"m.json.*{message}.*ladder bench machine") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def leaves(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each leaf as its container and its key there."""
    for key, value in list(data.items() if isinstance(data, dict) else enumerate(data)):
        if isinstance(value, dict | list):
            yield from leaves(value)
        else:
            yield data, key


def test_a_file_with_a_leaf_of_another_kind_is_refused() -> None:
    data = load("h100x2").to_dict()
    assert data["links"]
    data = json.loads(json.dumps(data))
    for inside, key in leaves(data):
        if key == "version":
            continue  # `read` compares it
        kept = inside[key]
        for other in ([], ["x"], {}, None):
            inside[key] = other
            with pytest.raises(UserError):
                from_dict(data)
        inside[key] = kept
    assert from_dict(data).gpus == 2


def test_products_in_8_bits_have_curves_of_their_own() -> None:
    """What is fitted to steps is a factor on these; without such curves, on those in 16 bits."""
    machine = load("h200x1")
    curve = machine.curve(IN_8_BITS, rows=4, weights="int8")
    (x, us), *_ = curve.points
    assert product(machine, x, 4, "int8") == Estimate(us, "measured")
    assert converting(machine, "int8", 4) != 1.0
    bare = replace(machine, curves=(curve,))
    assert converting(bare, "int8", 4) == 1.0
    assert converting(bare, "fp8", 4) == dict(CONVERTED)[4.0]
    former = with_former_kernels(machine)
    assert product(former, x, 4, "int8") == product(former, x, 4, "bf16")


@pytest.mark.parametrize("then", [with_former_kernels, with_uncut_kernels])
def test_one_of_several_gpus_has_the_kernels_of_the_same_time(
    then: Callable[[Machine], Machine],
) -> None:
    """Catches records of TP 1 that are predicted by the kernels of another time."""
    several, one = then(load("h200x4")), then(load("h200x1"))
    assert for_degree(several, 1).family("product") == one.family("product")
    assert for_degree(several, 1).family("product") != load("h200x1").family("product")


def test_what_stands_for_a_fit_of_8_bits_is_the_one_of_an_h200() -> None:
    points = with_former_kernels(load("h200x1")).curve("converted", weights="fp8").points
    assert tuple((rows, round(ratio, 2)) for rows, ratio in points) == CONVERTED


def test_no_machine_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="unknown machine 'h200x8'; known: h100x1, h100x2, h200x1, h200x2"
    ):
        load("h200x8")
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the machine file"):
        load(str(tmp_path / "m.json"))
    with pytest.raises(UserError, match=r"n\.json: No such file or directory; write one"):
        read(tmp_path / "n.json")
    assert module.VERSION == 1
