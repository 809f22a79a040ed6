"""The corpus of the quality benchmark: real English and code, tokenised, in one archive.

    apt-get install linux-doc-6.1 dict-gcide
    python benchmarks/quality_data.py --archive quality-data.tar.xz [--root /] [--out FOLDER]

Documents: each module of this Python's standard library, its tests included; each English page of
the Linux kernel's documentation, and its device-tree bindings; the Collaborative International
Dictionary of English in runs of neighbouring entries. `--root` is where the two Debian packages
were unpacked (`dpkg -x`), / where they are installed. Writes texts/*.jsonl, tokenizer/ and data/
to `--out` by `ladder tokenizer train` and `ladder data prepare`, and data/ to the archive, whose
bytes follow from its content alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path

from ladder.cli import main as ladder
from ladder.files import make_folder
from ladder.models.errors import UserError
from ladder.parser import Parser, parse_words

LINUX = "usr/share/doc/linux-doc-6.1"
GCIDE = "usr/share/dictd/gcide.dict.dz"
FOREIGN = {"site-packages", "dist-packages", "__pycache__"}
SUFFIXES = {".rst", ".txt", ".yaml", ""}  # "": Documentation/ABI, which is prose
ENTRY_RUN = 2**14  # characters of a dictionary's document: some 60 entries
SPACED = {"p", "div", "dd", "dt", "li", "tr", "pre", "h1", "h2", "h3", "h4", "h5", "section"}
HEADINGS = {"h1", "h2", "h3", "h4", "h5"}


def build(options: argparse.Namespace) -> int:
    """The exit code: 0, or that of the `ladder` command that failed."""
    texts, out = options.out / "texts", options.out
    make_folder(texts)
    sources = {"python": python(), "linux": linux(options.root), "gcide": gcide(options.root)}
    for name, documents in sources.items():
        count, size = write(texts / f"{name}.jsonl", documents)
        print(f"{name}: {count:,} documents, {size:,} bytes", flush=True)
        if not count:
            raise UserError(
                f"nothing of {name} below --root={options.root}: install linux-doc-6.1 and "
                f"dict-gcide, or name the folder that they were unpacked to"
            )
    split = ["--heldout-fraction", str(options.heldout_fraction), "--overwrite"]
    vocabulary = ["--vocab-size", str(options.vocab_size)]
    code = ladder(["tokenizer", "train", str(texts), "--out", str(out / "tokenizer"), *vocabulary,
                   *split])  # fmt: skip
    code = code or ladder(["data", "prepare", str(texts), "--tokenizer", str(out / "tokenizer"),
                           "--out", str(out / "data"), *split])  # fmt: skip
    if code == 0:
        pack(out / "data", options.archive)
        print(f"{options.archive}: {options.archive.stat().st_size / 2**20:.1f} MiB")
    return code


def write(file: Path, documents: Iterable[str]) -> tuple[int, int]:
    """Write documents as JSON lines; returns their number and bytes."""
    count = size = 0
    with file.open("w", encoding="utf-8") as stream:
        for document in documents:
            if document.strip():
                stream.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(document.encode("utf-8"))
    return count, size


def python() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not FOREIGN & set(file.relative_to(root).parts):
            yield from decoded(file.read_bytes())


def linux(root: Path) -> Iterator[str]:
    """Yield each page's source, or the page's text if its source quotes comments of the code."""
    pages, sources = root / LINUX / "html", root / LINUX / "Documentation"
    for file in sorted(sources.rglob("*")):
        within = file.relative_to(sources)
        name = within.with_suffix("") if file.suffix == ".gz" else within
        if not file.is_file() or name.suffix not in SUFFIXES or "translations" in name.parts:
            continue
        data = file.read_bytes()
        for text in decoded(gzip.decompress(data) if file.suffix == ".gz" else data):
            page = pages / name.with_suffix(".html")
            if name.suffix == ".rst" and ".. kernel-doc::" in text and page.is_file():
                text = Page.text(page.read_text(encoding="utf-8"))
            yield text


def gcide(root: Path) -> Iterator[str]:
    """Yield runs of entries. An entry starts at a line's first character; its text is indented."""
    file = root / GCIDE
    if not file.is_file():
        return
    run: list[str] = []
    size = 0
    text = gzip.decompress(file.read_bytes()).decode("utf-8", "replace")  # three bytes are invalid
    for line in text.splitlines(keepends=True):
        if size >= ENTRY_RUN and not line.startswith((" ", "\n")):
            yield "".join(run)
            run, size = [], 0
        run.append(line)
        size += len(line)
    yield "".join(run)


def decoded(data: bytes) -> Iterator[str]:
    """Yield the text, or nothing if it is not UTF-8 (in a few modules)."""
    try:
        yield data.decode("utf-8")
    except UnicodeDecodeError:
        return


class Page(HTMLParser):
    """The text of a Sphinx page's body: no navigation, one line a paragraph, code as it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.depth = self.verbatim = self.hidden = 0  # open tags: in the body, in code, in a link

    @classmethod
    def text(cls, page: str) -> str:
        parser = cls()
        parser.feed(page)
        parser.close()
        lines = "".join(parser.parts).splitlines()
        kept = [line.rstrip() for line in lines]
        return "\n".join(a for a, b in zip(kept, ["", *kept], strict=False) if a or b) + "\n"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "div" and (self.depth or values.get("role") == "main"):
            self.depth += 1
        if not self.depth:
            return
        if tag == "a" and (self.hidden or values.get("class") == "headerlink"):
            self.hidden += 1
        self.verbatim += tag == "pre"
        if tag in SPACED:
            self.parts.append("\n\n" if tag in HEADINGS or tag == "p" else "\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self.hidden:
            self.hidden -= 1
        if tag == "pre" and self.verbatim:
            self.verbatim -= 1
        if self.depth and tag in SPACED:
            self.parts.append("\n")
        if tag == "div" and self.depth:
            self.depth -= 1

    def handle_data(self, data: str) -> None:
        if not self.depth or self.hidden:
            return
        if not self.verbatim:
            data = data.replace("\n", " ")
            data = data.lstrip() if self.parts and self.parts[-1].endswith("\n") else data
        self.parts.append(data)


def pack(folder: Path, archive: Path) -> None:
    """Pack `data/` as one .tar.xz, without owners and times: the same data gives the same bytes."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    make_folder(archive.parent)
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, f"data/{file.name}", filter=plain)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(description="The corpus of the quality benchmark.")
    parser.add_argument("--archive", type=Path, required=True, help="the .tar.xz to write")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages lie (/)")
    parser.add_argument("--out", type=Path, default=Path("runs/quality-data"))
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--heldout-fraction", type=float, default=0.03)
    try:
        return build(parse_words(parser, arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
