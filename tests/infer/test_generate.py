"""Generation: the cache, batches, sampling, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ladder.infer.engine import Completion, generate
from ladder.infer.sampling import Sampling, choose_tokens, draws, probabilities
from ladder.infer.text import (
    CONTEXT,
    TokenPrinter,
    before_stop,
    continuation,
    read_stops,
    stopper,
)
from ladder.models import UserError
from tests.distributed import Pools, tp_mesh
from tests.infer.engines import PLANS, make, prompts, without_cache


@pytest.mark.parametrize(("plan", "degree"), PLANS)
def test_cache_and_batch_change_nothing(plan: str, degree: int | None) -> None:
    """A cache that is off by one place, or padding that is attended to, fails this."""
    model = make(plan, degree)
    results = generate(model, prompts(), max_new_tokens=9)
    expected = [without_cache(model, prompt, 9) for prompt in prompts()]
    assert [result.tokens for result in results] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3  # a model that ignores its input fails


def on_rank(rank: int, world: int, plan: str, degree: int | None) -> list[list[int]]:
    model = make(plan, degree, tp_mesh(world))
    greedy = generate(model, prompts(), max_new_tokens=6)
    drawn = generate(model, prompts(), max_new_tokens=6, sampling=Sampling(1.0, seed=3))
    return [result.tokens for result in greedy + drawn]


@pytest.mark.parametrize(("plan", "degree"), PLANS)
def test_ranks_generate_what_one_process_does(pools: Pools, plan: str, degree: int | None) -> None:
    """Ranks that sample apart, or a cache with another rank's heads, fail this."""
    model = make(plan, degree)
    greedy = generate(model, prompts(), max_new_tokens=6)
    drawn = generate(model, prompts(), max_new_tokens=6, sampling=Sampling(1.0, seed=3))
    expected = [result.tokens for result in greedy + drawn]
    assert pools(2).run(on_rank, plan, degree) == [expected, expected]


def test_stop_length_and_context() -> None:
    """A stop token must not be part of the text, and a full context must end it."""
    model = make("ladder", None)
    prompt = prompts()[0]
    tokens = without_cache(model, prompt, 8)
    stopped = generate(model, [prompt], max_new_tokens=8, stop={tokens[3]})[0]
    assert stopped == Completion(tokens[: tokens.index(tokens[3])], "stop")
    assert generate(model, [prompt], max_new_tokens=8)[0] == Completion(tokens, "length")
    full = generate(model, [prompt, prompt[:2]], max_new_tokens=100)
    assert [result.reason for result in full] == ["context", "context"]
    assert [len(result.tokens) for result in full] == [40 - 7, 40 - 2]
    assert full[0].tokens == without_cache(model, prompt, 33)


def test_streaming_calls_for_each_token() -> None:
    seen: list[tuple[int, int]] = []
    results = generate(
        make("ladder", None), prompts(), max_new_tokens=4, on_token=lambda i, t: seen.append((i, t))
    )
    assert [[t for i, t in seen if i == k] for k in range(3)] == [r.tokens for r in results]


def test_sampling_is_seeded_and_independent_of_neighbours() -> None:
    """One shared source of randomness would make a text depend on the batch it is in."""
    model = make("standard", None)
    draw = Sampling(temperature=1.0, seed=7)
    alone = generate(model, prompts()[:1], max_new_tokens=12, sampling=draw)
    together = generate(model, prompts(), max_new_tokens=12, sampling=draw)
    assert alone[0] == together[0]
    other = generate(model, prompts(), max_new_tokens=12, sampling=Sampling(1.0, seed=8))
    assert [r.tokens for r in other] != [r.tokens for r in together]


def test_probabilities_follow_their_definition() -> None:
    """top-p keeps the token that crosses the threshold; top-k exactly k; temperature divides."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    flat = probabilities(logits, Sampling(temperature=2.0))
    assert torch.allclose(flat, (logits / 2).softmax(-1))
    assert torch.allclose(
        probabilities(logits, Sampling(1.0, top_k=2)), torch.tensor([0.625, 0.375, 0, 0])
    )
    assert torch.allclose(
        probabilities(logits, Sampling(1.0, top_p=0.6)), torch.tensor([0.625, 0.375, 0, 0])
    )
    assert torch.allclose(
        probabilities(logits, Sampling(1.0, top_p=0.4)), torch.tensor([1.0, 0, 0, 0])
    )


def test_draws_have_the_right_frequencies() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, -1)
    uniforms = draws(Sampling(1.0, seed=1), 2, 4000)
    chosen = choose_tokens(logits, uniforms[:, 0], Sampling(1.0))
    share = torch.bincount(chosen, minlength=4) / 4000
    assert (share - torch.tensor([0.5, 0.3, 0.15, 0.05])).abs().max() < 0.03  # 4 standard errors
    only = choose_tokens(logits, uniforms[:, 1], Sampling(1.0, top_k=2))
    assert set(only.tolist()) == {0, 1}


def test_draws_at_the_edges_have_probability() -> None:
    """u = 0 must not pick a first token of probability 0, nor u near 1 such a last one."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).clamp(min=-1e4)
    for u, token in ((0.0, 1), (0.49, 1), (0.51, 2), (1 - 2**-24, 2)):
        assert choose_tokens(logits, torch.tensor([u]), Sampling(1.0)).tolist() == [token]


def test_nan_never_becomes_a_token() -> None:
    """argmax of NaN is a token like any other; it must be an error."""
    logits = torch.tensor([[1.0, float("nan"), 0.0], [1.0, 2.0, 0.0]])
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=2, top_p=0.9)):
        first, second = choose_tokens(logits, torch.zeros(2), sampling).tolist()
        assert first == -1
        assert second >= 0
    model = make("ladder", None)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="prompt 0 are not finite"):
        generate(model, prompts())


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt 0 is empty"),
        ([1] * 40, {}, "max_seq_len=40; shorten it to 39"),
        ([67], {}, "outside vocab_size=67"),
        ("text", {}, "prompt 0 is a str, no list of token ids; encode text"),
        (5, {}, "prompt 0 is an int, no list of token ids"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number, 1 or above"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be a whole number"),
        ([1], {"sampling": None}, "sampling=None must be a Sampling"),
        ([1], {"sampling": {"top_k": 5}}, "sampling={'top_k': 5} must be a Sampling"),
        ([1], {"stop": 5}, "stop=5 must be token ids"),
        ([1], {"stop": [2.5]}, r"stop=\[2.5\] must be token ids; give a list of integers"),
        (b"ab", {}, "prompt 0 is a bytes, no list of token ids"),
        ([torch.tensor([1, 2])], {}, r"prompt 0 has tensor\(\[1, 2\]\), no token id"),
        ([1.5], {}, "prompt 0 has 1.5, no token id"),
        ([[5, 8]], {}, r"prompt 0 has \[5, 8\], no token id"),
        (None, {}, "prompt 0 is null, no list of token ids"),
        (torch.tensor([0.5]), {}, "prompt 0 has 0.5, no token id"),
    ],
)
def test_bad_prompts_are_refused(prompt: Any, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(make("ladder", None), [prompt], **settings)


@pytest.mark.parametrize("given", [None, 5, torch.tensor(5)])
def test_what_is_no_list_of_prompts_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"prompts=.* must be a list of prompts, each a list"):
        generate(make("ladder", None), given)


def test_integers_of_numpy_and_torch_are_as_pythons() -> None:
    """Their own arithmetic overflows within a seed's, and in the length of a prompt's row."""
    model, given = make("ladder", None), [[5, 8, 13]]
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 9, "seed": 3}
    expected = generate(model, given, max_new_tokens=9, sampling=Sampling(**options))
    for kind in (np.int64, np.uint64, np.uint8, torch.tensor):
        numbers = {"top_k": kind(9), "seed": kind(3)}
        sampling = Sampling(**{**options, **numbers, "temperature": np.float64(1)})
        assert sampling == Sampling(**options)
        found = generate(model, given, max_new_tokens=kind(9), sampling=sampling)
        assert found == expected


def test_prompts_may_be_tensors() -> None:
    """Of any integers, and an id that is 0 alone, which is false."""
    model = make("ladder", None)
    lists = [[5, 8, 13], [0]]
    given: list[Any] = [lists, [torch.tensor(ids, dtype=torch.int32) for ids in lists]]
    given += [[iter(ids) for ids in lists], [list(torch.tensor(ids)) for ids in lists]]
    found = [generate(model, each, max_new_tokens=4) for each in given]
    assert len(found[0]) == 2
    assert found[1:] == found[:1] * 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_k": 5}, "top_k=5 has no effect"),
        ({"top_p": 0.9}, "top_p=0.9 has no effect"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf must be a finite number"),
        ({"temperature": "0.8"}, "temperature='0.8' must be a finite number; give a float"),
        ({"temperature": None}, "temperature=None must be a finite number"),
        ({"temperature": True}, "temperature=True must be a finite number"),
        ({"top_p": None}, "top_p=None must be a finite number"),
        ({"top_k": -1}, r"top_k=-1 must be a whole number, 0 \(all tokens\) or above"),
        ({"top_k": 2.5, "temperature": 1.0}, "top_k=2.5 must be a whole number"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed=-1 must be a whole number, 0 or above"),
        ({"seed": 2**63}, r"below 2\*\*63"),
        ({"temperature": 1e-45}, "temperature=1e-45 is too low"),
        ({"temperature": 9e-6}, "temperature=9e-06 is too low"),
    ],
)
def test_bad_sampling_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**settings)


TEXT = "Zwölf Boxkämpfer jagen 日本 မြန်မာဘာသာစကား über den großen 🦊 Deich. " * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: bytes that follow one another are decoded together, or not at all."""
    names = [*(f"<0x{n:02X}>" for n in range(256)), "<unk>", "▁", *"abcdefgijklmnoprstuvwxyzBDZ."]
    vocabulary = {name: n for n, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
def test_text_is_printed_as_it_comes(
    make_tokenizer: Callable[[], Tokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole characters, as the whole text has them; a token costs the same behind a long text."""
    tokenizer, longest = make_tokenizer(), 0
    tokens = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(tokens) == TEXT

    class Counted:
        def decode(self, some: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(some))
            return tokenizer.decode(some)

    for given in range(40, 160, 7):
        prompt, rest = tokens[:given], tokens[given:]
        before = tokenizer.decode(prompt)
        if before.endswith("\ufffd"):  # no prompt ends within a character
            continue
        printer = TokenPrinter(Counted(), prompt, "begun: ")
        for number, token in enumerate(rest):
            printer.add(number, token)
        shown = capsys.readouterr().out
        printer.end()
        assert "\ufffd" not in shown
        assert shown + capsys.readouterr().out == f"begun: {TEXT[len(before) :]}\n"
        assert len(shown) > len(TEXT) - len(before), "it came at the end"
    assert longest < 4 * CONTEXT


STOPS = [["ö"], ["🦊"], ["日本"], [" jagen"], [" B", "ä"], ["jagen 日本 မ"], ["é", "Zw", "zz"]]


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
@pytest.mark.parametrize("until", STOPS, ids=str)
def test_stop_strings_end_a_text(
    make_tokenizer: Callable[[], Tokenizer], until: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """At the token that completes one, which may be the first; what is printed ends before it."""
    tokenizer = make_tokenizer()
    tokens = tokenizer.encode(TEXT).ids[:170]
    for given in range(60):
        prompt, rest = tokens[:given], tokens[given:]
        if tokenizer.decode(prompt).endswith("\ufffd"):
            continue
        ended = stopper(tokenizer, until, [prompt])
        printer = TokenPrinter(tokenizer, prompt, "begun: ", until)
        assert ended is not None
        shown = ""
        for count, token in enumerate(rest, 1):
            text = continuation(tokenizer, prompt, rest[:count])
            printer.add(0, token)
            shown += capsys.readouterr().out
            found = any(stop in text for stop in until)
            assert ended(0, rest[:count]) == found, (given, count)
            if found:
                break
        printer.end()
        assert shown + capsys.readouterr().out == f"begun: {before_stop(text, until)}\n"
        assert found


@pytest.mark.parametrize("count", [1, 9, 200])
def test_special_tokens_inside_a_stop_string_are_no_part_of_it(count: int) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|end|>"])
    end = tokenizer.token_to_id("<|end|>")
    (a,), (b,) = (tokenizer.encode(letter).ids for letter in "ab")
    ended = stopper(tokenizer, ["ab"], [tokenizer.encode("zz").ids])
    assert ended is not None
    assert not ended(0, [a, *[end] * count])
    assert ended(0, [a, *[end] * count, b])


def test_text_that_may_begin_a_stop_string_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level()
    printer = TokenPrinter(tokenizer, [], "", ["abd", "bcx"])
    shown = []
    for token in tokenizer.encode("zabcabcy").ids:
        printer.add(0, token)
        shown.append(capsys.readouterr().out)
    assert shown == ["z", "", "", "a", "bc", "", "a", "bcy"]


def test_special_tokens_stop_by_their_ids() -> None:
    """A completion's text has none of them. A vocabulary's own names of bytes are no text."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|eot|>"])
    tokenizer.encode_special_tokens = False
    index = tokenizer.token_to_id("<|eot|>")
    assert tokenizer.token_to_id("é") is not None, "a byte of another character"
    assert read_stops(tokenizer, ["é", "<|eot|>", "a b"]) == ({index}, ["é", "a b"])
    with pytest.raises(UserError, match=r"the special token <\|eot\|> beside other text; give"):
        read_stops(tokenizer, ["a<|eot|>"])
