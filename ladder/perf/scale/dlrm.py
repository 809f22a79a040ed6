"""One training pass of a DLRM on 128 nodes, with and without fused embedding and all-to-all.

Source: Figure 15 and Table II of `Optimizing Distributed ML Communication with Fused
Computation-Collective Operations`. The execution graph is that of ASTRA-Sim. One GPU stands for
all. Its computation is in order, its collectives are in order on the network, and both run at the
same time. What the paper leaves out is swept: the batch, the tables of a node, the torus' shape,
and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ladder.costs import FP32
from ladder.perf.engine import SECOND, Engine, Line, picoseconds
from ladder.perf.scale.networks import Torus

NODES = 128
GBIT = 1e9 / 8
HBM = 1.6384e12  # bytes a second, of an MI210


@dataclass(frozen=True)
class Case:
    """The parameters of Table II (dimension, pooling, layers, width, bandwidth, latency) and more.

    batch: samples of a node in the data-parallel parts; every node looks up its tables for all
    samples. tables: of a node. gather: bytes a second of embedding lookups. flops: of the MLPs, a
    second. kernel: seconds that any kernel takes in addition. bottom: the number of layers below
    the interaction. slices: the parts in which a fused operator sends. value: bytes of a number.
    update: the bytes that an embedding's backward pass moves (it reads and writes rows), as a
    multiple of the forward pass.
    """

    dimension: int = 92
    pooling: int = 70
    layers: int = 43
    width: int = 682
    bandwidth: float = 200 * GBIT
    latency: float = 700e-9
    rows: int = 8
    batch: int = 512
    tables: int = 8
    gather: float = 0.6 * HBM
    flops: float = 0.5 * 45.3e12
    kernel: float = 10e-6
    bottom: int = 8
    slices: int = 64
    value: int = FP32
    update: float = 2.0

    @property
    def torus(self) -> Torus:
        return Torus(self.rows, NODES // self.rows, self.bandwidth, self.latency)

    @property
    def exchanged(self) -> float:
        """Bytes that a node sends in an all-to-all: the pooled rows of all samples."""
        return float(self.batch * NODES * self.tables * self.dimension * self.value)

    @property
    def lookup(self) -> float:
        """Seconds of the embedding operator, forward, without its kernel's launch."""
        return self.exchanged * (self.pooling + 1) / self.gather

    @property
    def layer(self) -> float:
        """Seconds of one MLP layer, forward."""
        return 2 * self.batch * self.width**2 / self.flops + self.kernel

    @property
    def gradients(self) -> float:
        """Seconds of the all-reduce of one layer's gradients."""
        return self.torus.all_reduce(float(self.width**2 * FP32))

    @property
    def interaction(self) -> float:
        """Seconds, forward: the exchanged rows are read, and written side by side."""
        return 2 * self.exchanged / self.gather + self.kernel


class Pass:
    """The events of one forward and backward pass. seconds: how long it takes."""

    def __init__(self, case: Case, fused: bool) -> None:
        self.case, self.engine = case, Engine()
        self.gpu, self.links = Line(self.engine, 1.0), Line(self.engine, 1.0)
        self.parts = case.slices if fused else 1
        self.exchange = case.torus.exchange(case.exchanged) / self.parts
        self.delay = picoseconds(case.torus.delay)
        self.to_join = self.parts + 1  # all slices, and the bottom layers
        self.to_update = self.parts
        self.slices, self.gradients = 0, 0  # how many wait for the links
        self.busy = False
        self._forward()
        self.seconds = self.engine.run() / SECOND
        left = self.to_join, self.to_update, self.slices, self.gradients
        assert not any(left), left

    def _forward(self) -> None:
        """The embeddings, then the bottom layers; the all-to-all runs beside the latter."""
        case = self.case
        for part in range(self.parts):
            seconds = case.lookup / self.parts + (0 if part else case.kernel)
            self.gpu.send(seconds, lambda: self.links.send(self.exchange, self._sent))
        self.gpu.send(case.bottom * case.layer, self._join)

    def _sent(self) -> None:
        self.engine.after(self.delay, self._join)

    def _join(self) -> None:
        self.to_join -= 1
        if self.to_join:
            return
        case = self.case
        self.gpu.send(case.interaction + (case.layers - case.bottom) * case.layer, self._backward)

    def _backward(self) -> None:
        case = self.case
        for _ in range(case.layers - case.bottom):
            self.gpu.send(2 * case.layer, self._gradient)
        self.gpu.send(2 * case.interaction, self._spread)

    def _gradient(self) -> None:
        self.gradients += 1
        self._use_links()

    def _spread(self) -> None:
        """Send the gradients of the pooled rows back to the nodes with the tables."""
        self.slices = self.parts
        self._use_links()
        for _ in range(self.case.bottom):
            self.gpu.send(2 * self.case.layer, self._gradient)

    def _use_links(self) -> None:
        """Start the next collective: gradients of pooled rows go before those of layers."""
        if self.busy or not (self.slices or self.gradients):
            return
        self.busy = True
        if self.slices:
            self.slices -= 1
            self.links.send(self.exchange, lambda: self._used(self._arrives))
        else:
            self.gradients -= 1
            self.links.send(self.case.gradients, lambda: self._used(None))

    def _used(self, then: Callable[[], None] | None) -> None:
        self.busy = False
        if then is not None:
            then()
        self._use_links()

    def _arrives(self) -> None:
        self.engine.after(self.delay, self._update)

    def _update(self) -> None:
        case = self.case
        launch = case.kernel if self.to_update == self.parts else 0.0
        self.to_update -= 1
        self.gpu.send(case.update * case.lookup / self.parts + launch, lambda: None)


def reduction(case: Case) -> float:
    """The share of its time that the pass saves with fused operators, in %."""
    return 100 * (1 - Pass(case, True).seconds / Pass(case, False).seconds)
