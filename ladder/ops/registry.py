"""The implementations behind each operator, and the choice among them.

An operator (`define`) has one or several implementations (`implement`), all of which compute the
same. A table says which is the fastest for a call; `staged`, which every operator has, runs the
calls that the table does not name. Nothing overlapped is chosen that has not been measured.

*The order of sums.* Most implementations add the ranks' partials in the order of the ranks, so that
results are equal to the bit over runs and implementations. Those that let the backend add
(`collective`), or add in an order of their own (`ring`), are not `ordered`. They are picked only
for the calls of a group that `allow_any_order` has named; there, `collective` also runs what the
table does not name.

A table is a JSON list of entries:

    [{"op": "matmul_reduce_scatter", "device": "NVIDIA H200", "dtype": "bfloat16", "ranks": 4,
      "sizes": [4096, 16384, 16384], "mode": "captured", "order": "ranks",
      "implementation": "staged", "options": {}, "source": "..."}]

device: the name of a GPU, or "cpu". sizes: those of the operator, in the order of `define`, each
rounded up to a power of two: an entry is for the calls in that bucket, see below. mode: "captured"
for calls in a CUDA graph, where none waits for the host, or "eager" (`ladder.comm.capture`). order:
"ranks" (the default of an entry), or "any" for calls that allow it, which it is then the first
choice for. options: keyword arguments of the implementation (tile shapes, chunks). table.json,
beside this file, has the measurements so far. A file of the user, named by the environment variable
LADDER_OPS_TABLE, takes precedence.

An entry may also have the sizes at which it was measured, and what the host may take to enqueue a
call, in microseconds; `ladder.ops.between` says which other calls of the bucket it is then for:

    "measured": [{"sizes": [4000, 12288, 16384], "us": 3665.5, "instead_us": 3847.6}],
    "host_us": 420.5

All ranks of a group must choose alike, since implementations exchange data in different ways. So
sizes are only such that are equal on all ranks, and all ranks capture a call, or none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ladder.comm.capture import MODES, Mode
from ladder.comm.capture import mode as current_mode
from ladder.config import read_entries
from ladder.models.errors import UserError, check_keys, unknown
from ladder.ops import between
from ladder.ops.between import Surplus

VARIABLE = "LADDER_OPS_TABLE"
UNSET = f"unset {VARIABLE}, or correct it"
PACKAGED = Path(__file__).with_name("table.json")
DEFAULT, ANY_ORDER = "staged", "collective"  # without a measurement
ORDERS = ("ranks", "any")
ANOTHER = "it adds in another order than that of the ranks"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOVABLE = (*DTYPES, torch.int32, torch.int64)  # of rows that are only moved
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in MOVABLE}
KEYS = {
    "op": str, "device": str, "dtype": str, "ranks": int, "sizes": list, "mode": str, "order": str,
    "implementation": str, "options": dict, "source": str, "measured": list, "host_us": int | float,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What is known of a call before it runs.

    sizes: rounded up to powers of two. any_order: sums may be in any order. exact: the sizes as
    they are, or () if only the bucket is known. mode: see `ladder.comm.capture`.
    """

    op: str
    device: str
    dtype: torch.dtype
    ranks: int
    sizes: tuple[int, ...]
    any_order: bool = False
    exact: tuple[int, ...] = ()
    mode: Mode = "eager"

    def __str__(self) -> str:
        named = zip(OPERATORS[self.op].sizes, self.sizes, strict=True)
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = ", ".join(f"{name} {size}" for name, size in named)
        return f"{self.device}, {dtype}, {self.ranks} ranks, {sizes}"


def always(call: Call) -> str | None:
    """The refusal of an implementation that runs every call: there is none."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    run: called as run(group, *arguments of the operator without group_name, **options). refusal:
    the reason why it cannot run a call on this machine, with the remedy, or None; it must be the
    same on all ranks. options: the names of its options. ordered: whether it adds in the order of
    the ranks. insisted: options that only `use` may give, and no table: with them the caller may do
    less with what is returned. surplus: what its products take longer than one of all rows, as a
    share of it, for a call of known sizes and options; None: they are one product.
    """

    name: str
    run: Callable[..., Any]
    refusal: Callable[[Call], str | None] = always
    options: tuple[str, ...] = ()
    ordered: bool = True
    insisted: tuple[str, ...] = ()
    surplus: Surplus | None = None

    def wasteful(self, call: Call, entry: Mapping[str, Any]) -> str | None:
        """Why a table's entry for the call's bucket is not for this call, or None."""
        return between.refusal(call, entry, self.surplus)


@dataclass(frozen=True)
class Operator:
    """An operator. sizes: the names of what `measure(ranks, *shapes)` returns."""

    name: str
    sizes: tuple[str, ...]
    measure: Callable[..., tuple[int, ...]]
    implementations: dict[str, Implementation] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """The implementation of a call, its options, and why. others: name -> why not that one.

    ordered: its sums are in the order of the ranks.
    """

    call: Call
    implementation: str
    why: str
    options: tuple[tuple[str, Any], ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    ordered: bool = True

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        order = "" if self.ordered else f"; {ANOTHER}"
        what = f"{self.call.op}, {self.call.mode}"
        lines = [f"{what}: {self.implementation}{options} ({self.why}{order})"]
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.others)])


OPERATORS: dict[str, Operator] = {}
# operator -> the implementation that `use` insists on, and its options
_asked: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {}
any_order_groups: WeakSet[dist.ProcessGroup] = WeakSet()  # see `allow_any_order`


def define(name: str, sizes: tuple[str, ...], measure: Callable[..., tuple[int, ...]]) -> None:
    """Declare an operator. measure(ranks, *shapes) gives its sizes from shapes of its arguments."""
    assert name not in OPERATORS, name
    OPERATORS[name] = Operator(name, sizes, measure)


def implement(
    op: str,
    name: str,
    refusal: Callable[[Call], str | None] = always,
    options: tuple[str, ...] = (),
    ordered: bool = True,
    insisted: tuple[str, ...] = (),
    surplus: Surplus | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that computes the operator `op`: see `Implementation`."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        found = OPERATORS[op].implementations
        assert name not in found, (op, name)
        found[name] = Implementation(name, run, refusal, options, ordered, insisted, surplus)
        _choose.cache_clear()
        return run

    return register


@contextlib.contextmanager
def use(op: str, implementation: str, **options: Any) -> Iterator[None]:
    """Within this context, run `op` by this implementation. All ranks must enter it.

    options: those of the implementation, as a table's entry has them. Raises UserError if there is
    no such operator, implementation or option. A call that the implementation cannot run raises
    UserError, too: it says why.
    """
    found = _implementation(op, implementation)
    check_keys(f"options of {op} by {implementation!r}", options, found.options)
    before = _asked.get(op)
    _asked[op] = implementation, tuple(options.items())
    try:
        yield
    finally:
        if before is None:
            del _asked[op]
        else:
            _asked[op] = before


def allows_any_order(group: dist.ProcessGroup) -> bool:
    """Whether the calls with this group may add in any order."""
    return group in any_order_groups


def explain(
    op: str,
    shapes: Sequence[Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    ranks: int | None = None,
    device: str | None = None,
    any_order: bool | None = None,
    mode: Mode | None = None,
    **arguments: Any,
) -> Choice:
    """Which implementation runs a call, and why; printable.

    shapes: those of the operator's tensors in their order; for a list of tensors, a list of shapes.
    arguments: what else the operator's sizes depend on (`capacity`). ranks: the size of the group;
    None: that of the default group. device: the name of a GPU, or "cpu"; None: this machine's.
    any_order: whether the group allows it (`allow_any_order`); None: what the default group says,
    if ranks is None, too. mode: "captured" or "eager"; None: that of a call made here, which is
    eager outside of a capture and of `as_captured`.
    """
    operator = _operator(op)
    if dtype not in MOVABLE:
        raise unknown("dtype", dtype, map(str, MOVABLE))
    if mode is None:
        mode = current_mode()
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    if ranks is None:
        if not dist.is_initialized():
            raise UserError("ranks=None without a process group; give the number of ranks")
        assert dist.group.WORLD is not None
        ranks = dist.get_world_size()
        any_order = allows_any_order(dist.group.WORLD) if any_order is None else any_order
    if device is None:
        device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        inspect.signature(operator.measure).bind(ranks, *shapes, **arguments)
        sizes = operator.measure(ranks, *shapes, **arguments)
    except (TypeError, IndexError) as error:
        wanted = ", ".join(list(inspect.signature(operator.measure).parameters)[1:])
        raise UserError(f"shapes={shapes!r} of {op}: give the shapes of {wanted}") from error
    return choose(
        Call(op, device, dtype, ranks, bucket(sizes), bool(any_order), tuple(sizes), mode)
    )


def choose(call: Call) -> Choice:
    """The implementation for a call. Raises UserError if one is insisted on that cannot run it."""
    return _choose(call, _asked.get(call.op), os.environ.get(VARIABLE) or None)


def listed(call: Call) -> tuple[str, Mapping[str, Any]]:
    """The implementation that a table names for a call, with its options, or else the one without
    a measurement; this machine may be another one, and is not asked whether it can run it."""
    _, entry = _entry(call, os.environ.get(VARIABLE) or None)
    if entry is not None:
        found = OPERATORS[call.op].implementations[entry["implementation"]]
        if not found.wasteful(call, entry):
            return found.name, entry["options"]
    return unmeasured(call), {}


def run(call: Call, group: dist.ProcessGroup, *arguments: Any) -> Any:
    """Run the operator by the chosen implementation."""
    choice = choose(call)
    chosen = OPERATORS[call.op].implementations[choice.implementation]
    return chosen.run(group, *arguments, **dict(choice.options))


def bucket(sizes: Sequence[int]) -> tuple[int, ...]:
    """Each size rounded up to a power of two; 0 stays 0."""
    return tuple(1 << (int(size) - 1).bit_length() if size > 0 else 0 for size in sizes)


@functools.cache
def device_name(device: torch.device) -> str:
    """The name of a device in tables: "cpu", or the GPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.lru_cache(maxsize=4096)  # prompts have many lengths
def _choose(
    call: Call, asked: tuple[str, tuple[tuple[str, Any], ...]] | None, file: str | None
) -> Choice:
    implementations = OPERATORS[call.op].implementations
    refusals = {name: each.refusal(call) for name, each in implementations.items()}
    options: Mapping[str, Any] = {}
    if asked is not None:
        (picked, given), why = asked, "it was asked for"
        options = dict(given)
        if refusals[picked] is not None:
            raise UserError(f"{call.op} by {picked!r} cannot run here: {refusals[picked]}")
    else:
        picked, why = unmeasured(call), f"no measurement for {call}"
        path, entry = _entry(call, file)
        if entry is not None:
            picked, options, why = entry["implementation"], entry["options"], entry["source"]
            why = f"{path.name}: {why}{between.said(entry)}"
            waste = implementations[picked].wasteful(call, entry)
            if refusals[picked] is not None:
                waste = f"which cannot run here: {refusals[picked]}"
            if waste is not None:
                why = f"{path.name} has {picked!r}, {waste}"
                picked, options = unmeasured(call), {}

    def why_not(each: Implementation) -> str:
        if refusals[each.name] is not None:
            return str(refusals[each.name])
        if asked is not None:
            return "not asked for"
        if not each.ordered and not call.any_order:
            return f"{ANOTHER}, which ladder.ops.allow_any_order allows"
        return "not measured as faster"

    chosen = implementations[picked]
    others = tuple(
        (each.name, why_not(each)) for each in implementations.values() if each != chosen
    )
    return Choice(call, picked, why, tuple(options.items()), others, chosen.ordered)


def unmeasured(call: Call) -> str:
    """The implementation of a call that no entry names."""
    found = OPERATORS[call.op].implementations.get(ANY_ORDER)
    able = call.any_order and found is not None and found.refusal(call) is None
    return ANY_ORDER if able else DEFAULT


def _entry(call: Call, file: str | None) -> tuple[Path, dict[str, Any] | None]:
    """The entry for a call, and the file that has it."""
    wanted = (call.op, call.device, call.dtype, call.ranks, list(call.sizes), call.mode)
    for path in [PACKAGED] if file is None else [Path(file), PACKAGED]:
        by_order: dict[str, dict[str, Any]] = {}
        for entry in read_table(path):
            dtype = DTYPE_NAMES[entry["dtype"]]
            found = (entry["op"], entry["device"], dtype, entry["ranks"], entry["sizes"])
            if (*found, entry["mode"]) == wanted:
                by_order.setdefault(entry["order"], entry)
        for order in ("any", "ranks") if call.any_order else ("ranks",):
            if order in by_order:
                return path, by_order[order]
    return PACKAGED, None


@functools.cache
def read_table(path: Path, remedy: str = UNSET) -> list[dict[str, Any]]:
    """The entries of a table. Raises UserError, with `remedy`, if the file is not a valid table."""
    entries = read_entries(path, "the table of operators", remedy)
    for entry in entries:
        for key, value in (("order", "ranks"), ("measured", []), ("host_us", 0)):
            entry.setdefault(key, value)
        _check_entry(f"the table of operators {path}", entry)
    return entries


def _check_entry(where: str, entry: dict[str, Any]) -> None:
    check_keys(where, entry, KEYS)
    if entry.get("mode") not in MODES:
        raise UserError(
            f"{where}: mode={entry.get('mode')!r}; give {' or '.join(MODES)}, or write the table "
            f"again with `ladder bench ops --write-table`"
        )
    for key, kind in KEYS.items():
        if not isinstance(entry.get(key), kind):
            said = getattr(kind, "__name__", "number")
            raise UserError(f"{where}: {key}={entry.get(key)!r} is no {said}")
    implementation = _implementation(entry["op"], entry["implementation"], f" in {where}")
    known = [name for name in implementation.options if name not in implementation.insisted]
    check_keys(f"options in {where}", entry["options"], known)
    if entry["order"] not in ORDERS:
        raise unknown(f"order in {where}", entry["order"], ORDERS)
    if entry["order"] == "ranks" and not implementation.ordered:
        raise UserError(
            f'{where}: {entry["op"]} by {entry["implementation"]!r} has order="ranks", and '
            f'{ANOTHER}; set order="any"'
        )
    if entry["dtype"] not in DTYPE_NAMES:
        raise unknown(f"dtype in {where}", entry["dtype"], DTYPE_NAMES)
    sizes, names = entry["sizes"], OPERATORS[entry["op"]].sizes
    whole = all(type(size) is int and size >= 0 for size in sizes)
    if len(sizes) != len(names) or not whole or bucket(sizes) != tuple(sizes):
        text = json.dumps(sizes)
        raise UserError(f"{where}: sizes={text} must be powers of two, [{', '.join(names)}]")
    between.check(where, entry)


def _operator(op: str, where: str = "") -> Operator:
    if op not in OPERATORS:
        raise unknown(f"operator{where}", op, OPERATORS)
    return OPERATORS[op]


def _implementation(op: str, name: str, where: str = "") -> Implementation:
    found = _operator(op, where).implementations
    if name not in found:
        raise unknown(f"implementation of {op}{where}", name, found)
    return found[name]
