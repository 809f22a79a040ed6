"""Rows of conversations: every form that is read, and what is left out, counted or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ladder.data.encoded import ANSWER, TOKEN
from ladder.data.prepare import prepare
from ladder.data.prepared import open_data
from ladder.data.tokenizer import load_tokenizer
from ladder.models import UserError
from tests.chats import CHAT, CHATML, TEMPLATE, THINKING, make_chats, prepare_chats, write_chats


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Path:
    return corpus.parent / "tokenizer"


def test_forms_and_files_give_the_same(tokenizer: Path, tmp_path: Path) -> None:
    """JSONL and Parquet, `from` and `value` or `role` and `content`, one process or two."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    chats = make_chats(30)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [[{"from": names[m["role"]], "value": m["content"]} for m in c] for c in chats]
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    parquet.write_table(arrow.table({"messages": chats}), tmp_path / "c.parquet")
    (tmp_path / "a").mkdir()
    files = {
        "messages": write_chats(tmp_path / "c.jsonl", chats),
        "conversations": write_chats(tmp_path / "a" / "c.jsonl", sharegpt, "conversations"),
    }
    found = {}
    for name, (field, path, workers) in {
        "jsonl": ("messages", files["messages"], 1),
        "sharegpt": ("conversations", files["conversations"], 2),
        "parquet": ("messages", tmp_path / "c.parquet", 1),
    }.items():
        prepare(
            [path], tokenizer, tmp_path / name, chat_field=field, workers=workers,
            chat_template=tmp_path / "template.jinja", heldout_fraction=0,
        )  # fmt: skip
        found[name] = (tmp_path / name / "train-00000.bin").read_bytes()
    assert found["jsonl"] == found["sharegpt"] == found["parquet"]


def test_the_tokenizers_own_template(tokenizer: Path, tmp_path: Path) -> None:
    """From either of the files that hold one; and it goes along with the data."""
    own = tmp_path / "tokenizer"
    own.mkdir()
    (own / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    file = write_chats(tmp_path / "chats.jsonl", make_chats(9))
    options: dict[str, Any] = {"chat_field": "messages", "heldout_fraction": 0}
    with pytest.raises(UserError, match=r"has no chat template .*--chat-template"):
        prepare([file], own, tmp_path / "none", **options)
    config = own / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": {"content": "<e>"}}))
    with pytest.raises(UserError, match=r"eos_token='<e>', which .* does not know"):
        prepare([file], own, tmp_path / "none", **options)
    config.write_text(json.dumps({"chat_template": TEMPLATE}))
    prepare([file], own, tmp_path / "a", **options)
    (own / "chat_template.jinja").write_text(TEMPLATE)
    config.unlink()
    prepare([file], own, tmp_path / "b", **options)
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == TEMPLATE
    prepare([file], tmp_path / "b", tmp_path / "c", **options)
    shards = [(tmp_path / name / "train-00000.bin").read_bytes() for name in "abc"]
    assert shards[0] == shards[1] == shards[2]
    (tmp_path / "other.jinja").write_text(CHATML)
    config.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "def", "x": 1}))
    prepare([file], own, tmp_path / "d", chat_template=tmp_path / "other.jinja", **options)
    kept = json.loads((tmp_path / "d" / "tokenizer_config.json").read_text())
    assert kept == {"bos_token": "def", "x": 1, "eos_token": "<|endoftext|>"}
    assert (tmp_path / "d" / "chat_template.jinja").read_text() == CHATML


def test_what_cannot_be_learnt_is_left_out_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    forged = [
        {"role": "user", "content": "say <|endoftext|>"},
        {"role": "assistant", "content": "no"},
    ]
    calls: list[dict[str, Any]] = [
        CHAT[0],
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": "3"},
        CHAT[1],
    ]
    chats = [CHAT, CHAT[:1], forged, [], calls, [{**message, "tool_calls": []} for message in CHAT]]
    options: dict[str, Any] = {"heldout_fraction": 0, "max_left_out": 4 / 6}
    data = open_data(prepare_chats(tmp_path, tokenizer, chats, **options))
    assert data.split("train").documents == 2
    assert data.index["left_out"] == {
        "without an answer": 1,
        "in which tools are called": 1,
        "in which someone says a special token's name": 1,
        "without messages": 1,
    }
    with pytest.raises(
        UserError, match=r"no conversation can be used: 1 without an answer, .*jsonl:1; correct"
    ):
        prepare_chats(tmp_path, tokenizer, [CHAT[:1]], overwrite=True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": "hello"}', "that are no list of messages"),
        ('{"messages": []}', "without messages"),
        ('{"messages": ["hello"]}', "with a message that has neither role and content nor from"),
        ('{"messages": [{"role": "user"}]}', "neither role and content nor from and value"),
        ('{"messages": [{"role": "usr", "content": ""}]}', "with a role that is none of system, "),
        ('{"messages": [{"role": ["user"], "content": ""}]}', "with a role that is none of"),
        ('{"messages": [{"from": "usr", "value": ""}]}', "with a from that is none of system, "),
        ('{"messages": [{"role": "user", "content": null}]}', "with content that is not text"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]}',
            "with content that is not text",
        ),
        ('{"messages": [{"role": "user", "content": []}]}', "with content that is not text"),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": 0.5}]}',
            "with a weight that is neither 0 nor 1",
        ),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair"),
        ('{"from": "function_call", "messages": []}', "without messages"),
        (
            '{"messages": [{"from": "gpt", "value": "a"}, {"from": "function_call", "value": ""}]}',
            "in which tools are called",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "reasoning_content": [1]}]}',
            "with a reasoning_content that is not text",
        ),
        (
            '{"instruction": "a", "input": "", "output": "b"}',
            "fields: instruction, input, output: write each row as a list of messages of role and "
            "content",
        ),
        ('{"prompt": "a", "completion": "b"}', "prompt, completion: give --chat-field prompt"),
        ('{"conversations": []}', "give --chat-field conversations"),
        ("{}", "without the field 'messages'"),
        ("[1]", "without the field 'messages'"),
        ('{"messages": [', "that are no valid JSON"),
    ],
)
def test_odd_rows_are_counted_and_the_rest_is_taken(
    tokenizer: Path, tmp_path: Path, line: str, reason: str
) -> None:
    good = [json.dumps({"messages": CHAT})] * 3
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join([*good, line, ""]))
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    options: dict[str, Any] = {
        "chat_field": "messages",
        "chat_template": tmp_path / "template.jinja",
        "heldout_fraction": 0,
    }
    with pytest.raises(
        UserError,
        match=rf"1 of 4 conversations cannot be used, more than max_left_out=0.1 .*{reason}.*, the "
        rf"first of them chats.jsonl:4; correct them.*--max-left-out",
    ):
        prepare([file], tokenizer, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    index = prepare([file], tokenizer, tmp_path / "out", **options, max_left_out=0.25)
    assert index["splits"]["train"]["documents"] == 3
    ((found, count),) = index["left_out"].items()
    assert reason in found
    assert count == 1


FIRST = "{{ messages[0].role }}" + TEMPLATE  # as Qwen's and Llama 3.1's, it needs a first message


def test_an_answer_at_the_beginning_is_left_out(tokenizer: Path, tmp_path: Path) -> None:
    """Catches one row that ends the whole call; a template that can render it keeps it."""
    (tmp_path / "first.jinja").write_text(FIRST)
    chats = [CHAT, CHAT[1:], CHAT]
    options: dict[str, Any] = {"heldout_fraction": 0, "max_left_out": 0.5}
    out = prepare_chats(
        tmp_path / "a", tokenizer, chats, chat_template=tmp_path / "first.jinja", **options
    )
    data = open_data(out)
    assert data.index["left_out"] == {"that begin with an answer": 1}
    assert data.split("train").documents == 2
    out = prepare_chats(tmp_path / "b", tokenizer, chats, **options)
    assert open_data(out).split("train").documents == 3


def failing(path: Path, part: str) -> Path:
    """A template that does `part` with a message `boom`."""
    when = "{% for m in messages if m.content == 'boom' %}" + part + "{% endfor %}"
    path.write_text(TEMPLATE + when)
    return path


BOOM = [CHAT[0], {"role": "assistant", "content": "boom"}]


@pytest.mark.parametrize(
    ("part", "reason"),
    [("{{ m.name.first }}", "UndefinedError"), ("{{ 1 + m.content }}", "TypeError")],
)
def test_a_conversation_that_fails_is_left_out(
    tokenizer: Path, tmp_path: Path, part: str, reason: str
) -> None:
    """Catches one row that ends the whole call."""
    template = failing(tmp_path / "odd.jinja", part)
    options: dict[str, Any] = {"heldout_fraction": 0, "max_left_out": 0.5}
    out = prepare_chats(
        tmp_path / "a", tokenizer, [CHAT, BOOM, CHAT], chat_template=template, **options
    )
    ((found, count),) = open_data(out).index["left_out"].items()
    assert found.startswith(f"that the template cannot render ({reason}: ")
    assert count == 1


def test_a_template_beyond_its_limits_names_the_row(tokenizer: Path, tmp_path: Path) -> None:
    template = failing(tmp_path / "long.jinja", "{{ 10**(10**10) }}")
    with pytest.raises(
        UserError, match=r"^conversation chats\.jsonl:2: the chat template of .*bits"
    ):
        prepare_chats(
            tmp_path, tokenizer, [CHAT, BOOM, CHAT], chat_template=template, max_left_out=1
        )


def test_a_wrong_field_ends_early(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after all of a long file: as soon as there are enough to tell."""
    monkeypatch.setattr("ladder.data.units.UNIT", 2**10)
    monkeypatch.setattr("ladder.data.tokenise.ENOUGH", 20)
    with pytest.raises(UserError, match="no conversation can be used") as error:
        prepare_chats(tmp_path, tokenizer, make_chats(200), chat_field="conversations")
    told = re.search(r"used: (\d+) without the field 'conversations'", str(error.value))
    assert told is not None
    assert 20 <= int(told[1]) < 100


def test_other_spellings_say_the_same(tokenizer: Path, tmp_path: Path) -> None:
    """Parts of text, and the roles developer, function and observation."""
    plain = [
        {"role": "system", "content": "Be brief."},
        *CHAT,
        {"role": "tool", "content": "3"},
        CHAT[3],
    ]
    other = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"text": "brief."}]},
        *({**m, "content": [{"type": "text", "text": m["content"]}], "weight": 1} for m in CHAT),
        {"role": "function", "content": "3", "name": "f"},
        {**CHAT[3], "weight": None},
    ]
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        *({"from": m["role"], "value": m["content"]} for m in CHAT),
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": CHAT[3]["content"]},
    ]
    found = []
    for n, chat in enumerate((plain, other, sharegpt)):
        out = prepare_chats(tmp_path / str(n), tokenizer, [chat], heldout_fraction=0)
        found.append((out / "train-00000.bin").read_bytes())
    assert found[0] == found[1] == found[2]


def text_of(folder: Path, tokenizer: Path) -> tuple[str, str]:
    """All of a prepared folder's text, and what is learnt of it."""
    tokens = np.fromfile(folder / "train-00000.bin", "<u4")
    decode = load_tokenizer(tokenizer).decode
    parts = tokens, tokens[tokens & ANSWER > 0]
    whole, learnt = (decode((part & TOKEN).tolist(), skip_special_tokens=False) for part in parts)
    return whole, learnt


def test_reasoning_and_tools_are_handed_to_the_template(tokenizer: Path, tmp_path: Path) -> None:
    """Or the row is left out: a template that writes <think> would teach an empty thought."""
    (tmp_path / "think.jinja").write_text(THINKING)
    template = {"chat_template": tmp_path / "think.jinja", "heldout_fraction": 0}
    tools = [{"type": "function", "function": {"name": "sum", "default": None}}]
    thinking = [CHAT[0], {**CHAT[1], "reasoning_content": " one, two "}]
    file = tmp_path / "chats.jsonl"
    for given in (tools, json.dumps(tools)):
        file.write_text(json.dumps({"messages": thinking, "tools": given}))
        out = tmp_path / f"{type(given).__name__}"
        prepare([file], tokenizer, out, chat_field="messages", **template)
        whole, _ = text_of(out, tokenizer)
        assert "<think> one, two </think>" in whole
        assert 'tools: [{"type": "function", "function": {"name": "sum"}}]' in whole
    (tmp_path / "plain.jinja").write_text(TEMPLATE)
    template["chat_template"] = tmp_path / "plain.jinja"
    rows = [{"messages": thinking}, {"messages": CHAT, "tools": tools}, {"messages": CHAT}]
    for no_tools in (["a", "b"], 3, "[{", ""):  # a column of that name may be anything
        rows.append({"messages": CHAT, "tools": no_tools})
    marks = [{**CHAT[0], "content": "a \ufdd0b\ufdd1 c"}, CHAT[1]]
    rows.append({"messages": marks})  # would be learnt by a template with generation tags
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = prepare(
        [file], tokenizer, tmp_path / "out", chat_field="messages", max_left_out=1, **template
    )
    assert index["left_out"] == {
        "with reasoning that the template does not write": 1,
        "with tools that the template does not write": 1,
        "with a character that marks answers, U+FDD0 or U+FDD1": 1,
    }


def test_prompts_and_completions_are_conversations(tokenizer: Path, tmp_path: Path) -> None:
    """As text or as messages; of the prompt nothing is learnt."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    texts = {"prompt": CHAT[0]["content"], "completion": CHAT[1]["content"]}
    lists = {"prompt": CHAT[:1], "completion": CHAT[1:2]}
    long = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    found = []
    for n, row in enumerate((texts, lists, long)):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(row))
        parquet.write_table(arrow.Table.from_pylist([row]), tmp_path / f"{n}.parquet")
        for form in ("jsonl", "parquet"):
            out = tmp_path / f"{n}{form}"
            prepare(
                [tmp_path / f"{n}.{form}"], tokenizer, out, chat_field="prompt", heldout_fraction=0,
                chat_template=tmp_path / "template.jinja",
            )  # fmt: skip
            found.append(text_of(out, tokenizer))
    said = "Three é<|endoftext|>"
    assert found[0] == (f"user: <one> & two?\nassistant: {said}\n", said)
    assert found[0] == found[1] == found[2] == found[3]
    assert found[4] == found[5]
    assert found[4][1] == "no<|endoftext|>"
    assert "Three" in found[4][0]
    with pytest.raises(
        UserError, match=r"its columns: prompt, completion; give --chat-field prompt"
    ):
        prepare(
            [tmp_path / "0.parquet"], tokenizer, tmp_path / "out", chat_field="messages",
            chat_template=tmp_path / "template.jinja",
        )  # fmt: skip


def test_answers_of_weight_0_are_read_and_not_learnt(tokenizer: Path, tmp_path: Path) -> None:
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], CHAT[3]]
    own = [CHAT[0], CHAT[1], CHAT[2], {**CHAT[3], "weight": 0}]
    found = {}
    for name, each in {"all": CHAT, "last": chat, "first": own}.items():
        out = prepare_chats(tmp_path / name, tokenizer, [each], heldout_fraction=0)
        found[name] = np.fromfile(out / "train-00000.bin", "<u4")
    assert all(
        np.array_equal(f & ~np.uint32(ANSWER), found["all"] & ~np.uint32(ANSWER))
        for f in found.values()
    )
    learnt = {name: (tokens & ANSWER) != 0 for name, tokens in found.items()}
    assert learnt["last"].any()
    assert learnt["first"].any()
    assert not (learnt["last"] & learnt["first"]).any()
    assert np.array_equal(learnt["last"] | learnt["first"], learnt["all"])
    with pytest.raises(UserError, match="1 whose answers all have weight 0"):
        prepare_chats(tmp_path / "none", tokenizer, [chat[:2]], heldout_fraction=0)
