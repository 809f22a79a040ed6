"""The kernels' machine code for a GPU, made without one: see tests.kernels.compiled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import ROOT
from tests.commands import PATIENCE

STORES = r"\bst\.global\.(\S+)"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernels_compile_for_a_gpu() -> None:
    """What only the interpreter takes, a wait without an end, a push in narrow stores: all fail."""
    code = [sys.executable, "-m", "tests.kernels.compiled"]
    run = subprocess.run(code, capture_output=True, cwd=ROOT, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr.decode()
    found = json.loads(run.stdout)
    assert {launch.split(":")[0] for launch in found["ptx"]} == set(found["kinds"])
    for launch, ptx in found["ptx"].items():
        waits = "ld.volatile" in ptx
        assert waits == ("trap;" in ptx), launch  # a dead peer ends it
        kind = found["kinds"][launch.split(":")[0]]
        assert not (waits and kind == "computation"), launch
        if kind == "communication":
            # 16 bytes a thread; the count of calls is one word.
            assert set(re.findall(STORES, ptx)) <= {"v4.b32", "b32"}, launch
            assert "v4.b32" in re.findall(STORES, ptx), launch
        if waits and kind != "both":
            assert "ld.volatile.global.v4.b32" in ptx, launch
