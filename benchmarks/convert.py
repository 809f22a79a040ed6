"""Time and peak memory of `ladder convert`, on a random checkpoint of a real model's shape.

    python benchmarks/convert.py [--model llama-3-8b] [--layers 5] [--folder FOLDER]
        [--plans standard ladder parallel]

Writes the checkpoint in Hugging Face's format, bfloat16, in FOLDER (a temporary one by default),
then runs each conversion in its own process, last `--to hf` of the standard conversion. Peak memory
is the process's largest resident set, including mapped pages of files (VmHWM; getrusage's value
includes the parent process). `imports` is the peak of a process that only imports the command. The
time is compared with a copy by `cp`, with the disk synchronised, and with SHA-256 of the bytes in
one thread: a conversion reads and writes once, reads back once, and hashes both times. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from jobs import finish

from ladder import records
from ladder.checkpoint import WEIGHTS, Entry, write_tensors
from ladder.config import model_config
from ladder.files import checksum, sync
from ladder.hf_config import config_to_huggingface
from ladder.models import ModelConfig, resolve_plan
from ladder.models.transformer import tensor_shapes
from ladder.parser import Parser, parse_words

# Runs its arguments as `ladder` does, or imports alone; prints peak bytes and seconds.
CHILD = """
import sys, time
from pathlib import Path
import ladder.convert.command
from ladder.cli import main
start = time.monotonic()
code = main(sys.argv[1:]) if sys.argv[1:] else 0
seconds = time.monotonic() - start
status = Path("/proc/self/status").read_text().split()
print(int(status[status.index("VmHWM:") + 1]) * 1024, seconds)
sys.exit(code)
"""


def write_checkpoint(folder: Path, config: ModelConfig) -> int:
    """Write a random Hugging Face checkpoint in bfloat16; returns its bytes."""
    folder.mkdir()
    data = config_to_huggingface(config, torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(data))
    shapes = tensor_shapes(config)

    def entry(name: str) -> Entry:
        def fetch() -> torch.Tensor:
            return torch.empty(shapes[name], dtype=torch.bfloat16).normal_(std=0.02)

        return Entry(name, 2 * shapes[name].numel(), fetch)

    entries = [entry(name) for name in shapes]
    write_tensors(folder, WEIGHTS, entries, writer=True)
    return sum(each.nbytes for each in entries)


def measured(*arguments: str) -> tuple[int, float]:
    """(peak bytes, seconds) of `ladder` with these arguments."""
    command = [sys.executable, "-c", CHILD, *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peak, seconds = result.stdout.splitlines()[-1].split()
    return int(peak), float(seconds)


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3-8b", help="a name from configs/models")
    parser.add_argument("--layers", type=int, default=5, help="its layers; 5 of 8B's are 4.3 GB")
    parser.add_argument("--plans", nargs="+", default=["standard", "ladder", "parallel"])
    parser.add_argument("--folder", type=Path, help="where to write, on the disk to be measured")
    parser.set_defaults(verb=run)
    return parse_words(parser)


def run(options: argparse.Namespace) -> int:
    config = replace(model_config(options.model), num_layers=options.layers, plan="standard")
    for plan in options.plans:  # before gigabytes are written
        replace(config, plan=resolve_plan(plan, config.num_layers)).refuse_no_comm()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = write_checkpoint(folder / "hf", config)
        largest = 2 * max(each.numel() for each in tensor_shapes(config).values())
        start = time.monotonic()
        subprocess.run(["cp", "-r", folder / "hf", folder / "copy"], check=True)
        for path in (folder / "copy").iterdir():
            sync(path)
        copied = time.monotonic()
        for path in (folder / "copy").glob("*.safetensors"):
            checksum(path)
        hashed = time.monotonic()
        shutil.rmtree(folder / "copy")
        print(
            f"{options.model}, {options.layers} layers: {size / 1e9:.2f} GB in bfloat16, largest "
            f"tensor {largest / 1e9:.2f} GB; cp and sync {copied - start:.1f} s, SHA-256 "
            f"{hashed - copied:.1f} s"
        )
        imports = measured()[0]
        print(f"{'imports':16} {imports / 1e9:5.2f} GB")
        rows = []
        runs = [(plan, "hf", ["--plan", plan]) for plan in options.plans]
        if "standard" in options.plans:  # Hugging Face's classes compute nothing else
            runs.append(("to hf", "standard", ["--to", "hf"]))
        for label, source, more in runs:
            out = folder / label
            peak, seconds = measured("convert", str(folder / source), "--out", str(out), *more)
            rows.append({"conversion": label, "peak_bytes": peak, "seconds": seconds})
            print(
                f"{label:16} {peak / 1e9:5.2f} GB peak, {(peak - imports) / 1e9:5.2f} GB beyond "
                f"imports, {seconds:6.1f} s, {size / 1e6 / seconds:6.0f} MB/s"
            )
            if label != "standard":
                shutil.rmtree(out)
    facts = records.facts("none") | {"cpu": platform.processor() or platform.machine()}
    facts |= {"command": " ".join(["python", *sys.argv])}
    facts |= {"model": options.model, "layers": options.layers, "bytes": size, "largest": largest}
    facts |= {"imports_bytes": imports, "cp_s": copied - start, "sha256_s": hashed - copied}
    print(json.dumps(facts | {"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(finish(parse()))
