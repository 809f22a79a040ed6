"""The text of completions: printed as its tokens come, and ended by stop strings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import chain, islice

from tokenizers import Tokenizer

from ladder.data.tokenizer import encode
from ladder.models.errors import UserError

CONTEXT = 32  # about the number of earlier tokens with which a new token is decoded


def continuation(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text that `tokens` add to the prompt; decoded alone, they may lose a leading space."""
    return str(tokenizer.decode(prompt + tokens))[len(tokenizer.decode(prompt)) :]


def _tail_start(tokenizer: Tokenizer, tokens: list[int], count: int) -> int:
    """Where about the last `count` tokens start, with a whole character if there is one.

    If its first byte is missing, decoders may lose all that follow. Up to 3 bytes may be missing.
    """
    last = max(0, len(tokens) - count)
    for start in range(last, max(-1, last - 4), -1):
        if not tokenizer.decode(tokens[start:]).startswith("\ufffd"):
            return start
    return last


# ---- stop strings -------------------------------------------------------------------------------


def read_stops(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[set[int], list[str]]:
    """The ids of the special tokens among the texts of --stop, and the other texts.

    Special tokens are no part of a completion's text, so their ids end it.
    """
    special = _special(tokenizer)
    for text in texts:
        encode(tokenizer, text, "--stop", special=False)  # refuses what is not UTF-8
        held = next((name for name in special if name in text), text)
        if held != text and text not in special:
            raise UserError(
                f"--stop={text!r} has the special token {held} beside other text; give --stop "
                f"{held} alone"
            )
    ids = {special[text] for text in texts if text in special}
    return ids, [text for text in texts if text not in special]


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens and their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special}


def stopper(
    tokenizer: Tokenizer, until: Sequence[str], prompts: Sequence[list[int]] | None = None
) -> Callable[[int, list[int]], bool] | None:
    """A function: do the new tokens complete one of the stop strings? None: there are none.

    It is for `ended` of `Engine.generate`. It depends on the tokens alone, so all ranks agree.
    prompts: the token ids before the new ones, for the text as it is printed (`continuation`).
    None: the new tokens are decoded alone, with special tokens, as the evaluation harness does.
    """
    until = [text for text in until if text]
    if not until:
        return None
    # A token of the text stands for at least one byte, and the tail's first may decode without its
    # space.
    longest = max(len(text.encode("utf-8")) for text in until) + 4
    heads = [prompt[_tail_start(tokenizer, prompt, CONTEXT) :] for prompt in prompts or ()]
    special = {*_special(tokenizer).values()}

    def ended(i: int, tokens: list[int]) -> bool:
        if prompts is None:
            start = _tail_start(tokenizer, tokens, longest)
            tail = tokenizer.decode(tokens[start:], skip_special_tokens=False)
        else:
            printed = (token for token in reversed(tokens) if token not in special)
            last = [*islice(printed, longest + 4 + CONTEXT)][::-1]
            start = _tail_start(tokenizer, last, longest)
            before = [*heads[i], *last[:start]]
            before = before[_tail_start(tokenizer, before, CONTEXT) :]
            tail = continuation(tokenizer, before, last[start:])
        return any(text in tail for text in until)

    return ended


def before_stop(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string in it; all of it if there is none."""
    return text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))]


def _undecided(text: str, until: Sequence[str]) -> int:
    """The number of characters at the text's end that may begin a stop string."""
    return max(
        (n for stop in until for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0
    )


# ---- printing -----------------------------------------------------------------------------------


class TokenPrinter:
    """Prints one completion token by token, up to a stop string.

    It holds back characters whose bytes are incomplete, and text that may begin a stop string.

    prompt: the prompt's token ids. text: printed before the completion, with its first token.
    until: the stop strings. A new token is decoded with only the last few tokens, so its time does
    not grow with the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], text: str, until: Sequence[str] = ()
    ) -> None:
        self.tokenizer, self.before, self.until = tokenizer, text, until
        self.tokens: list[int] = []  # not decoded yet
        self.shown = [prompt[_tail_start(tokenizer, prompt, CONTEXT) :]]  # whole characters each
        self.waiting = ""  # decoded, and may begin a stop string
        self.stopped = False

    def _text(self) -> str:
        return continuation(self.tokenizer, [*chain(*self.shown)], self.tokens)

    def _print(self, text: str, last: bool) -> None:
        if self.stopped:
            return
        self.waiting += text
        shown = before_stop(self.waiting, self.until)
        self.stopped = len(shown) < len(self.waiting)
        if not self.stopped and not last:
            shown = shown[: len(shown) - _undecided(shown, self.until)]
        self.waiting = self.waiting[len(shown) :]
        sys.stdout.write(self.before + shown)
        sys.stdout.flush()
        self.before = ""

    def add(self, _: int, token: int) -> None:
        self.tokens.append(token)
        text = self._text()
        if not text.endswith("\ufffd"):  # the bytes of a character may be split over tokens
            self._print(text, last=False)
            self.shown.append(self.tokens)
            self.tokens = []
            if sum(map(len, self.shown[1:])) >= CONTEXT:
                del self.shown[0]

    def end(self) -> None:
        self._print(self._text(), last=True)
        print()
