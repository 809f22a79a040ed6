"""One step on real ranks and on virtual ones: the model, its gradients, and how far they differ."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.models import ModelConfig, Transformer
from ladder.parallel.sharding import local_parameters, local_tensor, sum_shared_gradients
from tests.samples import (
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
    virtual,
)

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}  # of the tensor's largest value

# Of torch.compile: graphs that are made, and then run as they are; and what `compile=true` takes,
# which writes C++ for them and compiles it, for half a minute where no cache has it.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def compiling(backend: str) -> AbstractContextManager[Any]:
    """Within it torch.compile takes this backend."""
    return mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend))


def weigh(values: Tensor) -> Tensor:
    """A scalar on which each value has its own influence."""
    weights = torch.linspace(0.5, 2.0, values.numel(), dtype=values.dtype, device=values.device)
    return (values * weights.view_as(values)).sum()


def sample(config: Any, seed: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, some of which are to be ignored; of this rank's data-parallel group."""
    tokens = sample_tokens(config, seed, batch, length)
    targets = sample_tokens(config, seed + 100, batch, length)
    targets[0, : length // 2] = -100
    targets[-1, -1] = -1
    tokens[-1, -1], targets[0, -1] = config.vocab_size - 1, config.vocab_size - 1
    return tokens, targets


@dataclass
class Step:
    """The results of one training step: values without and with grad, and the gradients."""

    logits: Tensor
    value: Tensor
    grads: dict[str, Tensor | None]


def step(
    model: Transformer, tokens: Tensor, targets: Tensor, of: str = "losses", oracle: bool = False
) -> Step:
    """Logits without grad (generation's forward pass), then what `of` says and its backward.

    of: losses, logits, or the logits of the last place alone: what the oracle takes from all.
    """
    with torch.no_grad():
        logits = model(tokens)
    if of == "losses":
        value = model(tokens, targets)
    elif of == "logits":
        value = model(tokens)
    elif oracle:
        value = model(tokens)[:, -1:]
    else:
        assert of == "the last logits", of
        value = model(tokens, last=torch.full_like(tokens[:, 0], tokens.shape[1] - 1))
    weigh(value).backward()
    sum_shared_gradients(model)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(logits, value.detach(), grads)


class Case(NamedTuple):
    """A case of a parity test: its model, tokens, and the step of one process with virtual ranks.

    options: those that differ from the usual ones. state: the whole model's.
    """

    options: dict[str, Any]
    config: ModelConfig
    tokens: Tensor
    targets: Tensor
    state: dict[str, Tensor]
    expected: Step


def prepare(case: dict[str, Any], world: int) -> Case:
    """case: a plan in SAME_AT_ANY_T by name, batch, length, and fields of the config."""
    options = {"batch": 2, "length": 8, **case}
    plan, batch, length = (options.pop(name) for name in ("plan", "batch", "length"))
    config = small_config(SAME_AT_ANY_T[plan], world, **options)
    tokens, targets = sample(config, 1, batch, length)
    whole = full_model(config, seed=4)
    state = copy.deepcopy(whole.state_dict())
    expected = step(virtual(whole, world), tokens, targets)
    return Case(options, config, tokens, targets, state, expected)


def errors_of(model: Transformer, found: Step, expected: Step) -> dict[str, float]:
    """The relative error of all that this rank computed, by name."""
    errors = {
        "logits without grad": relative_error(found.logits, expected.logits),
        "logits or losses": relative_error(found.value, expected.value),
    }
    assert found.grads.keys() == expected.grads.keys()
    for name, local, part in local_parameters(model):
        whole, grad = expected.grads[name], found.grads[name]
        assert whole is not None, name
        if grad is None:
            errors[f"{name}.grad is None"] = math.inf
            continue
        mine, theirs = local_tensor(grad), whole[part]
        assert mine.shape == local.shape == theirs.shape, name
        # In units of the whole gradient's largest value: a shard's own may be almost nothing.
        difference = (mine.double() - theirs.double()).abs().max().item()
        largest = whole.abs().max().item()
        errors[f"{name}.grad"] = difference / largest if largest else difference
    return errors


def assert_none_wrong(answers: list[list[tuple[str, str, float]]]) -> None:
    lines = [
        f"rank {rank}: {label}: {what}: {error:.2e}"
        for rank, wrong in enumerate(answers)
        for label, what, error in wrong
    ]
    assert not lines, "\n".join(lines[:40])
