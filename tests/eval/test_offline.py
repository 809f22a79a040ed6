"""The offline suite: its data, its suites and its tables."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.eval import definitions, offline, results, suites
from ladder.models import UserError
from tests.chats import make_chats, prepare_chats

# ---- the offline data ---------------------------------------------------------------------------


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_offline_data_is_a_function_of_the_text(texts: Path, tmp_path: Path) -> None:
    index = offline.build_tasks([str(texts)], tmp_path / "a")
    assert offline.build_tasks([str(texts)], tmp_path / "b") == index
    assert index["documents"] == 4
    whole = {path.read_text(encoding="utf-8") for path in texts.iterdir()}
    assert {row["text"] for row in rows(tmp_path / "a", "heldout")} == {
        text[: offline.CHARACTERS] for text in whole
    }
    assert index["definitions"] == "the standard library"
    cloze = rows(tmp_path / "a", "cloze")
    assert len(cloze) > 100
    for row in cloze:
        true = row["passage"] + row["choices"][row["answer"]]
        assert sum(true in text for text in whole) == 1
        assert len(set(row["choices"])) == 4
        wrong = [row["passage"] + choice for choice in row["choices"]]
        assert sum(any(each in text for text in whole) for each in wrong) == 1
    assert {row["answer"] for row in cloze} == {0, 1, 2, 3}
    for row in rows(tmp_path / "a", "copying"):
        first, second, half = row["text"].split("\n")
        assert first == second == half + row["rest"]
    for row in rows(tmp_path / "a", "arithmetic"):
        *solved, asked = row["text"].split("\n")
        a, _, b, _ = asked.split()
        assert int(a) + int(b) == int(row["answer"])
        for line in solved:
            a, _, b, _, c = line.split()
            assert int(a) + int(b) == int(c)


def test_a_cloze_is_not_answered_by_length(tmp_path: Path) -> None:
    """No passage stands before a text's beginning: a wrong answer from there would be no gap's."""
    for i in range(30):
        source = random.Random(i)
        words = source.choices("abcdefghijklmnopqrstuvw", k=offline.PASSAGE // 2)
        words += [f"prolonged{source.randrange(1000)}" for _ in range(150)]
        (tmp_path / f"{i}.txt").write_text(" ".join(words) + "\n")
    offline.build_tasks([str(tmp_path)], tmp_path / "out", ["local_cloze"])
    found = rows(tmp_path / "out", "cloze")
    lengths = [[len(choice) for choice in row["choices"]] for row in found]
    longest = [
        row["answer"] == each.index(max(each)) for row, each in zip(found, lengths, strict=True)
    ]
    assert len(found) >= 30
    assert sum(longest) / len(found) == pytest.approx(0.25, abs=0.15)


CODE = '''
class Reader:
    """Reads lines of a file, one after another."""

    def readline(self):
        """Return what stands before the next end of a line.

        Or nothing.
        """

    def close(self):
        """Close the underlying file at once, for good."""

    def __iter__(self):
        """Give each of the lines in its turn, forever."""

async def fetch_all(urls):
    """Fetch-all of what can be had from there, but slowly."""

def short(x):
    """Little."""
'''
ENTRIES = r"""
Largo \Lar"go\, a. & adv. [It., large, L. largus.] (Mus.)
   Slow or slowly.

Lariat \Lar"i*at\ (l[a^]r"[i^]*[a^]t), n. [Sp. la reata the
   rope; la the + reata rope. Cf. {Reata}.] (Naut.)
   1. (Riding) A long, slender {rope} made of hemp or strips of
      hide. [Mexico & Western U.S.] --Smith.
      [1913 Webster]

   2. Something else.

Lariat \Lar"i*at\, v. t. [imp. & p. p. {Lariated}.]
   To secure with a lariat fastened to a stake.
   [1913 Webster]

Allonym \Al"lo*nym\, n.; pl. {Allonyms}.
   A name of another person, assumed by an author.
"""


def test_what_a_text_defines() -> None:
    """No definition that is too short or contains its headword; no origin, field or source."""
    found = [tuple(each)[:4] for each in definitions.definitions(CODE)]
    assert found == [
        ("Reader", 'class Reader:\n    """', "Reads lines of a file, one after another.", "class"),
        ("readline", 'def readline():\n    """',
         "Return what stands before the next end of a line.", "def"),
    ]  # fmt: skip
    assert [tuple(each)[:4] for each in definitions.definitions(ENTRIES)] == [
        ("Lariat", 'Lariat \\Lar"i*at\\, n.\n   ',
         "A long, slender rope made of hemp or strips of hide.", "n."),
    ]  # fmt: skip
    assert not [*definitions.definitions("def broken(:\n" + "word " * 40)]


def test_questions_of_definitions() -> None:
    names = [f"{a}_{b}" for a in ("green", "brown", "white") for b in ("apple", "melon", "grape")]
    said = [f"Return number {i} of what grows, neither {names[i - 1]} nor more." for i in range(9)]
    code = "\n".join(
        f'def {name}():\n    """{text}"""' for name, text in zip(names, said, strict=True)
    )
    code += '\nclass Alone:\n    """Nothing else of its kind is defined here."""\n'
    found = definitions.questions([code, code], 100)
    assert found == definitions.questions([code, code], 100)
    assert sorted(row["definition"] for row in found) == sorted(said)  # each once; not the class
    for row in found:
        right = said.index(row["definition"])
        assert row["headings"][row["answer"]] == f'def {names[right]}():\n    """'
        assert len(set(row["headings"])) == 4
        assert not any(names[right - 1] in heading for heading in row["headings"])
    assert len({row["answer"] for row in found}) > 1
    assert len(definitions.questions([code], 5)) == 5


def test_a_text_is_asked_for_its_own_definitions(tmp_path: Path) -> None:
    said = "Return what number {} of all these functions was made to compute."
    code = "".join(f'def name{i:03}():\n    """{said.format(i + 500)}"""\n\n' for i in range(60))
    (tmp_path / "code.py").write_text(code)
    index = offline.build_tasks([str(tmp_path)], tmp_path / "out", ["local_definitions"])
    assert index["definitions"] == "the text"
    assert list(index["files"]) == ["definitions.jsonl"]
    assert len(rows(tmp_path / "out", "definitions")) == 60


def test_prepared_data_gives_its_held_out_documents(
    corpus: Path, texts: Path, tmp_path: Path
) -> None:
    """Training documents, or text that is not the original's, would make the figures worthless."""
    prepare([texts], corpus, tmp_path / "data", heldout_fraction=0.5)
    held = open_corpus([texts], heldout_fraction=0.5).read("heldout")
    offline.build_tasks([str(tmp_path / "data")], tmp_path / "out")
    found = {row["text"] for row in rows(tmp_path / "out", "heldout")}
    assert found == {document.text[: offline.CHARACTERS] for document in held}
    assert 0 < len(found) < 4


def test_conversations_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Catches turns taken for documents, and the names of special tokens for text."""
    data = prepare_chats(tmp_path / "chats", corpus, make_chats(60))
    with pytest.raises(UserError, match=r"--text=.* holds conversations.*without --chat-field"):
        offline.build_tasks([str(data)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n")
    with pytest.raises(UserError, match="holds too little text to build the task 'cloze'"):
        offline.build_tasks([str(tmp_path / "short.txt")], tmp_path / "out")


# ---- suites and tables --------------------------------------------------------------------------


def test_suites_and_tasks(tmp_path: Path) -> None:
    shots = {entry.task: entry.num_fewshot for entry in suites.load_suite("paper-adapt")}
    assert shots == {
        "mmlu": 5, "arc_challenge": 25, "openbookqa": None, "hellaswag": 10,
        "truthfulqa_mc1": None, "gsm8k": 8, "ifeval": None,
    }  # fmt: skip
    assert [entry.task for entry in suites.entries(["paper-pretrain"], None)] == [
        "arc_challenge", "arc_easy", "hellaswag", "piqa", "sciq", "winogrande", "wikitext",
    ]  # fmt: skip
    assert suites.entries(["piqa"], 3) == [suites.SuiteTask("piqa", 3)]
    with pytest.raises(UserError, match="names 'piqa' twice"):
        suites.entries(["paper-pretrain", "piqa"], None)
    (tmp_path / "suite.yaml").write_text("- {task: piqa, shots: 5}\n")
    with pytest.raises(UserError, match=r"unknown key '.*' of task 1"):
        suites.entries([str(tmp_path / "suite.yaml")], None)


def test_the_error_of_a_ratio() -> None:
    """Against the spread of the ratio over many samples of the same population."""
    source = random.Random(2)

    def sample() -> list[tuple[float, int]]:
        sizes = [source.randrange(20, 200) for _ in range(80)]
        return [(-size * source.gauss(1.0, 0.2) + source.gauss(0, 5), size) for size in sizes]

    def bits(pairs: Sequence[tuple[float, int]]) -> float:
        return -sum(nats for nats, _ in pairs) / sum(size for _, size in pairs) / math.log(2)

    values = torch.tensor([bits(sample()) for _ in range(400)])
    found = [results.ratio_stderr("bits_per_byte", sample()) for _ in range(100)]
    assert sum(found) / 100 == pytest.approx(float(values.std()), rel=0.15)  # type: ignore[arg-type]
    assert results.ratio_stderr("acc", sample()) is None


def test_groups_stand_for_their_parts() -> None:
    def figure(task: str) -> results.Metric:
        return results.Metric(task, 5, "acc", 0.5, 0.01, True, 10)

    found = [figure(name) for name in ("mmlu", "mmlu_stem", "mmlu_algebra", "piqa")]
    groups = {"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_algebra"]}
    assert [each.task for each in results.shown(found, groups)] == ["mmlu", "piqa"]
    table = results.table({"a": found[:1], "b": found[1:2]})
    assert table == [["task", "shots", "metric", "a", "b"],
                     ["mmlu", "5", "acc ↑", "0.5000 ± 0.0100", "-"]]  # fmt: skip
