"""Evaluation: log-likelihoods, the harness beside transformers', the offline suite, the command."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from ladder.checkpoint import load_model
from ladder.cli import main
from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.eval import offline, results, suites
from ladder.eval.scoring import Request, score
from ladder.infer.engine import generate
from ladder.models import Transformer, UserError
from tests.corpus import VOCAB_SIZE, WORDS
from tests.distributed import Pools, tp_mesh
from tests.test_generate import make, prompts, without_cache

CONTEXT = 96


def needs_lm_eval() -> None:
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")


# ---- log-likelihoods ----------------------------------------------------------------------------


def directly(model: Transformer, request: Request) -> tuple[float, bool]:
    """One request by itself, from all logits, with what is too long cut as HFLM cuts it."""
    context, continuation = request
    if not continuation:
        return 0.0, True
    tokens = [*context, *continuation][-(model.config.max_seq_len + 1) :]
    logits = model(torch.tensor([tokens[:-1]]))[0, -len(continuation) :]
    chosen = torch.tensor(list(continuation))
    sums = logits.log_softmax(-1).gather(-1, chosen[:, None]).sum()
    return float(sums), bool((logits.argmax(-1) == chosen).all())


def requests() -> list[Request]:
    """Short, long, too long, empty, of equal inputs, and one that the model itself would give."""
    source = random.Random(3)

    def some(count: int) -> list[int]:
        return [source.randrange(1, 67) for _ in range(count)]

    shared = some(9)
    found = [Request(some(a), some(b)) for a, b in ((5, 3), (1, 1), (30, 2), (50, 4), (39, 40))]
    found += [Request(shared, [token]) for token in (4, 5, 6)]
    found += [Request(shared[:7], [*shared[7:], 5]), Request(some(3), [])]
    prompt = prompts()[0]
    return [*found, Request(prompt, without_cache(make("ladder", None), prompt, 3))]


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
    with pytest.raises(UserError, match="41 tokens is longer than the model's context"):
        score(model, [Request([1], [1] * 41)], 4)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        score(model, [Request([1], [1])], 4)


def test_a_caller_ends_a_generation() -> None:
    """The token that completes a stop sequence is the last, of its own sequence alone."""
    model = make("ladder", None)
    expected = [without_cache(model, prompt, 9) for prompt in prompts()]
    found = generate(
        model, prompts(), max_new_tokens=9, ended=lambda i, tokens: i == 1 and len(tokens) == 4
    )
    assert [each.tokens for each in found] == [expected[0], expected[1][:4], expected[2]]
    assert [each.reason for each in found] == ["length", "stop", "length"]


# ---- the offline data ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("texts"), random.Random(1)
    for i in range(4):
        words = [source.choice(WORDS) + str(source.randrange(40)) for _ in range(400)]
        lines = [" ".join(words[at : at + 9]) for at in range(0, len(words), 9)]
        (folder / f"{i}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_offline_data_is_a_function_of_the_text(texts: Path, tmp_path: Path) -> None:
    index = offline.build([str(texts)], tmp_path / "a")
    assert offline.build([str(texts)], tmp_path / "b") == index
    assert index["documents"] == 4
    whole = {path.read_text(encoding="utf-8") for path in texts.iterdir()}
    assert {row["text"] for row in rows(tmp_path / "a", "heldout")} == {
        text[: offline.CHARACTERS] for text in whole
    }
    cloze = rows(tmp_path / "a", "cloze")
    assert len(cloze) > 100
    for row in cloze:
        true = row["passage"] + row["choices"][row["answer"]]
        assert sum(true in text for text in whole) == 1
        assert len(set(row["choices"])) == 4
        wrong = [row["passage"] + choice for choice in row["choices"]]
        assert sum(any(each in text for text in whole) for each in wrong) == 1
    assert {row["answer"] for row in cloze} == {0, 1, 2, 3}
    for row in rows(tmp_path / "a", "copying"):
        first, second, half = row["text"].split("\n")
        assert first == second == half + row["rest"]
    for row in rows(tmp_path / "a", "arithmetic"):
        *solved, asked = row["text"].split("\n")
        a, _, b, _ = asked.split()
        assert int(a) + int(b) == int(row["answer"])
        for line in solved:
            a, _, b, _, c = line.split()
            assert int(a) + int(b) == int(c)


def test_prepared_data_gives_its_held_out_documents(
    corpus: Path, texts: Path, tmp_path: Path
) -> None:
    """Training documents, or text that is not the original's, would make the figures worthless."""
    prepare([texts], corpus, tmp_path / "data", heldout_fraction=0.5)
    held = open_corpus([texts], heldout_fraction=0.5).read("heldout")
    offline.build([str(tmp_path / "data")], tmp_path / "out")
    found = {row["text"] for row in rows(tmp_path / "out", "heldout")}
    assert found == {document.text[: offline.CHARACTERS] for document in held}
    assert 0 < len(found) < 4


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n")
    with pytest.raises(UserError, match="holds too little text to build the task 'cloze'"):
        offline.build([str(tmp_path / "short.txt")], tmp_path / "out")


# ---- suites and tables --------------------------------------------------------------------------


def test_suites_and_tasks(tmp_path: Path) -> None:
    shots = {entry.task: entry.num_fewshot for entry in suites.load_suite("paper-adapt")}
    assert shots == {
        "mmlu": 5, "arc_challenge": 25, "openbookqa": None, "hellaswag": 10,
        "truthfulqa_mc1": None, "gsm8k": 8, "ifeval": None,
    }  # fmt: skip
    assert [entry.task for entry in suites.entries(["paper-pretrain"], None)] == [
        "arc_challenge", "arc_easy", "hellaswag", "piqa", "sciq", "winogrande", "wikitext",
    ]  # fmt: skip
    assert suites.entries(["piqa"], 3) == [suites.Entry("piqa", 3)]
    with pytest.raises(UserError, match="names 'piqa' twice"):
        suites.entries(["paper-pretrain", "piqa"], None)
    (tmp_path / "suite.yaml").write_text("- {task: piqa, shots: 5}\n")
    with pytest.raises(UserError, match="unknown key of task 1"):
        suites.entries([str(tmp_path / "suite.yaml")], None)


def test_the_error_of_a_ratio() -> None:
    """Against the spread of the ratio over many samples of the same population."""
    source = random.Random(2)

    def sample() -> list[tuple[float, int]]:
        sizes = [source.randrange(20, 200) for _ in range(80)]
        return [(-size * source.gauss(1.0, 0.2) + source.gauss(0, 5), size) for size in sizes]

    def bits(pairs: Sequence[tuple[float, int]]) -> float:
        return -sum(nats for nats, _ in pairs) / sum(size for _, size in pairs) / math.log(2)

    values = torch.tensor([bits(sample()) for _ in range(400)])
    found = [results.ratio_stderr("bits_per_byte", sample()) for _ in range(100)]
    assert sum(found) / 100 == pytest.approx(float(values.std()), rel=0.15)  # type: ignore[arg-type]
    assert results.ratio_stderr("acc", sample()) is None


def test_groups_stand_for_their_parts() -> None:
    def figure(task: str) -> results.Metric:
        return results.Metric(task, 5, "acc", 0.5, 0.01, True, 10)

    found = [figure(name) for name in ("mmlu", "mmlu_stem", "mmlu_algebra", "piqa")]
    groups = {"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_algebra"]}
    assert [each.task for each in results.shown(found, groups)] == ["mmlu", "piqa"]
    table = results.table({"a": found[:1], "b": found[1:2]})
    assert table == [["task", "shots", "metric", "a", "b"],
                     ["mmlu", "5", "acc ↑", "0.5000 ± 0.0100", "-"]]  # fmt: skip


# ---- beside transformers ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face's layout, with the corpus's tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        eos_token_id=0, bos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    end = Tokenizer.from_file(str(corpus / "tokenizer.json")).id_to_token(0)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(corpus / "tokenizer.json"), eos_token=end, pad_token=end
    ).save_pretrained(folder)
    return folder


def hugging_face(folder: Path) -> Any:
    needs_lm_eval()
    pytest.importorskip("accelerate", reason="lm_eval's Hugging Face model needs it")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=4, dtype="float32")


def ours(folder: Path, batch: int, mesh: Any = None) -> Any:
    from ladder.eval.model import LadderLM

    return LadderLM(load_model(folder, mesh), folder, batch)


def instances(kind: str, arguments: Sequence[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, 0, ("test", i, 1)) for i, each in enumerate(arguments)]


TEXT = " ".join(WORDS[(i * 7 + i * i) % len(WORDS)] for i in range(120))
PAIRS = [
    ("def self", " return"), ("def self ", "return value"), ("", "range in"), (TEXT, " if else"),
    (TEXT[:30], TEXT[30:150]), ("x", "\n"), ("<|endoftext|>def", " value"), ("é", "ü☃"),
    ("", "<|endoftext|>self"),
]  # fmt: skip
ROLLING = [("self",), (TEXT,), (TEXT[:200],), ("☃",)]
STOPS = {"until": ["e", "\n\n"], "max_gen_toks": 12, "do_sample": False}
CONTEXTS = [("def self", STOPS), (TEXT, STOPS), ("in range", {"max_gen_toks": 5}), ("if", STOPS)]


def everything(model: Any) -> list[Any]:
    return [
        model.loglikelihood(instances("loglikelihood", PAIRS)),
        model.loglikelihood_rolling(instances("loglikelihood_rolling", ROLLING)),
        model.generate_until(instances("generate_until", CONTEXTS)),
    ]


def agree(found: list[Any], expected: list[Any]) -> None:
    for (nats, greedy), (their_nats, their_greedy) in zip(found[0], expected[0], strict=True):
        assert nats == pytest.approx(their_nats, abs=1e-4)
        assert greedy == their_greedy
    assert found[1] == pytest.approx(expected[1], abs=1e-4)
    assert found[2] == expected[2]


def offline_tasks(data: Path) -> dict[str, Any]:
    suites.require_lm_eval()
    return suites.load(suites.load_suite("offline"), data)


def figures(model: Any, folder: Path, data: Path) -> list[results.Metric]:
    from ladder.eval.command import evaluate

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


def test_the_harness_finds_what_it_does_in_transformers(
    llama: Path, texts: Path, tmp_path: Path, pools: Pools
) -> None:
    """One set of weights: log-likelihoods within 1e-4, equal texts, equal figures, at any batch."""
    reference = hugging_face(llama)
    expected = everything(reference)
    assert any(text for text in expected[2])
    offline.build([str(texts)], tmp_path)
    their_figures = figures(reference, llama, tmp_path)
    assert len(their_figures) == 6
    for batch in (1, 3, 16):
        model = ours(llama, batch)
        agree(everything(model), expected)
        same_figures(figures(model, llama, tmp_path), their_figures)
    for found, found_figures in pools(2).run(harness_on_rank, llama, tmp_path):
        agree(found, expected)
        same_figures(found_figures, their_figures)


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
    found = model.loglikelihood(instances("loglikelihood", pairs))
    expected = reference.loglikelihood(instances("loglikelihood", pairs))
    for (nats, greedy), (their_nats, their_greedy) in zip(found, expected, strict=True):
        assert nats == pytest.approx(their_nats, abs=1e-4)
        assert greedy == their_greedy


def test_every_model_sees_the_same_examples(llama: Path, texts: Path, tmp_path: Path) -> None:
    """A task goes on drawing where it was: the second model would be shown others."""
    needs_lm_eval()
    from lm_eval.tasks import TaskManager

    from ladder.eval.command import evaluate

    suites.require_lm_eval()
    offline.build([str(texts)], tmp_path / "data")
    (tmp_path / "task.yaml").write_text(
        "{task: shots, custom_dataset: !function ladder.eval.offline.read, dataset_kwargs: "
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
    (text,) = model.generate_until(instances("generate_until", [("", {"max_gen_toks": 4})]))
    assert isinstance(text, str)
    with pytest.raises(UserError, match="generates with num_beams=4"):
        model.generate_until(instances("generate_until", [("a", {"num_beams": 4})]))
    with pytest.raises(UserError, match=f"up to {CONTEXT} tokens and the model's context"):
        model.generate_until(instances("generate_until", [("a", {"max_gen_toks": CONTEXT})]))


# ---- the command --------------------------------------------------------------------------------


def test_models_side_by_side(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_lm_eval()
    other = tmp_path / "other"
    other.mkdir()
    for file in llama.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out"
    command = ["eval", str(llama), str(other), "--text", str(texts), "--out", str(out),
               "--limit", "3", "--batch", "2", "--device", "cpu"]  # fmt: skip
    assert main(command) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("local_")]
    assert len(lines) == 6
    for line in lines:  # the same weights, in both columns
        left, right = re.split(r" {2,}", line)[-2:]
        assert left == right
        assert " ± " in left
    record = json.loads((out / "results.json").read_text())
    assert list(record["results"]) == list(record["models"]) == [str(llama), str(other)]
    assert {each["examples"] for each in record["results"][str(llama)]} == {3}
    assert record["offline"]["files"]
    assert "| local_cloze | 0 | acc ↑ |" in (out / "results.md").read_text()


def test_a_task_of_the_hub_without_a_network(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_lm_eval()
    import datasets
    from lm_eval.tasks import TaskManager

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'x/cloze' on the Hub")

    config = "{task: hub_task, dataset_path: x/cloze, output_type: multiple_choice}"
    (tmp_path / "hub.yaml").write_text(config)
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    indexed = TaskManager(include_path=str(tmp_path), include_defaults=False)  # not all: 6 seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: indexed)
    command = ["eval", str(llama), "--out", str(tmp_path / "out"), "--tasks"]
    assert main([*command, "hub_task"]) == 2
    said = capsys.readouterr().err
    assert "task 'hub_task' cannot be loaded (ConnectionError" in said
    assert "`--tasks offline` needs neither" in said
    assert main([*command, "hub_tusk"]) == 2
    said = capsys.readouterr().err
    assert "'hub_tusk' is no task" in said
    assert "did you mean 'hub_task'?" in said
    assert "paper-adapt" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "--batch=0"),
        (["--limit", "0"], "--limit=0"),
        (["--num-fewshot", "-1"], "--num-fewshot=-1"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_harness(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", "nowhere"]) == 2
    assert "pip install 'ladder[eval]'" in capsys.readouterr().err
