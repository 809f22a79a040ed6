"""Conversations as tokens; the tokens of answers are marked, since the loss counts only these.

The tokenizer's chat template turns a conversation into text, which is cut where answers begin and
end. Each piece is tokenised on its own, as at inference, where the prompt ends where the answer
begins. A message that contains a special token's name would be tokenised as that token, so such
conversations are left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ladder.data.conversations import REASONING
from ladder.data.encoded import ANSWER, BEGINS, Encoded
from ladder.data.formats import Document, Field
from ladder.data.sandbox import CLOSE, OPEN
from ladder.data.sources import name_hash
from ladder.data.template import ChatTemplate, LeftOut, Piece
from ladder.data.tokenizer import encode_batch, parse_tokenizer
from ladder.data.units import Unit
from ladder.models.errors import UserError

AT_ONCE = 512  # conversations


class EncodeChat:
    """Reads and tokenises a unit of conversations; for text see `ladder.data.text.EncodeText`."""

    def __init__(self, definition: str, field: Field, template: ChatTemplate) -> None:
        self.definition, self.field, self.template = definition, field, template
        self._tokenizer: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}

    def _open(self) -> None:
        """Make the tokenizer, once in each process."""
        if self._tokenizer is not None:
            return
        self._tokenizer = parse_tokenizer(self.definition)
        self._tokenizer.encode_special_tokens = False  # the template writes special tokens
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = np.array([i for i, token in added.items() if token.special], np.int64)
        names = [re.escape(token.content) for token in added.values() if token.special]
        self._names = re.compile("|".join(names) or r"(?!)")

    def ends_answers(self) -> bool:
        """Whether the template writes a special token after an answer, as tried with a short
        example; True if it refuses the example."""
        self._open()
        example = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            pieces = self.template.pieces(example)
        except LeftOut:
            return True
        return any(piece.answer and self._names.search(piece.text) for piece in pieces)

    def __call__(self, unit: Unit) -> Encoded:
        self._open()
        tokens: list[npt.NDArray[Any]] = [np.empty(0, "<u4")]
        keys: list[int] = []
        sizes: list[int] = []
        left_out: Counter[str] = Counter()
        first: dict[str, str] = {}
        batch: list[list[Piece]] = []
        answer_ends: set[int | None] = set()

        def flush() -> None:
            tokens.extend(self._encode(batch, answer_ends))
            batch.clear()

        for document in unit.read(self.field):
            try:
                batch.append(self._pieces(document))
            except LeftOut as reason:
                left_out[str(reason)] += 1
                first.setdefault(str(reason), document.name)
                continue
            except UserError as error:
                raise UserError(f"conversation {document.name}: {error}") from error
            keys.append(name_hash(document.name))
            sizes.append(document.bytes)
            if len(batch) == AT_ONCE:
                flush()
        flush()
        lengths = np.array([len(each) for each in tokens[1:]], np.int64)
        return Encoded(
            np.concatenate(tokens), np.array(keys, np.uint64), lengths, np.array(sizes, np.int64),
            left_out, first, frozenset(answer_ends),
        )  # fmt: skip

    def _pieces(self, document: Document) -> list[Piece]:
        messages, tools = json.loads(document.text), None
        if isinstance(messages, dict):
            if "left_out" in messages:
                raise LeftOut(messages["left_out"])
            messages, tools = messages["messages"], messages["tools"]
        if any("tool_calls" in message for message in messages):
            raise LeftOut("in which tools are called")  # the call's arguments were not read
        said = [message.get(key, "") for message in messages for key in ("content", *REASONING)]
        said.append(json.dumps(tools, ensure_ascii=False))
        if any(map(self._names.search, said)):
            raise LeftOut("in which someone says a special token's name")
        if any(mark in each for mark in (OPEN, CLOSE) for each in said):
            raise LeftOut("with a character that marks answers, U+FDD0 or U+FDD1")
        return self.template.pieces(messages, tools)

    def _encode(
        self, batch: list[list[Piece]], answer_ends: set[int | None]
    ) -> Iterator[npt.NDArray[Any]]:
        """Each conversation's tokens with their marks, uint32. Adds to `answer_ends`."""
        assert self._tokenizer is not None
        texts = [piece.text for pieces in batch for piece in pieces]
        encodings = iter(encode_batch(self._tokenizer, texts))
        for pieces in batch:
            parts = []
            for piece in pieces:
                ids = np.array(next(encodings).ids, np.uint32)
                if piece.answer:
                    end = self._end(piece.text, ids)
                    answer_ends.add(None if end is None else int(ids[end]))
                    ids[: None if end is None else end + 1] |= ANSWER
                parts.append(ids)
            tokens = np.concatenate(parts)
            tokens[:1] |= BEGINS
            yield tokens.astype("<u4", copy=False)

    def _end(self, text: str, answer: npt.NDArray[Any]) -> int | None:
        """The position of an answer's end token, the last to learn: only a new line may follow it.
        None if other text follows the last special token: then the whole answer is learnt."""
        ends = np.flatnonzero(np.isin(answer, self._special))
        after = self._names.split(text)[-1]
        return int(ends[-1]) if len(ends) and not after.strip() else None
