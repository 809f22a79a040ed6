"""The presets: for each, what its records are (`ladder.models.presets` reads specifications)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ladder.models.errors import UserError
from ladder.models.plan import SublayerRecord


@dataclass(frozen=True)
class Layers:
    """The layers whose records a preset builds.

    name: the preset's, with its numbers. layers: a range of the model's `num_layers`.
    """

    name: str
    layers: range
    num_layers: int
    tp_degree: int | None

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("attention", "mlp") * len(self.layers)

    def root(self) -> float:
        """sqrt(T), by which the preset scales."""
        if self.tp_degree is None:
            raise depends_on_tp(self.name)
        return math.sqrt(self.tp_degree)

    def check_lag(self, lag: int) -> None:
        """Raise UserError if no sublayer could read a sum so late."""
        count = len(self.kinds)
        if lag >= count:
            has = "the model has" if len(self.layers) == self.num_layers else "its layers have"
            raise UserError(
                f"plan {self.name!r} delays by {lag} sublayers but {has} only {count}; give a "
                f"smaller number, or more layers"
            )


def _standard(at: Layers) -> list[SublayerRecord]:
    return [SublayerRecord(kind) for kind in at.kinds]


def _parallel(at: Layers) -> list[SublayerRecord]:
    return [SublayerRecord("attention+mlp")] * len(at.layers)


def _ladder(at: Layers) -> list[SublayerRecord]:
    return [SublayerRecord(kind, own_lag=1, peer_lag=1) for kind in at.kinds]


def _hybrid(at: Layers) -> list[SublayerRecord]:
    """The paper's converted models: ladder on the upper half (4.2)."""
    lower = 2 * (at.num_layers // 2)
    return _standard(at)[:lower] + _ladder(at)[lower:]


def _desync(at: Layers, n: int) -> list[SublayerRecord]:
    _check_group(at, n)
    return _groups(at, n, "residual", 1.0)


def _accumulate(at: Layers, n: int) -> list[SublayerRecord]:
    _check_group(at, n)
    return _groups(at, n, "accumulated", at.root())


def _check_group(at: Layers, n: int) -> None:
    if n < 2:
        raise UserError(
            f"plan {at.name!r}: n must be 2 or more; {at.name.split('-')[0]}-1x is `standard`"
        )


def _groups(at: Layers, n: int, reduce: str, scale: float) -> list[SublayerRecord]:
    """Groups of n sublayers, of which the last reduces by `reduce`. scale: own_scale of the rest.

    The last group has what is left.
    """
    return [
        SublayerRecord(kind, reduce=reduce)
        if i % n == 0 or i == len(at.kinds)
        else SublayerRecord(kind, reduce="none", own_scale=scale)
        for i, kind in enumerate(at.kinds, start=1)
    ]


def _accumulate_late(at: Layers, every: int, lag: int) -> list[SublayerRecord]:
    at.check_lag(lag)
    if every < 1 or lag < 1:
        raise UserError(f"plan {at.name!r}: both numbers must be 1 or more")
    root, count = at.root(), len(at.kinds)
    return [
        SublayerRecord(
            kind,
            # The first sublayer of a range takes all that the layers below have in flight.
            peer_lag=lag if n or at.layers.start == 0 else 0,
            reduce="accumulated" if (n + 1) % every == 0 or n + 1 == count else "none",
            # The layer above may read the last sum at once, and with it the own part.
            own_scale=root if n + 1 < count else 1.0,
        )
        for n, kind in enumerate(at.kinds)
    ]


def _delayed(at: Layers, delay: int) -> list[SublayerRecord]:
    at.check_lag(delay)
    root, count = at.root() if delay else 1.0, len(at.kinds)
    return [
        SublayerRecord(
            kind,
            own_lag=0,
            peer_lag=delay,
            reduce="output" if n < count - delay else "none",
            own_scale=root if n < delay or n >= count - delay else 1.0,
        )
        for n, kind in enumerate(at.kinds)
    ]


def _none(at: Layers) -> list[SublayerRecord]:
    return [SublayerRecord(kind, reduce="none") for kind in at.kinds]


@dataclass(frozen=True)
class Preset:
    """A preset. build: its records, from the layers and the numbers in its name. whole: it covers a
    whole model only. scaled: its records hold the square root of T."""

    build: Callable[..., list[SublayerRecord]]
    whole: bool = False
    scaled: bool = False


# By the form of the name, in which each capital letter stands for a number.
PRESETS = {
    "standard": Preset(_standard),
    "parallel": Preset(_parallel),
    "ladder": Preset(_ladder),
    "hybrid": Preset(_hybrid, whole=True),
    "desync-Nx": Preset(_desync),
    "accumulate-Nx": Preset(_accumulate, scaled=True),
    "accumulate-Nx-lagK": Preset(_accumulate_late, scaled=True),
    "dtp-D": Preset(_delayed, whole=True, scaled=True),
    "none": Preset(_none, whole=True),
}


def depends_on_tp(name: str) -> UserError:
    """The error for a plan that is to be resolved without T."""
    return UserError(
        f"plan {name!r} depends on T: set tp_degree, for example tp_degree=4 (`ladder convert`: "
        f"--tp-degree 4)"
    )
