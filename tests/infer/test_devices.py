"""An engine and its device without a GPU: the current one, and which sessions memory is made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.costs import HEADROOM
from ladder.infer import devices, engine, session
from ladder.infer.devices import on_device, pass_bytes, session_bytes
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling
from ladder.models import Transformer
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.infer.engines import make
from tests.samples import full_model, small_config


def test_another_gpu_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where it is not: torch's context takes longer than the question."""
    made: list[torch.device] = []

    def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
        made.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("cuda:0", "cuda", "cuda:1"):
        with on_device(torch.device(name)):
            pass
    assert made == [torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "current_device", None)  # which would start CUDA
    with on_device(torch.device("cpu")):
        pass


@pytest.mark.parametrize("fused", [False, True])
def test_an_engine_works_on_its_models_device(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing, captures and every pass; a caller's function runs with its own current device."""
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.pop()

    def here(module: Any, name: str) -> Any:
        work = getattr(module, name)

        def run(*args: Any, **options: Any) -> Any:
            assert entered, name
            return work(*args, **options)

        return run

    def record(work: Any) -> tuple[Any, None]:
        assert entered
        work()
        return mock.Mock(replay=work), None

    monkeypatch.setattr(devices, "on_device", on)
    monkeypatch.setattr(engine, "on_device", on)
    monkeypatch.setattr(engine, "fuse", here(engine, "fuse"))
    monkeypatch.setattr(session, "Cache", here(session, "Cache"))
    monkeypatch.setattr(session, "capture_graph", record)
    passes = []

    def passed(*_: Any) -> None:
        assert entered == [torch.device("cpu")] * len(entered) != []
        passes.append(1)

    for graphs in (False, True):
        found = Engine(make("ladder", None).float(), fused=fused)
        found.graphs = graphs
        found.model.register_forward_pre_hook(passed)
        found.generate(
            [[5, 8]], max_new_tokens=4, on_token=lambda *_: None if not entered else 1 / 0
        )
    assert len(passes) == 4 + 2 + 4  # a graph's capture is a pass of its own here
    assert not entered


def graphed(model: Transformer) -> Engine:
    found = Engine(model)
    found.graphs = True  # which the constructor refuses on a CPU
    return found


def batches(found: Engine) -> list[int]:
    return [batch for batch, *_ in found.sessions]


class Memory:
    """A GPU's: what sessions leave of it, once torch has given back what it kept of them."""

    def __init__(self, total: float, found: Engine) -> None:
        self.total, self.engine, self.kept = total, found, 0.0
        self.released = 0

    def held(self) -> float:
        sessions = self.engine.sessions.values()
        return sum(sum(each.nbytes for each in one.cache.tensors()) for one in sessions)

    def free(self, device: torch.device) -> float:
        self.kept = max(self.kept, self.held())
        return self.total - self.kept

    def release(self, device: torch.device) -> None:
        self.kept = self.held()
        self.released += 1


@contextlib.contextmanager
def limited(memory: Memory) -> Iterator[None]:
    with (
        mock.patch.object(devices, "free_bytes", memory.free),
        mock.patch.object(engine, "release", memory.release),
        mock.patch.object(session, "capture_graph", lambda work: (mock.Mock(replay=work), work())),
        mock.patch.object(engine, "pass_bytes", return_value=0.0),
        mock.patch.object(devices, "pass_bytes", return_value=0.0),
    ):
        yield


def test_a_session_that_does_not_fit_takes_the_place_of_the_oldest() -> None:
    """As many as it needs and no more; what torch keeps unused is asked for first."""
    found = graphed(make("ladder", None).float())
    one = session_bytes(found.model, 1, 40, "auto") - pass_bytes(found.model, 1, 1)
    memory = Memory(8.5 * one / HEADROOM, found)
    with limited(memory):
        for batch in (1, 2, 3):
            found.session(batch, 40, Sampling())
        assert (batches(found), memory.released) == ([1, 2, 3], 0)
        found.session(1, 40, Sampling())  # used again
        found.session(4, 40, Sampling())
        assert batches(found) == [3, 1, 4]
        memory.kept = memory.total  # nothing is free, but torch holds enough unused
        found.session(1, 40, Sampling(0.5))
        assert batches(found) == [3, 1, 4, 1]
        found.session(9, 40, Sampling())  # fits nowhere: torch says so on a GPU
        assert batches(found) == [3, 1, 4, 1, 9]


def test_a_prompt_takes_the_place_of_other_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of its own, or activations without one, but not of its own session."""
    found = graphed(make("ladder", None).float())
    with limited(memory := Memory(1e9, found)):
        expected = found.generate([[5, 8]], max_new_tokens=4)
        found.session(2, 40, Sampling())
        more = HEADROOM * (1e9 - memory.held() + 1)  # than is free now
        monkeypatch.setattr(engine, "pass_bytes", lambda *_: more)
        assert found.generate([[5, 8]], max_new_tokens=4) == expected  # its graph is there
        assert batches(found) == [2, 1]
        found.generate([[5] * 20], max_new_tokens=4)
        assert batches(found) == [1]


def dropped(rank: int, world_size: int) -> list[int]:
    model = full_model(small_config("ladder"), 5, torch.float32)
    shard_model(model, tp_mesh(world_size))
    found = graphed(model)
    one = session_bytes(found.model, 1, 64, "auto") - pass_bytes(found.model, 1, 1)
    with limited(Memory((1000 if rank == 0 else 6.5) * one / HEADROOM, found)):
        for batch in (1, 2, 3, 4):
            found.session(batch, 64, Sampling())
    return batches(found)


def test_all_ranks_drop_what_the_fullest_must(pools: Pools) -> None:
    """A rank that kept a session whose graph the others capture again would wait for ever."""
    assert pools(2).run(dropped) == [[4]] * 2


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_session_is_not_larger_than_thought(cache: str) -> None:
    model = full_model(small_config("ladder"), 5, torch.float32)
    session = Engine(model, cache=cache).session(3, 50, Sampling())
    bytes_of_cache = sum(each.nbytes for each in session.cache.tensors())
    assert session_bytes(model, 3, 50, cache) == bytes_of_cache + pass_bytes(model, 3, 1)
    logits = 3 * 67 * 4
    activations = 3 * 16 * 4 * (32 + 2 * 48)  # the residual, gate and up
    assert pass_bytes(model, 3, 16) > activations + logits
