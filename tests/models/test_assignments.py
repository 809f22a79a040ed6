"""Nothing assigns to a model from outside: its config and what it is handed stay as they were."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from ladder.models import Transformer
from tests import ROOT
from tests.samples import small_config

# Of a Transformer, its Runtime and its sublayers. `use(runtime)` is the one way to hand something
# over, and `forward` is never replaced.
KEPT = {
    "config", "runtime", "reducer", "plan", "specs", "shapes", "forward", "pick", "compute_dtype",
    "rotary", "add_norm", "call", "losses", "data_shard",
}  # fmt: skip


def assigned(source: str) -> Iterator[str]:
    """Assignments to an attribute in KEPT of anything but self."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
            continue
        if node.attr in KEPT and ast.unparse(node.value) != "self":
            yield ast.unparse(node)


def test_nothing_assigns_to_a_model() -> None:
    for path in sorted((ROOT / "ladder").rglob("*.py")):
        assert list(assigned(path.read_text())) == [], path


@pytest.mark.parametrize(
    "line",
    [
        "model.config = other",
        "self.model.config = other",
        "sublayer.forward, x = run, 1",
        "model.runtime.reducer: Any = r",
        "del layer.forward",
    ],
)
def test_an_assignment_is_found(line: str) -> None:
    assert len(list(assigned(line))) == 1


def test_a_runtime_is_frozen() -> None:
    model = Transformer(small_config("ladder"))
    with pytest.raises(AttributeError):
        model.runtime.reducer = model.reducer  # type: ignore[misc]
    with pytest.raises(AttributeError):
        model.config.plan = model.config.plan  # type: ignore[misc]
