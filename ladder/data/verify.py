"""Verification of shards against the checksums in their index.

A flipped bit gives a valid token, so nothing else would notice it. While training reads the shards,
a thread does the work, since terabytes take long: damage to small data is known before training
begins, else soon after. Held-out shards, which are small, are checked before they are scored.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from ladder.data.index import REMEDY
from ladder.data.mix import Mix
from ladder.data.prepared import TokenData
from ladder.files import checksum
from ladder.models.errors import UserError

PROMPT = 1.0  # seconds that a run waits for the result before it begins


def check_shards(data: TokenData, split: str) -> None:
    """Compare the shards of a split with their checksums. Raises UserError for a damaged one."""
    for path, digest in _shards(data, split):
        if said := _damage(path, digest):
            raise UserError(said)


def _shards(data: TokenData, split: str = "") -> list[tuple[Path, str]]:
    """The shards of a split, or of all, with their checksums."""
    return [
        (source.folder / shard["file"], shard["sha256"])
        for source in (data.sources if isinstance(data, Mix) else (data,))
        for name, record in source.index["splits"].items()
        if split in ("", name)
        for shard in record["shards"]
    ]


def _damage(path: Path, digest: str) -> str:
    """The error message for a shard that is damaged or cannot be read, or ""."""
    try:
        found = checksum(path)
    except OSError as error:
        return f"shard {path} cannot be read: {error.strerror}; {REMEDY}"
    if found != digest:
        return (
            f"shard {path} is damaged: its SHA-256 is not the one in the index; copy it again, or "
            f"{REMEDY}"
        )
    return ""


class Verification:
    """Compares this rank's part of the shards with their checksums, inside a `with`.

    Rank `rank` of `ranks` takes every `ranks`th shard of `data`.
    """

    def __init__(self, data: TokenData, rank: int = 0, ranks: int = 1) -> None:
        self.shards = _shards(data)[rank::ranks]
        self.failure = ""  # the error message for the first damaged shard
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._compare, name="shards", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __enter__(self) -> Verification:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()  # the thread stops after its current shard

    def soon(self) -> str:
        """The error message of a damaged shard or "", after PROMPT seconds at most."""
        self._thread.join(PROMPT)
        return self.failure

    def check(self) -> None:
        """Raise UserError if a damaged shard has been found."""
        if self.failure:
            raise UserError(self.failure)

    def _compare(self) -> None:
        for path, digest in self.shards:
            if self._ended.is_set() or self.failure:
                return
            self.failure = _damage(path, digest)
