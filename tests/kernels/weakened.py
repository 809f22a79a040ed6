"""Primitives and kernels with one line weakened, compiled for a GPU on any machine.

`python -m tests.kernels.weakened` prints a JSON object: of each entry of WEAKENED, the PTX of the
kernel of tests.primitives that calls it; of each of KERNELS, that of its launch. --few: of FEW
alone. A process of its own, as tests.kernels.compiled is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests import ROOT

if TYPE_CHECKING:
    from tests.kernels.standin import Gpu

BARRIER = "    _barrier()  # every thread's stores come before the release, which one thread does\n"
SIGNAL = '    tl.atomic_xchg(flag, value, sem="release", scope="sys")\n'
WAIT = '    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value:\n'
ARRIVE = '    return tl.atomic_add(counter, 1, sem="acq_rel", scope=SCOPE) == count - 1\n'
FLUSH = '"cp.async.bulk.wait_group 0; mov.u32 $0, 0;"'
FLUSHED = "        )\n    _fence_tma()\n"
LOAD = 'other=other, cache_modifier=".cg")'
ADD = 'mask=inside, sem="relaxed", scope="sys")'
POLL = """                volatile=True,
            )
            arrived += (word,)
"""
POLL_SUM = "mask=inside, other=0, volatile=True)"
SPIN = "        spins = count_spin(spins, SPIN_LIMIT)\n"
PEER = "tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(BITS)), 16)"

# What is weakened: the kernel of tests.primitives that must show it, the text of
# ladder/comm/primitives.py, which is there once, and what stands in its place.
WEAKENED: dict[str, tuple[str, str, str]] = {
    "signal: no release": ("send", SIGNAL, SIGNAL.replace("release", "relaxed")),
    "signal: of this GPU alone": ("send", SIGNAL, SIGNAL.replace("sys", "gpu")),
    "signal: of one thread's stores": ("send", BARRIER + SIGNAL, SIGNAL),
    "signal: left out": ("send", SIGNAL, "    _barrier()\n"),
    "wait: no acquire": ("receive", WAIT, WAIT.replace("acquire", "relaxed")),
    "wait: for this GPU alone": ("receive", WAIT, WAIT.replace("sys", "gpu")),
    "wait: left out": ("receive", WAIT, "    while spins < 0:\n"),
    "wait: without an end": (
        "receive", WAIT + SPIN, WAIT + "        spins += 1\n",
    ),
    "wait: not for TMA": ("tma", "    if TMA:\n", "    if False:\n"),
    "arrive: no order": ("sum", ARRIVE, ARRIVE.replace("acq_rel", "relaxed")),
    "arrive: no acquire": ("sum", ARRIVE, ARRIVE.replace("acq_rel", "release")),
    "arrive: no release": ("sum", ARRIVE, ARRIVE.replace("acq_rel", "acquire")),
    "arrive: of this GPU alone": ("sum for a peer", ARRIVE, ARRIVE.replace("SCOPE", '"gpu"')),
    "arrive: of one thread's stores": ("sum", BARRIER + ARRIVE, ARRIVE),
    "flush: read, not written": ("tma", FLUSH, FLUSH.replace("group 0", "group.read 0")),
    "flush: no fence": ("tma", FLUSHED, "        )\n"),
    "load: from L1": ("receive", LOAD, "other=other)"),
    "atomic_add: of this GPU alone": ("sum", ADD, ADD.replace("sys", "gpu")),
    "receive: from L1": ("exchange", POLL, POLL.replace("True", "False")),
    "receive: without an end": ("exchange", SPIN + "    return words", "    return words"),
    "receive_sum: from L1": ("collect", POLL_SUM, POLL_SUM.replace("True", "False")),
    "receive_sum: without an end": ("collect", SPIN + "    return arrived", "    return arrived"),
    "peer: of unknown alignment": (
        "send", PEER, "tl.load(buffers + rank).to(tl.pointer_type(BITS))",
    ),
}  # fmt: skip

HAND_OVER, PUSHED = "rows.hand_over", "_push_rows_kernel: bfloat16"
RECEIVED, GATHERED = "_receive_rows_kernel: bfloat16", "_gather_rows_kernel: bfloat16"
BAGS, POOLED = "bags._push_bags_kernel", "_push_bags_kernel: float32, tables"
EXPERTS = "_grouped_push_kernel: [experts, k, n]"
GEMM, LANDED = "gemm._gemm_kernel", "_land_slots_kernel: waiting"
AWAIT = "    await_open(peer(words, rank, tl.int32), rank, WORLD, SPIN_LIMIT)\n"
TELL = "            signal(to + (WORLD + rank) * 2, 1)\n"
OPENED = "signal(peer(words, rotate(s, rank, WORLD), tl.int32) + rank * STRIDE + program, 1)"
SENT = "signal(peer(words, to, tl.int32) + (WORLD + rank) * STRIDE + program, 1)"

# The same of kernels: a function of ladder.kernels, its launch in tests.kernels.compiled, the text.
KERNELS: dict[str, tuple[str, str, str, str]] = {
    "place: opens without a release": (
        "rows._place_kernel", "_place_kernel: bfloat16", "signal(pair, 1)", "tl.store(pair, 1)",
    ),
    "rows: stored before they may be": ("rows._push_rows_kernel", PUSHED, AWAIT, ""),
    "rows: counted on this GPU alone": (HAND_OVER, PUSHED, '"sys"', '"gpu"'),
    "rows: told without a release": (
        HAND_OVER, PUSHED, TELL, TELL.replace("signal", "tl.store"),
    ),
    "rows: from L1": ("rows._receive_rows_kernel", RECEIVED, " load(", " tl.load("),
    "rows: read without a wait": (
        "rows._receive_rows_kernel", RECEIVED, "wait(own + (WORLD + q) * 2, 1, SPIN_LIMIT)", "pass",
    ),
    "rows back: stored before they may be": (
        "rows._push_pieces_kernel", "_push_pieces_kernel: bfloat16",
        "wait(own + to * 2, 1, SPIN_LIMIT)", "pass",
    ),
    "rows back: from L1": ("rows._gather_rows_kernel", GATHERED, " load(", " tl.load("),
    "rows back: read without a wait": (
        "rows._gather_rows_kernel", GATHERED,
        "wait(own + (WORLD + rotate(s, rank, WORLD)) * 2, 1, SPIN_LIMIT)", "pass",
    ),
    "experts: stored before they may be": ("grouped._grouped_push_kernel", EXPERTS, AWAIT, ""),
    "experts: counted on this GPU alone": (HAND_OVER, EXPERTS, '"sys"', '"gpu"'),
    "bags: open without a release": (BAGS, POOLED, OPENED, OPENED.replace("signal", "tl.store")),
    "bags: stored before they may be": (
        BAGS, POOLED, "wait(own + q * STRIDE + program, 1, SPIN_LIMIT)", "pass",
    ),
    "bags: told without a release": (BAGS, POOLED, SENT, SENT.replace("signal", "tl.store")),
    "bags: read without a wait": (BAGS, POOLED, "wait(flag, 1, SPIN_LIMIT)", "pass"),
    "bags: from L1": (BAGS, POOLED, " load(", " tl.load("),
    "a landing: from L1": ("slots._add_slots", LANDED, " load(", " tl.load("),
    "a landing: read without a wait": (
        "slots._land_slots_kernel", LANDED, "wait(flags + flag, 1, SPIN_LIMIT)", "pass",
    ),
    "a product: waits, but not for TMA": (
        GEMM, "_gemm_kernel: waiting", "SPIN_LIMIT, TMA)", "SPIN_LIMIT)",
    ),
    "a product: counted on this GPU alone": (GEMM, "_gemm_kernel: tracking", '"sys"', '"gpu"'),
}  # fmt: skip

# What `make test` compiles.
FEW = ("signal: no release", "wait: no acquire", "rows: from L1", "a landing: read without a wait")


def weaken(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, f"{source.count(old)} times: {old}"
    return source.replace(old, new)


def kernels(gpu: Gpu, wanted: Collection[str]) -> dict[str, str]:
    """The PTX of each of KERNELS that is wanted."""
    from tests.kernels.compiled import launches
    from tests.kernels.standin import functions

    calls, found = {}, {}
    for case, kernel, args, meta in launches():
        calls[f"{kernel.__name__}: {case}"] = kernel, args, meta
    every = functions()

    def rewrite(function: Any, text: str) -> None:
        function._unsafe_update_src(text)
        for each in every:
            each.hash = None  # it covers the functions that are called, too

    for label, (name, launch, old, new) in KERNELS.items():
        if label not in wanted:
            continue
        module, _, attribute = name.partition(".")
        function = getattr(sys.modules[f"ladder.kernels.{module}"], attribute)
        kernel, args, meta = calls[launch]
        text, gpu.case = function.src, label
        rewrite(function, weaken(text, old, new))
        kernel.device_caches.clear()
        found[label] = kernel.run(*args, grid=(1,), warmup=True, **meta).ptx
        rewrite(function, text)
    return found


def main(wanted: Collection[str]) -> None:
    from tests.kernels.standin import Gpu

    source, name = (ROOT / "ladder/comm/primitives.py").read_text(), "ladder.comm.primitives"
    gpu = Gpu()
    with gpu.present(), tempfile.TemporaryDirectory() as folder:
        found = kernels(gpu, wanted)  # before the primitives that they call are replaced
        for number, (label, (case, old, new)) in enumerate(WEAKENED.items()):
            if label not in wanted:
                continue
            file = Path(folder, f"primitives{number}.py")  # Triton reads a function's text
            file.write_text(weaken(source, old, new))
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
            sys.modules.pop("tests.primitives", None)
            each = importlib.import_module("tests.primitives")
            kernel, args, meta = each.launches()[case]
            gpu.case = label
            found[label] = kernel.run(*args, grid=(1,), warmup=True, **meta).ptx
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    # Without CUDA `ladder.jit` would leave Triton alone.
    with mock.patch.object(torch.backends.cuda, "is_built", return_value=True):
        from ladder import jit  # noqa: F401
    main(FEW if "--few" in sys.argv else [*WEAKENED, *KERNELS])
