"""The primitives with one line weakened, compiled for a GPU on any machine.

`python -m tests.kernels.weakened` prints a JSON object: of each entry of WEAKENED, the PTX of the
kernel of tests.primitives that calls it. A process of its own, as tests.kernels.compiled is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch

from tests import ROOT

BARRIER = "    _barrier()  # every thread's stores come before the release, which one thread does\n"
SIGNAL = '    tl.atomic_xchg(flag, value, sem="release", scope="sys")\n'
WAIT = '    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value:\n'
ARRIVE = '    return tl.atomic_add(counter, 1, sem="acq_rel", scope=SCOPE) == count - 1\n'
FLUSH = '"cp.async.bulk.wait_group 0; mov.u32 $0, 0;"'
FLUSHED = "        )\n    _fence_tma()\n"
LOAD = 'other=other, cache_modifier=".cg")'
ADD = 'mask=inside, sem="relaxed", scope="sys")'
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
        "receive", WAIT + "        spins = count_spin(spins, SPIN_LIMIT)\n",
        WAIT + "        spins += 1\n",
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
    "peer: of unknown alignment": (
        "send", PEER, "tl.load(buffers + rank).to(tl.pointer_type(BITS))",
    ),
}  # fmt: skip


def weaken(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, f"{source.count(old)} times: {old}"
    return source.replace(old, new)


def main() -> None:
    from tests.kernels.standin import Gpu

    source, name = (ROOT / "ladder/comm/primitives.py").read_text(), "ladder.comm.primitives"
    gpu, found = Gpu(), {}
    with gpu.present(), tempfile.TemporaryDirectory() as folder:
        for number, (label, (case, old, new)) in enumerate(WEAKENED.items()):
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
    main()
