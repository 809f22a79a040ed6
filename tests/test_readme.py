"""README.md and the pages of docs/: their commands, Python, files and links work.

A page's commands and Python run in its order, in a folder that holds what the page does not make
itself; words are appended to commands only to make them short. What needs a GPU, a network or an
optional package is parsed and not run: see tests.pages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from ladder.bench.inference.points import load_option_sets
from ladder.bench.training.points import parse_layout
from ladder.cli import main, make_parser
from ladder.parallel import launch
from ladder.train.config import load_train_config
from tests import ROOT, pages
from tests.pages import TEXTS, TRAINING, Block, verb

# ---- What is known of README.md: it alone takes a reader through the jobs, from nothing.
README = "README.md"
JOBS = {"plans", "tokenizer", "data", "train", "convert", "generate"}
GPU_VERBS = ("bench",)

INDEX = "docs/README.md"
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in (README, *DOCS)}
BLOCKS = {name: pages.parse(text) for name, text in PAGES.items()}
HARNESS = importlib.util.find_spec("lm_eval") is not None  # the extra `eval`
DATA = "runs/data"
# What a page may start from, and how it is made.
SHARED = (
    "ladder tokenizer train --vocab-size 512 --out runs/tokenizer",
    f"ladder data prepare --tokenizer runs/tokenizer --out {DATA}",
    "ladder train tiny plan=ladder out=runs/tiny",
    "ladder train tiny plan=standard out=runs/standard",
    "ladder convert runs/standard --plan hybrid --out runs/hybrid",
    "ladder finetune tiny init=runs/hybrid out=runs/healed",
)

every_page = pytest.mark.parametrize("page", list(PAGES))


def steps(page: str) -> list[list[str] | Block]:
    """A page's commands and Python blocks in the order in which they can run.

    What trains above the page's own preparing of the recipes' data comes last.
    """
    found: list[list[str] | Block] = []
    for block in BLOCKS[page]:
        if block.runs:
            found += [block] if block.language == "python" else pages.commands(block)
    prepares = [
        n
        for n, step in enumerate(found)
        if not isinstance(step, Block) and pages.made(step) == DATA
    ]
    early = [
        step
        for step in found[: min(prepares, default=0)]
        if not isinstance(step, Block) and verb(step) in TRAINING
    ]
    return [step for step in found if not any(step is each for each in early)] + early


def checkpoints(words: list[str]) -> list[Path]:
    """The checkpoints of the run that a training command writes."""
    return sorted((Path(pages.made(words) or "") / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and in runs/ a tokenizer, data, and models of two steps."""
    folder = tmp_path_factory.mktemp("shared")
    pages.write_texts(folder / TEXTS)
    with contextlib.chdir(folder):
        for command in SHARED:
            pages.run(pages.shortened(shlex.split(command)))
    return folder


@pytest.fixture
def working(page: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory: the shared folder without what the page makes, and its files."""
    own = {pages.made(step) for step in steps(page) if not isinstance(step, Block)}
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    for folder in (tmp_path / "runs").iterdir():
        if f"runs/{folder.name}" in own:
            shutil.rmtree(folder)
    monkeypatch.chdir(tmp_path)
    pages.write_files(BLOCKS[page])


@pytest.mark.parametrize(
    "page",
    [pytest.param(name, marks=pytest.mark.slow) for name in (README, *DOCS) if steps(name)],
)
def test_a_page_runs(page: str, working: None) -> None:
    names: dict[str, object] = {}
    for step in steps(page):
        if isinstance(step, Block):
            exec(compile(step.text, page, "exec"), names)
            continue
        if verb(step) in GPU_VERBS or (verb(step) == "eval" and not HARNESS):
            continue
        if "--resume" in step:  # leave it a step to do
            shutil.rmtree(checkpoints(step)[-1])
        pages.run(pages.shortened(step))
        if verb(step) in TRAINING:
            found = [path.name for path in checkpoints(step)]
            assert found == ["step-000001", "step-000002"], shlex.join(step)


def test_what_runs_is_what_there_is() -> None:
    """README.md goes through the jobs; it and the pages together use every way to start."""
    found = {name: [s for s in steps(name) if not isinstance(s, Block)] for name in PAGES}
    assert {verb(words) for words in found[README]} >= JOBS
    everything = [words for each in found.values() for words in each]
    assert {words[0] for words in everything} == {"ladder", "torchrun"}
    assert {verb(words) for words in everything} >= {*JOBS, *TRAINING, "eval"}
    for option in ("--resume", "--nproc"):
        assert any(option in words for words in everything), option


@every_page
def test_every_command_is_parsed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that need a GPU or a network; none is started. Recipes are resolved."""
    monkeypatch.setattr(launch, "run", lambda *arguments: 0)
    monkeypatch.chdir(tmp_path)
    pages.write_files(BLOCKS[page])
    for words in [words for block in BLOCKS[page] for words in pages.commands(block)]:
        given = words[words.index("ladder") + 1 :]
        try:
            assert main(given) == 0
        except SystemExit as error:  # argparse's
            raise AssertionError(f"{shlex.join(words)}: not a command of ladder") from error
        if given[0] in TRAINING and not given[1].endswith(".json"):
            load_train_config(given[1], [word for word in given[2:] if re.match(r"[\w.]+=", word)])
        if "--suite" in given:
            load_option_sets(given[given.index("--suite") + 1], {})
        if "--layouts" in given:
            rest = given[given.index("--layouts") + 1 :]
            for layout in rest[: next((i for i, w in enumerate(rest) if "--" in w), None)]:
                parse_layout(layout)


@every_page
def test_code_is_valid(page: str) -> None:
    """Python compiles; YAML and JSON are such, also the lines of a .jsonl file."""
    for block in BLOCKS[page]:
        if block.language == "python":
            compile(block.text, page, "exec")
        elif block.language == "yaml":
            assert yaml.safe_load(block.text), block.text
        elif block.language == "json":
            texts = block.text.splitlines() if block.note.endswith(".jsonl") else [block.text]
            assert all(json.loads(text) for text in texts)
        else:
            assert block.language in ("", "inline", "sh", "text", "jinja", "diff"), block.language
        known = block.note in ("", *pages.NOT_RUN) or block.file
        assert known, f"{block.language} {block.note}: neither a file nor one of {pages.NOT_RUN}"


@every_page
def test_links_lead_somewhere(page: str) -> None:
    """To files that exist, and to headings that their pages have; paths in backticks, too."""
    folder = (ROOT / page).parent
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", pages.prose(PAGES[page])):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (folder / name).resolve() if name else ROOT / page
        found = target.exists()
        if found and anchor:
            found = anchor in pages.anchors(target.read_text(encoding="utf-8"))
        missing += [] if found else [link]
    for block in BLOCKS[page]:
        for span in block.text.splitlines() if block.language == "inline" else []:
            if re.fullmatch(r"(benchmarks|configs|docs|ladder|tests)(/[\w.-]+)+/?", span):
                missing += [] if (ROOT / span).exists() else [span]
    assert not missing, f"{page} names {missing}"


def test_options_are_what_there_is() -> None:
    """Pages name no option that no command has, and every option that one has."""
    known = _options(make_parser())
    found = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", "\n".join(PAGES.values())))
    named = {
        word
        for blocks in BLOCKS.values()
        for block in blocks
        for span in block.text.splitlines()
        if block.language == "inline" and span.startswith("--")
        for word in span.split()
        if word.startswith("--")
    }
    assert not named - known, f"no command has {sorted(named - known)}"
    assert not known - found, f"no page names {sorted(known - found)}"


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The long options of a parser and of its commands, without those that explain themselves."""
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(_options, action.choices.values()))
        elif action.help is not argparse.SUPPRESS:
            found |= {each for each in action.option_strings if each.startswith("--")}
    return found - {"--help", "--version"}


def test_every_page_is_in_the_index() -> None:
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", PAGES[INDEX], flags=re.MULTILINE)
    found = {f"docs/{name}" for name in listed} | {INDEX}
    top = {name for name in DOCS if "/results/" not in name}
    assert found == {*top, "docs/results/README.md"}
    results = {name for name in DOCS if "/results/" in name} - {"docs/results/README.md"}
    linked = re.findall(r"\]\(([\w-]+\.md)\)", PAGES["docs/results/README.md"])
    assert {f"docs/results/{name}" for name in linked} == results


def test_every_verb_is_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    """In README.md or docs/, as `ladder VERB`, or as `make VERB` where that is how to run it."""
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    _, _, listed = capsys.readouterr().out.partition("commands:")
    verbs = re.findall(r"^    ([a-z][a-z-]*(?: [a-z]+)?)\b", listed, flags=re.MULTILINE)
    assert {"plans", "train", "generate", "doctor", "convert sensitivity"} <= set(verbs)
    text = "\n".join(PAGES.values())
    missing = [verb for verb in verbs if not re.search(rf"\b(ladder|make) {verb}\b", text)]
    assert not missing, f"README.md and docs/ do not mention ladder {', '.join(missing)}"
