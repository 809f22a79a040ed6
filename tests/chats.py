"""A few conversations that the tests of fine-tuning share, as data and prepared."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ladder.data.prepare import prepare
from tests.corpus import WORDS

CHATML = """{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message['content'] | tojson }}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
# As Qwen3's for training: earlier answers lose their empty thought once a question follows.
THINKING = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- 'tools: ' + (tools | tojson) + '\n' }}{%- endif %}
{%- for m in messages %}{{- m.role + ': ' }}
{%- if m.role == 'assistant' %}
{%- if loop.index0 > ns.last %}{{- '<think>' + (m.reasoning_content or '') + '</think>' }}{%- endif %}
{%- generation %}{{- m.content + eos_token }}{%- endgeneration %}
{%- else %}{{- m.content }}{%- endif %}{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""  # noqa: E501
CHAT = [
    {"role": "user", "content": "<one> & two?"},
    {"role": "assistant", "content": " Three é"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]

TEMPLATE = """
{%- for message in messages -%}
{{ message['role'] }}: {{ message['content'] | trim }}
{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}
{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


def make_chats(count: int, seed: int = 1, longest: int = 12) -> list[list[dict[str, str]]]:
    """Conversations of one to three questions and answers, some after a system message."""
    source = random.Random(seed)

    def say(role: str) -> dict[str, str]:
        words = [source.choice(WORDS) for _ in range(source.randint(1, longest))]
        return {"role": role, "content": " ".join(words)}

    found = []
    for n in range(count):
        turns = [say(role) for _ in range(source.randint(1, 3)) for role in ("user", "assistant")]
        found.append([say("system"), *turns] if n % 3 == 0 else turns)
    return found


def write_chats(path: Path, chats: list[list[dict[str, str]]], field: str = "messages") -> Path:
    lines = [json.dumps({field: chat}) + "\n" for chat in chats]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def prepare_chats(
    folder: Path, tokenizer: Path, chats: list[list[dict[str, str]]], **options: Any
) -> Path:
    """Write and prepare conversations in `folder`; returns the prepared folder."""
    folder.mkdir(exist_ok=True)
    file = write_chats(folder / "chats.jsonl", chats)
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    settings: dict[str, Any] = {
        "heldout_fraction": 0.1,
        "chat_field": "messages",
        "chat_template": folder / "template.jinja",
    }
    prepare([file], tokenizer, folder / "data", **{**settings, **options})
    return folder / "data"
