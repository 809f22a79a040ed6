"""The data of the `offline` suite, built deterministically from local text.

    heldout.jsonl      texts, for bits per byte
    cloze.jsonl        a passage, its continuation, and three other parts of the same document
    definitions.jsonl  a definition, and the headings of four words, one of which it defines
    copying.jsonl      a list of words and its first half again; the answer is the second half
    arithmetic.jsonl   sums of two numbers, after four solved ones
    index.json         the source of the text, and the files' checksums

The task configs in ladder/eval/tasks refer to the functions at the end.
"""

from __future__ import annotations

import heapq
import json
import random
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ladder.data.formats import Document
from ladder.data.index import INDEX, holds_chats
from ladder.data.prepared import open_data
from ladder.data.sources import name_hash, open_corpus
from ladder.data.tokenizer import load_tokenizer
from ladder.data.verify import check_shards
from ladder.eval.definitions import CHOICES, questions
from ladder.files import checksum, make_folder, write_text
from ladder.models.errors import UserError

VERSION = 2  # the version of the data built from a text, for its index
# The tasks of ladder/eval/tasks, and the file that each reads.
TASKS = {
    "local_heldout": "heldout",
    "local_cloze": "cloze",
    "local_definitions": "definitions",
    "local_copying": "copying",
    "local_arithmetic": "arithmetic",
    "local_sums": "arithmetic",
}
DOCUMENTS = 64
CHARACTERS = 4096  # scored per document
READ_TOKENS = 2**21  # read of a prepared folder, whose documents are in arbitrary order

QUESTIONS = 300
SEARCHED = 2**17  # characters per document
PASSAGE, WORDS, WIDEST = 240, 6, 120  # characters before a gap; words and most characters in it
APART = 400  # characters between a gap and the wrong answers
FEWEST = 40  # definitions; with fewer, the standard library's are used

COPIES, LIST = 100, 10  # words of a list
SUMS, SHOTS, LARGEST = 100, 4, 50


def build_tasks(
    paths: Sequence[str] | None, out: Path, tasks: Collection[str] = tuple(TASKS)
) -> dict[str, Any]:
    """Write the data of the `tasks` into the folder `out`, and return its index.

    paths: text, .jsonl and .parquet files and folders of them, of which all text is used; or one
        folder of `ladder data prepare`, of which the held-out documents are used; None: the
        held-out documents of this Python's standard library, as `ladder data prepare` splits them.

    If a text has too few definitions, those of the standard library are used, as the index records.
    Raises UserError if there is too little text.
    """
    wanted = {TASKS[task] for task in tasks if task in TASKS}
    documents, source = _documents(paths)
    texts = [document.text for document in documents]
    index = {"version": VERSION, "source": source, "documents": len(documents)}
    rows: dict[str, list[dict[str, Any]]] = {}
    if "heldout" in wanted:
        rows["heldout"] = [{"text": text[:CHARACTERS]} for text in texts]
    if "cloze" in wanted:
        rows["cloze"] = _cloze(documents)
    if "definitions" in wanted:
        rows["definitions"] = questions(texts, QUESTIONS)
        index["definitions"] = "the text"
        if len(rows["definitions"]) < FEWEST and paths is not None:
            found, _ = _documents(None)
            rows["definitions"] = questions([document.text for document in found], QUESTIONS)
            index["definitions"] = "the standard library"
    if "copying" in wanted:
        rows["copying"] = _copying(texts)
    if "arithmetic" in wanted:
        rows["arithmetic"] = _arithmetic()
    where = "the standard library" if paths is None else ", ".join(paths)
    for name, made in rows.items():
        if not made:
            raise UserError(
                f"--text: {where} holds too little text to build the task {name!r}; give more, in "
                f"documents of {PASSAGE + CHOICES * APART} characters and above"
            )
    make_folder(out)
    files = {}
    for name, made in rows.items():
        file = out / f"{name}.jsonl"
        write_text(file, "".join(json.dumps(row) + "\n" for row in made))
        files[file.name] = checksum(file)
    index["files"] = files
    write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _documents(paths: Sequence[str] | None) -> tuple[list[Document], dict[str, Any]]:
    """The DOCUMENTS documents with the lowest hashes of their names, and their source."""
    found: Iterator[Document]
    if paths is not None and len(paths) == 1 and (Path(paths[0]) / INDEX).is_file():
        found, source = _prepared(Path(paths[0]))
    elif paths is None:
        corpus = open_corpus(None)
        found, source = corpus.read("heldout"), corpus.description
    else:
        corpus = open_corpus(paths, heldout_fraction=0.0)  # all documents
        found, source = corpus.read("train"), corpus.description
    chosen = heapq.nsmallest(DOCUMENTS, found, key=lambda document: name_hash(document.name))
    return chosen, source


def _prepared(folder: Path) -> tuple[Iterator[Document], dict[str, Any]]:
    """The held-out documents of a prepared folder, decoded; byte-level tokens are lossless."""
    data = open_data(folder)
    if holds_chats(data.index):
        raise UserError(
            f"--text={folder} holds conversations, which are no text to score; give text files, or "
            f"a folder that was prepared without --chat-field"
        )
    check_shards(data, "heldout")
    split = data.split("heldout")
    tokens = split.read(0, min(len(split), READ_TOKENS))
    tokenizer = load_tokenizer(folder)
    ends = np.flatnonzero(tokens == data.eos_id).tolist()

    def documents() -> Iterator[Document]:
        start = 0
        for number, end in enumerate(ends):
            text = tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
            start = end + 1
            if text:
                yield Document(str(number), text, len(text.encode("utf-8")))

    return documents(), {"kind": "prepared", "path": str(folder), **data.index["source"]}


def _cloze(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """Questions taken from all documents in turn."""
    sources = [_gaps(document) for document in documents]
    rows: list[dict[str, Any]] = []
    while sources and len(rows) < QUESTIONS:
        left = []
        for source in sources:
            row = next(source, None)
            if row is not None:
                rows.append(row)
                left.append(source)
        sources = left
    return rows[:QUESTIONS]


def _gaps(document: Document) -> Iterator[dict[str, Any]]:
    """Questions whose four answers come from one document, so that its subject gives none away.

    The answers begin at the end of a word. Four positions are drawn, and then one of them as the
    gap: otherwise the positions of the right and the wrong answers would be distributed
    differently in a short document.
    """
    text, source = document.text[:SEARCHED], random.Random(name_hash(document.name))
    pattern = re.compile(rf"(?<=\S)(?:\s+\S+){{{WORDS}}}")
    starts = [each.start() for each in re.finditer(r"(?<=\S)\s+(?=\S)", text)]
    matches = {at: match[0] for at in starts if (match := pattern.match(text, at))}
    answers = {at: a for at, a in matches.items() if at >= PASSAGE and len(a) <= WIDEST}
    left = [*answers]
    source.shuffle(left)
    while True:
        drawn: list[int] = []
        for at in left:
            if all(abs(at - o) >= APART and answers[at] != answers[o] for o in drawn):
                drawn.append(at)
            if len(drawn) == CHOICES:
                break
        else:
            return
        left = [at for at in left if at not in drawn]
        gap = drawn[source.randrange(CHOICES)]
        passage = text[gap - PASSAGE : gap]
        yield {
            "passage": passage[passage.find(" ") + 1 :],  # from the beginning of a word
            "choices": [answers[at] for at in drawn],
            "answer": drawn.index(gap),
        }


def _copying(texts: Sequence[str]) -> list[dict[str, Any]]:
    found = {word for text in texts for word in re.findall(r"\b\w{3,12}\b", text)}
    words, source = sorted(found), random.Random(0)
    if len(words) < LIST:
        return []
    rows = []
    for _ in range(COPIES):
        chosen = source.sample(words, LIST)
        whole, half = " ".join(chosen), " ".join(chosen[: LIST // 2])
        rows.append({"text": f"{whole}\n{whole}\n{half}", "rest": whole[len(half) :]})
    return rows


def _arithmetic() -> list[dict[str, Any]]:
    source = random.Random(0)
    rows = []
    for _ in range(SUMS):
        pairs = [(source.randrange(LARGEST), source.randrange(LARGEST)) for _ in range(SHOTS + 1)]
        solved = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:-1])
        a, b = pairs[-1]
        rows.append({"text": f"{solved}{a} + {b} =", "answer": str(a + b)})
    return rows


# ---- functions that the task configs refer to ------------------------------------------------


def read_task(folder: str, file: str, **_: Any) -> dict[str, Any]:
    """The data of a task for lm-evaluation-harness: one split, `test`."""
    import datasets

    lines = (Path(folder) / file).read_text(encoding="utf-8").split("\n")
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines if line])}


def copied(row: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    (nats, likeliest), *_ = results
    size = len(row["rest"].encode("utf-8"))
    return {"acc": float(likeliest), "bits_per_byte": (nats, size)}


def summed(row: dict[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    (nats, _), *_ = results
    return {"bits_per_byte": (nats, len(f" {row['answer']}\n"))}


def answered(row: dict[str, Any], results: Sequence[str]) -> dict[str, Any]:
    return {"exact_match": float(results[0].strip() == row["answer"])}
