"""Shards are compared with the checksums in their index while training reads them.

A flipped bit is a token like any other, so that nothing else would tell. A thread does it, for
terabytes take long: what is damaged is known before training begins where the data is small, and
soon after otherwise.
"""

from __future__ import annotations

import threading
from types import TracebackType

from ladder.data.batches import TokenData
from ladder.data.index import REMEDY
from ladder.data.mix import Mix
from ladder.files import checksum
from ladder.models.errors import UserError

PROMPT = 1.0  # seconds that a run waits for it before it begins


class Verification:
    """Compares this rank's part of the shards, within a `with`.

    data: of which rank `rank` of `ranks` takes every `ranks`th shard.
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
        self.failure = ""  # what is wrong with the first that is damaged
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
        self._ended.set()  # it ends with the shard that it is at

    def soon(self) -> str:
        """What is wrong, empty where nothing is known to be, after PROMPT seconds at most."""
        self._thread.join(PROMPT)
        return self.failure

    def check(self) -> None:
        """Raise UserError where a damaged shard has been found."""
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
