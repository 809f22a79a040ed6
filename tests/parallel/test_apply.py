"""Activation checkpointing and compilation: the same numbers, and what is kept and done again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.config import build
from ladder.models import ModelConfig, Transformer, UserError
from ladder.models.layers import RMSNorm
from ladder.parallel import choose
from ladder.parallel.apply import (
    CHECKPOINTING,
    check_sequence_parallel,
    make_model,
    sublayer_call,
)
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sharding import initialise
from ladder.train import metrics
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.parallel.steps import BACKENDS, compiling
from tests.samples import sample_tokens, small_config
from tests.train.runs import losses, recipe, weights

PRODUCTS = 7  # of a layer, forward: q, k, v, o, gate, up, down


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tp", [2, 4])  # as many as T, and more
def test_sequence_parallelism_is_refused(tp: int) -> None:
    config = small_config("dtp-1", 2, True)
    with pytest.raises(UserError, match=rf"sequence_parallel=true with tp={tp} .*own_lag=0"):
        check_sequence_parallel(config, tp)


def step(model: Transformer) -> tuple[dict[str, Tensor], Counter[str]]:
    """Every gradient of one step, and the operations of its backward pass."""
    tokens = sample_tokens(model.config, 1, 2, 16)
    loss = model(tokens, tokens).mean()
    with Counted() as counted:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return grads, counted.found


@pytest.mark.parametrize("plan", ["ladder", "parallel", "desync-2x"])
def test_checkpointing_changes_no_bit(plan: str) -> None:
    """`full` does every product again and `selective` none. Catches a sublayer that was left out,
    a policy that knows no product, and random state or a wrong argument in what is done again."""
    config = small_config(plan, 2, plan == "desync-2x")
    found = {}
    for mode in CHECKPOINTING:
        model = make_model(
            config, torch.float32, None, torch.device("cpu"), activation_checkpointing=mode
        )
        initialise(model, 3)
        found[mode] = step(model)
    product = "bmm" if plan == "desync-2x" else "mm"
    products = {mode: counts[product] for mode, (_, counts) in found.items()}
    assert products["none"] == products["selective"] > 0
    # The last product of each sublayer has no use in its own backward pass: it is not done again.
    again = products["full"] - products["none"]
    assert config.num_layers * (PRODUCTS - 2) <= again <= config.num_layers * PRODUCTS
    names = {name for _, counts in found.values() for name in counts}
    attention = [name for name in names if "attention" in name and "backward" not in name]
    assert sum(found["selective"][1][name] for name in attention) == 0
    assert sum(found["full"][1][name] for name in attention) == config.num_layers
    for mode in ("full", "selective"):
        assert found[mode][0].keys() == found["none"][0].keys()
        for name, grad in found["none"][0].items():
            assert torch.equal(grad, found[mode][0][name]), (mode, name)


class Counting(AsyncReducer):
    """A reducer of somebody else, which counts what it reduces."""

    calls = 0

    def reduce(self, partial: Tensor, blocking: bool = False) -> Any:
        Counting.calls += 1
        return super().reduce(partial, blocking)


def train_by(rank: int, world: int, settings: dict[str, Any]) -> int:
    """Train by a reducer that is registered as `counting`; the calls of it."""
    where = f"{__name__}:Counting"
    registered = {"counting": replace(choose.REDUCERS["async"], where=where)}
    names = (*choose.TRAINING, "counting")
    with mock.patch.dict(choose.REDUCERS, registered), mock.patch.object(choose, "TRAINING", names):
        train(build(TrainConfig, settings, "test recipe"), device="cpu")
    calls, Counting.calls = Counting.calls, 0
    return calls


def test_a_recipe_names_the_reducer(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    """Catches a key that is read and not used. One that sums in the same way trains the same."""
    plain = recipe(corpus, tmp_path / "plain", tp=2, steps=2, warmup_steps=0).to_dict()
    assert pools(2).run(train_by, plain) == [0, 0]
    named = {**plain, "reducer": "counting", "out": str(tmp_path / "run")}
    assert all(pools(2).run(train_by, named))
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")


def test_an_unknown_mode_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"activation_checkpointing 'ful' .did you mean 'full'"):
        recipe(corpus, tmp_path, activation_checkpointing="ful")
    with pytest.raises(UserError, match="activation_checkpointing 'ful'"):
        sublayer_call(Transformer(small_config()), "ful", False)


def train_layouts(rank: int, world: int, settings: dict[str, Any], out: str) -> None:
    for tp, mode in ((1, "full"), (2, "selective"), (2, "full")):
        changes = {"tp": tp, "dp_shard": 0, "activation_checkpointing": mode,
                   "sequence_parallel": tp > 1, "out": f"{out}/{tp}-{mode}"}  # fmt: skip
        train(build(TrainConfig, settings | changes, "test recipe"), device="cpu")


def test_checkpointing_under_fsdp_and_sequence_parallelism(
    corpus: Path, tmp_path: Path, pools: Pools
) -> None:
    """Catches what is done again after FSDP has let the weights go, or with a reduce inside."""
    alone = recipe(corpus, tmp_path / "alone", plan="ladder", steps=6, batch_size=8, lr=3e-3)
    train(alone, device="cpu")
    pools(2).run(train_layouts, alone.to_dict(), str(tmp_path))
    for name in ("1-full", "2-selective", "2-full"):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)


def train_compiled(rank: int, world: int, settings: dict[str, Any], backend: str, out: str) -> None:
    """Plain and compiled; beside each run, how often gradients were reduced."""
    for name in ("plain", "compiled"):
        changes = {"compile": name == "compiled", "dp_shard": 0, "micro_batch_size": 2,
                   "activation_checkpointing": "selective", "out": f"{out}/{name}"}  # fmt: skip
        config = build(TrainConfig, settings | changes, "test recipe")
        with (
            compiling(backend),
            mock.patch.object(
                _fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce
            ) as reduced,
        ):
            train(config, device="cpu")
        if rank == 0:
            Path(out, f"{name}-reduced").write_text(str(reduced.call_count))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_under_fsdp(corpus: Path, tmp_path: Path, pools: Pools, backend: str) -> None:
    """Two micro-batches a step, evaluated and saved. FSDP's hooks stay outside of what is compiled:
    inside, too, they shard weights that are still needed, or reduce gradients twice."""
    settings = recipe(
        corpus, tmp_path, plan="ladder", steps=4, batch_size=8, lr=3e-3, eval_interval=2
    ).to_dict()
    pools(2).run(train_compiled, settings, backend, str(tmp_path))
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)
    assert weights(tmp_path / "compiled").keys() == weights(tmp_path / "plain").keys()
    counts = [int((tmp_path / f"{name}-reduced").read_text()) for name in ("plain", "compiled")]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(corpus: Path, tmp_path: Path, backend: str) -> None:
    """With selective checkpointing, trained, evaluated and resumed: the losses of the plain run."""
    settings: dict[str, Any] = {"plan": "ladder", "steps": 6, "lr": 3e-3, "batch_size": 4}
    train(recipe(corpus, tmp_path / "plain", **settings), device="cpu")
    compiled = recipe(
        corpus,
        tmp_path / "compiled",
        compile=True,
        activation_checkpointing="selective",
        **settings,
    )
    torch._dynamo.utils.counters.clear()
    with compiling(backend):
        train(compiled, device="cpu", stop_after=3)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        train(compiled, device="cpu", resume=True)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)
    assert weights(tmp_path / "compiled").keys() == weights(tmp_path / "plain").keys()
    assert any("heldout_loss" in record for record in metrics.read_metrics(tmp_path / "compiled"))


def compiled_and_not(
    config: ModelConfig, change: Callable[[Transformer], None] = lambda model: None
) -> list[Tensor]:
    """Losses without and with `compile`, of a model that `change` has changed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = []
    for compile in (False, True):
        with compiling("aot_eager"):
            model = make_model(config, torch.float32, None, torch.device("cpu"), compile=compile)
        initialise(model, 0)
        change(model)
        tokens = sample_tokens(config, seed=0)
        found.append(model(tokens, tokens).detach())
    return found


class DoubledNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_norm_of_ones_own_is_not_compiled() -> None:
    """Catches a norm of another class or eps that is computed as the config's, and lost hooks."""
    calls = []

    def change(model: Transformer) -> None:
        first, second = model.model.layers[0], model.model.layers[1]
        first.input_layernorm.eps = 1.0
        first.post_attention_layernorm.register_forward_hook(lambda *_: calls.append(1))
        own = DoubledNorm(model.config.hidden_size, model.config.norm_eps)
        own.load_state_dict(second.input_layernorm.state_dict())
        second.input_layernorm = own

    plain, compiled = compiled_and_not(small_config(), change)
    assert len(calls) == 2
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_a_plan_of_many_scales_compiles_no_landing_for_each() -> None:
    records: list[dict[str, Any]] = [
        {"kind": kind, "reduce": "none", "own_scale": 1 + n / 100}
        for n, kind in enumerate(("attention", "mlp") * 9)
    ]
    records[-1] = {"kind": "mlp", "reduce": "accumulated"}
    config = small_config({"sublayers": records}, ranks=2, depends=True, num_layers=9)
    plain, compiled = compiled_and_not(config)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3  # attention, the MLP, and a function of the loss


@pytest.mark.parametrize(
    "mode",
    [pytest.param(m, marks=() if m == "selective" else pytest.mark.slow) for m in CHECKPOINTING],
)
def test_a_sublayer_is_compiled_whole_and_once(mode: str) -> None:
    """Catches a graph break, after which torch runs the sublayer uncompiled, and compilation again
    in every pass, each of which has objects of its own."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    with compiling("aot_eager"):
        model = make_model(
            small_config("ladder"), torch.float32, None, torch.device("cpu"),
            activation_checkpointing=mode, compile=True,
        )  # fmt: skip
    initialise(model, 0)
    tokens = sample_tokens(model.config, seed=0)
    graphs = []
    for _ in range(3):
        model(tokens, tokens).mean().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [7, 7, 7]  # attention, MLP, 3 landings, and the loss's two functions
    assert not counters["graph_break"]
