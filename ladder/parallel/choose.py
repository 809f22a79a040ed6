"""The registry of reducers with their capabilities, and the choice of a pass's reducer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ladder.kernels.limits import MAX_ROWS
from ladder.models.errors import UserError, unknown
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks
from ladder.parallel.dispatch import Dispatch
from ladder.parallel.refusals import fused_refusal, sharded_refusal

if TYPE_CHECKING:  # predictions choose, too, and need no torch
    import torch

    from ladder.models.reducer import Reducer

OVERLAPS = "the operators' table has an overlapping implementation for each matmul"


@dataclass(frozen=True)
class Capabilities:
    """A reducer and its capabilities.

    where: "module:class", relative to `ladder.parallel` if it begins with a dot; imported by
    `make`. base: whether it can be a model's own reducer, made from ranks and a group; other
    reducers are for some passes of a model with a base. backward: it has gradients. peer_memory: it
    needs access to the peers' memory. shards_residual: each rank holds the residual of its own
    tokens only, so there are no virtual ranks. rounds: it rounds the messages of prompts, so their
    sums differ. kind: the 8-bit type of these messages.
    """

    where: str
    base: bool
    backward: bool = False
    peer_memory: bool = False
    shards_residual: bool = False
    rounds: bool = False
    kind: str = ""

    @property
    def make(self) -> Any:
        """The class, which makes a reducer from ranks and a group."""
        module, name = self.where.split(":")
        found = getattr(import_module(module, "ladder.parallel"), name)
        return functools.partial(found, kind=self.kind) if self.kind else found


def _in_eight_bits(kind: str) -> Capabilities:
    where = ".eight_bits:EightBitReducer"
    return Capabilities(where, base=True, rounds=True, kind=kind)


REDUCERS = {
    "async": Capabilities(".reducers:AsyncReducer", base=True, backward=True),
    "push": Capabilities(".reducers:PushReducer", base=True, peer_memory=True),
    "async-fp8": _in_eight_bits("fp8"),
    "async-int8": _in_eight_bits("int8"),
    "sequence": Capabilities(
        ".sequence:SequenceReducer", base=True, backward=True, shards_residual=True
    ),
    "fused": Capabilities(".fused:FusedReducer", base=True, backward=True, shards_residual=True),
    "sharded": Capabilities(".sharded:ShardedReducer", base=False, shards_residual=True),
    "decode": Capabilities(".decode:DecodeReducer", base=False),
}
TRAINING = tuple(name for name, each in REDUCERS.items() if each.base and each.backward)
ROUNDING = tuple(name for name, each in REDUCERS.items() if each.rounds)
# `fused` is for prompts: the model's own reducer is then the one of `auto` (`inference_base`).
INFERENCE = (
    *(n for n, each in REDUCERS.items() if each.base and not each.shards_residual),
    "fused",
)


@dataclass(frozen=True)
class Choice:
    """A reducer's name, its transport (or ""), and the reason of the choice."""

    reducer: str
    transport: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.reducer}{self.transport and f', {self.transport}'} ({self.why})"


def choose_training(
    plan: Plan,
    ranks: Ranks,
    shape: tuple[int, int] = (0, 0),
    base: str = "auto",
    *,
    sequence_parallel: bool = False,
    overlaps: Callable[[int], bool] | None = None,
) -> Choice:
    """The reducer of all passes of a training run.

    shape: [B, S] of a pass; (0, 0) if it is not known. base: the requested reducer.
    sequence_parallel: whether the residual is sharded by tokens. overlaps: a function of a pass's
    number of tokens: whether its exchanges can run beneath the products around them
    (`ladder.parallel.overlap`); None: they cannot.
    Raises UserError if the plan or the ranks do not allow `base`.
    """
    chosen = training_reducer(base, sequence_parallel)
    check_base("train", plan, ranks, chosen)
    if base != "auto":
        return Choice(chosen, why="it was asked for")
    tokens = shape[0] * shape[1]
    measured = sequence_parallel and _sequential_and_blocking(plan)
    if tokens and measured and overlaps is not None and overlaps(tokens):
        return Choice("fused", why=f"{tokens} tokens; {OVERLAPS}")
    return Choice(chosen, why=f"with sequence_parallel={str(sequence_parallel).lower()}")


def choose_prefill(
    plan: Plan,
    ranks: Ranks,
    shape: torch.Size | tuple[int, int],
    token_bytes: int,
    table: Dispatch | None,
    base: str = "auto",
    *,
    overlaps: Callable[[int], bool] | None = None,
) -> Choice:
    """The reducer of a prompt's pass over tokens of `shape` [B, S].

    token_bytes: the size of one token's partial. table: the dispatch table of this GPU and number
    of ranks; None: the ranks have no access to each other's memory. base, overlaps: as in
    `choose_training`.
    Raises UserError if the plan or the ranks do not allow `base`.
    """
    check_base("prefill", plan, ranks, base)
    refusal = sharded_refusal(plan, ranks)
    if base == "fused":
        transport = "collective" if table is None else _transport(table, plan, shape, token_bytes)
        return Choice("fused", "" if refusal else transport, "it was asked for")
    base = _all_reducer(base, table)
    if base != "push" or table is None or refusal is not None:
        alone = "without the peers' memory, the residual cannot be sharded by tokens"
        return Choice(base, why=refusal or alone)
    tokens = shape[0] * shape[1]
    transport = _transport(table, plan, shape, token_bytes)
    why = f"{tokens} tokens of {token_bytes} bytes"
    large = 0 < table.prefill.fused <= tokens * token_bytes
    if large and _sequential_and_blocking(plan) and overlaps is not None and overlaps(tokens):
        return Choice("fused", transport, f"{why}; {OVERLAPS}")
    return Choice("sharded", transport, why)


def choose_decode(
    plan: Plan, ranks: Ranks, sequences: int, table: Dispatch | None, base: str = "auto"
) -> Choice:
    """The reducer of a decode step of `sequences` sequences. table, base: as in `choose_prefill`.

    Raises UserError if the plan or the ranks do not allow `base`.
    """
    check_base("decode", plan, ranks, base)
    base = _all_reducer(base, table)
    if sequences <= MAX_ROWS and ranks.held == 1:
        return Choice("decode", why=f"up to {MAX_ROWS} sequences; it reduces as {base}")
    return Choice(base, why=f"more than {MAX_ROWS} sequences, or virtual ranks")


def _all_reducer(base: str, table: Dispatch | None) -> str:
    """The reducer that sums whole partials where `base` leaves that open."""
    return ("async" if table is None else "push") if base in ("auto", "fused") else base


def _sequential_and_blocking(plan: Plan) -> bool:
    """Whether every reduce blocks and no attention runs beside an MLP, as in `standard`: only
    prompts and steps of such plans have been measured by operators."""
    return all(plan.blocking) and all(each.kind != "attention+mlp" for each in plan.sublayers)


def _transport(
    table: Dispatch, plan: Plan, shape: torch.Size | tuple[int, int], token_bytes: int
) -> str:
    tokens = shape[0] * shape[1]
    return table.prefill.transport(tokens, tokens * token_bytes, all(plan.blocking))


def training_reducer(reducer: str, sequence_parallel: bool) -> str:
    """The reducer of a model in training: `reducer`, or for "auto" the one that fits.

    Raises UserError if `reducer` has no backward pass, or does not fit `sequence_parallel`.
    """
    check_name("train", reducer)
    fitting = [name for name in TRAINING if REDUCERS[name].shards_residual == sequence_parallel]
    if reducer != "auto" and reducer not in fitting:
        raise UserError(
            f"reducer={reducer} with sequence_parallel={str(sequence_parallel).lower()}: use "
            f"{', '.join(fitting)} or auto, or set sequence_parallel="
            f"{str(not sequence_parallel).lower()}"
        )
    return fitting[0] if reducer == "auto" else reducer


def name_of(reducer: Reducer) -> str:
    """The name of a training model's reducer."""
    return next(name for name in TRAINING if REDUCERS[name].make is type(reducer))


def check_base(phase: str, plan: Plan, ranks: Ranks, base: str, option: str = "reducer") -> None:
    """Raise UserError if `base` cannot be a model's own reducer; "auto" is always accepted."""
    check_name(phase, base, option)
    refusal = None
    if base != "auto" and REDUCERS[base].shards_residual:
        refusal = (sharded_refusal if phase == "train" else fused_refusal)(plan, ranks)
    if refusal is not None:
        instead = "async" if ranks.processes == 1 else "async or push"
        if phase == "train":
            instead = "async and sequence_parallel=false"
        raise UserError(
            f"{option}={base} with tp={ranks.processes} and plan {plan.name!r}: {refusal}; use "
            f"{option}={instead}"
        )


def check_name(phase: str, base: str, option: str = "reducer") -> None:
    """Raise UserError unless `base` is "auto" or a model's own reducer for this phase."""
    names = TRAINING if phase == "train" else INFERENCE
    if base not in ("auto", *REDUCERS):
        raise unknown(option, base, ("auto", *names))
    if base == "auto" or base in names:
        return
    each = REDUCERS[base]
    why = "it is picked automatically for single passes and cannot be a model's reducer"
    if phase == "train" and not each.backward:
        why = "it has no backward pass"
    elif phase != "train" and each.shards_residual and each.base:
        why = "it is for training"
    raise UserError(f"{option}={base} cannot be used here: {why}; use {', '.join(names)} or auto")


def inference_base(reducer: str, processes: int) -> str:
    """The model's own reducer for inference by `reducer`, a name in INFERENCE or "auto".

    All ranks must call this.
    """
    return pick_reducer(processes) if reducer in ("auto", "fused") else reducer


def pick_reducer(processes: int) -> str:
    """The fastest reducer of a model's own for inference on this machine: `push` if all ranks can
    run it, else `async`.

    All ranks must call this.
    """
    from ladder.comm.access import common_push_refusal  # late: it needs torch

    return "async" if processes == 1 or common_push_refusal(processes) else "push"
