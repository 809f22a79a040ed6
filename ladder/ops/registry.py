"""The operators, and the implementations behind each.

An operator (`define`) has one or several implementations (`implement`), all of which compute the
same, among them `staged`. `ladder.ops.choice` picks one for each call.

*The order of sums.* Most implementations add the ranks' partials in the order of the ranks, so that
results are equal to the bit over runs and implementations. Those that let the backend add
(`collective`), or add in an order of their own (`ring`), are not `ordered`. They are picked only
for the calls of a group that `allow_any_order` has named; for such a group, `collective` also runs
the calls that the table does not name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ladder.comm.capture import Mode
from ladder.kernels.bags import MAX_PROGRAMS, ORDERS
from ladder.models.errors import UserError, is_whole, unknown
from ladder.ops.blocks import MAX_BLOCKS, MAX_RATIO
from ladder.ops.steps import LANES
from ladder.ops.tilings import tiling_of

DEFAULT, ANY_ORDER = "staged", "collective"  # without a measurement
SERIAL = (DEFAULT, ANY_ORDER)  # those that do not overlap: in rank order, in any order
ANOTHER = "it adds in another order than that of the ranks"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOVABLE = (*DTYPES, torch.int32, torch.int64)  # dtypes of rows that are only moved
TYPED = {"bool": (bool, "true or false"), "int": (int, "a whole number")}  # of options
# The most of options that are counts, which are 1 or more. None: no limit.
COUNTS: dict[str, int | None] = {
    "blocks": MAX_BLOCKS, "ratio": MAX_RATIO, "streams": len(LANES), "shots": 2, "stages": None,
    "group_m": None, "pieces": None, "programs": MAX_PROGRAMS,
}  # fmt: skip
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in MOVABLE}


@dataclass(frozen=True)
class Call:
    """The properties of a call by which its implementation is chosen.

    sizes: rounded up to powers of two, as tables have them. any_order: sums may be in any order.
    exact: the sizes as they are, or () if only their bucket is known; a printed call has them, each
    with its bucket if that differs. mode: see `ladder.comm.capture`. apart: the reason why the
    group's ranks cannot reach each other's memory, "" if they can; None: the ranks are taken to
    have neighbouring GPUs of this machine.
    """

    op: str
    device: str
    dtype: torch.dtype
    ranks: int
    sizes: tuple[int, ...]
    any_order: bool = False
    exact: tuple[int, ...] = ()
    mode: Mode = "eager"
    apart: str | None = None

    def __str__(self) -> str:
        named = zip(OPERATORS[self.op].sizes, self.exact or self.sizes, self.sizes, strict=True)
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = ", ".join(
            f"{name} {size}{f' [{most}]' if most != size else ''}" for name, size, most in named
        )
        return f"{self.device}, {dtype}, {self.ranks} ranks, {sizes}"


def always(call: Call) -> str | None:
    """The refusal of an implementation that runs every call: there is none."""
    return None


Surplus = Callable[[Call, Mapping[str, Any]], float]  # see `Implementation`


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    run: called as run(group, *arguments of the operator without group_name, **options). refusal:
    the reason why it cannot run a call on this machine, with the remedy, or None; it must be the
    same on all ranks. options: the names of its options; those of COUNTS, `tile` and `order` take
    the same values in every implementation. ordered: whether it adds in the order of the ranks.
    insisted: options that only `use` may give, and no table, since they restrict what the caller
    may do with the result. surplus: a function of a call with known sizes and of its
    options: how much longer its products take than one product of all rows, as a share of that
    one's time; None: it has one product.
    """

    name: str
    run: Callable[..., Any]
    refusal: Callable[[Call], str | None] = always
    options: tuple[str, ...] = ()
    ordered: bool = True
    insisted: tuple[str, ...] = ()
    surplus: Surplus | None = None


@dataclass(frozen=True)
class Operator:
    """An operator. sizes: the names of the sizes that `measure(ranks, *shapes)` returns. check:
    called as check(ranks, *tensors); raises UserError for tensors that the operator refuses."""

    name: str
    sizes: tuple[str, ...]
    measure: Callable[..., tuple[int, ...]]
    check: Callable[..., None]
    implementations: dict[str, Implementation] = field(default_factory=dict)


OPERATORS: dict[str, Operator] = {}
FORGET: list[Callable[[], None]] = []  # clear what was chosen, when an implementation is replaced


def define(
    name: str,
    sizes: tuple[str, ...],
    measure: Callable[..., tuple[int, ...]],
    check: Callable[..., None],
) -> None:
    """Declare an operator. measure(ranks, *shapes) gives its sizes from its arguments' shapes;
    check(ranks, *tensors) refuses tensors that it cannot take."""
    assert name not in OPERATORS, name
    OPERATORS[name] = Operator(name, sizes, measure, check)


def implement(
    op: str,
    name: str,
    refusal: Callable[[Call], str | None] = always,
    options: tuple[str, ...] = (),
    ordered: bool = True,
    insisted: tuple[str, ...] = (),
    surplus: Surplus | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function that computes the operator `op`: see `Implementation`.

    A function that is defined again, by a reloaded module, replaces itself.
    """
    found, where = find_operator(op).implementations, f"implementation {name!r} of {op}"
    if not callable(refusal):
        raise UserError(f"{where}: refusal={refusal!r} must be a function of a call")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(run).parameters
        every = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        for key, names in (("options", options), ("insisted", insisted)):
            right = isinstance(names, tuple) and (every or all(map(parameters.__contains__, names)))
            if not right:
                raise UserError(
                    f"{where}: {key}={names!r} must be a tuple of parameters of {_place(run)}"
                )
        if name in found:
            before, now = map(_place, (found[name].run, run))
            if before != now:
                raise UserError(f"{where} is {before} already; give {now} another name")
            for forget in FORGET:
                forget()
        found[name] = Implementation(name, run, refusal, options, ordered, insisted, surplus)
        return run

    return register


def _place(run: Callable[..., Any]) -> str:
    """The module and name of a function; a partial has none."""
    name = getattr(run, "__qualname__", None)
    return f"{run.__module__}.{name}" if name else repr(run)


def check_values(where: str, implementation: Implementation, options: Mapping[str, Any]) -> None:
    """Raise UserError for a value that its option does not take: of another type than the
    implementation declares, or out of range.

    where: begins the message. Options that the implementation does not have are ignored.
    """
    if not options:
        return
    declared = _declared(implementation.run)
    for key, value in options.items():
        if key not in implementation.options:
            continue
        kind = declared.get(key)
        if kind is not None and type(value) is not kind[0]:
            raise UserError(f"{where}: {key}={value!r} must be {kind[1]}")
        _check_value(where, key, value)


def _check_value(where: str, key: str, value: Any) -> None:
    """Raise UserError for a value that no implementation takes. where: begins the message."""
    if key == "tile":
        try:
            tiling_of(str(value), None)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    elif key == "order" and value not in ORDERS:
        raise UserError(f"{where}: {unknown(key, value, ORDERS)}")
    elif key in COUNTS and (not is_whole(value) or not 1 <= value <= (COUNTS[key] or value)):
        most = COUNTS[key]
        said = f"1 to {most}" if most else "1 or more"
        raise UserError(f"{where}: {key}={value!r} must be {said}")


@functools.cache  # the packaged table asks for hundreds of entries
def _declared(run: Callable[..., Any]) -> dict[str, tuple[type, str]]:
    """The types of TYPED among a function's parameters, by name."""
    said = {
        name: str(each.annotation).removesuffix(" | None")
        for name, each in inspect.signature(run).parameters.items()
    }
    return {name: TYPED[kind] for name, kind in said.items() if kind in TYPED}


def bucket(sizes: Sequence[int]) -> tuple[int, ...]:
    """Each size rounded up to a power of two; 0 stays 0."""
    return tuple(1 << (int(size) - 1).bit_length() if size > 0 else 0 for size in sizes)


def call_of(
    op: str, device: str, dtype: torch.dtype, ranks: int, sizes: Sequence[int], any_order: bool,
    mode: Mode, apart: str | None = None,
) -> Call:  # fmt: skip
    """The call with these sizes."""
    return Call(op, device, dtype, ranks, bucket(sizes), any_order, tuple(sizes), mode, apart)


def find_operator(op: str, where: str = "") -> Operator:
    if op not in OPERATORS:
        raise unknown(f"operator{where}", op, OPERATORS)
    return OPERATORS[op]


def find_implementation(op: str, name: str, where: str = "") -> Implementation:
    found = find_operator(op, where).implementations
    if name not in found:
        raise unknown(f"implementation of {op}{where}", name, found)
    return found[name]
