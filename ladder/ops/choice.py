"""The choice among an operator's implementations, by tables of measurements.

A table says which is the fastest for a call; `staged`, which every operator has, runs the calls
that the table does not name. No overlapped implementation is chosen unless it was measured.

All ranks of a group must choose alike, since implementations exchange data in different ways. So a
call's sizes must be equal on all ranks, and either all ranks capture a call, or none does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ladder.comm.capture import MODES, Mode
from ladder.comm.capture import mode as current_mode
from ladder.jit import device_name
from ladder.models.errors import UserError, check_keys, is_whole, unknown
from ladder.ops import between
from ladder.ops.refusals import reduced_precision
from ladder.ops.registry import (
    ANOTHER,
    ANY_ORDER,
    DEFAULT,
    FORGET,
    MOVABLE,
    OPERATORS,
    Call,
    Implementation,
    Operator,
    call_of,
    check_values,
    find_implementation,
    find_operator,
)
from ladder.ops.table import VARIABLE, devices, entry_of

NUMBERS = ("capacity", "table_counts")  # what operators' `measure` takes besides shapes


@dataclass(frozen=True)
class Choice:
    """The implementation of a call, its options, and why. others: (name, why it was not chosen).

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


# operator -> the implementation that `use` insists on, and its options
_asked: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {}
any_order_groups: WeakSet[dist.ProcessGroup] = WeakSet()  # see `allow_any_order`


@contextlib.contextmanager
def use(op: str, implementation: str, **options: Any) -> Iterator[None]:
    """Within this context, run `op` by this implementation. All ranks must enter it.

    options: those of the implementation, as a table's entry has them. Raises UserError if there is
    no such operator, implementation or option. A call that the implementation cannot run raises
    UserError, too: it says why.
    """
    found = find_implementation(op, implementation)
    where = f"options of {op} by {implementation!r}"
    check_keys(where, options, found.options)
    check_values(where, found, options)
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
    device: str | torch.device | None = None,
    any_order: bool | None = None,
    mode: Mode | None = None,
    **arguments: Any,
) -> Choice:
    """Which implementation runs a call, and why; printable.

    shapes: those of the tensors that the operator's sizes depend on, in the operator's order: of
    bags weights and offsets, of rows x, of experts h and W, of the backward passes of
    `all_gather_matmul` and `matmul_reduce_scatter` all but the gradients. For a list of tensors, a
    list of shapes. arguments: what else the sizes depend on (`capacity`, `table_counts`). ranks:
    the size of the group; None: that of the default group. device: the name of a GPU, or "cpu"; a
    device of this machine (also "cuda", "cuda:1"); None: this machine's. any_order: whether the
    group allows it (`allow_any_order`); None: not, or with ranks=None what the default group
    allows. mode: "captured" or "eager"; None: that of a call made here, which is eager outside of a
    capture and of `as_captured`.
    """
    operator = find_operator(op)
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
    if not is_whole(ranks) or ranks < 1:
        raise UserError(f"ranks={ranks!r} must be a whole number, 1 or more")
    named = _device_name(device)
    names = _check_given(operator, shapes, arguments)
    try:
        inspect.signature(operator.measure).bind(ranks, *shapes, **arguments)
        operator.check(ranks, *(_tensors(each, dtype) for each in shapes), **arguments)
        sizes = operator.measure(ranks, *shapes, **arguments)
    except (TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise UserError(
            f"shapes={shapes!r} of {op}: give the shapes of {names}, in whole numbers from 0 on, "
            f"and a list of shapes for a list of tensors"
        ) from error
    found = choose(call_of(op, named, dtype, int(ranks), sizes, bool(any_order), mode))
    return replace(found, why=found.why + _similar(named)) if named == device else found


def _device_name(device: object) -> str:
    """The name in tables of the device that `explain` is given."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str) and device.partition(":")[0] != "cuda":
        return device
    if not isinstance(device, str | torch.device):
        raise UserError(f'device={device!r} must be the name of a GPU, such as "NVIDIA H200"')
    try:
        return device_name(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # assert: a torch without CUDA
        raise UserError(
            f"device={str(device)!r}: this machine has no such GPU; give the name of one, such as "
            f'"NVIDIA H200"'
        ) from error


def _similar(device: str) -> str:
    """The tables' GPU that may be meant by a name that none of them has: "h200"."""
    names = sorted(devices(os.environ.get(VARIABLE) or None))
    words = {*device.lower().split()}
    near = [name for name in names if words <= {*name.lower().split()}]
    return f"; did you mean {near[0]!r}?" if near and device not in names else ""


def _check_given(operator: Operator, shapes: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """The names of the tensors whose shapes `explain` takes.

    Raises UserError for another number of shapes, and for an argument that is unknown, left out, or
    no number.
    """
    _, *taken = inspect.signature(operator.measure).parameters.values()
    tensors = [each for each in taken if each.name not in NUMBERS]
    numbers = [each for each in taken if each.name in NUMBERS]
    names = ", ".join(each.name for each in tensors)
    if not isinstance(shapes, list | tuple):
        raise UserError(f"shapes={shapes!r} must be a list, of the shapes of {names}")
    given = sum(not isinstance(each, int) for each in shapes)  # a number may follow the shapes
    most, least = len(tensors), sum(each.default is each.empty for each in tensors)
    if not least <= given <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        raise UserError(
            f"{operator.name} takes {count} shape{'s' if most > 1 else ''} ({names}), {given} "
            f"{'was' if given == 1 else 'were'} given"
        )
    check_keys(f"explain for {operator.name}", arguments, [each.name for each in numbers])
    if not is_whole(arguments.get("capacity", 1)):
        raise UserError(f"capacity={arguments['capacity']!r} must be a whole number, 1 or more")
    counts = arguments.get("table_counts")
    if counts is not None and not (isinstance(counts, list | tuple) and all(map(is_whole, counts))):
        raise UserError(f"table_counts={counts!r} must be a list, of each rank's number of tables")
    for each in numbers:
        if each.default is each.empty and each.name not in arguments and given == len(shapes):
            raise UserError(f"{operator.name} needs {each.name}, too; give {each.name}=NUMBER")
    return names


def _tensors(shape: Any, dtype: torch.dtype) -> Any:
    """A meta tensor of a shape, or a list of them for a list of shapes; a number stays a number."""
    if isinstance(shape, int):
        return shape
    several = shape == [] or not all(isinstance(each, int) for each in shape)
    if isinstance(shape, list | tuple) and several:
        return [_tensors(each, dtype) for each in shape]
    return torch.empty(shape, dtype=dtype, device="meta")


def choose(call: Call) -> Choice:
    """The implementation for a call. Raises UserError if one is insisted on that cannot run it."""
    known = tuple(sorted(OPERATORS[call.op].implementations))  # whatever was imported first
    asked, file = _asked.get(call.op), os.environ.get(VARIABLE) or None
    return _choose(call, known, asked, file, reduced_precision())


def listed(call: Call) -> tuple[str, Mapping[str, Any]]:
    """The implementation that a table names for a call, and its options; else the `unmeasured` one.
    The call may be for another machine, so this one is not asked whether it can run it."""
    return _listed(call, os.environ.get(VARIABLE) or None)


@functools.lru_cache(maxsize=4096)  # prompts have many lengths
def _listed(call: Call, file: str | None) -> tuple[str, Mapping[str, Any]]:
    _, entry = entry_of(call, file)
    if entry is not None:
        found = OPERATORS[call.op].implementations[entry["implementation"]]
        if not between.refusal(call, entry):
            return found.name, entry["options"]
    return unmeasured(call), {}


def run(call: Call, group: dist.ProcessGroup, *arguments: Any) -> Any:
    """Run the operator by the chosen implementation."""
    choice = choose(call)
    chosen = OPERATORS[call.op].implementations[choice.implementation]
    return chosen.run(group, *arguments, **dict(choice.options))


@functools.lru_cache(maxsize=4096)  # prompts have many lengths
def _choose(
    call: Call, known: tuple[str, ...], asked: tuple[str, tuple[tuple[str, Any], ...]] | None,
    file: str | None, settings: tuple[bool, ...],
) -> Choice:  # fmt: skip
    """known: the operator's implementations; others may be added later. settings: torch's settings
    on which refusals depend. Both are here as keys of the cache."""
    implementations = {name: OPERATORS[call.op].implementations[name] for name in known}
    refusals = {name: each.refusal(call) for name, each in implementations.items()}
    options: Mapping[str, Any] = {}
    if asked is not None:
        (picked, given), why = asked, "it was asked for"
        options = dict(given)
        if refusals[picked] is not None:
            raise UserError(f"{call.op} by {picked!r} cannot run here: {refusals[picked]}")
    else:
        picked, why = unmeasured(call), f"no measurement for {call}"
        path, entry = entry_of(call, file)
        if entry is not None:
            picked, options, why = entry["implementation"], entry["options"], entry["source"]
            why = f"{path.name}: {why}{between.said(entry)}"
            waste = between.refusal(call, entry)
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


FORGET += [_listed.cache_clear, _choose.cache_clear]


def unmeasured(call: Call) -> str:
    """The implementation of a call that no entry names."""
    found = OPERATORS[call.op].implementations.get(ANY_ORDER)
    able = call.any_order and found is not None and found.refusal(call) is None
    return ANY_ORDER if able else DEFAULT
