"""The command line: what a stranger types, and what a mistake gets back."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from ladder.__main__ import main as command_main
from ladder.cli import main
from ladder.folders import newest
from ladder.models import resolve_plan
from ladder.parallel import launch
from ladder.plans import picture
from tests import ROOT
from tests.commands import Start
from tests.corpus import make_corpus, swap_two_tokens
from tests.distributed import PATIENCE

LADDER = [sys.executable, "-m", "ladder"]
RESUMES = "--resume continues from the last checkpoint, if one was written"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A real process, as a user's; its standard input is closed."""
    return subprocess.run(
        [*LADDER, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def one_line_error(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit code 2, one line, no traceback, and it says these words."""
    assert result.returncode == 2, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in errors[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` and the run `run`, trained through the command line on two ranks."""
    folder = tmp_path_factory.mktemp("cli")
    make_corpus(folder)
    recipe = {
        "data": str(folder / "data"),
        "out": str(folder / "run"),
        "model": {"name": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_layers": 2},
        "plan": str(folder / "lag2.yaml"),
        "steps": 4,
        "seq_len": 16,
        "batch_size": 4,
        "warmup_steps": 1,
        "log_interval": 1,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lags = "{own_lag: 2, peer_lag: 2}"
    (folder / "lag2.yaml").write_text(
        f"layers:\n  - {{layers: 0-1, attention: {lags}, mlp: {lags}}}\n"
    )
    result = run("train", str(folder / "recipe.yaml"), "tp=2", "lr=1e-3", "--nproc", "2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("held-out:") == 1  # only rank 0 speaks
    assert "plan lag2: 4 collectives per token, 1 blocking" in result.stdout
    return folder


def test_plans_prints_pictures_tables_and_json(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plans", "--layers", "8"]) == 0
    overview = capsys.readouterr().out
    assert [line.split() for line in overview.splitlines() if line.startswith("ladder ")] == [
        ["ladder", "16", "1", "no"]
    ]
    assert main(["plans", "--layers", "1"]) == 0  # which is too few for one of them
    assert "accumulate-8x-lag4" not in capsys.readouterr().out
    assert main(["plans", "standard", "ladder", "dtp-1", "--layers", "8", "--tp-degree", "2"]) == 0
    text = capsys.readouterr().out
    assert "attn 0    ]........[mlp 0" in text  # standard waits
    assert "attn 0    ][mlp 0" in text  # ladder does not
    assert "one final mean" in text
    assert main(["plans", "accumulate-4x-lag2", "dtp-2", "--layers", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second = (n for n, line in enumerate(lines) if line.startswith("compute"))
    for n, bar, begin, end in (
        (first, "<sum 0-3-", "[attn 2", "[attn 3"),
        (second, "<sum 0-", "[mlp 0", "[mlp 1"),
    ):
        boxes, bars = lines[n : n + 2]  # a sum in flight has the time of two sublayers
        assert bars.index(bar) == boxes.index(begin)
        assert boxes.index("[", bars.index(">")) == boxes.index(end)
    assert main(["plans", str(trained / "lag2.yaml"), "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert plan["num_layers"] == 2  # all that its ranges cover
    assert plan["name"] == "lag2"
    assert plan["collectives_per_token"] == 4
    assert plan["blocking_collectives_per_token"] == 1
    assert plan["sublayers"][2]["own_lag"] == 2
    assert plan["depends_on_tp"] is False
    assert main(["plans", "ladder", "--model", "llama-3-8b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["num_layers"] == 32


def test_a_picture_shows_a_last_layer_that_differs() -> None:
    """But not one that only ends the reduces of the layers below."""
    for plan, shown in {"ladder@3": "attn 3    ][mlp 3 ", "desync-2x@3": "<sync 7>",
                        "parallel@3": "attn+mlp 3]", "ladder@0-2": "[attn 3    ]....",
                        "dtp-2": "  [attn 0 ", "accumulate-8x": "  [attn 0 "}.items():  # fmt: skip
        assert shown in picture(resolve_plan(plan, 4, 4)), plan


def test_generate_streams_batches_and_runs_on_ranks(
    trained: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(trained / "run"), "--prompt", "def value", "--max-new-tokens", "8"]
    alone = start(main, arguments).result()
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("def value")
    ranks = start(main, [*arguments, "--nproc", "2"]).result()
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout == alone.stdout
    assert ranks.stderr.count("reducer picked: async (push: it needs GPUs)") == 1
    assert "reducer" not in alone.stderr  # one process reduces nothing
    more = ["--prompt", "print", "--temperature", "0.8", "--seed", "4"]
    assert main([*arguments, *more]) == 0
    assert capsys.readouterr().out.count("--- prompt") == 2


def test_stop_strings_of_a_command(
    trained: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several tokens; on ranks, in batches and in files, and where the last token ends one."""
    words = ["generate", str(trained / "run"), "--prompt", "def value", "--max-new-tokens"]
    assert main([*words, "12", "--ignore-eos"]) == 0
    whole = capsys.readouterr().out.removeprefix("def value").removesuffix("\n")
    stop = whole[-5:-1]  # about two tokens
    shown = whole[: whole.index(stop)]
    ended = [*words, "20", "--ignore-eos", "--stop", "no such text", "--stop", stop]
    assert main(ended) == 0
    assert capsys.readouterr().out == f"def value{shown}\n"
    ranks = start(main, [*ended, "--nproc", "2"]).result()
    assert (ranks.returncode, ranks.stdout) == (0, f"def value{shown}\n")
    assert main([*ended, "--prompt", "def value"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"ended by stop)\ndef value{shown}\n") == 2
    count = int(out.partition("prompt 0 (")[2].split()[0])  # tokens; as many are enough
    file = trained / "stopped.jsonl"
    asked = [*words, str(count), "--ignore-eos", "--stop", stop, "--out", str(file)]
    assert main(asked) == 0
    assert capsys.readouterr().out == f"{file}: 1 completions\n"
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line == {"prompt": "def value", "text": shown, "tokens": count, "reason": "stop"}
    file.unlink()


def from_stdin(text: str, words: list[str]) -> int:
    """The command with this standard input."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    return main(words)


def test_prompts_of_a_file_and_completions_in_one(
    trained: Path, tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts = ["def value", "größer", "print\n"]
    text = "".join(json.dumps({"prompt": prompt, "id": 3}) + "\n\n" for prompt in prompts)
    file.write_text(text)
    words = ["generate", str(trained / "run"), "--max-new-tokens", "6"]
    assert main([*words, *(word for prompt in prompts for word in ("--prompt", prompt))]) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--prompts", str(file)]) == 0
    assert capsys.readouterr().out == printed
    assert main([*words, "--prompts", str(file), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 completions\n"
    lines = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    assert [line["prompt"] for line in lines] == prompts
    for i, line in enumerate(lines):
        head = f"--- prompt {i} ({line['tokens']} tokens, ended by {line['reason']})\n"
        assert f"{head}{line['prompt']}{line['text']}\n" in printed
    # Ranks that are started have no standard input of their own.
    again = tmp_path / "again.jsonl"
    given = [*words, "--prompts", "-", "--out", str(again), "--nproc", "2"]
    ranks = start(from_stdin, text, given).result()
    assert ranks.returncode == 0, ranks.stderr
    assert again.read_text() == out.read_text()
    assert main([*words, "--prompts", str(file), "--out", str(file)]) == 2
    assert f"--out={file} is the file of --prompts" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--prompts", str(file), "--prompt", "a"])
    assert "--prompt and --prompts exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\n", 'prompts={} is empty; give lines such as {"prompt": "The"}'),
        ('{"prompt": "a"}\n{"prompt": 3}', '{} line 2 has prompt=3; write it as {"prompt":'),
        ('{"prompt": "a"}\n["b"]', "{} line 2 has a list; write"),
        ('{"prompt": "a"}\n\n{"prompt" "a"}', "{} line 3 is not valid JSON"),
        ('{"prompt": "\\ud800"}', "{} line 1 is not valid JSON (text that is not UTF-8"),
        ('{"prompt": "a"}\n{"prompt": ""}', "{} line 2='' has no tokens; give some text"),
        ('{"prompt": "' + "a b " * 2000 + '"}', "{} line 1 has "),
        ('{"prompt": "a"}\n \n\n{"prompt": "' + "a b " * 2000 + '"}', "{} line 4 has "),
    ],
)  # fmt: skip
def test_lines_that_are_no_prompts(
    trained: Path, tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(text)
    command = ["generate", str(trained / "run"), "--prompts", str(file), "--out", str(out)]
    assert main(command) == 2
    assert said.replace("{}", str(file)) in capsys.readouterr().err
    assert not out.exists()


def test_generate_says_what_keeps_a_model_from_the_fused_kernels(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(trained / "run"), "--prompt", "a", "--max-new-tokens", "1"]
    said = "decodes without fused kernels, which cannot run adapters"
    monkeypatch.setattr("ladder.infer.command.fuse_refusal", lambda model: "adapters")
    assert main([*words, "--device", "cpu"]) == 0
    assert said not in capsys.readouterr().err  # a CPU has none
    monkeypatch.setattr("ladder.infer.command.device_of", lambda model: torch.device("cuda"))
    assert main([*words, "--device", "cpu"]) == 0
    assert said in capsys.readouterr().err


def test_an_interrupted_text_ends_its_line(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, on_token: Callable[[int, int], None], **__: object) -> None:
        on_token(0, 65)
        raise KeyboardInterrupt

    monkeypatch.setattr("ladder.infer.command.generate", interrupted)
    assert main(["generate", str(trained / "run"), "--prompt", "a", "--device", "cpu"]) == 130
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1
    assert captured.out.endswith("\n")
    assert captured.err == "interrupted\n"


def test_resume_through_the_command_line(trained: Path, start: Start) -> None:
    recipe = str(trained / "recipe.yaml")
    command = start(main, ["train", recipe, "tp=2", "lr=1e-3", "--nproc", "2", "--resume"])
    one_line_error(command.result(), "has finished its steps=4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nonsense"], ["unknown train config 'nonsense'", "tiny"]),
        (["plans", "--layers", "100000000"], ["--layers=100000000", "1 to 10000"]),
        (["train", "{}/recipe.yaml", "learning_rate=1"], ["'learning_rate'", "known: data"]),
        (["train", "{}/recipe.yaml", "lrr=1"], ["did you mean 'lr'"]),
        (["train", "{}/recipe.yaml", "plan=laddder"], ["unknown plan 'laddder'", "'ladder'"]),
        (["train", "{}/recipe.yaml", "steps"], ["not of the form key=value; write steps=VALUE"]),
        (["train", "{}/recipe.yaml", "lr", "0.5"], ["'lr' is not of the form", "write lr=0.5"]),
        (["train", "{}/recipe.yaml", "steps=many"], ["steps='many' must be a whole number"]),
        (["train", "{}/recipe.yaml", "lr="], ["lr has no value: it must be a number"]),
        (["train", "{}/recipe.yaml", "betas=1"], ["for example betas=[0.9,0.99]"]),
        (["train", "{}/recipe.yaml", "out=/proc/nope"], ["/proc/nope"]),
        (["train", "{}/recipe.yaml", "out="], ["out='' is no folder"]),
        (["train", "{}/recipe.yaml", "--device", "tpu"], ["--device=tpu"]),
        (["train", "{}/recipe.yaml", "out={}/data"], ["holds something else, index.json"]),
        (["train", "{}/recipe.yaml", "out={}/recipe.yaml"], ["yaml is a file; give a folder"]),
        (["plans", "ladder@3-1"], ["is no range", "0-31", "lower one first"]),
        (["generate", "{}/run", "--prompt", "a", "--max-new-tokens", "0"], ["--max-new-tokens=0"]),
        (["convert", "sensitivity", "{}/run", "--data", "{}/data", "--layers", "1", "--out", "{}"],
         ["is a folder"]),
        (["plans", "dtp-99"], ["delays by 99 sublayers"]),
        (["plans", "standard,ladder"], ["unknown plan 'standard,ladder'", "separated by spaces"]),
        (["plans", "ladder@40-50"], ["outside the model's layers 0-31; name some"]),
        (["plans", "x.yaml"], ["cannot read x.yaml"]),
        (["plans", "--model", "llama-9"], ["unknown model config 'llama-9'", "llama-3-8b"]),
        (["predict", "runs/no"], ["model config 'runs/no' does not exist; give a YAML file, or"]),
        (["generate", "/nowhere", "--prompt", "a"], ["/nowhere does not exist"]),
        (["generate", "{}/run/checkpoints", "--prompt", "a"],
         ["holds checkpoints of a run; give ", "/run (its newest) or ", "checkpoints/step-000004"]),
        (["generate", "{}/data", "--prompt", "a"], ["neither a model folder", "; give"]),
        (["generate", "{}/run", "--prompt", "a b " * 2000], ["max_seq_len=512"]),
        (["generate", "{}/run", "--prompt", "a", "--stop", ""], ["--stop='' has no text"]),
        (["generate", "{}/run", "--prompt", "a", "--stop", "a <|endoftext|>"],
         ["special token <|endoftext|> beside other text"]),
        (["generate", "{}/run", "--prompt", "a", "--seed", "3"],
         ["--seed=3 has no effect at temperature=0", "also give a temperature"]),
        (["generate", "{}/run", "--prompts", "{}/no.jsonl"],
         ["/no.jsonl cannot be read (No such file or directory); give a file of JSON lines"]),
        (["generate", "{}/run", "--prompt", "a", "--out", "{}"], [": name a file in a folder"]),
        (["generate", "{}/run", "--prompt", "a", "--dtype", "int8"], ["--dtype=int8"]),
        (["generate", "{}/run", "--prompt", "a", "--tp", "4"], ["--nproc 4"]),
        (["generate", "{}/run", "--prompt", "a", "--tp", "-1"], ["--tp=-1 must be 0"]),
        (["generate", "{}/run", "--prompt", "a", "--reducer", "pull"],
         ["unknown reducer 'pull'", "known: auto, async, push"]),
        (["generate", "{}/run", "--prompt", "a", "--reducer", "push"], ["--reducer=push"]),
        (["data", "prepare", "/no", "--tokenizer", "{}/tokenizer", "--out", "{}/x"], ["'/no'"]),
        (["tokenizer", "train", "--vocab-size", "10", "--out", "{}/y"], ["--vocab-size=10"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    trained: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, for speed; `test_mistakes_on_ranks` starts real ones."""
    before = sorted(trained.rglob("*"))
    code = main([word.format(trained) if "{}" in word else word for word in arguments])
    err = capsys.readouterr().err
    assert code == 2, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, err
    for word in words:
        assert word.replace("{}", str(trained)) in errors[0]
    assert sorted(trained.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tp=2", "model.num_heads=7", "model.head_dim=8", "model.num_kv_heads=1"], ["=7"]),
        (["plan=desync-4x", "tp_degree=1", "tp=2"], ["tp_degree=1", "cannot run on 2 ranks"]),
    ],
)  # fmt: skip
def test_mistakes_on_ranks(
    trained: Path, start: Start, overrides: list[str], words: list[str]
) -> None:
    """Two ranks hit the same mistake: one line, exit code 2, and no hang."""
    out = trained / "never"
    recipe = str(trained / "recipe.yaml")
    command = start(main, ["train", recipe, f"out={out}", *overrides, "--nproc", "2"])
    one_line_error(command.result(), *words)
    assert not out.exists()


@pytest.mark.parametrize(
    "command",
    [
        ["train", "tiny"],
        ["finetune", "tiny"],
        ["convert", "sensitivity", "x", "--data", "x", "--layers", "1"],
        ["generate", "x", "--prompt", "a"],
        ["eval", "x"],
        ["bench", "inference"],
        ["bench", "inference", "--cold", "--prompt", "0"],
        ["bench", "comm"],
        ["bench", "ops"],
        ["bench", "train"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("nproc", ["0", "-4"])
def test_no_processes_are_a_mistake_before_any_other(
    command: list[str], nproc: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--nproc", nproc]) == 2
    assert capsys.readouterr().err == f"error: --nproc={nproc} must be 1 or more\n"


def test_a_reducer_that_cannot_run_says_why(trained: Path, start: Start) -> None:
    asked = ["--prompt", "a", "--reducer", "push", "--nproc", "2"]
    command = start(main, ["generate", str(trained / "run"), *asked])
    one_line_error(
        command.result(), "reducer=push cannot run here: it needs GPUs", "use reducer=async"
    )


def error_of_ranks(start: Start, store: Path, *commands: list[str]) -> str:
    """The only error of a process for each command, started by hand as the ranks of one job."""
    ranks = []
    for rank, command in enumerate(commands):
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(commands)),
                       "LADDER_RENDEZVOUS": str(store)}  # fmt: skip
        ranks.append(start(main, command, environment=environment))
    assert [rank.wait() for rank in ranks] == [2] * len(commands)
    lines = [line for r in ranks for line in r.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, lines
    return lines[0]


def test_ranks_that_disagree_are_told(trained: Path, tmp_path: Path, start: Start) -> None:
    """Two processes started by hand with different configs, as on two nodes."""
    command = ["train", str(trained / "recipe.yaml"), f"out={tmp_path / 'run'}"]
    error = error_of_ranks(start, tmp_path / "store", [*command, "seed=1"], [*command, "seed=2"])
    assert "ranks disagree: seed is 1 on rank 0 and 2 on rank 1" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "tiny", "lrr=1"], "unknown key 'lrr'"),
        (["generate", "/no", "--prompt", "x"], "/no does not exist"),
        (["generate", "/no", "--prompt", "x", "--top-p", "2"], "--top-p=2.0 must be"),
        (["eval", "/no"], "/no does not exist"),
        (["eval", "/no", "--limit", "0"], "--limit=0 must be 1 or more"),
    ],
)
def test_a_mistake_of_all_ranks_is_told_once(
    command: list[str], said: str, tmp_path: Path, start: Start
) -> None:
    """Where torchrun has started them, no launcher has looked at the options before."""
    assert said in error_of_ranks(start, tmp_path / "store", command, command)


def test_options_that_differ_between_ranks_are_named(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One by one: not as all options of either rank."""
    monkeypatch.setattr(launch, "gathered", lambda value: [value, {**value, "top_k": 2}])
    assert main(["generate", str(trained / "run"), "--prompt", "a", "--device", "cpu"]) == 2
    assert "error: ranks disagree: top_k is 0 on rank 0 and 2 on rank 1;" in capsys.readouterr().err


def test_overrides_may_follow_options(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse alone refuses them; an unknown option must still be refused."""
    recipe = str(trained / "recipe.yaml")
    assert main(["train", recipe, "--device", "cpu", f"out={trained / 'after'}", "steps=2"]) == 0
    assert main(["train", str(trained / "after" / "recipe.json"), "steps=2", "--resume"]) == 2
    assert "has finished its steps=2" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", recipe, "--devise", "cpu"])


def test_a_tokenizer_is_not_overwritten(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "tokenizer" / "tokenizer.json").read_bytes()
    command = ["tokenizer", "train", str(trained / "texts"), "--vocab-size", "280"]
    assert main([*command, "--out", str(trained / "tokenizer")]) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert (trained / "tokenizer" / "tokenizer.json").read_bytes() == before


def test_the_tokenizer_of_data_or_a_model_is_never_replaced(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches shards and weights whose tokens stand for other text from then on."""
    command = ["tokenizer", "train", str(trained / "texts"), "--vocab-size", "280", "--overwrite"]
    for folder, name in ((trained / "data", "index"), (newest(trained / "run"), "config")):
        before = (folder / "tokenizer.json").read_bytes()
        assert main([*command, "--out", str(folder)]) == 2
        error = capsys.readouterr().err
        assert f"--out={folder} holds prepared data or a model ({name}.json)" in error
        assert "overwrite" not in error
        assert (folder / "tokenizer.json").read_bytes() == before
    run = tmp_path / "run"
    shutil.copytree(newest(trained / "run"), run)
    swap_two_tokens(run / "tokenizer.json")
    assert main(["generate", str(run), "--prompt", "a", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "tokenizer.json is damaged: its checksum is wrong; copy it again, or use" in error


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["train", "tiny"], f"interrupted; {RESUMES}"),
        (["finetune", "tiny", "init=x"], f"interrupted; {RESUMES}"),
        (["eval", "model"], "interrupted"),
    ],
)
def test_an_interrupt_says_how_to_go_on(
    command: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a command can; and what became of a save that was under way."""

    def stopped(*arguments: object, **options: object) -> None:
        stop = KeyboardInterrupt()
        stop.add_note("also: step-000002 cannot be written")
        raise stop

    monkeypatch.setattr("ladder.train.loop.train", stopped)
    monkeypatch.setattr("ladder.eval.command.eval_command", stopped)
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").touch()
    assert main(command) == 130
    assert capsys.readouterr().err == f"{told}\nalso: step-000002 cannot be written\n"


def test_an_interrupt_during_the_imports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "ladder.cli", Interrupted("ladder.cli"))
    assert command_main() == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_ends_the_ranks(
    trained: Path, tmp_path: Path, start: Start, number: signal.Signals
) -> None:
    """To the launcher alone, as `timeout -s INT` sends it: no rank may train on."""
    run = tmp_path / "run"
    command = start(
        main,
        ["train", str(trained / "recipe.yaml"), f"out={run}", "steps=100000", "--nproc", "2"],
    )
    metrics = run / "metrics.jsonl"
    command.until(lambda: metrics.exists() and metrics.stat().st_size)
    ranks = command.ranks()
    assert len(ranks) == 2
    command.send(number)
    assert command.wait() == (130 if number == signal.SIGINT else -number)
    limit = time.monotonic() + PATIENCE
    while any(running(rank) for rank in ranks):
        assert time.monotonic() < limit
        time.sleep(0.01)


def running(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_help_names_every_verb() -> None:
    result = run("--help")
    assert result.returncode == 0
    for verb in ("plans", "data", "tokenizer", "train", "generate", "doctor", "demo"):
        assert f"\n    {verb}" in result.stdout
