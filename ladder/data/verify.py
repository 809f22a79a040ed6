"""Verification of shards against the checksums in their index, while training reads them.

A flipped bit gives a valid token, so nothing else would notice it. A thread does the work, since
terabytes take long: damage to small data is known before training begins, else soon after.
"""

from __future__ import annotations

import threading
from types import TracebackType

from ladder.data.index import REMEDY
from ladder.data.mix import Mix
from ladder.data.prepared import TokenData
from ladder.files import checksum
from ladder.models.errors import UserError

PROMPT = 1.0  # seconds that a run waits for the result before it begins


class Verification:
    """Compares this rank's part of the shards with their checksums, inside a `with`.

    Rank `rank` of `ranks` takes every `ranks`th shard of `data`.
    """

    def __init__(self, data: TokenData, rank: int = 0, ranks: int = 1) -> None:
        sources = data.sources if isinstance(data, Mix) else (data,)
        shards = [
            (source.folder / shard["file"], shard["sha256"])
            for source in sources
            for record in source.index["splits"].values()
            for shard in record["shards"]
        ]
        self.shards = shards[rank::ranks]
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
            if self._ended.is_set():
                return
            try:
                found = checksum(path)
            except OSError as error:
                self.failure = f"shard {path} cannot be read: {error.strerror}; {REMEDY}"
                return
            if found != digest:
                self.failure = (
                    f"shard {path} is damaged: its SHA-256 is not the one in the index; copy it "
                    f"again, or {REMEDY}"
                )
                return
