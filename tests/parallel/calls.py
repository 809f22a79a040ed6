"""The calls while a model runs: collectives, waits and operations, in order."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.models import Plan, Transformer
from ladder.ops import choice
from ladder.ops.registry import Call


class Dispatched(TorchDispatchMode):
    """Counts the communicating operators that are dispatched within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        communicates = "c10d" in func.namespace or func.namespace == "symm_mem"
        self.count += communicates and "wait_tensor" not in str(func)
        return func(*args, **(kwargs or {}))


@dataclass
class Diary:
    """The events of a forward and a backward pass, in order: (what, sublayer).

    start, wait: of the sublayer's reduce. launch, done: of the sublayer's own computation, by hooks
    on its modules and, backward, on the tensors that enter and leave them.
    """

    plan: Plan
    forward: list[tuple[str, int]] = field(default_factory=list)
    backward: list[tuple[str, int]] = field(default_factory=list)
    names: list[Any] = field(default_factory=list)  # the exchanges, in the order of their start
    in_backward: bool = False

    def write(self, what: str, sublayer: int) -> None:
        (self.backward if self.in_backward else self.forward).append((what, sublayer))

    def sublayer_of(self, exchange: Any) -> int:
        """The sublayer whose reduce it is; -1 for the embedding's, N for the final mean's."""
        if not any(known is exchange for known in self.names):
            self.names.append(exchange)
        index = next(i for i, known in enumerate(self.names) if known is exchange)
        records = self.plan.sublayers
        posting = [n for n in range(len(records)) if records[n].reduce != "none"]
        return [-1, *posting, len(records)][index]

    def hook(self, model: Transformer) -> None:
        """Write down when each sublayer computes, forward and backward."""

        def before(n: int) -> Callable[..., None]:
            def hook(module: Any, args: tuple[Tensor, ...]) -> None:
                self.write("launch", n)
                if args[0].requires_grad:
                    args[0].register_hook(lambda grad: self.write("done", n))

            return hook

        def after(n: int) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Tensor) -> None:
                self.write("done", n)
                if output.requires_grad:
                    output.register_hook(lambda grad: self.write("launch", n))

            return hook

        for n, record in enumerate(self.plan.sublayers):
            layer = model.model.layers[self.plan.layers[n]]
            first = layer.mlp if record.kind == "mlp" else layer.self_attn
            last = layer.self_attn if record.kind == "attention" else layer.mlp
            first.register_forward_pre_hook(before(n))
            last.register_forward_hook(after(n))


@contextlib.contextmanager
def operations() -> Iterator[Counter[str]]:
    """The calls of `torch.ops.ladder` that run within it, by name."""
    found: Counter[str] = Counter()
    run = choice.run

    def counted(call: Call, *arguments: Any) -> Any:
        found[call.op] += 1
        return run(call, *arguments)

    with mock.patch.object(choice, "run", counted):
        yield found
