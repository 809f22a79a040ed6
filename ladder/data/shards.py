"""The unfinished shards of a prepared folder, from which an interrupted `prepare` resumes.

The folder `.OUT.unfinished` beside `out` holds:
    progress.json   the arguments, the progress and the length of each shard
    data/           the shards written so far; renamed to `out` at the end
    old/            the previous content of `out`, while the two are exchanged
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder import files, lock
from ladder.data.streams import compared
from ladder.models.errors import UserError

KEPT = 2  # a call that fails keeps its finished units if there are at least so many


class Unfinished:
    """The unfinished work for `out`, to which `append` and `commit` add.

    state: plain data. `arguments` determine the result, `units` is the number of finished units,
    `splits` has the form that it has in the index; the caller adds further keys.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f".{out.name}.unfinished")
        self.data, self.old = self.folder / "data", self.folder / "old"
        self.state: dict[str, Any] = self._load()
        self.begun = False
        self._hashes: dict[str, Any] = {}  # running SHA-256 of the last shard of each split
        self._touched: set[Path] = set()

    @property
    def units(self) -> int:
        return int(self.state.get("units", 0))

    def differs(self, arguments: Mapping[str, Any]) -> str:
        """The first argument that differs from `arguments`, in words; empty where none does."""
        before = self.state["arguments"]
        for key in {**arguments, **before}:
            if compared(key, arguments.get(key)) != compared(key, before.get(key)):
                return f"{key}={before.get(key)!r} and not {arguments.get(key)!r}"
        return ""

    def start(self, state: Mapping[str, Any], splits: tuple[str, ...]) -> None:
        """Start from nothing."""
        self.begun = True
        self._progress.unlink(missing_ok=True)  # first: it must never name shards that are deleted
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir()
        self._hashes.clear()
        self._touched.clear()
        empty = {name: {"tokens": 0, "bytes": 0, "documents": 0, "shards": []} for name in splits}
        self.state = {**state, "units": 0, "splits": empty}

    def go_on(self) -> bool:
        """Truncate the shards to the lengths in `state`; False if one is missing or too short."""
        self.begun = True
        known = set()
        for record in self.state["splits"].values():
            for shard in record["shards"]:
                path = self.data / shard["file"]
                size = shard["tokens"] * self.state["itemsize"]
                if not path.is_file() or path.stat().st_size < size:
                    return False
                os.truncate(path, size)
                known.add(path)
                if "sha256" not in shard:
                    self._hashes[path.name] = hashlib.sha256(path.read_bytes())
        for path in set(self.data.iterdir()) - known:
            path.unlink()
        return True

    def append(
        self,
        split: str,
        tokens: npt.NDArray[Any],
        documents: int,
        size: int,
        shard_tokens: int,
    ) -> None:
        """Append documents to a split, in files of `shard_tokens` tokens; the last is shorter."""
        record = self.state["splits"][split]
        shards = record["shards"]
        record["tokens"] += len(tokens)
        record["documents"] += documents
        record["bytes"] += size
        while len(tokens):
            if not shards or "sha256" in shards[-1]:
                shards.append({"file": f"{split}-{len(shards):05d}.bin", "tokens": 0})
                self._hashes[shards[-1]["file"]] = hashlib.sha256()
            shard = shards[-1]
            part, tokens = np.split(tokens, [shard_tokens - shard["tokens"]])
            data = part.tobytes()
            path = self.data / shard["file"]
            if not shard["tokens"]:
                self._touched.add(self.data)  # the folder has a new entry to sync
            with path.open("ab") as file:
                file.write(data)
            self._touched.add(path)
            self._hashes[shard["file"]].update(data)
            shard["tokens"] += len(part)
            if shard["tokens"] == shard_tokens:
                self._close(shard)

    def commit(self, **facts: Any) -> None:
        """Record on disk that one more unit is finished; `facts` update `state`."""
        for path in self._touched:
            files.sync(path)
        self._touched.clear()
        self.state.update(facts, units=self.units + 1)
        files.write_text(self._progress, json.dumps(self.state))

    def finish(self, fill: Callable[[Path], None], check: Callable[[], None]) -> None:
        """Let `fill` write the other files of the folder, then rename the folder to `out`.

        `check` raises for an `out` that must not be replaced.
        """
        fill(self.data)
        for path in (*self.data.rglob("*"), self.data):
            files.sync(path)
        check()
        try:
            if self.out.exists():
                self.out.rename(self.old)
            self.data.rename(self.out)
        except BaseException:
            self.restore()
            raise
        files.sync(self.out.parent)
        self.state = {}  # nothing is left to go on with

    def close_shards(self) -> None:
        """Record the hashes of the last shards: no documents will follow."""
        for record in self.state["splits"].values():
            for shard in record["shards"]:
                if "sha256" not in shard:
                    self._close(shard)

    def restore(self) -> None:
        """Move the previous content back to `out`, if it was moved away and not replaced."""
        if self.old.exists() and not self.out.exists():
            self.old.rename(self.out)

    def _close(self, shard: dict[str, Any]) -> None:
        shard["sha256"] = self._hashes.pop(shard["file"]).hexdigest()

    @property
    def _progress(self) -> Path:
        return self.folder / "progress.json"

    def _load(self) -> dict[str, Any]:
        try:
            state = json.loads(self._progress.read_bytes())
        except (OSError, ValueError):  # never written, or truncated by a crash of the machine
            return {}
        return state if isinstance(state, dict) and self.data.is_dir() else {}


@contextmanager
def unfinished(out: Path) -> Iterator[Unfinished]:
    """The unfinished work for `out`, locked for this process.

    Its folder is removed at the end of the body. If the body fails, the folder is kept if it has
    KEPT finished units or more; if the process is killed, it is always kept. Raises UserError if
    another process holds the lock, or if `out` cannot be written.
    """
    with lock.hold(files.beside(out), f"out={out}"):
        work = Unfinished(out)
        try:
            work.folder.mkdir(exist_ok=True)
            work.restore()
            try:
                yield work
            finally:
                if work.units < KEPT:
                    shutil.rmtree(work.folder, ignore_errors=True)
                elif work.begun:
                    print(f"kept in {work.folder}; the same command resumes", file=sys.stderr)
        except OSError as error:
            raise UserError(
                f"{out} cannot be written ({error}); choose another folder or make room"
            ) from error
