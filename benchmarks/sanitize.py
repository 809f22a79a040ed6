"""Runs every kernel that needs one GPU on small odd shapes, for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py
    compute-sanitizer --tool synccheck python benchmarks/sanitize.py --only swiglu land

Add `--error-exitcode 9` before `python` for an exit code that a script can check. Each tensor has
its own allocation of exactly its size, so that memcheck sees an access beyond its end. What a
kernel writes is also compared with its reference, so a launch that a sanitizer lost is an error.
Kernels that need peers are not here: tests/infer/test_gpu_decode.py provokes those of a decode
step, and tests of operators make few calls for the sanitizer, on two GPUs:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --target-processes all --report-api-errors no pytest tests/ops -k each_once

The cases are in sanitize_cases.py.
"""

from __future__ import annotations

import os

# Before torch is used: its caching allocator would hand out parts of large blocks.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch
from sanitize_cases import CASES, DEVICE, DTYPES
from torch import Tensor

from ladder import jit, kernels
from ladder.parser import Parser, parse_words


def compare(name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape, (name, found.shape, wanted.shape)
    difference = (found.double() - wanted.double()).abs().max().item()
    allowed = DTYPES[dtype] * max(1.0, wanted.double().abs().max().item())
    if not difference <= allowed:  # a NaN is not
        raise AssertionError(f"{name}, {dtype}: {difference:.2e} from its reference")


def main() -> None:
    exported = {name for name in kernels.__all__ if not name.endswith("_reference")}
    taken = {"LandingJob", "PushTarget", "SendJob", "new_landing"}  # by `project` and `land`
    missing = exported - set(CASES) - taken
    assert not missing, f"ladder.kernels exports {sorted(missing)}: add their cases"
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    only = parse_words(parser).only
    if not jit.on_triton(torch.zeros(1, device=DEVICE)):
        parser.error("no CUDA device: there is no kernel to check (or set TRITON_INTERPRET=1)")
    torch.manual_seed(0)
    for name in only:
        count = 0
        for dtype in DTYPES:
            for found, wanted in CASES[name](dtype):
                compare(name, found, wanted, dtype)
                count += 1
        print(f"{name}: {count} results as their references'", flush=True)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
