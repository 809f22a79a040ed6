"""What README.md says, done: its commands, its Python, its plan, its links.

The commands run as they stand there, in its order, in one empty folder; words are appended only to
make them short. Those that need a GPU are parsed and not run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from ladder.cli import main
from ladder.parallel import launch
from tests.corpus import WORDS
from tests.distributed import PATIENCE

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = {"ladder": ["-m", "ladder"], "torchrun": ["-m", "torch.distributed.run"]}
TRAINING = ("train", "finetune")
NEEDS_GPU = ("bench",)
HARNESS = importlib.util.find_spec("lm_eval") is not None  # the extra `eval`
BARE = ("plans", "doctor")  # do their work without further words
COMMAND = re.compile(r"(ladder|torchrun) ")

SHORT_RUN = (
    "steps=2",
    "batch_size=2",
    "seq_len=32",
    "warmup_steps=1",
    "eval_windows=2",
    "checkpoint_interval=1",
)


class Block(NamedTuple):
    """A fenced block, or the code in the text between two (language `inline`, one on a line)."""

    section: str
    language: str
    text: str


def parse(text: str) -> list[Block]:
    """The code of a Markdown text in its order, each under the nearest `## ` heading above it."""
    blocks: list[Block] = []
    section = ""
    fence: list[str] | None = None
    language = ""
    prose: list[str] = []

    def end_of_prose() -> None:
        spans = re.findall(r"`([^`]+)`", "\n".join(prose))
        prose.clear()
        lines = "\n".join(" ".join(span.split()) for span in spans)
        blocks.append(Block(section, "inline", lines))

    for line in text.splitlines():
        if line.startswith("```"):
            if fence is None:
                end_of_prose()
                fence, language = [], line.removeprefix("```").strip()
            else:
                blocks.append(Block(section, language, "\n".join(fence)))
                fence = None
        elif fence is not None:
            fence.append(line)
        elif line.startswith("## "):
            end_of_prose()
            section = line.removeprefix("## ").strip()
        else:
            prose.append(line)
    assert fence is None, "a fenced block of README.md does not end"
    end_of_prose()
    return blocks


BLOCKS = parse(README)
JOBS = "The four jobs"


def commands(section: str, *languages: str) -> list[list[str]]:
    """The words of each `ladder` and `torchrun` command of the section, in order."""
    found = []
    for block in BLOCKS:
        if block.section == section and block.language in languages:
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True) if COMMAND.match(line) else []
                if words and (block.language != "inline" or not only_named(words)):
                    found.append(words)
    return found


def only_named(words: list[str]) -> bool:
    """Whether the text names a verb (`ladder train`) or a pattern (`ladder plans NAME`)."""
    if any(word.isupper() for word in words):
        return True
    return words[1] not in BARE and not any("=" in word or "--" in word for word in words)


def verb(words: list[str]) -> str:
    return words[words.index("ladder") + 1]


def insert(words: list[str], more: tuple[str, ...]) -> list[str]:
    """`more` after the last positional word: positional words do not follow options."""
    start = 0 if words[0] == "ladder" else words.index("ladder")
    options = [i for i, word in enumerate(words) if i > start and word.startswith("--")]
    at = options[0] if options else len(words)
    return [*words[:at], *more, *words[at:]]


def shortened(words: list[str], texts: Path) -> list[str]:
    """The command with what makes it short: fewer steps and tokens, less text, fewer processes."""
    if verb(words) in TRAINING:
        words = insert(words, SHORT_RUN)
        if words[2] == "tiny-sft":  # whole conversations
            words = insert(words, ("seq_len=128",))
    elif verb(words) == "generate":
        words = [*words, "--max-new-tokens", "3"]
    elif verb(words) == "eval":
        words = [*words, "--limit", "2"]
    elif verb(words) in ("data", "tokenizer") and "--chat-field" not in words:
        words = [*words, str(texts)]
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


def checkpoints(words: list[str]) -> list[Path]:
    """Of the run that a training command writes."""
    (out,) = (word.partition("=")[2] for word in words if word.startswith("out="))
    return sorted((Path(out) / "checkpoints").iterdir())


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of text, outside the empty one that is the working directory from here on."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(20):
        words = [WORDS[(i * 7 + j * j) % len(WORDS)] + f"_{(i + j) % 13}" for j in range(240)]
        (folder / f"{i:02d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def test_the_commands_run(texts: Path) -> None:
    """The plans' first, then the four jobs, then the training of the README's own plan."""
    for block in BLOCKS:
        if block.language == "yaml" and (named := re.match(r"# (\S+\.yaml)\b", block.text)):
            Path(named[1]).write_text(block.text + "\n", encoding="utf-8")
        if len(language := block.language.split()) == 2:  # a file's text, and its name
            Path(language[1]).write_text(block.text + "\n", encoding="utf-8")

    idea = commands("The idea", "", "inline")
    jobs = commands(JOBS, "")
    plans = [words for words in idea if verb(words) == "plans"]
    later = [words for words in idea if verb(words) != "plans"]  # they need the data of the jobs
    assert any("my-plan.yaml" in words for words in plans)
    assert any("plan=my-plan.yaml" in words for words in later)
    assert {words[0] for words in jobs} == {"ladder", "torchrun"}
    assert {"tokenizer", "data", "train", "generate"} <= {verb(words) for words in jobs}
    assert any("--resume" in words for words in jobs)
    assert any("--nproc" in words for words in jobs)

    for words in [*plans, *jobs, *commands(JOBS, "inline"), *later]:
        if verb(words) in NEEDS_GPU or (verb(words) == "eval" and not HARNESS):
            continue
        if "--resume" in words:  # leave it a step to do
            shutil.rmtree(checkpoints(words)[-1])
        run(shortened(words, texts))
        if verb(words) in TRAINING:
            names = [path.name for path in checkpoints(words)]
            assert names == ["step-000001", "step-000002"], shlex.join(words)


def test_every_command_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that need a GPU, in whatever section; none is started."""
    monkeypatch.setattr(launch, "run", lambda *arguments: 0)
    sections = {block.section for block in BLOCKS}
    found = [words for section in sections for words in commands(section, "", "inline")]
    assert len(found) > 10
    for words in found:
        try:
            assert main(words[words.index("ladder") + 1 :]) == 0
        except SystemExit as error:  # argparse's
            raise AssertionError(f"{shlex.join(words)}: not a command of ladder") from error


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [block.text for block in BLOCKS if block.language == "python"]
    assert blocks
    names: dict[str, object] = {}
    for text in blocks:
        exec(compile(text, "README.md", "exec"), names)
    config, logits = names["config"], names["logits"]
    assert list(logits.shape) == [1, 16, 512]  # type: ignore[attr-defined]
    assert config.plan.name == "ladder@2-3"  # type: ignore[attr-defined]


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    relative = [link.partition("#")[0] for link in links if "://" not in link]
    assert relative
    missing = [link for link in relative if link and not (ROOT / link).exists()]
    assert not missing, f"README.md links to {missing}"


def test_every_verb_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    """As `ladder VERB`, or as `make VERB` where that is how to run it."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    _, _, listed = capsys.readouterr().out.partition("commands:")
    verbs = re.findall(r"^    ([a-z][a-z-]*)\b", listed, flags=re.MULTILINE)
    assert {"plans", "train", "generate", "doctor"} <= set(verbs)
    missing = [verb for verb in verbs if not re.search(rf"\b(ladder|make) {verb}\b", README)]
    assert not missing, f"README.md does not mention ladder {', '.join(missing)}"
