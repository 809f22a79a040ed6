"""Conversations as data: how they are written down, what is learnt of them, how they are packed."""

from __future__ import annotations

import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ladder.data import packing
from ladder.data.batches import PackedWindows
from ladder.data.encoded import ANSWER, BEGINS
from ladder.data.packing import pack
from ladder.data.prepare import prepare
from ladder.data.prepared import open_data
from ladder.data.template import ChatTemplate, LeftOut
from ladder.data.tokenizer import load_tokenizer
from ladder.models import UserError
from ladder.models.documents import starts_of
from tests.chats import TEMPLATE, make_chats, prepare_chats, write_chats
from tests.samples import full_model, small_config

CHATML = """{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message['content'] | tojson }}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
CHAT = [
    {"role": "user", "content": "<one> & two?"},
    {"role": "assistant", "content": " Three é"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Path:
    return corpus.parent / "tokenizer"


@pytest.fixture(scope="module")
def prepared(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("chats"), tokenizer, make_chats(60))


def windows_of(folder: Path, seq_len: int, split: str = "train") -> PackedWindows:
    found = open_data(folder).windows(split, seq_len)
    assert isinstance(found, PackedWindows)
    return found


def answers(chat: list[dict[str, str]]) -> str:
    said = [m["content"].strip() + "<|endoftext|>" for m in chat if m["role"] == "assistant"]
    return "".join(said)


@pytest.mark.parametrize("source", [TEMPLATE, CHATML])
def test_templates_render_as_transformers_renders_them(tokenizer: Path, source: str) -> None:
    """Including Jinja's extensions, and characters that HTML would escape."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<|endoftext|>", bos_token="def"
    )
    names = {"eos_token": "<|endoftext|>", "bos_token": "def"}
    template = pickle.loads(pickle.dumps(ChatTemplate(source, names, "here")))
    for prompt in (False, True):
        assert template.render(CHAT[:3], prompt) == theirs.apply_chat_template(
            CHAT[:3], chat_template=source, add_generation_prompt=prompt, tokenize=False
        )


def test_answers_begin_where_their_prompts_end() -> None:
    template = ChatTemplate(CHATML, {"bos_token": "!"}, "here")
    pieces = template.pieces(CHAT)
    assert "".join(piece.text for piece in pieces) == template.render(CHAT)
    assert [piece.text for piece in pieces if piece.answer] == [
        " Three é<|im_end|>\n",
        "no<|im_end|>\n",
    ]
    with pytest.raises(LeftOut, match="without an answer"):
        template.pieces(CHAT[:1])
    forgetful = ChatTemplate("{% for m in messages[-2:] %}{{ m.content }}{% endfor %}", {}, "here")
    with pytest.raises(LeftOut, match="writes otherwise once others follow"):
        forgetful.pieces(CHAT)


def test_only_answers_and_their_end_are_targets(prepared: Path, tokenizer: Path) -> None:
    """The text of each conversation's targets. Catches targets that are shifted, prompts that
    are learnt, new lines after the end that are, and conversations lost, doubled or cut."""
    vocabulary = load_tokenizer(tokenizer)
    found = []
    for split in ("train", "heldout"):
        windows = windows_of(prepared, 128, split)
        for i in range(len(windows)):
            tokens, targets = windows.read([i])
            begins = windows.begins([i], tokens, None)
            assert begins is not None
            marks = starts_of(begins).tolist()
            wanted = int((targets >= 0).sum())
            assert windows.targets([i]) == wanted > 0
            for start, stop in itertools.pairwise(marks):
                learnt = targets[0, start:stop]
                if (learnt >= 0).any():
                    ids = learnt[learnt >= 0].tolist()
                    found.append(vocabulary.decode(ids, skip_special_tokens=False))
                shifted = tokens[0, start + 1 : stop]
                kept = learnt[:-1] >= 0
                assert torch.equal(shifted[kept], learnt[:-1][kept])
    chats = make_chats(60)
    assert sorted(found) == sorted(map(answers, chats))


def test_the_last_token_is_learnt_where_it_is_an_answers(tokenizer: Path, tmp_path: Path) -> None:
    """With nothing written after its end; for any sizes in which a split is read."""
    (tmp_path / "terse.jinja").write_text(TEMPLATE.replace("{{ '\\n' }}", ""))
    chats = make_chats(30)
    options = {"chat_template": tmp_path / "terse.jinja", "heldout_fraction": 0}
    windows = windows_of(prepare_chats(tmp_path, tokenizer, chats, **options), 32)
    vocabulary = load_tokenizer(tokenizer)
    split, found = windows.split, []
    for start, size in zip(windows.found.starts, windows.found.sizes, strict=True):
        if size < 32:  # it is whole
            marked = split.read_marked(start, start + size + 1)
            assert marked[-1] & ANSWER
            assert (
                len(split) == start + size + 1
                or split.read_marked(start + size + 1, start + size + 2) & BEGINS
            )
            ids = split.tokens(marked[marked & ANSWER > 0]).tolist()
            found.append(vocabulary.decode(ids, skip_special_tokens=False))
    assert len(found) > 5
    assert {*found} <= {*map(answers, chats)}
    everyone = range(len(windows))
    assert windows.targets(everyone) == int((windows.read(everyone)[1] >= 0).sum())
    for chunk in (1, 7, 50, len(split)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing, "CHUNK", chunk)
            again = packing.survey(split.read_marked, len(split), 32)
        for one, other in zip(again, windows.found, strict=True):
            assert np.array_equal(one, other), chunk


def test_a_conversation_does_not_see_its_neighbours(prepared: Path) -> None:
    """Its losses in a window equal those that it has alone."""
    windows = windows_of(prepared, 128)
    model = full_model(small_config("ladder", vocab_size=300, max_seq_len=128), 3)
    rows = range(4)
    tokens, targets = windows.read(rows)
    begins = windows.begins(rows, tokens, None)
    assert begins is not None
    starts = starts_of(begins)
    assert len(starts) > 8
    losses = model(tokens, targets, documents=starts)
    plain = model(tokens, targets)
    flat = [each.flatten() for each in (tokens, targets, losses)]
    for start, stop in itertools.pairwise(starts.tolist()):
        alone, wanted, packed = (each[start:stop].unsqueeze(0) for each in flat)
        assert torch.allclose(model(alone, wanted), packed, atol=1e-5)
    assert (losses - plain).abs().max() > 1e-2


def test_what_is_too_long_is_truncated_or_left_out_and_counted(
    tokenizer: Path, tmp_path: Path
) -> None:
    words = " ".join(["value"] * 100)
    chats = [
        [{"role": "user", "content": "if"}, {"role": "assistant", "content": words}],
        [{"role": "user", "content": words}, {"role": "assistant", "content": "if"}],
        *make_chats(4, longest=2),
    ]
    windows = windows_of(prepare_chats(tmp_path, tokenizer, chats, heldout_fraction=0), 64)
    assert (windows.found.truncated, windows.found.unanswered) == (1, 1)
    assert len(windows.found.starts) == 5
    assert windows.found.sizes.max() == 64
    (note,) = windows.notes()
    assert "1 conversations truncated, 1 left out" in note


def test_a_conversation_that_just_fits_is_not_truncated() -> None:
    """Its last token is a target alone, so that seq_len + 1 tokens fit in a window."""
    for size, truncated in ((5, 0), (6, 1)):
        marked = np.full(size, ANSWER | 7)
        marked[0] = BEGINS | 7
        found = packing.survey(lambda start, stop, m=marked: m[start:stop], size, 4)
        assert (found.sizes.tolist(), found.targets.tolist()) == ([4], [4])
        assert (found.truncated, found.unanswered) == (truncated, 0)


def test_packing_is_dense_and_repeatable() -> None:
    sizes = np.random.default_rng(0).integers(1, 65, 2000)
    windows = pack(sizes, 64)
    assert sorted(n for window in windows for n in window) == list(range(2000))
    assert all(sizes[window].sum() <= 64 for window in windows)
    assert len(windows) < 1.02 * sizes.sum() / 64
    assert windows == pack(sizes, 64)
    assert pack(sizes[:0], 64) == []


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
        ('{"chats": []}', "without the field 'messages'"),
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "is not valid Jinja"),
        ("{{ messages[0].content.upper(1) }}", "cannot render a conversation"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ 1 // 0 }}", "cannot render a conversation .ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("", "whose answers the template does not write"),
        ("{{ raise_exception('roles must alternate') }}", "refuses .roles must alternate"),
    ],
)
def test_broken_templates_are_refused(
    tokenizer: Path, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "bad.jinja").write_text(source)
    with pytest.raises(UserError, match=message):
        prepare_chats(tmp_path, tokenizer, [CHAT], chat_template=tmp_path / "bad.jinja")
