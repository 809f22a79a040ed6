"""What benchmarks/residual.py measures of one model: coefficients, sizes, shares and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ladder.models import Plan, Transformer
from ladder.models.forward_pass import Landed, Norm, Output, Pass
from ladder.models.in_flight import InFlight
from ladder.models.plan import Landing
from ladder.models.ranks import Ranks
from ladder.models.reducer import Reducer
from ladder.models.runtime import Runtime

DIGITS = 5  # of the recorded figures
OUTPUTS = ("o_proj.weight", "down_proj.weight")  # the matrices that write to the residual


class WatchedPass(Pass):
    """A pass that keeps the residual of each read, the partials, and later their gradients."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.residuals: list[Tensor] = []  # N + 1, [T, B, S, D]
        self.partials: list[Tensor] = []  # N, [T, B, S, D]

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        landing = super().land(n, arrivals, norm)

        def keep(_: Landed) -> Landed:
            residual, normed = landing.wait()
            self.residuals.append(keep_gradient(residual))
            return residual, normed

        return InFlight((), keep)

    def write(self, n: int, partial: Any) -> None:
        self.partials.append(keep_gradient(partial))
        super().write(n, partial)


class WatchingReducer(Reducer):
    """The reducer of one process that holds all ranks; `newest` is its newest pass."""

    newest: WatchedPass

    def begin(self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size) -> Pass:
        self.newest = WatchedPass(runtime, self, plan, norms)
        return self.newest


def keep_gradient(value: Tensor) -> Tensor:
    if value.requires_grad:
        value.retain_grad()
    return value


def observe(
    model: Transformer, tokens: Tensor, targets: Tensor, degree: int
) -> tuple[WatchedPass, float]:
    """The pass of `model` over tokens and targets [B, S] on T virtual ranks, and its mean loss.

    After it, the parameters, residuals and partials have the gradients of that loss. The model
    keeps its new reducer.
    """
    reducer = WatchingReducer(Ranks(degree, 0, degree))
    model.use(Runtime(reducer))
    model.zero_grad(set_to_none=True)
    loss = model(tokens, targets).sum() / (targets >= 0).sum()
    loss.backward()
    return reducer.newest, loss.item()


def coefficients(plan: Plan, degree: int) -> Tensor:
    """The coefficient of each partial in the residual of each read: [N + 1, T, N, T].

    Entry [n, q, m, r] is how much of rank r's partial of sublayer m is in rank q's residual of
    read n. A residual is linear in the partials: unit vectors that go through the same pass as a
    model's partials measure the coefficients exactly.
    """
    count = len(plan.sublayers)
    size = count * degree
    reducer = WatchingReducer(Ranks(degree, 0, degree))
    norms: list[Callable[[Tensor], Tensor]] = [lambda x: x] * (count + 1)
    run = reducer.begin(Runtime(reducer), plan, norms, torch.Size((1, 1)))
    run.start(torch.zeros(1, 1, size, dtype=torch.float64))
    units = torch.eye(size, dtype=torch.float64).view(count, degree, 1, 1, size)
    for n in range(count):
        run.read(n)
        run.write(n, units[n])
    run.read(count)
    return torch.stack(reducer.newest.residuals).view(count + 1, degree, count, degree)


def arrivals(found: Tensor) -> list[int]:
    """For each of N outputs, the first read with it alike on all ranks, or the final read.

    found: what `coefficients` returns.
    """
    reads = []
    for m in range(found.shape[2]):
        alike = [
            bool((each == each[0]).all() and (each != 0).all()) for each in found[:, :, m].unbind()
        ]
        reads.append(next((n for n, same in enumerate(alike) if same), len(found) - 1))
    return reads


def rms(value: Tensor) -> float:
    return value.double().square().mean().sqrt().item()


def norm(gradients: Sequence[Tensor | None]) -> float:
    return math.sqrt(
        sum(each.double().square().sum().item() for each in gradients if each is not None)
    )


def rebuilt(run: WatchedPass, found: Tensor, n: int) -> Tensor:
    """The residual of read n, by coefficients: the embedding and the partials, [T, B, S, D]."""
    total = run.residuals[0].detach()
    for m, partial in enumerate(run.partials):
        if found[n, :, m].any():
            share = found[n, :, m].to(partial)
            total = total + torch.einsum("qr,rbsd->qbsd", share, partial.detach())
    return total


@torch.no_grad()
def measure(model: Transformer, tokens: Tensor, targets: Tensor, degree: int) -> dict[str, Any]:
    """All figures of one model, as plain data. Shapes as for `observe`."""
    with torch.enable_grad():
        run, loss = observe(model, tokens, targets, degree)
    plan, found = run.plan, coefficients(run.plan, degree)
    count, reads = len(plan.sublayers), arrivals(found)
    final = run.residuals[-1].mean(0)  # the ranks' mean, if they differ
    square = final.square().sum(-1)

    def share(written: Tensor) -> float:
        return ((written * final).sum(-1) / square).mean().item()

    sublayers = []
    for m, (record, partial) in enumerate(zip(plan.sublayers, run.partials, strict=True)):
        arrived = found[reads[m]].mean(0)[m]  # [T], the mean over the reading ranks
        landed = next((n for n in range(m + 1, count + 1) if found[n, :, m].any()), count)
        weights = found[count].mean(0)[m].to(partial)
        written = torch.einsum("r,rbsd->bsd", weights, partial)
        sublayers.append(
            {
                "sublayer": m,
                "layer": plan.layers[m],
                "kind": record.kind,
                "reduce": record.reduce,
                "own_scale": record.own_scale,
                "partial_rms": [rms(each) for each in partial],
                "output_rms": rms(partial.sum(0)),
                "first_read": landed,
                "own_coefficient": found[landed].diagonal(dim1=0, dim2=2)[m].mean().item(),
                "equal_read": reads[m],
                "coefficients": arrived.tolist(),
                "written_rms": rms(written),
                "share": share(written),
                "partial_gradient": norm([partial.grad]) / math.sqrt(degree),
            }
        )
    residuals = []
    for n, residual in enumerate(run.residuals):
        size = rms(residual)
        residuals.append(
            {
                "read": n,
                "layer": plan.layers[n] if n < count else None,
                "rms": size,
                "apart": rms(residual - residual.mean(0)) / size,
                "gradient": norm([residual.grad.sum(0)]),  # for a change of all ranks alike
                "error": rms(residual - rebuilt(run, found, n)) / size,
            }
        )
    embedding = run.residuals[0].mean(0)
    return rounded(
        {
            "loss": loss,
            "error": max(each["error"] for each in residuals),
            "embedding": {"rms": rms(embedding), "share": share(embedding)},
            "residuals": residuals,
            "sublayers": sublayers,
            "parameters": list(parameters(model)),
        }
    )


def parameters(model: Transformer) -> Iterator[dict[str, Any]]:
    """Gradient norms of each slot's parameters, and of the matrix that writes to the residual."""
    for n, slot in enumerate(model.slots):
        (output,) = (w for name, w in slot.named_parameters() if name.endswith(OUTPUTS))
        yield {
            "layer": n // 2,
            "kind": ("attention", "mlp")[n % 2],
            "gradient": norm([each.grad for each in slot.parameters()]),
            "output_gradient": norm([output.grad]),
            "output_weight_rms": rms(output),
        }
    yield {"kind": "embedding", "gradient": norm([model.model.embed_tokens.weight.grad])}


def rounded(value: Any) -> Any:
    """Plain data with DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
