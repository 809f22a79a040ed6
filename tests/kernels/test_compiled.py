"""The kernels' machine code for a GPU, made without one: see tests.kernels.compiled.

`make test` compiles the primitives and a few kernels, `make test-all` all of them, for minutes.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest

from tests import ROOT
from tests.commands import PATIENCE
from tests.kernels.compiled import FEW, WORLD
from tests.kernels.ptx import WAIT, before_the_wait, follow
from tests.kernels.weakened import FEW as FEW_WEAKENED
from tests.kernels.weakened import KERNELS, WEAKENED

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

STORES = r"\bst\.global\.(\S+)"


# What each primitive is to a GPU, in order: see the docstrings of ladder.comm.primitives.
BARRIER, LOAD, STORE = r"bar\.sync", r"ld\.global\.cg\.v4", r"st\.global\.v4\.b32"
RELEASE = (BARRIER, r"atom\.global\.sys\.release\.exch")
ACQUIRE = (r"(?:ld|atom)\.global\.sys\.acquire", BARRIER, r"trap;")
READ, WRITTEN = r"cp\.async\.bulk\.tensor\.2d\.shared", r"cp\.async\.bulk\.tensor\.2d\.global"
POLL = (r"ld\.volatile\.global\.v4\.b32", BARRIER, r"trap;")
FLUSH = (r"cp\.async\.bulk\.wait_group 0;", r"fence\.proxy\.async;")


def last(scope: str) -> tuple[str, ...]:
    """`arrive`, and what the last one does."""
    arrives = rf"atom\.global\.{scope}\.acq_rel\.add"
    return (STORE, BARRIER, arrives, BARRIER, LOAD, r"(?:red|atom)\.global\.sys\.relaxed\.add")


PRIMITIVES = {
    "send": (STORE, *RELEASE),
    "receive": (*ACQUIRE, LOAD),
    "tma": (*ACQUIRE, r"fence\.proxy\.async;", READ, WRITTEN, *FLUSH, *RELEASE),
    "sum": last("gpu"),
    "sum for a peer": last("sys"),
    "push": (STORE,) * 4,
    "across": (r"ld\.global\.v2\.b64", *[r"st\.global\.b32"] * 4),
    "exchange": (*POLL, STORE),
    "collect": (*POLL, STORE),
    "tile": (STORE,),
}


SHARED = 227 * 1024  # bytes that a program may have


def printed(module: str, *options: str) -> dict[str, Any]:
    """The JSON object that a module of the tests prints."""
    code = [sys.executable, "-m", module, *options]
    run = subprocess.run(code, capture_output=True, cwd=ROOT, timeout=4 * PATIENCE, check=False)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`printed`, once for all: of workers of pytest-xdist, between which the tests of this file are
    divided, one makes the object and the others wait for it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = tmp_path_factory.getbasetemp().parent  # of all workers

    @functools.cache
    def made(module: str, *options: str) -> dict[str, Any]:
        if run is None:
            return printed(module, *options)
        file = folder / "-".join((run, module, *options))
        with file.open("a+", encoding="utf-8") as shared:
            fcntl.flock(shared, fcntl.LOCK_EX)
            if file.stat().st_size == 0:
                json.dump(printed(module, *options), shared)
                shared.flush()
            return json.loads(file.read_text(encoding="utf-8"))

    return made


@pytest.fixture
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What a test asks for: all if it is slow, else few."""
    return () if request.node.get_closest_marker("slow") else ("--few",)


@pytest.fixture
def found(once: Callable[..., dict[str, Any]], options: tuple[str, ...]) -> dict[str, Any]:
    return once("tests.kernels.compiled", *options)


@pytest.fixture
def weakened(once: Callable[..., dict[str, Any]], options: tuple[str, ...]) -> dict[str, str]:
    return once("tests.kernels.weakened", *options)


def cases(names: Iterable[str], kernel: str = "", few: Iterable[str] = FEW) -> list[Any]:
    """As pytest's cases: slow, but for those of `few`."""
    quick = {name.removeprefix(f"{kernel}: ") for name in few}
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in names]


def check_resources(made: dict[str, dict[str, int]]) -> None:
    """Shared memory that a program may have; nothing spilled by the kernels of hot steps."""
    for launch, machine in made.items():
        assert machine["shared"] <= SHARED, launch
        assert machine["spilled"] == 0 or ": hot " not in launch, launch
    assert any(": hot " in launch for launch in made)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu(every: bool, found: dict[str, Any]) -> None:
    """What only the interpreter takes, a wait without an end, a push in narrow stores: all fail."""
    if every:
        assert {launch.split(":")[0] for launch in found["ptx"]} == set(found["kinds"])
    else:
        assert set(found["ptx"]) == set(FEW)
    for launch, ptx in found["ptx"].items():
        waits = "ld.volatile" in ptx or re.search(ACQUIRE[0], ptx) is not None
        assert waits == ("trap;" in ptx), launch  # a dead peer ends it
        kind = found["kinds"][launch.split(":")[0]]
        assert not (waits and kind == "computation"), launch
        if kind == "communication":
            # 16 bytes a thread; the count of calls is one word.
            assert set(re.findall(STORES, ptx)) <= {"v4.b32", "b32"}, launch
            assert "v4.b32" in re.findall(STORES, ptx), launch
        if "ld.volatile" in ptx and kind != "both":
            assert "ld.volatile.global.v4.b32" in ptx, launch


@pytest.mark.slow
def test_every_statement_of_every_kernel_compiles(found: dict[str, Any]) -> None:
    """What only one side of an `if` calls, and calls wrongly, fails; so does a side without a case.

    Triton compiles the side that a launch's constants choose, and its interpreter checks no types.
    """
    assert not found["unread"], "\n".join(found["unread"])
    check_resources(found["made"])


@pytest.mark.slow
def test_defaults_are_numbers(found: dict[str, Any]) -> None:
    """Triton 3.6, of torch 2.11, compiles no call that leaves out an argument with a text."""
    assert not found["defaults"], "\n".join(found["defaults"])


@pytest.mark.slow
def test_attention_copies_keys_before_its_wait(found: dict[str, Any]) -> None:
    """And writes nothing before."""
    wanted = ["bfloat16", "a cache in fp8", "a cache in fp8, not in pairs"]
    early = []
    for launch, ptx in found["ptx"].items():
        if launch.startswith("_attention_kernel"):
            assert WAIT in ptx, launch
            before = before_the_wait(ptx)
            assert not re.search(r"\bst\.global|\batom\.", before), launch
            if re.search(r"cp\.async\.c[ag]", before):
                early.append(launch)
    assert early == [f"_attention_kernel: {case}" for case in wanted]


@pytest.mark.slow
def test_steps_of_all_sizes_compile_to_machine_code() -> None:
    """One, two, four and eight ranks; 1 to 64 rows; weights of every type."""
    check_resources(printed("tests.kernels.compiled", "--everything")["made"])


def check_order(name: str, ptx: str) -> None:
    """Nothing is read before the wait, and nothing written after the signal. 16 bytes at a time."""
    wanted = PRIMITIVES[name]
    assert follow(wanted, ptx), name
    if ACQUIRE[0] in wanted:
        before, after = re.split(ACQUIRE[0], ptx, maxsplit=1)
        assert not re.search(f"ld.global|{READ}", before)
        assert "trap;" in after
    if POLL[0] in wanted:
        assert not re.search(r"st\.global", re.split(POLL[2], ptx)[0])
    if RELEASE[1] in wanted:
        after = re.split(RELEASE[1], ptx)[-1]
        assert not re.search(f"st.global|{WRITTEN}", after)
    if name == "tile":
        assert set(re.findall(STORES, ptx)) == {"v4.b32"}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives_order_memory_as_they_say(name: str, found: dict[str, Any]) -> None:
    """A release, an acquire, a barrier or a fence that is moved fails, too."""
    check_order(name, found["primitives"][name])


@pytest.mark.parametrize("what", cases(WEAKENED, few=FEW_WEAKENED))
def test_a_weakened_primitive_is_seen(what: str, weakened: dict[str, str]) -> None:
    """Each wait, release, acquire, barrier and fence, as the test above reads them."""
    with pytest.raises(AssertionError):
        check_order(WEAKENED[what][0], weakened[what])


def check_gemm(case: str, ptx: str) -> None:
    """Warp-group products from shared memory that TMA fills, no spills, stores of 16 bytes.

    Waiting is an acquire before the first read of a tile's rows; tracking a release after its
    stores; summing an acquire, out of line, and slots that are read past L1, 16 bytes at a time;
    none is in a plain product.
    """
    assert "wgmma.mma_async" in ptx
    assert (re.search(READ, ptx) is not None) == ("without" not in case)
    assert set(re.findall(STORES, ptx)) == {"v4.b32"}
    assert ".local" not in ptx
    assert re.search("wgmma.wait_group.sync.aligned 1;", ptx) or "without" in case  # loads ahead
    *tiles, rest = re.split(r"atom\.global\.sys\.acq_rel\.add", ptx)
    sums = case in ("summing", "averaging", "with an addend")
    assert bool(tiles) == (case == "tracking" or sums)
    for tile in tiles:
        assert re.search(BARRIER, re.split(STORES, tile)[-1])
    assert not tiles or not re.search(STORES, rest)
    assert (re.search(ACQUIRE[0], ptx) is not None) == (case == "waiting" or sums)
    assert (re.search(LOAD, ptx) is not None) == sums
    if case == "waiting":
        # The two loads of a step, of rows and weight, wherever the compiler put them.
        before, *waits = re.split(ACQUIRE[0], ptx)
        assert not re.search(READ, before)
        assert sum(len(re.findall(READ, each)) for each in waits) > 2
        for each in waits:
            first, *reads = re.split(READ, each)
            assert len(reads) in (0, 2)
            assert not reads or re.search(r"fence\.proxy\.async;", first)


GEMMS = ("plain", "plain, [K, N]", "plain, without TMA", "waiting", "tracking", "summing",
         "averaging", "with an addend")  # fmt: skip


@pytest.mark.parametrize("case", cases(GEMMS, "_gemm_kernel"))
def test_a_gemm_uses_the_tensor_cores(case: str, found: dict[str, Any]) -> None:
    check_gemm(case, found["ptx"][f"_gemm_kernel: {case}"])


def check_landing(case: str, ptx: str) -> None:
    """Slots are read past L1, 16 bytes at a time; without flags nothing is waited for."""
    waits, slots = case == "waiting", r"ld\.global\.cg\.v4"
    assert (re.search(ACQUIRE[0], ptx) is not None) == waits
    assert set(re.findall(STORES, ptx)) == {"v4.b32"}
    assert ".local" not in ptx
    assert re.search(slots, ptx)
    if waits:
        *before, last = re.split(ACQUIRE[0], ptx)
        assert not any(re.search(slots, each) for each in before)
        assert follow((BARRIER, slots), last)


@pytest.mark.parametrize("case", cases(["there", "waiting"], "_land_slots_kernel"))
def test_a_landing_of_slots_reads_them_after_their_flags(case: str, found: dict[str, Any]) -> None:
    check_landing(case, found["ptx"][f"_land_slots_kernel: {case}"])


def test_a_choice_counts_its_call_when_all_warps_have_read_the_count(found: dict[str, Any]) -> None:
    """A warp that reads the next count would wait for a call that may never come."""
    ptx = found["ptx"]["_choose_kernel: bfloat16"]
    after = ptx[ptx.rindex("ld.volatile") :]
    assert follow((BARRIER, r"st\.global"), after)


# What pushes rows: opens, waits, stores at the peers, hands over. A lent result is not copied.
COUNTED = r"atom\.global\.{}\.acq_rel\.add"
COPIED = (r"st\.global\.b32", LOAD, STORE)  # the word is cleared before
SENDS = (*ACQUIRE, STORE, BARRIER, COUNTED.format("sys"), *RELEASE)
RECEIVES = (*ACQUIRE, LOAD, STORE, BARRIER, COUNTED.format("gpu"))
PUSHES = {
    "_push_bags_kernel: float32, remote": (*RELEASE, *ACQUIRE, STORE, *RELEASE, *ACQUIRE, *COPIED),
    "_push_bags_kernel: float32, tables": (*RELEASE, *ACQUIRE, STORE, *RELEASE, *ACQUIRE, *COPIED),
    "_push_bags_kernel: float32, oblivious": (*RELEASE, *ACQUIRE, STORE, *RELEASE, *ACQUIRE),
    "_push_bags_kernel: bfloat16, remote": (*RELEASE, *ACQUIRE, STORE, *RELEASE, *ACQUIRE, *COPIED),
    "_place_kernel: bfloat16": (r"st\.global\.b32", *RELEASE),
    "_push_rows_kernel: bfloat16": SENDS,
    "_push_pieces_kernel: bfloat16": SENDS,
    "_receive_rows_kernel: bfloat16": RECEIVES,
    "_gather_rows_kernel: bfloat16": RECEIVES,
    "_grouped_push_kernel: [experts, k, n]": SENDS,
    "_grouped_push_kernel: [experts, n, k]": SENDS,
}


def check_pushes(name: str, ptx: str) -> None:
    """A store before the peer has opened its slots, or after it was told, fails; so do spills."""
    assert follow(PUSHES[name], ptx), name
    assert ".local" not in ptx
    if STORE in PUSHES[name]:
        assert not re.search(STORE, re.split(ACQUIRE[0], ptx, maxsplit=1)[0])
    if PUSHES[name] == SENDS:
        assert not re.search(STORE, re.split(COUNTED.format("sys"), ptx)[-1])
    if "_push_bags" in name:  # four rows of a bag at once
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
    if "_grouped" in name:
        assert "wgmma.mma_async" in ptx
        assert re.search(READ, ptx)


@pytest.mark.parametrize("name", cases(PUSHES))
def test_rows_are_pushed_in_order_and_by_16_bytes(name: str, found: dict[str, Any]) -> None:
    check_pushes(name, found["ptx"][name])


def check_kernel(name: str, ptx: str) -> None:
    kernel, _, case = name.partition(": ")
    if kernel == "_gemm_kernel":
        check_gemm(case, ptx)
    elif kernel == "_land_slots_kernel":
        check_landing(case, ptx)
    else:
        check_pushes(name, ptx)


@pytest.mark.parametrize("what", cases(KERNELS, few=FEW_WEAKENED))
def test_a_weakened_kernel_is_seen(what: str, weakened: dict[str, str]) -> None:
    """Each wait, release and read past L1 of bags, rows, experts, landings and products."""
    with pytest.raises(AssertionError):
        check_kernel(KERNELS[what][1], weakened[what])


@pytest.mark.slow
def test_first_weights_are_brought_before_the_wait(found: dict[str, Any]) -> None:
    """On tensor cores; and nothing after it, where they are read at once."""
    for case in ("8 rows", "8 rows, fp8"):
        *before, last = found["ptx"][f"_project_kernel: {case}"].split(WAIT)
        assert any("prefetch.global.L2" in each for each in before)
        assert "prefetch.global.L2" not in last


@pytest.mark.slow
def test_copies_of_weights_wait_for_no_sum(found: dict[str, Any]) -> None:
    """The norm's squares are summed at the end: before the copies, they would wait for the load."""
    last = found["ptx"]["_project_kernel: 8 rows, of a norm"].split(WAIT)[-1]
    before, copies, after = last.partition("cp.async.cg")
    assert copies
    assert "shfl" not in before
    assert "shfl" in after


@pytest.mark.parametrize(
    "case", cases(["1 rows, any weight", "8 rows, any weight"], "_project_kernel")
)
def test_weights_that_may_just_have_been_written_are_read_after_the_wait(
    case: str, found: dict[str, Any]
) -> None:
    """A kernel that starts before the previous one has ended would read what was there before. Nor
    are the addresses of slots read early: `ladder.kernels.collect` writes those."""
    *before, last = found["ptx"][f"_project_kernel: {case}"].split(WAIT)
    reads = r"ld\.global|cp\.async\.c"
    assert before
    assert not any(re.search(reads, each) for each in before)
    assert re.search(reads, last)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "scales"), [("8 rows", False), ("8 rows, fp8", True)])
def test_what_the_end_of_a_tile_needs_is_read_before_the_wait(
    case: str, scales: bool, found: dict[str, Any]
) -> None:
    """The addresses of all ranks' slots, and the scales of the weight's rows."""
    before, _, _ = found["ptx"][f"_project_kernel: {case}"].rpartition(WAIT)
    assert len(re.findall(r"ld\.global\.b64", before)) == WORLD
    assert bool(re.search(r"ld\.global(?!\.b64)", before)) == scales


@pytest.mark.slow
def test_weights_in_8_bits_are_read_as_they_are_stored(found: dict[str, Any]) -> None:
    """Half the copies of 16 bytes of bfloat16's product, cut alike; converted in registers, no
    spills.

    The product of bfloat16 knows neither conversion nor scales.
    """
    name = "_project_kernel: 8 rows"
    copies = {
        case: len(re.findall(r"cp\.async\.cg", found["ptx"][f"{name}{case}"]))
        for case in (", cut as 8 bits", ", fp8", ", int8")
    }
    # 16 rows of x and 32 of the weight in bfloat16; the weight's part is halved
    assert copies[", fp8"] == copies[", int8"] == copies[", cut as 8 bits"] * 2 // 3
    for launch, ptx in found["ptx"].items():
        assert not re.search(r"cvt\.\w*\.?bf16\.f16", ptx), launch  # slow: `widened`
        if launch.startswith("_project_kernel"):
            assert ".local" not in ptx, launch
            assert ("e4m3x2" in ptx) == ("fp8" in launch), launch
