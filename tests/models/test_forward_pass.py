"""The forward pass: what it leaves behind, and what a compiler traces of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.infer.engine import Engine
from ladder.models import Transformer
from ladder.models.forward_pass import MATRIX_PRODUCTS, Pass, Summed
from ladder.models.presets import PlanSpec
from ladder.models.reducer import Reducer
from ladder.parallel.apply import make_model
from ladder.parallel.choose import REDUCERS
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sharded import ShardedReducer
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.samples import (
    DEPENDS_ON_T,
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
    virtual,
)

PLANS: dict[str, PlanSpec] = {**SAME_AT_ANY_T, **DEPENDS_ON_T}
LAST = torch.tensor([3, 6])


@contextmanager
def watched() -> Iterator[list[weakref.ref]]:
    """Inside, the passes and what their reads give; the garbage collector is off."""
    found: list[weakref.ref] = []
    read = Pass.read

    def watch(run: Pass, n: int) -> Any:
        given = read(run, n)
        found.extend(weakref.ref(each) for each in (run, given, run.residual) if each is not None)
        return given

    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(Pass, "read", watch):
            yield found
    finally:
        if enabled:
            gc.enable()


def left(found: list[weakref.ref]) -> int:
    """How many of them are alive; they are forgotten."""
    assert len(found) > 8
    count = sum(each() is not None for each in found)
    found.clear()
    return count


def left_by(model: Transformer) -> list[int]:
    """What passes without and with `last` leave, and one whose loss was sent back."""
    tokens = sample_tokens(model.config, 1, 2, 8)
    counts = []
    with watched() as found:
        for last in (None, LAST):
            with torch.no_grad():
                logits = model(tokens, last=last)
            counts.append(left(found))
            del logits
        model(tokens, tokens).mean().backward()
        counts.append(left(found))
    return counts


@pytest.mark.parametrize("name", PLANS)
def test_a_pass_leaves_nothing_behind(name: str) -> None:
    """Catches a cycle of a pass, its landing and its outputs: GPU memory until a collection."""
    config = small_config(PLANS[name], 2 if name in DEPENDS_ON_T else 1, name in DEPENDS_ON_T)
    assert left_by(full_model(config, 5, torch.float32)) == [0, 0, 0]


def left_on_ranks(rank: int, world_size: int, plan: str) -> dict[str, list[int]]:
    """In a worker: what the passes of each reducer leave behind."""
    config = small_config(SAME_AT_ANY_T[plan])
    model = full_model(config, 5, torch.float32)
    shard_model(model, tp_mesh(world_size))
    tokens = sample_tokens(config, 1, 2, 8)
    base = model.reducer
    assert isinstance(base, AsyncReducer)
    counts = {"async": left_by(model)}
    for name in ("sequence", "fused"):
        make = REDUCERS[name].make
        model.use(replace(model.runtime, reducer=make(base.ranks, base.group)))
        with watched() as found:
            model(tokens, tokens).mean().backward()
            counts[name] = [left(found)]
    sharded = ShardedReducer(base.ranks, base.group, config.plan)
    model.use(replace(model.runtime, reducer=sharded))
    with watched() as found, torch.no_grad():
        counts["sharded"] = []
        for last in (None, LAST):
            model(tokens, last=last)
            counts["sharded"].append(left(found))
    model.use(replace(model.runtime, reducer=base))
    engine = Engine(model, fused=True)
    with watched() as found:
        engine.generate([[1, 2, 3], [4]], max_new_tokens=3)
        counts["decode"] = [left(found)]
    return counts


def test_a_pass_of_each_reducer_leaves_nothing_behind(pools: Pools) -> None:
    for counts in pools(2).run(left_on_ranks, "lags 3, 1 and 0, some parallel"):
        assert counts.pop("async") == [0, 0, 0]
        assert counts == {"sequence": [0], "fused": [0], "sharded": [0, 0], "decode": [0]}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a mix of everything", marks=pytest.mark.slow),
        "groups in flight under own parts of others",
    ],
)
def test_the_whole_model_compiles_into_one_graph(name: str) -> None:
    """Catches what a compiler cannot trace, which would cut the graph at every sublayer, and what
    differs from pass to pass, which would compile it again."""
    config = small_config(PLANS[name], 2, True)
    model = full_model(config, 5, torch.float32)
    tokens = sample_tokens(config, 1, 2, 8)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = model(tokens)  # also fills the plan's cached properties
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=count)
    for _ in range(3):
        assert torch.equal(compiled(tokens), expected)
    assert len(graphs) == 1


def test_compiled_sublayers_keep_the_last_positions_alone() -> None:
    """What `last` selects is a part of what a sublayer computes."""
    config = small_config("ladder")
    found = []
    for compile in (False, True):
        with mock.patch.object(torch, "compile", lambda each, **_: each):  # no compiler needed
            model = make_model(config, torch.float32, None, torch.device("cpu"), compile=compile)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.1)
            found.append(model(sample_tokens(config, 1, 2, 8), last=LAST))
    assert found[0].shape[1] == 1
    assert torch.equal(*found)


class Summing(Pass):
    """A pass whose `row` has summed its product over the ranks when it returns."""

    def operators(self, n: int) -> Any:
        return self

    def column(self, x: Any, weights: Any) -> Any:
        return MATRIX_PRODUCTS.column(x, weights)

    def row(self, x: Any, weight: Any) -> Summed:
        partial = weight(x)
        return Summed(self.reducer.reduce(self.sum_held(partial)), partial)

    def reduce(self, n: int, partial: Any) -> Any:
        raise AssertionError("summed twice")


class SummingReducer(Reducer):
    def begin(self, runtime: Any, plan: Any, norms: Any, shape: Any) -> Pass:
        return Summing(runtime, self, plan, norms)


@pytest.mark.parametrize("name", ["standard", "ladder", "lag 2", "own at once, peers 1 later"])
@pytest.mark.parametrize("last", [None, LAST])
def test_a_row_may_have_summed_its_product(name: str, last: torch.Tensor | None) -> None:
    """`write` then starts no reduce. Catches a sum over the ranks that is reduced again, and one
    that lands at another read than the plan's."""
    depends = name in DEPENDS_ON_T
    config = small_config(PLANS[name], 2 if depends else 1, depends)
    model = virtual(full_model(config, 5), 2)
    tokens = sample_tokens(config, 1, 2, 8)
    expected = model(tokens, last=last)
    model.use(replace(model.runtime, reducer=SummingReducer(model.reducer.ranks)))
    assert relative_error(model(tokens, last=last), expected) < 1e-12


def test_a_row_that_sums_is_for_outputs_alone() -> None:
    """Another reduce sums more than the partial, or nothing."""
    config = small_config("desync-2x", 2, True)
    model = virtual(full_model(config, 5), 2)
    model.use(replace(model.runtime, reducer=SummingReducer(model.reducer.ranks)))
    with pytest.raises(AssertionError, match="reduce='none'"):
        model(sample_tokens(config, 1, 2, 8))
