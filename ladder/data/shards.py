"""The shards of a prepared folder while they are written: kept on disk, gone on with after a crash.

Beside the folder that is to be, `out`, lies `.OUT.unfinished`:
    progress.json   what was asked for, how far it is done, and so how long each shard is
    data/           the shards as far as they are written; moved to `out` in the end
    old/            what `out` held, while the two change places
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
from ladder.models.errors import UserError

KEPT = 2  # units done, from which on a call that fails leaves them to the next one


class Unfinished:
    """The work that was done for `out`: `state` says what, `append` and `commit` add to it.

    state: plain data. `arguments` is what the result depends on, `units` how many are in it,
    `splits` what each holds (as the index has it); the caller keeps there what else it needs.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f".{out.name}.unfinished")
        self.data, self.old = self.folder / "data", self.folder / "old"
        self.state: dict[str, Any] = self._load()
        self.begun = False
        self._hashes: dict[str, Any] = {}  # of the last shard of each split
        self._touched: set[Path] = set()

    @property
    def units(self) -> int:
        return int(self.state.get("units", 0))

    def differs(self, arguments: Mapping[str, Any]) -> str:
        """What the work was done with other than `arguments`; empty: nothing, it can go on."""
        before = self.state["arguments"]
        for key in {**arguments, **before}:
            if arguments.get(key) != before.get(key):
                return f"{key}={before.get(key)!r} and not {arguments.get(key)!r}"
        return ""

    def start(self, state: Mapping[str, Any], splits: tuple[str, ...]) -> None:
        """Begin, with nothing done."""
        self.begun = True
        self._progress.unlink(missing_ok=True)  # first: it must not speak of shards that are gone
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir()
        self._hashes.clear()
        self._touched.clear()
        empty = {name: {"tokens": 0, "bytes": 0, "documents": 0, "shards": []} for name in splits}
        self.state = {**state, "units": 0, "splits": empty}

    def go_on(self) -> bool:
        """Bring the shards back to what `state` says; False where they are not what it says."""
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
        """Add documents to a split: files of `shard_tokens` tokens each, the last one shorter."""
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
                self._touched.add(self.data)  # a new file is an entry of its folder
            with path.open("ab") as file:
                file.write(data)
            self._touched.add(path)
            self._hashes[shard["file"]].update(data)
            shard["tokens"] += len(part)
            if shard["tokens"] == shard_tokens:
                self._close(shard)

    def commit(self, **facts: Any) -> None:
        """One more unit is done, on disk; `facts` replace what `state` says."""
        for path in self._touched:
            files.sync(path)
        self._touched.clear()
        self.state.update(facts, units=self.units + 1)
        files.write_text(self._progress, json.dumps(self.state))

    def finish(self, fill: Callable[[Path], None], check: Callable[[], None]) -> None:
        """Have `fill` add to the shards what else belongs there, and give them the name `out`.

        `check` refuses an `out` that must not be replaced.
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
        """The last shards get their hashes: nothing will be added."""
        for record in self.state["splits"].values():
            for shard in record["shards"]:
                if "sha256" not in shard:
                    self._close(shard)

    def restore(self) -> None:
        """Give `out` back what it held, where it was taken aside and nothing took its place."""
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
        except (OSError, ValueError):  # never written, or cut off by a crash of the machine
            return {}
        return state if isinstance(state, dict) and self.data.is_dir() else {}


@contextmanager
def unfinished(out: Path) -> Iterator[Unfinished]:
    """The work for `out`, this process's alone. Its folder is gone at the end of the body.

    Where the body fails, it stays if enough was done; a process that is killed leaves it anyway.
    Raises UserError where another process is at it, or where `out` cannot be written.
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
                    print(f"kept in {work.folder}; the same command goes on there", file=sys.stderr)
        except OSError as error:
            raise UserError(
                f"{out} cannot be written ({error}); choose another folder or make room"
            ) from error
