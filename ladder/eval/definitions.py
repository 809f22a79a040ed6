"""Definitions found in a text, as multiple-choice questions: which of four words is defined?

Two kinds of text have recognisable definitions: Python, where a docstring follows the name of its
function or class, and dictionaries in the format of GCIDE (Debian's dict-gcide), where an entry
begins with its headword and, between backslashes, its pronunciation:

    Largo \\Lar"go\\, adv. [It., large, L. largus.] (Mus.)
       Slow or slowly; -- more so than {adagio}.
"""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

SHORTEST, LONGEST = 24, 160  # characters of a definition
STEM = 5  # first letters of a headword, which its inflections and derivations share
CHOICES = 4
TRIES = 64  # headwords considered as wrong answers

ENTRY = re.compile(
    r"^(?P<word>[A-Za-z][a-z]{3,}) (?P<said>\\[^\\\n]+\\)(?: \([^\n]*?\))?,? "
    r"(?P<part>prop\. n\.|n\.|a\.|adj\.|adv\.|v\. [ti]\.)\s(?P<body>(?:.*\n(?=[ \t\n]))*.*)",
    re.MULTILINE,
)


class Definition(NamedTuple):
    """A headword and its definition.

    heading: the text before the definition. text: one paragraph, in one line. kind: the word class,
    from which wrong answers are drawn (functions, verbs, ...). stem: lower-case letters and digits
    that would give the headword away if the definition contained them.
    """

    headword: str
    heading: str
    text: str
    kind: str
    stem: str


def definitions(text: str) -> Iterator[Definition]:
    """The definitions in a text, without those that are too short or contain their headword."""
    for each in (*_python(text), *_dictionary(text)):
        if len(each.text) >= SHORTEST and each.stem not in letters(each.text):
            yield each


def questions(texts: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """At most `limit` questions: a definition, the headings of four words, and the right one.

    Each headword is asked for once. The wrong ones are of its kind and do not occur in the
    definition either.
    """
    found: dict[str, Definition] = {}
    for text in texts:
        for each in definitions(text):
            found.setdefault(each.headword.lower(), each)
    kinds: dict[str, list[Definition]] = {}
    for each in found.values():
        kinds.setdefault(each.kind, []).append(each)
    source = random.Random(0)
    asked = source.sample([*found.values()], len(found))
    rows: list[dict[str, Any]] = []
    for each in asked:
        if len(rows) == limit:
            break
        said = letters(each.text)
        pool = source.sample(kinds[each.kind], min(TRIES, len(kinds[each.kind])))
        others = [other for other in pool if other is not each and other.stem not in said]
        if len(others) < CHOICES - 1:
            continue
        shown = source.sample([each, *others[: CHOICES - 1]], CHOICES)
        headings = [other.heading for other in shown]
        rows.append({"headings": headings, "definition": each.text, "answer": shown.index(each)})
    return rows


def letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _python(text: str) -> Iterator[Definition]:
    """Names of functions and classes, and the first paragraphs of their docstrings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the code in the text
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # the text is not Python
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        said = ast.get_docstring(node)
        if not said or node.name.startswith("__") or len(node.name) < 4:
            continue
        kind, after = ("class", "") if isinstance(node, ast.ClassDef) else ("def", "()")
        heading = f'{kind} {node.name}{after}:\n    """'
        yield Definition(node.name, heading, paragraph(said), kind, letters(node.name))


def _dictionary(text: str) -> Iterator[Definition]:
    """The headwords of a dictionary, each with its first definition, without origin and sources."""
    for entry in ENTRY.finditer(text):
        word, part = entry["word"], entry["part"]
        body = re.sub(r"^1\.\s+", "", _unbracketed(entry["body"]))
        said = re.sub(r"(\s*\[[^\[\]]*\]|\s*--\s*[A-Z][^-]*)+$", "", paragraph(_unbracketed(body)))
        if not said[:1].isalpha():  # the entry begins with another form, such as a plural
            continue
        heading = f"{word} {entry['said']}, {part}\n   "
        stem = letters(word)[:STEM]
        yield Definition(word, heading, said.translate({123: None, 125: None}), part, stem)


def _unbracketed(text: str) -> str:
    """The text without leading [origins] and (fields)."""
    depth = 0
    for at, character in enumerate(text):
        if depth == 0 and character not in "[(" and not character.isspace():
            return text[at:]
        depth += (character in "[(") - (character in "])")
    return ""


def paragraph(text: str) -> str:
    """The first paragraph, in one line, cut after a word if longer than LONGEST."""
    line = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    return line if len(line) <= LONGEST else line[: LONGEST + 1].rsplit(" ", 1)[0]
