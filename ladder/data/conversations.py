"""Conversations as instruction data has them, as lists of messages in one spelling."""

from __future__ import annotations

import json
from typing import Any

from ladder.models.errors import UserError, unknown

# Infinity-Instruct and others of the ShareGPT form name who speaks in their own way.
ROLES = {"human": "user", "gpt": "assistant"}
KNOWN = ("system", "user", "assistant", "tool")
CALLS = ("tool_calls", "function_call")
FORMS = (("role", "content"), ("from", "value"))


def conversation_text(value: Any, where: str) -> str:
    """A conversation as JSON, `[{"role": "user", "content": "..."}, ...]`; no messages: "".

    value: `[{role, content}, ...]` or `[{from, value}, ...]`; other keys are passed over. A message
    that calls tools beside what it says, or in place of it, has the key `tool_calls`.

    Raises UserError, with `where`, for anything else.
    """
    if not isinstance(value, list):
        raise UserError(
            f"{where} is a {type(value).__name__}, not a list of messages; mend or remove it, or "
            f"choose another chat_field"
        )
    if not value:
        return ""
    messages = [_message(each, f"{where}, message {n}") for n, each in enumerate(value, 1)]
    return json.dumps(messages, ensure_ascii=False)


def _message(message: Any, where: str) -> dict[str, str]:
    form = None
    if isinstance(message, dict):
        form = next((form for form in FORMS if form[0] in message and form[1] in message), None)
    if form is None:
        keys = ", ".join(message) if isinstance(message, dict) else type(message).__name__
        raise UserError(
            f"{where} has neither role and content nor from and value ({keys}); mend or remove the "
            f"conversation"
        )
    role, content = (message[key] for key in form)
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in KNOWN:
        raise unknown(f"{form[0]} of {where}", role, (*KNOWN, *ROLES))
    calls = any(message.get(key) for key in CALLS)
    if calls and content is None:
        content = ""
    if not isinstance(content, str):
        raise UserError(
            f"{where}: {form[1]} is a {type(content).__name__}, not a string; mend or remove the "
            f"conversation"
        )
    return {"role": role, "content": content, **({"tool_calls": ""} if calls else {})}
