"""Chat templates: Jinja templates that turn a conversation into a tokenizer's text format.

They are rendered in Jinja's sandbox as transformers renders them, but without its function that
gives the date: a conversation gives the same text on any day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError, UndefinedError
from tokenizers import Tokenizer

from ladder.data.conversations import REASONING
from ladder.data.sandbox import CLOSE, LONGEST, MEMORY, OPEN, LimitError, Sandbox
from ladder.data.tokenizer import (
    TEMPLATE,
    TOKENIZER_CONFIG,
    end_of_text,
    special_tokens,
    tokenizer_config,
    tokenizer_file,
)
from ladder.models.errors import UserError, reason

Message = dict[str, Any]  # role and content; one with weight 0 is not learnt
DATE = "strftime_now"  # transformers' function that gives the date
MARK = "END_OF_LAST_MESSAGE "  # a text that occurs in no conversation


class LeftOut(Exception):
    """A conversation that the template cannot render; the message is the reason."""


class RenderError(UserError):
    """The template fails at a conversation, and may not at others."""


class Piece(NamedTuple):
    """A part of a conversation's text. answer: the model writes it, including the end token."""

    text: str
    answer: bool


class ChatTemplate:
    """A template and the special tokens that it uses. It can be pickled.

    source: the Jinja text. where: its origin, for errors. Raises UserError for invalid Jinja.
    """

    def __init__(self, source: str, names: dict[str, str], where: str) -> None:
        self.source, self.names, self.where = source, names, where
        self._compile()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("source", "names", "where")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _compile(self) -> None:
        self._sandbox = Sandbox()
        self._sandbox.filters["tojson"] = _to_json
        self._sandbox.globals["raise_exception"] = _refuse
        try:
            self._template = self._sandbox.run(lambda: self._sandbox.from_string(self.source))
        except Exception as error:  # Python compiles Jinja's output, and has limits of its own
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, TemplateSyntaxError):
                what = f"line {error.lineno}: {error.message}"
            raise UserError(
                f"the chat template of {self.where} is not valid Jinja ({what}); give one with "
                f"--chat-template"
            ) from error

    def render(
        self, messages: Sequence[Message], prompt: bool = False, tools: list[Any] | None = None
    ) -> str:
        """The text of a conversation; prompt: with the beginning of the assistant's next turn.

        tools: descriptions of the tools that the assistant may call. Raises LeftOut if the template
        refuses the conversation, and UserError if the template fails or exceeds the limits of
        ladder.data.sandbox.
        """
        return self._unmarked(self._marked(messages, prompt, tools))

    def _unmarked(self, text: str) -> str:
        return text.replace(OPEN, "").replace(CLOSE, "") if self._sandbox.tagged else text

    def _marked(self, messages: Sequence[Message], prompt: bool, tools: list[Any] | None) -> str:
        """The text with the marks of {% generation %} tags, if the template has any."""
        try:
            return self._sandbox.run(lambda: self._render(messages, prompt, tools))
        except LeftOut:
            raise
        except Exception as error:  # a template is a program and may raise anything
            kind = RenderError if isinstance(error, UndefinedError | TypeError) else UserError
            raise kind(
                f"the chat template of {self.where} cannot render a conversation ({_why(error)}); "
                f"give {'one without it' if _of_date(error) else 'another'} with --chat-template"
            ) from error

    def _render(self, messages: Sequence[Message], prompt: bool, tools: list[Any] | None) -> str:
        size, found = 0, []
        for text in self._template.generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt,
            **self.names,
        ):  # fmt: skip
            size += len(text)
            if size > LONGEST:
                raise LimitError(f"it writes more than {LONGEST:,} characters")
            found.append(text)
        whole = "".join(found)
        whole.encode("utf-8")  # raises for half a surrogate pair
        return whole

    def unfinished(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to the end of its last message, for continuing that."""
        last = {**messages[-1], "content": messages[-1]["content"] + MARK}
        before, mark, after = self.render([*messages[:-1], last]).rpartition(MARK.strip())
        if not mark:
            raise LeftOut("whose last message the template does not show")
        # If the mark has lost its trailing space, the template strips messages.
        return before if after.startswith(" ") else before.rstrip()

    def pieces(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[Piece]:
        """The text of a conversation, cut where answers begin and end.

        Answers are what the template writes inside of {% generation %} tags. If it has none, an
        answer begins where the prompt for it ends, so it is exactly the text that the model has to
        write. Raises LeftOut if there is no answer, if it cannot be located in the text, if
        reasoning or tools are not in the text, or if the template fails at the conversation;
        UserError if it exceeds its limits.
        """
        try:
            marked = self._marked(messages, False, tools)
            whole = self._unmarked(marked)
            thoughts = (message.get(key, "") for message in messages for key in REASONING)
            if not all(thought.strip() in whole for thought in thoughts):
                raise LeftOut("with reasoning that the template does not write")
            if tools and whole == self.render(messages):
                raise LeftOut("with tools that the template does not write")
            if self._sandbox.tagged:
                found = self._cut_by_tags(messages, marked)
            else:
                found = self._cut(messages, whole, tools)
        except RenderError as error:
            raise LeftOut(f"that the template cannot render ({_why(error.__cause__)})") from error
        if not any(piece.answer and piece.text for piece in found):
            if any(piece.text for piece in found[1::2]):
                raise LeftOut("whose answers all have weight 0")
            answered = any(message["role"] == "assistant" for message in messages)
            raise LeftOut(
                "whose answers the template does not write" if answered else "without an answer"
            )
        return [piece for piece in found if piece.text]

    def _cut_by_tags(self, messages: Sequence[Message], marked: str) -> list[Piece]:
        """What lies outside and inside of the tags, by turns."""
        parts = re.split(f"([{OPEN}{CLOSE}])", marked)
        texts, marks = parts[::2], "".join(parts[1::2])
        if marks != (OPEN + CLOSE) * (len(texts) // 2):
            raise LeftOut("whose {% generation %} tags do not open and close by turns")
        learnt = [each.get("weight") != 0 for each in messages if each["role"] == "assistant"]
        if all(learnt):  # a template may write several tags for one answer
            learnt = [True] * (len(texts) // 2)
        if len(learnt) != len(texts) // 2:
            raise LeftOut("with answers of weight 0 that {% generation %} tags do not tell apart")
        return [Piece(text, n % 2 == 1 and learnt[n // 2]) for n, text in enumerate(texts)]

    def _cut(self, messages: Sequence[Message], whole: str, tools: list[Any] | None) -> list[Piece]:
        """The text before each answer and the answer, by turns; then the rest."""
        found: list[Piece] = []
        done = 0
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._prompt(messages[:n], tools)
            last = n + 1 == len(messages)
            after = whole if last else self.render(messages[: n + 1], tools=tools)
            if not (whole.startswith(after) and after.startswith(before) and done <= len(before)):
                raise LeftOut("with turns that the template writes otherwise once others follow")
            learnt = message.get("weight") != 0
            found += [Piece(whole[done : len(before)], False), Piece(after[len(before) :], learnt)]
            done = len(after)
        return [*found, Piece(whole[done:], False)]

    def _prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> str:
        try:
            return self.render(messages, prompt=True, tools=tools)
        except RenderError as error:
            if messages:
                raise
            # Many templates look at the first message, of which there is none.
            raise LeftOut("that begin with an answer") from error


def load_template(
    tokenizer: Path, encoder: Tokenizer, given: Path | None
) -> tuple[ChatTemplate, dict[str, Any]]:
    """The chat template `given`, or the one beside a tokenizer.json; and tokenizer_config.json.

    Raises UserError if there is no valid template.
    """
    path, config = tokenizer.with_name(TOKENIZER_CONFIG), tokenizer_config(tokenizer.parent)
    names = special_tokens(tokenizer.parent)
    if "eos_token" not in names:
        names["eos_token"] = encoder.id_to_token(end_of_text(encoder))
    if not config.get("eos_token"):
        config["eos_token"] = names["eos_token"]
    if encoder.token_to_id(names["eos_token"]) is None:
        raise UserError(
            f"{tokenizer.parent} has eos_token={names['eos_token']!r}, which {tokenizer} does not "
            f"know; copy the tokenizer's files again"
        )
    file = given or tokenizer.with_name(TEMPLATE)
    if given is not None or file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), names, str(file)), config
        except UnicodeDecodeError as error:
            raise UserError(f"the chat template {file} is {reason(error)}; convert it") from error
        except OSError as error:
            raise UserError(
                f"the chat template {file} cannot be read ({reason(error)}); give the path of a "
                f"Jinja file"
            ) from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        named = (each for each in source if isinstance(each, dict))
        source = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if not isinstance(source, str):
        raise UserError(
            f"the tokenizer {tokenizer} has no chat template (no {TEMPLATE} beside it, and no "
            f"chat_template in {TOKENIZER_CONFIG}); give a Jinja file with --chat-template"
        )
    return ChatTemplate(source, names, str(path)), config


def open_template(folder: Path, tokenizer: Tokenizer, given: str | None) -> ChatTemplate | None:
    """The template in the file `given`; "" is the template of a model's folder, None is none."""
    if given is None:
        return None
    return load_template(tokenizer_file(folder), tokenizer, Path(given) if given else None)[0]


def _to_json(value: Any, **options: Any) -> str:
    """The filter `tojson`; Jinja's own would escape HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _of_date(error: BaseException | None) -> bool:
    """Whether the template calls transformers' function of the date."""
    return isinstance(error, UndefinedError) and str(error) == f"{DATE!r} is undefined"


def _why(error: BaseException | None) -> str:
    """Why a template cannot render a conversation."""
    if isinstance(error, LimitError | MemoryError):
        return str(error) or f"it takes more than {MEMORY / 2**30:g} GiB of memory"
    if _of_date(error):
        return f"it asks for the date by {DATE}, which is undefined, so that data is reproducible"
    return f"{type(error).__name__}: {error}"


def _refuse(message: str) -> None:
    raise LeftOut(f"that the template refuses ({message})")
