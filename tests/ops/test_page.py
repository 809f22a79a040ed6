"""docs/operators.md: its example runs under torchrun, and prints what the page says."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ladder.ops  # noqa: F401  (defines the operators)
from ladder.ops.registry import OPERATORS
from tests import ROOT, pages
from tests.distributed import PATIENCE

PAGE = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
BLOCKS = pages.parse(PAGE)


@pytest.mark.slow  # torchrun and its ranks import torch; so do the commands of other pages
def test_the_example_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    (at,) = [n for n, block in enumerate(BLOCKS) if block.file == "mlp.py"]
    (tmp_path / "mlp.py").write_text(BLOCKS[at].text, encoding="utf-8")
    texts = [block.text for block in BLOCKS[at:] if block.language == "text"]
    command, printed = shlex.split(texts[0]), texts[1]
    assert command[0] == "torchrun"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1:]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed


def test_the_page_names_every_operator_as_it_is_called() -> None:
    """Also the arguments of those that it writes out."""
    text = "\n".join(block.text for block in BLOCKS if block.language == "inline")
    for name in OPERATORS:
        if name.endswith("_backward"):
            continue
        assert name in text.replace("`", ""), name
        schema = getattr(torch.ops.ladder, name).default._schema
        arguments = ", ".join(argument.name for argument in schema.arguments)
        written = [line for line in text.splitlines() if line.startswith(f"{name}(")]
        for line in written:
            given = line[len(name) + 1 : line.index(")")].replace("*, ", "")
            assert ", ".join(word.split("=")[0] for word in given.split(", ")) == arguments


def test_the_page_has_the_shapes_that_explain_takes() -> None:
    lines = iter(PAGE.splitlines())
    assert any(line == "| operators | shapes | also |" for line in lines)
    next(lines)
    found: dict[str, list[str]] = {}
    for line in itertools.takewhile(bool, lines):
        operators, shapes, also = line.strip("|").split(" | ")
        words = re.sub(r" \(.*?\)", "", shapes).split(", or ")[-1].split(", ")
        words += [word.strip("`=") for word in also.split() if word.endswith("=`")]
        found |= {
            name.strip(" `"): [word.strip() for word in words] for name in operators.split(",")
        }
    assert found == {
        name: list(inspect.signature(each.measure).parameters)[1:]
        for name, each in OPERATORS.items()
    }
