"""Conversations of instruction data in their various formats, turned into one format.

A conversation's text is JSON: the list of its messages; {"messages": ..., "tools": ...} if it has
tools; or {"left_out": REASON} for one that cannot be used. Data sets contain rows of any kind:
unusable ones are skipped and counted by reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
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
REASONING = ("reasoning_content", "thinking")  # a message's; templates read one or the other
PARTS = ("text", "input_text", "output_text")  # the types of parts that are text


class _Odd(Exception):
    """Why a conversation cannot be used."""


def columns_beside(name: str) -> tuple[str, ...]:
    """The columns that belong to the conversations in the column `name`, where rows have them."""
    return ("completion", "tools") if name == "prompt" else ("tools",)


def chat_field_of(columns: Collection[str]) -> str:
    """The column of these, usual in instruction data, that holds conversations, or ""."""
    both = {"prompt", "completion"} <= {*columns}
    usual = ("messages", "conversations", *(("prompt",) if both else ()))
    return next((each for each in usual if each in columns), "")


def remedy_for(columns: Collection[str]) -> str:
    """What to do about rows of these columns, which lack the one that was asked for."""
    if name := chat_field_of(columns):
        return f"give --chat-field {name}"
    return "write each row as a list of messages of role and content"


def conversation_text(row: Mapping[str, Any], name: str) -> str:
    """The conversation in the column `name` of a row, as JSON.

    It is `[{role, content}, ...]` or `[{from, value}, ...]`. Content may be a list of parts of
    text. In the result, a message that calls tools (with or without text) has the key `tool_calls`;
    `weight: 0` (do not learn this message) and the keys in REASONING are kept. Other keys are
    ignored. The column `prompt` goes on with the row's `completion`; both may be text. Only the
    completion is learnt.
    """
    try:
        if name == "prompt" and row.get("completion") is not None:
            prompt = [_message(each) for each in _turns(row[name], "user")]
            messages: list[dict[str, Any]] = [
                {**each, "weight": 0} if each["role"] == "assistant" else each for each in prompt
            ]
            messages += [_message(each) for each in _turns(row["completion"], "assistant")]
        else:
            messages = [_message(each) for each in _turns(row[name])]
        if not messages:
            raise _Odd("without messages")
        tools = _tools(row.get("tools"))
        found = {"messages": messages, "tools": tools} if tools else messages
        text = json.dumps(found, ensure_ascii=False)
        text.encode("utf-8")
    except UnicodeEncodeError:
        return unusable("with half a surrogate pair, which is no Unicode text")
    except _Odd as odd:
        return unusable(str(odd))
    return text


def unusable(reason: str) -> str:
    """The text of a conversation that cannot be used. The reason continues "conversations ..."."""
    return json.dumps({"left_out": reason})


def _turns(value: Any, role: str = "") -> list[Any]:
    """A list of messages. role: of a text in place of a list; empty: there must be a list."""
    if role and isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise _Odd("that are no list of messages")
    return value


def _tools(value: Any) -> list[Any]:
    """The tools that a row describes: a list of objects, or that as JSON. Templates read nothing
    else, and a column of that name may be anything: names of tools, a number."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return []
    return [_without_nulls(each) for each in value]


def _without_nulls(value: Any) -> Any:
    """Parquet gives every object the keys of all others, with nulls: without these keys."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


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
    for key in REASONING:
        if (thought := message.get(key)) is not None:
            if not isinstance(thought, str):
                raise _Odd(f"with a {key} that is not text")
            found |= {key: thought} if thought else {}
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
