"""Conversations of instruction data in their various formats, turned into one format.

A conversation's text is JSON: the list of its messages, or {"left_out": REASON} for one that cannot
be used. Data sets contain rows of any kind: unusable ones are skipped and counted by reason.
"""

from __future__ import annotations

import json
from typing import Any

# Infinity-Instruct and others of the ShareGPT form have their own names of roles; `developer` is
# OpenAI's newer name of `system`, `function` its older name of `tool`.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
KNOWN = ("system", "user", "assistant", "tool")
CALLS = ("tool_calls", "function_call")
FORMS = (("role", "content"), ("from", "value"))
PARTS = ("text", "input_text", "output_text")  # the types of parts that are text


class _Odd(Exception):
    """Why a conversation cannot be used."""


def conversation_text(value: Any) -> str:
    """A conversation as JSON, `[{"role": "user", "content": "..."}, ...]`.

    value: `[{role, content}, ...]` or `[{from, value}, ...]`. Content may be a list of parts of
    text. In the result, a message that calls tools (with or without text) has the key `tool_calls`,
    and `weight: 0` (do not learn this message) is kept. Other keys are ignored.
    """
    try:
        if not isinstance(value, list):
            raise _Odd("that are no list of messages")
        if not value:
            raise _Odd("without messages")
        text = json.dumps([_message(each) for each in value], ensure_ascii=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return unusable("with half a surrogate pair, which is no Unicode text")
    except _Odd as odd:
        return unusable(str(odd))
    return text


def unusable(reason: str) -> str:
    """The text of a conversation that cannot be used. The reason continues "conversations ..."."""
    return json.dumps({"left_out": reason})


def _message(message: Any) -> dict[str, Any]:
    form = None
    if isinstance(message, dict):
        form = next((form for form in FORMS if form[0] in message and form[1] in message), None)
    if form is None:
        raise _Odd("with a message that has neither role and content nor from and value")
    speaker, content = (message[key] for key in form)
    role = ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
    if role not in KNOWN:
        raise _Odd(f"with a {form[0]} that is none of {', '.join((*KNOWN, *ROLES))}")
    found = {"role": role, "content": _text(content)}
    if speaker == "function_call" or any(message.get(key) for key in CALLS):
        found = {"role": role, "content": found["content"] or "", "tool_calls": ""}
    if found["content"] is None:
        raise _Odd("with content that is not text")
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise _Odd("with a weight that is neither 0 nor 1")
    return {**found, "weight": 0} if weight == 0 else found


def _text(content: Any) -> str | None:
    """A message's content, a string or a list of parts of text; None where it is something else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type", "text") in PARTS
    ]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts and len(texts) == len(content) else None
