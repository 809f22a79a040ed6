"""Time to the first token from a cold start: new processes and an empty Triton cache.

Each point has ranks of its own, which build the model with random weights, capture the engine's
graphs and process a prompt. The time includes the start of the processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from ladder.bench.inference.build import build_model
from ladder.bench.inference.points import InferencePoint, cache_kind, resolve
from ladder.comm.switch import P2P_SWITCH
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling, draws
from ladder.parallel import launch

LIMIT = 900.0  # seconds after which a start has failed
STARTED = "LADDER_COLD_STARTED"  # seconds since the epoch, in the ranks' environment
MARK = "cold start: "  # before the JSON that rank 0 prints


def start(point: InferencePoint) -> dict[str, float]:
    """Run `child` on new ranks; returns its times in seconds, and `exit_s`, until all have ended.

    If a rank fails, ends the others and raises RuntimeError with the ranks' output.
    """
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        environment = {
            **os.environ,
            "WORLD_SIZE": str(point.tp),
            launch.RENDEZVOUS: str(Path(folder) / "store"),
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
            STARTED: repr(began),
        }
        if not point.p2p:
            environment[P2P_SWITCH] = "1"
        command = [sys.executable, "-m", "ladder", "bench", "inference"]
        command += ["--cold-child", json.dumps(asdict(point))]
        outputs = [(Path(folder) / f"rank{rank}").open("w+") for rank in range(point.tp)]
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(point.tp)
        ]
        try:
            failed = _wait(ranks, began + LIMIT)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        texts = [_read(output) for output in outputs]
        if failed is not None:
            raise RuntimeError(f"the cold start of {point} failed: {failed}\n{''.join(texts)}")
        line = next(line for line in texts[0].splitlines() if line.startswith(MARK))
        return {**json.loads(line.removeprefix(MARK)), "exit_s": time.time() - began}


def _wait(ranks: Sequence[subprocess.Popen], limit: float) -> str | None:
    """Wait until all ranks have ended; returns the first failure, or None."""
    while any(process.poll() is None for process in ranks):
        for rank, process in enumerate(ranks):
            if process.poll():
                return f"rank {rank} ended with {process.returncode}"
        if time.time() > limit:
            return f"no end within {LIMIT:g} s"
        time.sleep(0.02)
    codes = [process.returncode for process in ranks]
    return None if not any(codes) else f"the ranks ended with {codes}"


def _read(output: IO[str]) -> str:
    output.seek(0)
    text = output.read()
    output.close()
    return text


def child(point: InferencePoint, device_name: str = "cuda") -> int:
    """Generate one token on a new rank; rank 0 prints the seconds of each part."""
    began = float(os.environ[STARTED])
    times: dict[str, float] = {}
    last = began

    def done(part: str) -> None:
        nonlocal last
        if device_name == "cuda":
            torch.cuda.synchronize()
        now = time.time()
        times[f"{part}_s"], last = now - last, now

    now = time.time()
    times["imports_s"], last = now - began, now
    device = launch.join(device_name)
    done("group")
    config = resolve(point)
    model = build_model(point, config, point.reducer, device)
    done("weights")
    with torch.inference_mode():
        engine = Engine(model, cache=cache_kind(point))
        session = engine.session(point.batch, point.prompt + point.new_tokens, Sampling())
        done("capture")
        source = torch.Generator().manual_seed(0)
        shape = (point.batch, point.prompt)
        prompts: list[Any] = list(torch.randint(0, config.vocab_size, shape, generator=source))
        session.prefill(prompts, draws(Sampling(), point.batch, 1))
        tokens = session.out.tolist()
        done("prefill")
    if min(tokens) < 0:
        raise RuntimeError(f"{point}: the logits are not finite")
    if launch.rank() == 0:
        print(MARK + json.dumps({**times, "total_s": last - began}), flush=True)
    return 0
