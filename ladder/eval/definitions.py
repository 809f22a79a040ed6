"""Definitions that stand in a text, and questions which of four headwords one of them defines.

Two kinds of text say which word is defined where: Python, in which a docstring follows the name of
its function or class, and a dictionary laid out as GCIDE (Debian's dict-gcide), in which an entry
begins with its headword and, between backslashes, how that is said:

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
STEM = 5  # letters of a dictionary's headword: its inflections and derivations share them
CHOICES = 4
TRIES = 64  # headwords that are looked at for wrong answers

ENTRY = re.compile(
    r"^(?P<word>[A-Za-z][a-z]{3,}) (?P<said>\\[^\\\n]+\\)(?: \([^\n]*?\))?,? "
    r"(?P<part>prop\. n\.|n\.|a\.|adj\.|adv\.|v\. [ti]\.)\s(?P<body>(?:.*\n(?=[ \t\n]))*.*)",
    re.MULTILINE,
)


class Definition(NamedTuple):
    """heading: what introduces it, as its text does. text: one paragraph, in one line.

    kind: headwords of one kind can stand for each other (functions, or verbs). stem: what gives the
    headword away, in lower case and letters and digits alone.
    """

    headword: str
    heading: str
    text: str
    kind: str
    stem: str


def definitions(text: str) -> Iterator[Definition]:
    """Those of a text, but for what is too short and what holds its own headword."""
    for each in (*_python(text), *_dictionary(text)):
        if len(each.text) >= SHORTEST and each.stem not in letters(each.text):
            yield each


def questions(texts: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """At most `limit` definitions, each with the headings of four words, one of which it defines.

    Each headword is asked for once. The wrong ones are of its kind, and none of them stands in the
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
        warnings.simplefilter("ignore")  # of what the text holds
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return  # it is no Python
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
    """Entries; a definition is the first of its entry, without origin, field and sources."""
    for entry in ENTRY.finditer(text):
        word, part = entry["word"], entry["part"]
        body = re.sub(r"^1\.\s+", "", _unbracketed(entry["body"]))
        said = re.sub(r"(\s*\[[^\[\]]*\]|\s*--\s*[A-Z][^-]*)+$", "", paragraph(_unbracketed(body)))
        if not said[:1].isalpha():  # a plural, or another form, stands first
            continue
        heading = f"{word} {entry['said']}, {part}\n   "
        stem = letters(word)[:STEM]
        yield Definition(word, heading, said.translate({123: None, 125: None}), part, stem)


def _unbracketed(text: str) -> str:
    """Without the origins and fields, [in brackets] and (in parentheses), that it begins with."""
    depth = 0
    for at, character in enumerate(text):
        if depth == 0 and character not in "[(" and not character.isspace():
            return text[at:]
        depth += (character in "[(") - (character in "])")
    return ""


def paragraph(text: str) -> str:
    """The first paragraph, in one line; what is longer than LONGEST is cut after a word."""
    line = " ".join(re.split(r"\n\s*\n", text.strip())[0].split())
    return line if len(line) <= LONGEST else line[: LONGEST + 1].rsplit(" ", 1)[0]
