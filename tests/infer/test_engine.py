"""The engine's bookkeeping: widths, capacities, sessions, replays; without a GPU.

Graphs are stood in for by a replay that runs the recorded work again, so that what surrounds them
(buffers that stay, warm-up steps that write, padded prompts, steps taken ahead) is what a GPU has.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ladder.checkpoint import WEIGHTS, model_entries, write_config, write_tensors
from ladder.costs import GRAPHED_PROMPT_TOKENS
from ladder.infer.engine import (
    SESSIONS,
    Completion,
    Engine,
    Session,
)
from ladder.infer.graphs import WARM_UP_STEPS, no_collection
from ladder.infer.sampling import Sampling
from ladder.models import Transformer, UserError
from ladder.models.quantised import quantise_model
from ladder.models.ranks import Ranks
from tests.infer.engines import make

PLANS = [("standard", None), ("ladder", None), ("desync-2x", 2), ("dtp-1", 2)]
CONTEXT = 72  # prompts are padded to 16, 32, 48, 64 and 72 (not 128)
BOTH = pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])


class Replay:
    """A CUDA graph's interface over plain work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@pytest.fixture(autouse=True)
def _graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(work: Callable[[], None]) -> tuple[Replay, None]:
        for _ in range(WARM_UP_STEPS):
            work()
        return Replay(work), None

    monkeypatch.setattr("ladder.infer.session.capture_graph", record)


def engine_for(model: Transformer, graphs: bool, fused: bool = False) -> Engine:
    engine = Engine(model.float() if fused else model, fused=fused)
    engine.graphs = graphs  # which the constructor refuses on a CPU
    return engine


def test_captured_steps_prefer_no_more_shared_memory_than_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of fused kernels, and around the warm-up runs: what is captured has to be set before. Beside
    NCCL's kernels the driver chooses, and on two streams for 8 sequences and more. In 8 bits one
    sequence needs more there."""
    asked: list[int] = []

    @contextlib.contextmanager
    def preferred(percent: int) -> Iterator[None]:
        asked.append(percent)
        with monkeypatch.context() as patched:
            patched.setattr(Session, "_step", lambda session: asked.append(0))
            yield

    monkeypatch.setattr("ladder.infer.session.carveout", preferred)
    runs = [0] * WARM_UP_STEPS
    for plan, fused in (("ladder", False), ("ladder", True), ("standard", True)):
        engine = engine_for(make(plan, None), True, fused)
        many = 28 if plan == "standard" else -1
        for batch, least in ((1, 0), (2, 0), (3, 28), (7, 28), (8, many), (64, many), (65, -1)):
            engine.session(batch, 16, Sampling())
            assert asked == [least if fused else -1, *runs]
            asked.clear()
    monkeypatch.setattr(engine.model.reducer, "ranks", Ranks(degree=2))
    engine.session(4, 16, Sampling())
    assert asked == [-1, *runs]
    asked.clear()
    quantised = make("ladder", None).float()
    quantise_model(quantised, "fp8")
    engine_for(quantised, True, True).session(1, 16, Sampling())
    assert asked == [28, *runs]
    asked.clear()
    parallel = engine_for(make("parallel", None), True, True)
    for batch, least in ((32, -1), (33, 28)):
        parallel.session(batch, 16, Sampling())
        assert asked == [least, *runs], "from 33 on it has one stream"
        asked.clear()


def test_no_garbage_is_collected_during_a_capture() -> None:
    """An engine in a cycle, freed there with its symmetric memory, would end the process."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    with no_collection():
        gone = weakref.ref(Cycle())
        kept = [[n] for n in range(100_000)]  # enough to call for a collection
        assert gone() is not None
    del kept
    gc.collect()
    assert gone() is None
    assert gc.isenabled()


def test_a_folder_in_place_of_a_model(tmp_path: Path) -> None:
    """The same tokens as the model that was saved; its options are refused beside a model."""
    model = make("ladder", None).float()
    write_config(tmp_path, model.config, None)
    write_tensors(tmp_path, WEIGHTS, model_entries(model), writer=True)
    prompts = prompts_of(3, 7)
    found = Engine(str(tmp_path), device="cpu").generate(prompts, max_new_tokens=6)
    assert found == Engine(model).generate(prompts, max_new_tokens=6)
    with pytest.raises(UserError, match=r"--tp=2 with 1 process: .* torchrun --nproc-per-node 2"):
        Engine(tmp_path, tp=2, device="cpu")
    with pytest.raises(UserError, match="unknown reducer 'nope'"):
        Engine(tmp_path, reducer="nope", device="cpu")
    with pytest.raises(UserError, match="--reducer=push with one process"):
        Engine(tmp_path, reducer="push", device="cpu")
    with pytest.raises(UserError, match="loaded already"):
        Engine(model, reducer="async")
    for wrong in (Engine(model), torch.nn.Linear(2, 2), None):
        name = type(wrong).__name__
        with pytest.raises(UserError, match=f"model is of type {name}; give a Transformer"):
            Engine(wrong)  # type: ignore[arg-type]


def prompts_of(*lengths: int, seed: int = 2) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 67, (n,), generator=generator).tolist() for n in lengths]


def assert_greedy(model: Transformer, prompt: list[int], found: Completion) -> None:
    """Each token is the likeliest after all that is before it: one pass over the whole text."""
    text = torch.tensor([prompt + found.tokens])
    best = model(text).argmax(-1)[0, len(prompt) - 1 : -1]
    assert found.tokens == best.tolist()


@pytest.mark.parametrize(
    ("longest", "width"),
    [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (512, 512), (513, 768), (4096, 4096),
     (4097, 5120), (7000, 7000), (6800, 7000)],
)  # fmt: skip
def test_prompt_widths(longest: int, width: int) -> None:
    """Up to a limit, a step; never beyond the cache, nor shorter than the prompt."""
    model = make("standard", None)
    session = Session(model, 1, 7000, Sampling(), fused=False, graphs=True)
    assert session.prompt_width(longest) == width
    plain = Session(model, 1, 7000, Sampling(), fused=False, graphs=False)
    assert plain.prompt_width(longest) == longest


def test_capacities_and_sessions() -> None:
    """A session is kept for its batch, capacity and kind of sampling: whatever the seed is."""
    engine = engine_for(make("ladder", None, max_seq_len=600), graphs=True)
    capacities = {n: engine.session(2, n, Sampling()).capacity for n in (1, 256, 257, 512, 599)}
    assert capacities == {1: 256, 256: 256, 257: 512, 512: 512, 599: 600}
    assert len(engine.sessions) == 3
    first = engine.session(2, 100, Sampling(0.5, seed=1))
    assert first.cache.keys.shape[-2] == first.capacity
    assert engine.session(2, 200, Sampling(0.5, seed=9)) is first
    others = [(3, 100, Sampling(0.5)), (2, 300, Sampling(0.5)), (2, 100, Sampling(0.6))]
    others += [(2, 100, Sampling(0.5, top_k=3)), (2, 100, Sampling(0.5, top_p=0.5))]
    assert all(engine.session(*other) is not first for other in others)
    plain = engine_for(engine.model, graphs=False)
    assert plain.session(2, 100, Sampling()).capacity == 100
    assert not plain.sessions


def test_the_sessions_used_last_are_kept() -> None:
    engine = engine_for(make("ladder", None), graphs=True)
    found = [engine.session(batch, 9, Sampling()) for batch in range(1, SESSIONS + 1)]
    assert engine.session(1, 9, Sampling()) is found[0]
    engine.session(SESSIONS + 1, 9, Sampling())
    assert len(engine.sessions) == SESSIONS
    assert engine.session(1, 9, Sampling()) is found[0]  # used since
    assert engine.session(2, 9, Sampling()) is not found[1]


def test_a_full_cache_is_an_error() -> None:
    """And writes over nothing: the longest prompt's last place was full four steps ago."""
    engine = engine_for(make("ladder", None, max_seq_len=20), graphs=False)
    session = engine.session(2, 8, Sampling())
    with pytest.raises(UserError, match="cache of 8 positions is full"):
        session.step()
    with torch.inference_mode():
        session.prefill([[1] * 7, [2] * 3], torch.zeros(1, 2))
        for _ in range(8 - 3):
            session.step()
        with pytest.raises(UserError, match="cache of 8 positions is full"):
            session.step()
        with pytest.raises(UserError, match="a prompt of 9 tokens does not fit"):
            session.prefill([[1] * 9, [2]], torch.zeros(1, 2))
    with pytest.raises(UserError, match="a session of 21 tokens is longer"):
        engine.session(1, 21, Sampling())


@pytest.mark.parametrize("mode", ["plain", "graphs", "fused", "fused graphs"])
@pytest.mark.parametrize(("plan", "degree"), PLANS)
def test_to_the_last_place_of_the_cache(plan: str, degree: int | None, mode: str) -> None:
    """Prompts on both sides of each width, in a cache full of NaN; all go on until it is full.

    A sequence that is full must leave its neighbours alone, and memory that nothing was written to
    must not be read (0 times NaN is NaN).
    """
    fused = "fused" in mode
    model = make(plan, degree, max_seq_len=CONTEXT)
    engine = engine_for(make(plan, degree, max_seq_len=CONTEXT), "graphs" in mode, fused)
    session = engine.session(6, CONTEXT, Sampling())
    engine.session = lambda *_: session  # type: ignore[method-assign]
    prompts = prompts_of(16, 1, 17, 64, 65, CONTEXT - 1)
    others = prompts_of(3, 16, 2, 15, 1, 7)  # again, and much shorter
    for batch in (prompts, others):
        with torch.inference_mode():
            session.cache.keys.fill_(math.nan)
            session.cache.values.fill_(math.nan)
        results = engine.generate(batch, max_new_tokens=100)
        for prompt, result in zip(batch, results, strict=True):
            assert result.reason == "context"
            assert len(result.tokens) == CONTEXT - len(prompt)
            assert_greedy(model, prompt, result)


@pytest.mark.parametrize(
    ("plan", "degree"),
    [pytest.param(*p, marks=() if p[0] == "ladder" else pytest.mark.slow) for p in PLANS],
)
def test_graphs_change_nothing(plan: str, degree: int | None) -> None:
    """Warm-up steps that shift the draws, or an older batch that shines through, fail this."""
    model = make(plan, degree, max_seq_len=CONTEXT)
    plain, graphed = engine_for(model, False), engine_for(model, True)
    for sampling in (Sampling(), Sampling(1.0, seed=4), Sampling(1.0, seed=5), Sampling(1.0, 9)):
        for lengths in ((5, 18, 1), (40, 2, 33), (1, 1, 1)):
            prompts = prompts_of(*lengths)
            expected = plain.generate(prompts, max_new_tokens=14, sampling=sampling)
            for _ in range(2):
                found = graphed.generate(prompts, max_new_tokens=14, sampling=sampling)
                assert found == expected, (sampling, lengths)
    assert len(graphed.sessions) == 3
    assert all(len(session.prompt_graphs) == 3 for session in graphed.sessions.values())


def test_seeds() -> None:
    """Two seeds share a session; each must have its own text, and the same one again."""
    engine = engine_for(make("ladder", None, max_seq_len=CONTEXT), True)
    prompts = prompts_of(4, 9)
    texts = [
        [result.tokens for result in engine.generate(
            prompts, max_new_tokens=10, sampling=Sampling(1.0, seed=seed))]
        for seed in (1, 2, 1, 3)
    ]  # fmt: skip
    assert texts[0] == texts[2]
    assert texts[0] != texts[1] != texts[3] != texts[0]
    assert len(engine.sessions) == 1


@BOTH
def test_stop_tokens_end_one_sequence_each(graphs: bool) -> None:
    """A stop may be the first token or the last; the others' texts go on as if it were not."""
    model = make("ladder", None, max_seq_len=CONTEXT)
    prompts = prompts_of(6, 11, 20)
    whole = [r.tokens for r in engine_for(model, graphs).generate(prompts, max_new_tokens=9)]
    stops = {whole[0][0], whole[1][-1]}
    seen: list[tuple[int, int]] = []
    results = engine_for(model, graphs).generate(
        prompts, max_new_tokens=9, stop=stops, on_token=lambda i, token: seen.append((i, token))
    )
    assert results[0] == Completion([], "stop")
    for i, (tokens, result) in enumerate(zip(whole, results, strict=True)):
        places = [n for n, token in enumerate(tokens) if token in stops]
        end = places[0] if places else len(tokens)
        assert result == Completion(tokens[:end], "stop" if places else "length")
        assert [token for j, token in seen if j == i] == result.tokens
    assert results[1].reason == "stop"


@BOTH
def test_steps_end_with_the_last_sequence(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step more than the texts need, but for the one that a graph takes ahead of a stop."""
    model = make("standard", None, max_seq_len=CONTEXT)
    engine = engine_for(model, graphs)
    tokens = engine.generate(prompts_of(5), max_new_tokens=8)[0].tokens  # and the session's warm-up
    steps = []
    original = Session.step
    monkeypatch.setattr(Session, "step", lambda self: (steps.append(1), original(self)))
    engine.generate(prompts_of(5), max_new_tokens=8)
    assert len(steps) == 7  # the prefill chooses the first token
    steps.clear()
    place = next(n for n, token in enumerate(tokens) if n > 2 and token not in tokens[:n])
    engine.generate(prompts_of(5), max_new_tokens=30, stop={tokens[place]})
    assert len(steps) == place + graphs
    steps.clear()
    engine.generate(prompts_of(CONTEXT - 1), max_new_tokens=30)
    assert not steps


def test_a_session_keeps_a_few_graphs_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills of other widths use no graph; the graphs that are kept stay in use."""
    monkeypatch.setattr("ladder.infer.session.PROMPT_GRAPHS", 2)
    model = make("ladder", None, max_seq_len=CONTEXT)
    plain, graphed = engine_for(model, False), engine_for(model, True)
    graphed.session(1, CONTEXT, Sampling())
    for length in (5, 20, 40, 60, 21, 6, 39):
        session = graphed.session(1, CONTEXT, Sampling())
        monkeypatch.setattr(graphed, "session", lambda *_, one=session: one)
        prompts = prompts_of(length)
        expected = plain.generate(prompts, max_new_tokens=4)
        assert graphed.generate(prompts, max_new_tokens=4) == expected, length
    assert len(session.prompt_graphs) == 2


def test_long_prompts_go_without_a_graph() -> None:
    """Beyond GRAPHED_PROMPT_TOKENS in a batch a prefill keeps no graph, and uses none."""
    model = make("standard", None, num_layers=1, max_seq_len=GRAPHED_PROMPT_TOKENS // 2 + 100)
    engine = engine_for(model, True)
    prompts = prompts_of(GRAPHED_PROMPT_TOKENS // 2 + 1, 3)
    results = engine.generate(prompts, max_new_tokens=3)
    (session,) = engine.sessions.values()
    assert not session.prompt_graphs
    assert_greedy(model, prompts[1], results[1])
    assert engine_for(model, False).generate(prompts[1:], max_new_tokens=3) == results[1:]


def test_graphs_are_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match="graphs"):
        Engine(make("standard", None), graphs=True)
