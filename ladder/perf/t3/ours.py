"""T3's hardware on a GPU of ours: a `System` from the description of a machine."""

from __future__ import annotations

from dataclasses import replace

from ladder.costs import MULTIPROCESSORS
from ladder.perf.machine import Machine
from ladder.perf.t3.system import System

LARGE = 2.0**28  # bytes of a copy whose rate is the link's
CACHE = 50 * 2**20  # of an H100 and an H200


def system_of(machine: Machine) -> System:
    """The rates are the machine's. The paper gives the DRAM's queue, the tracker, and the cost of
    turning from one stream to the other, counted in entries of the queue.

    Raises UserError if the machine lacks a curve.
    """
    paper = System()
    memory = 1e12 * machine.value("copy_tb_s")
    flops = 1e12 * machine.value("matrix_tflop_s")
    nvlink = 1e6 * LARGE / machine.curve("peer copy").at(LARGE).us
    push = machine.curve("all-reduce", algorithm="push").at(0.0).us
    latency = push - machine.value("push_kernel_us")
    return replace(
        paper,
        units=MULTIPROCESSORS,
        clock=flops / (MULTIPROCESSORS * paper.flops_per_clock),
        efficiency=1.0,  # the rate is a measured one
        link=nvlink,
        latency=1e-6 * max(0.0, latency),
        shared=True,
        burst=memory,
        reduce=memory,
        switch=paper.switch * paper.burst / memory,
        cache=CACHE,
    )
