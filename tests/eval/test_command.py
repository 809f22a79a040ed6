"""`ladder eval`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder.cli import main
from ladder.infer.load import load_for_inference
from ladder.models import UserError
from tests.evaluation import needs_lm_eval


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
               "--limit", "3", "--batch", "2", "--device", "cpu",
               "--dtype", "bfloat16"]  # fmt: skip
    assert main(command) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("local_") and " ± " in line]
    assert len(lines) == 8
    for line in lines:  # the same weights, in both columns
        left, right = re.split(r" {2,}", line)[-2:]
        assert left == right
    record = json.loads((out / "results.json").read_text())
    assert list(record["results"]) == list(record["models"]) == [str(llama), str(other)]
    assert {each["examples"] for each in record["results"][str(llama)]} == {3}
    assert (
        {each["dtype"] for each in record["models"].values()} == {record["dtype"]} == {"bfloat16"}
    )
    assert f"{llama}: {llama} (bfloat16)" in printed
    assert "local_definitions: of the standard library" in printed
    assert record["offline"]["files"]
    assert "| local_cloze | 0 | acc ↑ |" in (out / "results.md").read_text()
    before = (out / "results.json").read_bytes()
    command[command.index("--dtype") : command.index("--dtype") + 2] = ["--weights", "int8"]
    command[command.index("--out") + 1] = str(tmp_path / "small")
    assert main([*command, "--tasks", "local_cloze"]) == 0
    small = json.loads((tmp_path / "small" / "results.json").read_text())
    assert {each["weights"] for each in small["models"].values()} == {small["weights"]} == {"int8"}
    assert record["weights"] == "bfloat16"
    command[command.index("--out") + 1] = str(out)
    assert main([*command, "--limit", "1"]) == 2
    assert f"--out={out} holds results already" in capsys.readouterr().err
    assert (out / "results.json").read_bytes() == before
    capsys.readouterr()
    few = [*command, "--limit", "1", "--tasks", "local_cloze", "--overwrite"]
    assert main([*few, "--num-fewshot", "3"]) == 0
    assert "--num-fewshot=3 has no effect: these tasks have no examples" in capsys.readouterr().out
    assert json.loads((out / "results.json").read_text())["limit"] == 1


def test_each_example_is_written_if_asked(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of every model, in a file for each task; --overwrite removes older ones."""
    needs_lm_eval()
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(llama, other)
    command = ["eval", str(llama), str(other), "--text", str(texts), "--out", str(out), "--limit",
               "2", "--device", "cpu", "--log-samples", "--tasks", "local_cloze",
               "local_arithmetic"]  # fmt: skip
    assert main(command) == 0
    assert f"results.md, {out / 'samples_*.jsonl'}\n" in capsys.readouterr().out
    record = json.loads((out / "results.json").read_text())
    for task, metric in (("local_cloze", "acc"), ("local_arithmetic", "exact_match")):
        lines = (out / f"samples_{task}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        found = [(each["model"], each["task"], each["doc_id"]) for each in samples]
        assert found == [(str(model), task, i) for model in (llama, other) for i in range(2)]
        assert samples[0]["resps"] == samples[2]["resps"]
        (mean,) = (each["value"] for each in record["results"][str(llama)]
                   if (each["task"], each["metric"]) == (task, metric))  # fmt: skip
        assert sum(each[metric] for each in samples[:2]) / 2 == mean
    del command[command.index("--log-samples")]
    (out / "samples_mine.jsonl").write_text('{"mine": 1}\n')
    assert main([*command[:-1], "--overwrite"]) == 0
    assert [file.name for file in out.glob("samples_*")] == ["samples_mine.jsonl"]


def test_texts_are_scored_in_windows_as_a_run_was_trained(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One length for all models of a table: figures of windows of other lengths do not compare."""
    needs_lm_eval()
    runs = []
    for length in (24, 40):
        runs.append(tmp_path / f"run-{length}")
        shutil.copytree(llama, runs[-1])
        (runs[-1] / "train.json").write_text(json.dumps({"config": {"seq_len": length}}))

    def found(*folders: Path, task: str = "local_heldout") -> tuple[str, dict[str, Any]]:
        out = tmp_path / "out"
        command = ["eval", *map(str, folders), "--text", str(texts), "--out", str(out),
                   "--overwrite", "--limit", "2", "--tasks", task, "--device", "cpu"]  # fmt: skip
        assert main(command) == 0
        return capsys.readouterr().out, json.loads((out / "results.json").read_text())

    def windows(record: dict[str, Any]) -> list[int]:
        return [each["window"] for each in record["models"].values()]

    beginnings = "\nlocal_heldout: the first 4,096 characters of each document\n"
    printed, alone = found(llama)
    assert beginnings in printed
    assert "windows" not in printed
    assert windows(alone) == [192]
    printed, one = found(runs[1])
    assert f"{beginnings}windows: 40 tokens, as trained\n" in printed
    assert windows(one) == [40]
    printed, both = found(llama, *runs)
    assert "windows: 24 tokens, the fewest that a run was trained with\n" in printed
    assert both["windows"] in (tmp_path / "out" / "results.md").read_text()
    assert windows(both) == [24, 24, 24]
    values = [each["value"] for (each,) in both["results"].values()]
    assert values[0] == values[1] == values[2]
    others = [next(iter(record["results"].values()))[0]["value"] for record in (alone, one)]
    assert len({values[0], *others}) == 3
    short = tmp_path / "short"
    shutil.copytree(llama, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    printed, lower = found(runs[1], short)
    assert "windows: 32 tokens, the shortest context of the models\n" in printed
    assert windows(lower) == [32, 32]
    printed, each = found(llama, short)  # no run
    assert f"windows: {llama} 192, {short} 32 tokens, each model's context\n" in printed
    assert each["windows"] == f"{llama} 192, {short} 32 tokens, each model's context"
    assert windows(each) == [192, 32]
    printed, _ = found(runs[0], task="local_sums")  # has no windows
    assert "windows" not in printed
    assert "characters of each document" not in printed


def test_a_run_that_fails_changes_nothing(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Wherever it does: before its data is built, while it is, and after, at the last model."""
    needs_lm_eval()
    out = tmp_path / "runs" / "out"
    command = ["eval", str(llama), "--out", str(out), "--limit", "1", "--device", "cpu",
               "--tasks", "local_cloze", "--text"]  # fmt: skip
    (tmp_path / "short.txt").write_text("too little")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "bad.yaml").write_text(
        "{task: bad, dataset_path: json, dataset_kwargs: {data_files: no}}"
    )

    def fail() -> None:
        for words, message in (
            (["--tp", "2", "--text", str(texts)], "--tp=2 with 1 process:"),
            (["--text", str(tmp_path / "short.txt")], "holds too little text"),
            (["bad", "--text", str(texts), "--include-path", str(tasks)],
             "task 'bad' cannot be loaded"),
        ):  # fmt: skip
            tasks_last = [*command[:-3], "--overwrite", "--tasks", "local_cloze"]
            assert main([*tasks_last, *words]) == 2
            assert message in capsys.readouterr().err
        with monkeypatch.context() as patched:
            patched.setattr("ladder.eval.command.load_for_inference", lambda *_, **__: 1 / 0)
            assert main([*command, str(texts), "--overwrite"]) == 1

    fail()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "short.txt", tasks]
    assert main([*command, str(texts)]) == 0
    (out / "notes").write_text("of the user")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert {"notes", "results.json", "cloze.jsonl"} <= {path.name for path in before}
    fail()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("error", [UserError("no memory"), KeyboardInterrupt()])
def test_finished_models_are_kept(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, error: BaseException,
) -> None:  # fmt: skip
    """Whatever ends the run at a later one, with the data of the suite, and what is missing."""
    needs_lm_eval()
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(llama, other)
    command = ["eval", str(llama), str(other), "--text", str(texts), "--out", str(out),
               "--limit", "1", "--device", "cpu", "--tasks", "local_cloze"]  # fmt: skip

    def load(folder: Path, **options: Any) -> Any:
        if folder == other:
            raise error
        return load_for_inference(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr("ladder.eval.command.load_for_inference", load)
        assert main(command) == (2 if isinstance(error, UserError) else 130)
    said = capsys.readouterr()
    assert f"{out / 'results.json'} has the results of the models that were finished" in said.err
    assert re.search(r"local_cloze +0 +acc ↑ +\d", said.out)
    record = json.loads((out / "results.json").read_text())
    assert list(record["results"]) == list(record["models"]) == [str(llama)]
    assert record["incomplete"] == f"without {other}"
    assert f"- incomplete: without {other}" in (out / "results.md").read_text()
    assert {path.name for path in (out / "offline").iterdir()} == {"index.json", "cloze.jsonl"}
    assert main([*command, "--overwrite"]) == 0
    record = json.loads((out / "results.json").read_text())
    assert list(record["results"]) == [str(llama), str(other)]
    assert record["incomplete"] is None


@pytest.mark.parametrize("task", ["local_cloze", "local_arithmetic"])  # scored, and generated
def test_a_model_without_finite_logits(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    needs_lm_eval()
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(llama, other)
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, other / "model.safetensors")
    assert main(["eval", str(llama), str(other), "--text", str(texts), "--out", str(out),
                 "--limit", "1", "--device", "cpu", "--tasks", task]) == 2  # fmt: skip
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert re.match(rf"error: {other}: the model's logits .*are not finite; its weights", line)
    assert f"{out / 'results.json'} has the results of the models that were finished" in said
    assert main(["generate", str(other), "--prompt", "a", "--device", "cpu"]) == 2
    assert f"error: {other}: the model's logits of prompt 0 are" in capsys.readouterr().err


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
    assert main([*command, "offlin"]) == 2
    assert "no suite (did you mean 'offline'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "--batch=0"),
        (["--limit", "0"], "--limit=0"),
        (["--num-fewshot", "-1"], "--num-fewshot=-1"),
        (["--dtype", "float16"], "--dtype=float16 must be auto, float32 or bfloat16"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    assert main(["eval", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_harness(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", str(tmp_path)]) == 2
    assert "pip install -e '.[eval]'" in capsys.readouterr().err


def test_the_last_model_is_looked_at_before_the_first_is_run(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_lm_eval()
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    command = ["eval", str(llama), str(other), "--out", str(tmp_path / "out")]

    def said(*words: str) -> str:
        assert main([*command[:3], *words, *command[3:]]) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert f"MODEL={other} is given twice" in said(f"{other}/")
    early = said("--activations", "fp8")
    assert early.startswith(
        "error: --activations=fp8 with matrices in the type of"
    )  # reads no text
    assert "has no chat template" in said("--chat-template")
    gone = str(tmp_path / "nowhere.jinja")
    assert f"{gone} cannot be read (No such file or directory); give" in said(
        "--chat-template", gone
    )
    definition = json.loads((other / "tokenizer.json").read_text())
    added = {**definition["added_tokens"][0], "id": 4000, "content": "[PAD]"}  # as some Llamas have
    (other / "tokenizer.json").write_text(
        json.dumps({**definition, "added_tokens": [*definition["added_tokens"], added]})
    )
    assert "has no chat template" in said("--chat-template")
    definition["model"]["vocab"]["much"] = 5000
    (other / "tokenizer.json").write_text(json.dumps(definition))
    size = json.loads((other / "config.json").read_text())["vocab_size"]
    assert f"{other} has a tokenizer with a token of id 5000, outside vocab_size={size}" in said()
    (other / "tokenizer.json").unlink()
    assert "tokenizer.json; copy the model's own tokenizer.json there" in said()
    assert main(["generate", str(other), "--prompt", "a"]) == 2
    assert "; copy the model's own tokenizer.json there" in capsys.readouterr().err
    tensors = load_file(llama / "model.safetensors")
    save_file({**tensors, "model.extra": torch.zeros(2)}, other / "model.safetensors")
    assert "holds tensors that the model does not have: model.extra" in said()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": "UNSAFE"}], "task 'rows' runs programs that the model wrote"),
        ([{"asked": "a", "answer": "b"}], "task 'rows' cannot be loaded"),
        ([{"question": "a", "answer": "b"}, {"question": "a", "answer": None}],
         "task 'rows' cannot be built"),
        ([{"question": "a", "answer": "b" * 400}], "task 'rows' has a continuation of"),
        ([], "task 'rows' cannot be loaded: a split of its data is empty"),
    ],
)  # fmt: skip
def test_data_that_a_task_cannot_use(
    llama: Path,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_lm_eval()
    from lm_eval.tasks import TaskManager

    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.yaml").write_text(
        "{task: rows, custom_dataset: !function ladder.eval.offline.read_task, dataset_kwargs: "
        f"{{file: rows.jsonl, folder: {tmp_path}}}, test_split: test, output_type: loglikelihood, "
        "doc_to_text: 'Q: {{question}}', doc_to_target: '{{answer[:600]}}', metric_list: [{metric: "
        f"acc, aggregation: mean, higher_is_better: true}}], unsafe_code: {'UNSAFE' in lines}}}"
    )
    indexed = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: indexed)
    assert main(["eval", str(llama), "--out", str(tmp_path / "out"), "--tasks", "rows"]) == 2
    assert message in capsys.readouterr().err


def test_tasks_of_ones_own(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the harness's files in a folder; its own ten thousand are not read for them."""
    needs_lm_eval()
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    command = ["eval", str(llama), "--device", "cpu", "--out", str(out), "--tasks", "mine",
               "--include-path", str(tasks)]  # fmt: skip
    assert main(command) == 2
    assert f"--include-path={tasks} holds no YAML file" in capsys.readouterr().err
    tasks.mkdir()
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    (tasks / "mine.yaml").write_text(f"""
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{{metric: byte_perplexity}}]
""")
    assert main(command) == 2
    assert "task 'mine' cannot be loaded: a split of its data is empty" in capsys.readouterr().err
    rows.write_text('{"text": "a b c"}\n' * 3)
    assert main([*command, "--num-fewshot", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"mine +0 +byte_perplexity", printed)  # a whole text has no examples before it
    assert "--num-fewshot=2 has no effect: these tasks have no examples" in printed
    record = json.loads((out / "results.json").read_text())
    assert [each["examples"] for each in record["results"][str(llama)]] == [3]


def write_task(folder: Path, name: str, more: str) -> None:
    """A task of two rows, with further keys of its config."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"asked": "a b", "answer": "c"}\n{"asked": "b c", "answer": "d"}\n')
    (folder / f"{name}.yaml").write_text(
        f"{{task: {name}, dataset_path: json, dataset_kwargs: {{data_files: {{test: {rows}, train: "
        f"{rows}}}}}, test_split: test, doc_to_text: '{{{{asked}}}}', doc_to_target: "
        f"'{{{{answer}}}}', metric_list: [{{metric: exact_match}}], {more}}}"
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("max_gen_toks: 150", "task 'asks' generates up to 150 tokens and the context of {other} is"
         " max_seq_len=100; leave the task out"),
        ("max_gen_toks: 0", "task 'asks': max_gen_toks=0 must be a whole number, 1 or above"),
        ("max_tokens: many", "task 'asks': max_tokens='many' must be a whole number, 1 or above"),
        ("num_beams: 2", "task 'asks' generates with num_beams=2, and the engine supports only"),
        ("do_sample: true, top_k: -1", "task 'asks': top_k=-1 must be a whole number"),
        ("do_sample: true, top_p: most", "task 'asks': top_p='most' must be a finite number"),
        ("temperature: .nan", "task 'asks': temperature=nan must be a finite number"),
        ("until: 3", "task 'asks' has until=3; give a text or a list of texts"),
        ("until: [a, 3]", "task 'asks' has until=['a', 3]; give a text or a list of texts"),
    ],
)  # fmt: skip
def test_options_of_generation_are_refused_before_a_model_is_run(
    llama: Path, tmp_path: Path, kwargs: str, message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """For the shortest context of all models: what other tasks scored would be lost."""
    needs_lm_eval()
    other, tasks, out = tmp_path / "other", tmp_path / "tasks", tmp_path / "out"
    shutil.copytree(llama, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    tasks.mkdir()
    write_task(tasks, "asks", f"output_type: generate_until, generation_kwargs: {{{kwargs}}}")
    monkeypatch.setattr("ladder.eval.command.load_for_inference", lambda *_, **__: 1 / 0)
    command = ["eval", str(llama), str(other), "--device", "cpu", "--out", str(out),
               "--include-path", str(tasks), "--tasks", "asks"]  # fmt: skip
    assert main(command) == 2
    assert message.format(other=other) in capsys.readouterr().err
    assert not out.exists()


def test_options_of_generation_without_effect_are_accepted(llama: Path, tmp_path: Path) -> None:
    needs_lm_eval()
    write_task(tmp_path, "asks", "output_type: generate_until, generation_kwargs: {until: null, "
               "max_gen_toks: 4, num_beams: 1, top_p: null}")  # fmt: skip
    assert main(["eval", str(llama), "--device", "cpu", "--out", str(tmp_path / "out"),
                 "--include-path", str(tmp_path), "--tasks", "asks"]) == 0  # fmt: skip


@pytest.mark.parametrize(
    ("split", "shots", "message"),
    [
        ("train", 2, None),
        ("train", 3, "num-fewshot=3: task 'asks' has 2 rows of examples; lower it to 2 or less"),
        ("test", 1, None),
        ("test", 2, "num-fewshot=2: task 'asks' has 1 row of examples besides the one that is "
         "scored; lower it to 1 or less (--num-fewshot)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sampler", ["default", "first_n"])
def test_more_examples_than_there_are(
    llama: Path, tmp_path: Path, sampler: str, split: str, shots: int, message: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    needs_lm_eval()
    write_task(tmp_path, "asks", f"output_type: loglikelihood, fewshot_split: {split}, "
               f"fewshot_config: {{sampler: {sampler}}}")  # fmt: skip
    config = (tmp_path / "asks.yaml").read_text().replace("exact_match", "acc")
    (tmp_path / "asks.yaml").write_text(config)
    code = main(["eval", str(llama), "--device", "cpu", "--out", str(tmp_path / "out"),
                 "--include-path", str(tmp_path), "--tasks", "asks",
                 "--num-fewshot", str(shots)])  # fmt: skip
    said = capsys.readouterr()
    if message is None:
        assert code == 0
        assert re.search(rf"asks +{shots} +acc", said.out)
    else:
        assert code == 2
        assert message in said.err
        assert str(llama) not in said.out


def test_a_negative_number_of_examples(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_lm_eval()
    suite = tmp_path / "suite.yaml"
    suite.write_text("- {task: asks, num_fewshot: -1}")
    write_task(tmp_path, "asks", "output_type: generate_until, num_fewshot: -2")
    command = ["eval", str(llama), "--device", "cpu", "--out", str(tmp_path / "out"), "--tasks"]
    assert main([*command, str(suite)]) == 2
    assert f"task 'asks' of {suite}: num_fewshot=-1 must be a whole" in capsys.readouterr().err
    suite.unlink()
    assert main([*command, "asks", "--include-path", str(tmp_path)]) == 2
    assert "task 'asks': num_fewshot=-2 must be a whole number, 0" in capsys.readouterr().err


def test_a_group_of_ones_own_leads_to_the_offline_suite(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it names decides, and no prefix: a task of one's own may be called local_more."""
    needs_lm_eval()
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    tasks.mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n')
    (tasks / "more.yaml").write_text(
        f"{{task: local_more, tag: mine, dataset_path: json, dataset_kwargs: {{data_files: {{test: "
        f"{tmp_path / 'rows.jsonl'}}}}}, test_split: test, output_type: loglikelihood_rolling, "
        "doc_to_text: '', doc_to_target: text, metric_list: [{metric: byte_perplexity}]}"
    )
    (tasks / "group.yaml").write_text(
        "{group: all_of_it, task: [mine, {group: inner, task: [{task: local_sums}]}]}"
    )
    command = ["eval", str(llama), "--device", "cpu", "--limit", "1", "--out", str(out),
               "--include-path", str(tasks), "--text", str(texts), "--tasks"]  # fmt: skip
    assert main([*command, "local_more"]) == 2
    assert "--tasks names none of its tasks" in capsys.readouterr().err
    assert main([*command, "all_of_it"]) == 0
    record = json.loads((out / "results.json").read_text())
    assert [each["task"] for each in record["results"][str(llama)]] == ["local_more", "local_sums"]
    assert [*record["offline"]["files"]] == ["arithmetic.jsonl"]
