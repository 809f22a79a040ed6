"""The code of a page (README.md, or one of docs/), and how its commands are run, shortened.

A fenced block without a language, or of `sh`, holds commands of `ladder` and `torchrun`; one of
`python` is run too. A second word after the language says why a block is only parsed (`sh gpu`: see
NOT_RUN), or names the file that the block is (`yaml my-plan.yaml`). Commands in the text, between
backticks, are parsed and not run. Output is in blocks of `text`. A `diff` is of the package, and
what runs after it is a file: see tests/test_extending.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from ladder.cli import main
from tests import ROOT
from tests.corpus import WORDS
from tests.distributed import PATIENCE

PYTHON = {"ladder": ["-m", "ladder"], "torchrun": ["-m", "torch.distributed.run"]}
NOT_RUN = ("gpu", "network", "optional", "long")  # what it needs, or takes too long
TRAINING = ("train", "finetune")
READING = ("data", "tokenizer")
BARE = ("plans", "doctor", "demo")  # do their work without further words
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(ladder|torchrun) ")
TEXTS = "texts"  # a folder of text that pages may name

SHORT_RUN = (
    "steps=2",
    "batch_size=2",
    "seq_len=32",
    "warmup_steps=1",
    "eval_windows=2",
    "checkpoint_interval=1",
)


class Block(NamedTuple):
    """A fenced block, or the code in the text between two (language `inline`, one on a line).

    note: the second word after the language.
    """

    language: str
    note: str
    text: str

    @property
    def runs(self) -> bool:
        return self.language in ("", "sh", "python") and self.note not in NOT_RUN and not self.file

    @property
    def file(self) -> str | None:
        """The name of the file that the block is, if it is one."""
        return self.note if "." in self.note else None


def parse(text: str) -> list[Block]:
    """The code of a page in its order."""
    blocks: list[Block] = []
    fence: list[str] | None = None
    language = note = ""
    prose: list[str] = []

    def end_of_prose() -> None:
        spans = re.findall(r"`([^`]+)`", "\n".join(prose))
        prose.clear()
        lines = "\n".join(" ".join(span.split()) for span in spans)
        blocks.append(Block("inline", "", lines))

    for line in text.splitlines():
        if line.startswith("```"):
            if fence is None:
                end_of_prose()
                language, _, note = line.removeprefix("```").strip().partition(" ")
                fence = []
            else:
                blocks.append(Block(language, note, "\n".join(fence)))
                fence = None
        elif fence is not None:
            fence.append(line)
        else:
            prose.append(line)
    assert fence is None, "a fenced block does not end"
    end_of_prose()
    return blocks


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page: its headings, in GitHub's spelling."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def commands(block: Block) -> list[list[str]]:
    """The words of each `ladder` and `torchrun` command of a block, in order."""
    if block.language not in ("", "sh", "inline"):
        return []
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True) if COMMAND.match(line) else []
        while words and "=" in words[0]:
            del words[0]  # an environment variable's
        if words and (block.language != "inline" or not only_named(words)):
            found.append(words)
    return found


def only_named(words: list[str]) -> bool:
    """Whether the text names a verb (`ladder train`) or a pattern (`ladder plans NAME`)."""
    if any(word.rpartition("=")[2].isupper() for word in words):
        return True
    return words[1] not in BARE and not any("=" in word or "--" in word for word in words)


def verb(words: list[str]) -> str:
    return words[words.index("ladder") + 1]


def made(words: list[str]) -> str | None:
    """The folder that a command writes."""
    for word in words:
        if word.startswith("out="):
            return word.removeprefix("out=")
    return words[words.index("--out") + 1] if "--out" in words else None


def write_files(blocks: list[Block]) -> None:
    """Write the files that the page shows into the working directory."""
    for block in blocks:
        named = re.match(r"# (\S+\.yaml)\b", block.text) if block.language == "yaml" else None
        name = named[1] if named else block.file
        if name is not None:
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(block.text + "\n", encoding="utf-8")


def write_texts(folder: Path) -> None:
    """A folder of twenty texts."""
    folder.mkdir()
    for i in range(20):
        words = [WORDS[(i * 7 + j * j) % len(WORDS)] + f"_{(i + j) % 13}" for j in range(240)]
        (folder / f"{i:02d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")


def insert(words: list[str], more: tuple[str, ...]) -> list[str]:
    """`more` after the last positional word: positional words do not follow options."""
    start = 0 if words[0] == "ladder" else words.index("ladder")
    options = [i for i, word in enumerate(words) if i > start and word.startswith("--")]
    at = options[0] if options else len(words)
    return [*words[:at], *more, *words[at:]]


def shortened(words: list[str]) -> list[str]:
    """A shorter command: fewer steps and tokens, less text, fewer processes."""
    if verb(words) in TRAINING:
        words = insert(words, SHORT_RUN)
        if words[2] == "tiny-sft":  # whole conversations
            words = insert(words, ("seq_len=128",))
    elif verb(words) == "generate":
        words = [*words, "--max-new-tokens", "3"]
    elif verb(words) == "eval":
        words = [*words, "--limit", "2"]
    elif verb(words) in READING and words[3].startswith("--"):  # no paths: the standard library
        words = [*words, TEXTS]
    if words[0] == "torchrun":
        at = words.index("--nproc-per-node") + 1
        words = [*words[:at], "2", *words[at + 1 :]]
    elif verb(words) in (*TRAINING, "generate", "eval") and "--nproc" not in words:
        words = [*words, "--device", "cpu"]
    return words


def run(words: list[str]) -> None:
    """Run a command in the working directory; fails the test unless it succeeds."""
    shown = shlex.join(words)
    if words[0] == "ladder" and "--nproc" not in words:
        try:
            code = main(words[1:])
        except SystemExit as error:  # argparse's
            code = int(error.code or 0)
        assert code == 0, f"{shown}: exit code {code}"
        return
    program = [sys.executable, *PYTHON[words[0]], *words[1:]]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    result = subprocess.run(
        program,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, f"{shown}: exit code {result.returncode}\n{result.stderr}"
