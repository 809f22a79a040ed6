"""Captured calls and eager ones: which implementation runs, and what prepares a capture."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import ladder.ops
from ladder.comm import capture
from ladder.comm.capture import as_captured, mode
from ladder.infer import graphs
from ladder.models.errors import UserError
from ladder.ops import choice, explain, registry, use, workspace
from ladder.ops.registry import OPERATORS
from ladder.ops.table import VARIABLE
from tests.distributed import Pools
from tests.ops.everyone import world

OP = "all_reduce"


def capturing() -> Any:
    """As if the current stream were being captured."""
    return mock.patch.object(capture, "capturing", return_value=True)


def times_seven(group: Any, x: Tensor) -> Tensor:
    return 7 * x


def times_five(group: Any, x: Tensor) -> Tensor:
    return 5 * x


@contextlib.contextmanager
def two_modes(path: Path) -> Iterator[None]:
    """A table whose graphs run `seven`, and whose eager calls run `five`."""
    entry = {
        "op": OP, "device": "cpu", "dtype": "float32", "ranks": 2, "sizes": [16], "options": {},
        "source": "a test",
    }  # fmt: skip
    both = (("captured", "seven"), ("eager", "five"))
    path.write_text(json.dumps([{**entry, "mode": m, "implementation": name} for m, name in both]))
    more = {
        "seven": registry.Implementation("seven", times_seven),
        "five": registry.Implementation("five", times_five),
    }
    with (
        mock.patch.dict(OPERATORS[OP].implementations, more),
        mock.patch.dict("os.environ", {VARIABLE: str(path)}),
    ):
        choice._choose.cache_clear()
        yield
    choice._choose.cache_clear()


def test_a_call_is_captured_in_a_capture_and_where_one_is_prepared() -> None:
    assert mode() == "eager"
    with capturing():
        assert mode() == "captured"
    with as_captured():
        with as_captured():
            assert mode() == "captured"
        assert mode() == "captured"
        seen: list[str] = []
        other = threading.Thread(target=lambda: seen.append(mode()))  # as of a backward pass
        other.start()
        other.join()
        assert seen == ["captured"]
    with pytest.raises(KeyError), as_captured():
        raise KeyError
    assert mode() == "eager"


def test_explain_says_the_mode(tmp_path: Path) -> None:
    with two_modes(tmp_path / "table.json"):
        given: dict[str, Any] = {"dtype": torch.float32, "ranks": 2, "device": "cpu"}
        assert str(explain(OP, [(4, 4)], **given)).startswith("all_reduce, eager: five (table.json")
        found = explain(OP, [(4, 4)], mode="captured", **given)
        assert str(found).startswith("all_reduce, captured: seven (table.json")
        with as_captured():
            assert explain(OP, [(4, 4)], **given).implementation == "seven"
            assert explain(OP, [(4, 4)], mode="eager", **given).implementation == "five"
        with pytest.raises(UserError, match=r"unknown mode 'graph'.*captured, eager"):
            explain(OP, [(4, 4)], mode="graph", **given)


def called(rank: int, world_size: int, file: str) -> None:
    """Every call has the mode of its own time: a backward pass that of when it runs."""
    x, call = torch.ones(4, 4, requires_grad=True), torch.ops.ladder.all_reduce

    def grad(y: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    with two_modes(Path(file).with_suffix(f".{rank}.json")):
        assert torch.equal(call(x, world()), 5 * x)
        for captured in (as_captured, capturing):
            with captured():
                y = call(x, world())
                assert torch.equal(y, 7 * x)
                assert torch.equal(grad(call(x, world())), 7 * x)  # warmed up, or captured, too
                with use(OP, "five"):  # who insists gets it in both
                    assert torch.equal(call(x, world()), 5 * x)
            assert torch.equal(grad(y), 5 * x)
        compiled = torch.compile(lambda x: call(x + 1, world()), backend="aot_eager")
        assert torch.equal(compiled(x.detach()), 10 * torch.ones(4, 4))
        with as_captured():  # traced once, and chosen when it runs
            assert torch.equal(compiled(x.detach()), 14 * torch.ones(4, 4))
        assert torch.equal(compiled(x.detach()), 10 * torch.ones(4, 4))


def test_calls_run_what_their_mode_picks(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(called, str(tmp_path / "table"))


def test_the_runs_before_a_capture_run_what_it_holds() -> None:
    """`capture_graph` on a made-up GPU: only in a real capture does the stream say so itself."""
    seen: list[str] = []
    gpu = mock.MagicMock()

    def work() -> int:
        seen.append(mode())
        return 3

    with mock.patch.object(graphs, "torch", gpu), mock.patch.object(graphs, "capture_stream"):
        _, result = graphs.capture_graph(work)
    assert result == 3
    assert seen == ["captured"] * graphs.WARM_UP_STEPS + ["eager"]
    assert mode() == "eager"


def test_a_capture_without_its_memory_says_how_to_prepare_it() -> None:
    space = mock.Mock(spec=workspace.Workspace, op=OP)
    with capturing(), pytest.raises(UserError, match=r"needs new memory \(1 MiB\)") as raised:
        workspace.Workspace.check_capture(space, "1 MiB")
    assert "within ladder.ops.as_captured()" in str(raised.value)
    with as_captured():  # it is no capture: memory can be made, and is
        workspace.Workspace.check_capture(space, "1 MiB")
    assert ladder.ops.as_captured is as_captured
