"""Conversations as data: how templates write them, what is learnt of them, how they are packed."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from ladder.data import packing
from ladder.data.batches import PackedWindows
from ladder.data.encoded import ANSWER, BEGINS
from ladder.data.mix import open_sources
from ladder.data.packing import pack
from ladder.data.prepared import open_data
from ladder.data.template import ChatTemplate, LeftOut, load_template
from ladder.data.tokenizer import load_tokenizer
from ladder.models import UserError
from ladder.models.documents import starts_of
from tests.chats import CHAT, CHATML, TEMPLATE, THINKING, make_chats, prepare_chats
from tests.samples import full_model, small_config


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Path:
    return corpus.parent / "tokenizer"


@pytest.fixture(scope="module")
def prepared(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_chats(tmp_path_factory.mktemp("chats"), tokenizer, make_chats(60))


def test_special_tokens_of_an_older_file(tokenizer: Path, tmp_path: Path) -> None:
    """They are found, and the config that is kept is as it was: transformers will read it."""
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    kept = {"eos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}}
    older = {"bos_token": {"content": "<|bos|>"}, "eos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    path, encoder = tmp_path / "tokenizer.json", load_tokenizer(tmp_path)
    template, config = load_template(path, encoder, None)
    assert template.names == {"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}
    assert config == kept
    (tmp_path / "tokenizer_config.json").write_text("{}")
    _, config = load_template(path, encoder, None)
    assert config == {"eos_token": "<|endoftext|>"}


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
    source = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    template = ChatTemplate(source, {"bos_token": "!"}, "here")
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


def test_generation_tags_say_what_an_answer_is() -> None:
    """Also where earlier turns are written otherwise once others follow."""
    template = pickle.loads(pickle.dumps(ChatTemplate(THINKING, {"eos_token": "!"}, "here")))
    pieces = template.pieces(CHAT)
    whole = template.render(CHAT)
    assert whole.endswith("user: more\nassistant: <think></think>no!\n")
    assert "".join(piece.text for piece in pieces) == whole
    assert [piece.text for piece in pieces if piece.answer] == [" Three é!", "no!"]
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    assert [piece.text for piece in template.pieces(chat) if piece.answer] == ["no!"]
    with pytest.raises(LeftOut, match="without an answer"):
        template.pieces(CHAT[:1])
    twice = THINKING.replace("{{- m.content + eos_token }}", "{{- m.content }}{% generation %}")
    twice = twice.replace("{%- endgeneration %}", "{% endgeneration %}{%- endgeneration %}")
    with pytest.raises(LeftOut, match="tags do not open and close by turns"):
        ChatTemplate(twice, {"eos_token": "!"}, "here").pieces(CHAT)
    last = THINKING.replace("messages %}{{- m.role", "messages[-2:] %}{{- m.role")
    with pytest.raises(LeftOut, match=r"of weight 0 that .* tags do not tell apart"):
        ChatTemplate(last, {"eos_token": "!"}, "here").pieces(chat)


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


def test_an_answer_that_begins_with_a_special_token_is_learnt(
    tokenizer: Path, tmp_path: Path
) -> None:
    """Where no end token follows it, the whole answer."""
    source = TEMPLATE.replace("{{ message['content'] | trim }}", "@{{ message['content'] | trim }}")
    source = source.replace("{{ eos_token }}", "").replace("@", "{{ eos_token }}")
    (tmp_path / "open.jinja").write_text(source)
    options = {"chat_template": tmp_path / "open.jinja", "heldout_fraction": 0}
    windows = windows_of(prepare_chats(tmp_path, tokenizer, [CHAT], **options), 64)
    ids = windows.read([0])[1][0]
    said = load_tokenizer(tokenizer).decode(ids[ids >= 0].tolist(), skip_special_tokens=False)
    assert said == "<|endoftext|>Three é\n<|endoftext|>no\n"


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
    (note,) = windows.notes(1)
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "is not valid Jinja"),
        ("{{ messages[0].content.upper(1) }}", "cannot render .TypeError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ strftime_now('%Y') }}", "it asks for the date by strftime_now, which is undefined"),
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


def test_a_template_that_asks_for_the_date() -> None:
    """It is undefined: without a default of its own the template is refused, with the remedy."""
    with pytest.raises(UserError, match=r"asks for the date .*cible\); give one without it"):
        ChatTemplate("{{ strftime_now('%Y') }}", {}, "x").render([])
    guarded = "{{ strftime_now('%Y') if strftime_now is defined else '26 Jul 2024' }}"
    assert ChatTemplate(guarded, {}, "x").render([]) == "26 Jul 2024"
    with pytest.raises(UserError, match=r"'name' is undefined\); give another with"):
        ChatTemplate("{{ name('%Y') }}", {}, "x").render([])


def test_a_template_that_is_not_utf8_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(
        UserError, match=r"bad\.jinja is not UTF-8 text \(byte 3 is 0xe9\); convert"
    ):
        prepare_chats(tmp_path, tokenizer, [CHAT], chat_template=tmp_path / "bad.jinja")


def test_the_token_that_ends_all_answers_ends_a_text(tokenizer: Path, tmp_path: Path) -> None:
    """Qwen's base models end a text by another token than an answer; a model that is trained on
    chats must stop at both. Data of earlier versions, and of answers that end in two ways, have the
    one that ends a text."""
    encoder = load_tokenizer(tokenizer)
    encoder.add_special_tokens(["<|end|>", "<|call|>"])
    own = tmp_path / "tokenizer"
    own.mkdir()
    encoder.save(str(own / "tokenizer.json"))
    end = encoder.token_to_id("<|end|>")
    other = "{{ '<|end|>' if loop.index < 3 else '<|call|>' }}"
    for name, mark, ids in (("one", "{{ '<|end|>' }}", [end, 0]), ("two", other, [0])):
        source = tmp_path / f"{name}.jinja"
        source.write_text(TEMPLATE.replace("{{ eos_token }}", mark))
        folder = prepare_chats(
            tmp_path / name, own, [CHAT] * 9, chat_template=source, workers=2, heldout_fraction=0
        )
        assert open_data(folder).end_ids == ids
    folder = tmp_path / "one" / "data"
    assert open_data(folder).ends == [end, 0]
    both = folder, shutil.copytree(folder, tmp_path / "again")
    mixed = open_sources([{"path": str(each), "weight": 1} for each in both])
    assert mixed.ends == [end, 0]
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "answer_end_id": 999}))
    with pytest.raises(UserError, match=r"answer_end_id=999 must be .* below 302"):
        open_data(folder)
    del index["answer_end_id"]
    (folder / "index.json").write_text(json.dumps(index))
    assert open_data(folder).ends == 0


@pytest.mark.parametrize("ends", [True, False])
def test_a_template_that_ends_no_answer_is_said(
    tokenizer: Path, tmp_path: Path, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "own.jinja"
    source.write_text(TEMPLATE if ends else TEMPLATE.replace("{{ eos_token }}", ""))
    prepare_chats(tmp_path / "chats", tokenizer, make_chats(20), chat_template=source)
    said = "own.jinja writes no special token at the end of an answer: a model that is trained on"
    assert (said in capsys.readouterr().err) != ends
