"""Evaluation: log-likelihoods, and the harness beside transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import load_model
from ladder.eval import offline, results, suites
from ladder.eval.command import evaluate
from ladder.eval.scoring import Request, score
from ladder.infer.engine import generate, refuse_not_finite
from ladder.models import Transformer, UserError
from tests.corpus import WORDS
from tests.distributed import Pools, tp_mesh
from tests.evaluation import CONTEXT, needs_lm_eval
from tests.infer.engines import make, prompts, without_cache

# ---- log-likelihoods ----------------------------------------------------------------------------


def directly(model: Transformer, request: Request) -> tuple[float, bool]:
    """One request by itself, from all logits, with what is too long cut as HFLM cuts it."""
    context, continuation, _ = request
    if not continuation:
        return 0.0, True
    tokens = [*context, *continuation][-(model.config.max_seq_len + 1) :]
    logits = model(torch.tensor([tokens[:-1]]))[0, -len(continuation) :]
    chosen = torch.tensor(list(continuation))
    sums = logits.log_softmax(-1).gather(-1, chosen[:, None]).sum()
    return float(sums), bool((logits.argmax(-1) == chosen).all())


def requests() -> list[Request]:
    """Short, long, too long, empty, of equal inputs, and one that the model itself would give.

    And that one with another beginning, after which the last token is the model's own again.
    """
    source = random.Random(3)

    def some(count: int) -> list[int]:
        return [source.randrange(1, 67) for _ in range(count)]

    shared = some(9)
    found = [Request(some(a), some(b)) for a, b in ((5, 3), (1, 1), (30, 2), (50, 4), (39, 40))]
    found += [Request(shared, [token]) for token in (4, 5, 6)]
    found += [Request(shared[:7], [*shared[7:], 5]), Request(some(3), [])]
    model, prompt = make("ladder", None), prompts()[0]
    own = without_cache(model, prompt, 3)
    other = own[0] % 66 + 1
    found.append(Request(prompt, [other, *without_cache(model, [*prompt, other], 1)]))
    return [*found, Request(prompt, own)]


@pytest.mark.parametrize(
    ("plan", "degree"), [("standard", None), ("ladder", None), ("desync-4x", 4)]
)
def test_batches_score_what_single_sequences_do(plan: str, degree: int | None) -> None:
    """Padding that is seen, a place that is off by one or results in another order fail this."""
    model, asked = make(plan, degree), requests()
    with torch.no_grad():
        expected = [directly(model, request) for request in asked]
    for batch in (1, 3, 16):
        found = score(model, asked, batch)
        assert [each.greedy for each in found] == [greedy for _, greedy in expected]
        for each, (nats, _) in zip(found, expected, strict=True):
            assert each.loglikelihood == pytest.approx(nats, abs=1e-9)
    assert [greedy for _, greedy in expected].count(True) < len(asked)
    if plan == "ladder":
        assert found[-1].greedy
        assert not found[-2].greedy


def test_equal_inputs_share_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four answers of one token cost one sequence, not four."""
    model, shapes = make("standard", None), []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda tokens, **more: shapes.append(tokens.shape) or forward(tokens, **more),
    )
    score(model, [Request([7, 8, 9], [token]) for token in (1, 2, 3, 4)], batch=16)
    assert shapes == [(1, 3)]


def scored_on_rank(rank: int, world: int, plan: str, degree: int | None) -> list[Any]:
    return [tuple(each) for each in score(make(plan, degree, tp_mesh(world)), requests(), 3)]


@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("dtp-1", 4)])
def test_ranks_score_what_one_process_does(pools: Pools, plan: str, degree: int | None) -> None:
    expected = score(make(plan, degree), requests(), 3)
    for found in pools(2).run(scored_on_rank, plan, degree):
        for (nats, greedy), each in zip(found, expected, strict=True):
            assert nats == pytest.approx(each.loglikelihood, abs=1e-9)
            assert greedy == each.greedy


def test_what_cannot_be_scored_is_refused() -> None:
    model = make("standard", None)
    with pytest.raises(UserError, match="task 'x' has a continuation of 41 tokens, longer than"):
        score(model, [Request([1], [1] * 41, "x")], 4)
    with pytest.raises(UserError, match="a token outside vocab_size=67 of runs/x; is its tok"):
        score(model, [Request([1], [67])], 4, where="runs/x")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        score(model, [Request([1], [1])], 4)


def refused_on_rank(rank: int, world: int) -> list[str]:
    model, said = make("ladder", None, tp_mesh(world)), []
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for work in (lambda: score(model, requests(), 3), lambda: generate(model, prompts())):
        with pytest.raises(UserError) as error, refuse_not_finite(Path("runs/x")):
            work()
        said.append(str(error.value))
    return said


def test_logits_that_are_not_finite_are_refused_on_every_rank(pools: Pools) -> None:
    first, second = pools(2).run(refused_on_rank)
    assert first == second
    for said, what in zip(first, ("logits are", "logits of prompt 0 are"), strict=True):
        assert said.startswith(f"runs/x: the model's {what} not finite; its weights hold NaN or")


def test_groups_hide_what_they_report() -> None:
    """A metric that no group above a task reports is the task's alone; shots may differ."""
    found = results.metrics({
        "results": {
            "all": {"acc,none": 0.5, "sample_len": 4},
            "part": {"exact_match,none": 0.25},
            "a": {"acc,none": 0.5, "acc_norm,none": 0.75},
            "b": {"acc,none": 0.5, "exact_match,none": 0.25},
        },
        "n-shot": {"a": 0, "b": 5, "part": 5},
        "higher_is_better": {},
    })  # fmt: skip
    shown = results.shown(found, {"all": ["a", "part"], "part": ["b"]})
    rows = results.table({"m": shown})
    assert [row[:3] for row in rows[1:]] == [
        ["all", "-", "acc"], ["part", "5", "exact_match"], ["a", "0", "acc_norm"]
    ]  # fmt: skip
    assert results.plain({"m": shown})["m"][0]["num_fewshot"] is None


def test_a_caller_ends_a_generation() -> None:
    """The token that completes a stop sequence is the last, of its own sequence alone."""
    model = make("ladder", None)
    expected = [without_cache(model, prompt, 9) for prompt in prompts()]
    found = generate(
        model, prompts(), max_new_tokens=9, ended=lambda i, tokens: i == 1 and len(tokens) == 4
    )
    assert [each.tokens for each in found] == [expected[0], expected[1][:4], expected[2]]
    assert [each.reason for each in found] == ["length", "stop", "length"]


# ---- beside transformers ------------------------------------------------------------------------


def hugging_face(folder: Path) -> Any:
    needs_lm_eval()
    pytest.importorskip("accelerate", reason="lm_eval's Hugging Face model needs it")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32")


def our_model_there(folder: Path, plan: str) -> Any:
    """Our model of transformers in the harness's own Hugging Face model."""
    needs_lm_eval()
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    from ladder.hf import LadderForCausalLM

    model = LadderForCausalLM.from_pretrained(folder, plan=plan)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4, device="cpu")


def ours(folder: Path, batch: int, mesh: Any = None) -> Any:
    from ladder.eval.model import LadderLM

    return LadderLM(load_model(folder, mesh), folder, batch)


def instances(kind: str, arguments: Sequence[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, 0, ("test", i, 1)) for i, each in enumerate(arguments)]


TEXT = " ".join(WORDS[(i * 7 + i * i) % len(WORDS)] for i in range(250))
PAIRS = [
    ("def self", " return"), ("def self ", "return value"), ("", "range in"), (TEXT, " if else"),
    (TEXT[:30], TEXT[30:150]), ("x", "\n"), ("<|endoftext|>def", " value"), ("é", "ü☃"),
    ("", "<|endoftext|>self"),
]  # fmt: skip
ROLLING = [("self",), (TEXT,), (TEXT[:200],), ("☃",)]
STOPS = {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False}
CONTEXTS = [("def self", STOPS), (TEXT, STOPS), ("in range", {"max_gen_toks": 5}), ("if", STOPS)]


def everything(model: Any, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[Any]:
    return [
        model.loglikelihood(instances("loglikelihood", pairs)),
        model.loglikelihood_rolling(instances("loglikelihood_rolling", ROLLING)),
        model.generate_until(instances("generate_until", CONTEXTS)),
    ]


def agree(found: list[Any], expected: list[Any]) -> None:
    for (nats, greedy), (their_nats, their_greedy) in zip(found[0], expected[0], strict=True):
        assert nats == pytest.approx(their_nats, abs=1e-4)
        assert greedy == their_greedy
    # Theirs are sums in float32, which is no finer than 1.2e-4 at the 1,700 nats of a long text.
    assert found[1] == pytest.approx(expected[1], abs=1e-4, rel=2**-23)
    assert found[2] == expected[2]


def offline_tasks(data: Path) -> dict[str, Any]:
    suites.require_lm_eval()
    return suites.load(suites.load_suite("offline"), data)


def figures(model: Any, folder: Path, data: Path) -> list[results.Metric]:
    return evaluate(model, folder, offline_tasks(data), limit=4)


def same_figures(found: list[results.Metric], expected: list[results.Metric]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.task, mine.metric) == (theirs.task, theirs.metric)
        if mine.metric == "bits_per_byte":
            assert mine.value == pytest.approx(theirs.value, abs=1e-5)
        else:
            assert mine.value == theirs.value
        assert mine.stderr == pytest.approx(theirs.stderr, abs=1e-5)


def harness_on_rank(rank: int, world: int, folder: Path, data: Path) -> tuple[Any, Any]:
    model = ours(folder, 3, tp_mesh(world))
    return everything(model), figures(model, folder, data)


@pytest.mark.slow
def test_the_harness_finds_what_it_does_in_transformers(
    llama: Path, texts: Path, tmp_path: Path, pools: Pools
) -> None:
    """One set of weights: log-likelihoods within 1e-4, equal texts, equal figures, at any batch."""
    reference = hugging_face(llama)
    expected = everything(reference)
    assert any(text for text in expected[2])
    offline.build_tasks([str(texts)], tmp_path)
    their_figures = figures(reference, llama, tmp_path)
    assert len(their_figures) == 8
    for batch in (1, 3, 16):
        model = ours(llama, batch)
        agree(everything(model), expected)
        same_figures(figures(model, llama, tmp_path), their_figures)
    for found, found_figures in pools(2).run(harness_on_rank, llama, tmp_path):
        agree(found, expected)
        same_figures(found_figures, their_figures)


@pytest.mark.parametrize("plan", ["standard", "ladder"])
def test_the_engine_finds_what_our_model_of_transformers_does(
    llama: Path, texts: Path, tmp_path: Path, plan: str
) -> None:
    reference = our_model_there(llama, plan)
    reference.model.save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / file).write_bytes((llama / file).read_bytes())
    data = tmp_path / "data"
    offline.build_tasks([str(texts)], data)
    model = ours(tmp_path / "model", 3)
    assert model.model.config.plan.name == plan
    agree(everything(model), everything(reference))
    same_figures(figures(model, llama, data), figures(reference, llama, data))


def test_a_conversation_reads_as_in_transformers(llama: Path, texts: Path, tmp_path: Path) -> None:
    """Templates that strip messages, refuse a system message, or add a token of their own."""
    needs_lm_eval()
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    from ladder.eval.model import LadderLM

    model = LadderLM(load_model(tmp_path), tmp_path, 3, "")
    reference = hugging_face(tmp_path)
    asked = {"role": "user", "content": " self "}
    begun = {"role": "assistant", "content": "The answer is "}
    for history, prompt in (
        ([asked], True),
        ([{"role": "system", "content": "return"}, asked], True),
        ([asked, begun], False),
        ([asked, {**begun, "content": "value"}], False),
    ):
        found = model.apply_chat_template(history, add_generation_prompt=prompt)
        assert found == reference.apply_chat_template(history, add_generation_prompt=prompt)
    offline.build_tasks([str(texts)], tmp_path / "data", ["local_sums", "local_definitions"])
    tasks = suites.load([suites.SuiteTask("local_sums"), suites.SuiteTask("local_definitions")],
                        tmp_path / "data")  # fmt: skip
    found, expected = (
        evaluate(each, tmp_path, tasks, limit=3, chat_template="") for each in (model, reference)
    )
    same_figures(found, expected)
    assert evaluate(model, tmp_path, tasks, limit=3)[0] != found[0]


def test_a_beginning_of_text_token_is_added_as_transformers_adds_it(
    llama: Path, tmp_path: Path
) -> None:
    """Llama's tokenizers put one before each text; two, or none, change every log-likelihood."""
    needs_lm_eval()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["added_tokens"].append(
        {"id": 299, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    )  # fmt: skip
    definition["model"]["vocab"] = {
        token: i for token, i in definition["model"]["vocab"].items() if i < 299
    }
    definition["model"]["merges"] = [
        pair for pair in definition["model"]["merges"]
        if "".join(pair) in definition["model"]["vocab"]
    ]  # fmt: skip
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing", "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [299], "tokens": ["<s>"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    ).save_pretrained(tmp_path)  # fmt: skip
    assert AutoTokenizer.from_pretrained(tmp_path).encode("def")[0] == 299
    model, reference = ours(tmp_path, 4), hugging_face(tmp_path)
    assert model.prefix_token_id == reference.prefix_token_id == 299
    pairs = [*PAIRS, ("<s>def", " self"), ("", "<s>value")]
    for text in ("def", "<s>def", ""):
        assert model.tok_encode(text) == reference.tok_encode(text)
    agree(everything(model, pairs), everything(reference, pairs))


def test_special_tokens_that_only_an_older_file_names(llama: Path, tmp_path: Path) -> None:
    """As transformers reads it, which ignores it beside a config with a list of added tokens."""
    needs_lm_eval()
    from transformers import PreTrainedTokenizerFast

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    tokenizer = ours(llama, 4).tokenizer
    first, end, other = map(tokenizer.id_to_token, (5, 6, 7))
    older, config = tmp_path / "special_tokens_map.json", tmp_path / "tokenizer_config.json"
    older.write_text(json.dumps({"bos_token": first, "eos_token": {"content": end}}))
    for found in ({}, {"bos_token": other}, {"bos_token": other, "added_tokens_decoder": {}}):
        config.write_text(json.dumps(found))
        model, theirs = ours(tmp_path, 4), PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert model.prefix == theirs.bos_token_id
        assert model.end == (theirs.eos_token_id or 0)


def test_a_stop_sequence_that_is_a_special_token(llama: Path) -> None:
    """One that ends no text of the folder's, as `<|im_end|>` of a base model, and is not shown."""
    model, reference = ours(llama, 1), our_model_there(llama, "standard")
    prompt, options = "def self", {"max_gen_toks": 12, "do_sample": False}
    (free,) = generate(model.model, [model.tok_encode(prompt)], max_new_tokens=12)
    names = [model.tokenizer.id_to_token(token) for token in free.tokens]
    name = next(name for name in names[1:] if name.isascii() and name != names[0])
    for tokenizer in (model.tokenizer, reference.tokenizer.backend_tokenizer):
        tokenizer.add_special_tokens([name])
    asked = instances("generate_until", [(prompt, {**options, "until": [name]}), (prompt, options)])
    found = model.generate_until(asked)
    assert found == reference.generate_until(asked)
    assert found[0] == model.tokenizer.decode(free.tokens[: names.index(name)])
    assert len(found[1]) > len(found[0])


def test_every_model_sees_the_same_examples(llama: Path, texts: Path, tmp_path: Path) -> None:
    """A task goes on drawing where it was: the second model would be shown others."""
    needs_lm_eval()
    from lm_eval.tasks import TaskManager

    suites.require_lm_eval()
    offline.build_tasks([str(texts)], tmp_path / "data")
    (tmp_path / "task.yaml").write_text(
        "{task: shots, custom_dataset: !function ladder.eval.offline.read_task, dataset_kwargs: "
        "{file: arithmetic.jsonl}, test_split: test, fewshot_split: test, num_fewshot: 2, "
        "output_type: loglikelihood, doc_to_text: text, doc_to_target: answer, "
        "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]}"
    )
    manager = TaskManager(
        include_path=str(tmp_path), include_defaults=False,
        metadata={"folder": str(tmp_path / "data")},
    )  # fmt: skip
    tasks, model = manager.load("shots"), load_model(llama)
    (first,), (second,) = (evaluate(model, llama, tasks, limit=3) for _ in range(2))
    assert first == second
    assert (first.num_fewshot, first.examples) == (2, 3)
    assert first.stderr is not None


def test_what_transformers_cannot_do(llama: Path) -> None:
    """Empty continuations are certain; what melts into its context is its last token."""
    needs_lm_eval()
    model = ours(llama, 4)
    empty = [("def", ""), ("", "")]
    assert model.loglikelihood(instances("loglikelihood", empty)) == [(0.0, True)] * 2
    assert model.loglikelihood_rolling(instances("loglikelihood_rolling", [("",)])) == [0.0]
    assert len(model.tok_encode("return")) == 1 < len(model.tok_encode("ret"))
    melted, whole, last = model.loglikelihood(
        instances("loglikelihood", [("ret", "urn"), ("", "return"), ("re", "t")])
    )
    assert melted == whole
    assert melted != last
    (text,) = model.generate_until(instances("generate_until", [("", {"max_gen_toks": 4})]))
    assert isinstance(text, str)
    with pytest.raises(UserError, match="generates with num_beams=4"):
        model.generate_until(instances("generate_until", [("a", {"num_beams": 4})]))
    with pytest.raises(UserError, match=f"up to {CONTEXT} tokens and the context of {llama}"):
        model.generate_until(instances("generate_until", [("a", {"max_gen_toks": CONTEXT})]))
