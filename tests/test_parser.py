"""Errors of command lines: one line with the option, its value and the remedy; overrides."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from ladder.cli import main, make_parser
from ladder.parser import Parser, parse_words

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench inferense", "unknown command 'inferense' (did you mean 'inference'?); known: "
         "inference, comm, ops, train, machine; see `ladder bench --help`"),
        ("generate", "missing: MODEL; see `ladder generate --help`"),
        ("generate x", "one of the arguments --prompt --prompts is required; see `ladder generate "
         "--help`"),
        ("train tiny --devise cpu steps=2",
         "unknown option --devise (did you mean '--device'?); a value of the recipe is given "
         "without dashes: devise=VALUE; see `ladder train --help`"),
        ("finetune tiny --seq-len=5",
         "unknown option --seq-len; a value of the recipe is given without dashes: seq_len=VALUE; "
         "see `ladder finetune --help`"),
        ("generate x --prompt y temperature=0.8", "temperature=0.8 is no argument but an option: "
         "give it as --temperature 0.8; see `ladder generate --help`"),
        ("eval x num_fewshot=3", "num_fewshot=3 is no argument but an option: give it as "
         "--num-fewshot 3; see `ladder eval --help`"),
        ("train tiny steps=2 nproc=2", "nproc=2 is no argument but an option: give it as "
         "--nproc 2; see `ladder train --help`"),
        ("train resume=yes", "resume=yes is no argument but an option: give it as --resume; see "
         "`ladder train --help`"),
        ("convert sensitivity x --device=cpu --windws=3 --data x --layers 1",
         "unknown option --windws (did you mean '--windows'?); see `ladder convert sensitivity "
         "--help`"),
        ("doctor cpu", "unexpected argument 'cpu': leave it out, or move it to the others; see "
         "`ladder doctor --help`"),
        ("train tiny --nproc two",
         "--nproc=two must be a whole number; see `ladder train --help`"),
        ("predict llama-3-8b --batch 1 2.5",
         "--batch=2.5 must be a whole number; see `ladder predict --help`"),
        ("generate x --temperature hot",
         "--temperature=hot must be a number; see `ladder generate --help`"),
        ("convert x --to hff",
         "unknown --to 'hff' (did you mean 'hf'?); known: ladder, hf; see `ladder convert --help`"),
        ("generate x --prompt", "--prompt needs a value (one that begins with - is given as "
         "--prompt=VALUE); see `ladder generate --help`"),
        ("predict x --plans", "--plans needs a value; see `ladder predict --help`"),
        ("plans --json=yes", "--json takes no value: leave out 'yes'; see `ladder plans --help`"),
        ("predict x --decode --train",
         "--train and --decode exclude each other; see `ladder predict --help`"),
        ("predict x --m h100",
         "ambiguous option: --m could match --machine, --micro-batch; see `ladder predict --help`"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(line: str, told: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    captured = capsys.readouterr()
    assert captured.err == f"error: {told}\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("generate /no --prompt x --top-p 1.5", "--top-p=1.5 must be"),
        ("plans dtp-2 --tp-degree 0", "--tp-degree=0 must be"),
        ("plans ladder@9 --layers 4", "layers='9' of plan"),  # not --layers, which is 4
        ("data prepare --tokenizer x --out x --config {} --workers 3", "max_tokens=0 must be"),
        ("train tiny steps=0", "steps=0 must be"),
    ],
)
def test_an_error_names_the_option_that_was_typed(
    line: str, told: str, tmp_path: Path, capsys: Captured
) -> None:
    """Functions name their argument; what a file or an override says keeps its name."""
    (tmp_path / "data.yaml").write_text("max_tokens: 0")
    assert main(line.format(tmp_path / "data.yaml").split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in dict.fromkeys(action.choices.values()):
                yield from commands(each)


def test_an_option_of_several_values_is_given_once(capsys: Captured) -> None:
    """argparse would keep the values of the last one alone. Other options may be repeated."""
    names = set()
    for parser in commands(make_parser()):
        for action in parser._actions:
            if not (action.option_strings and action.nargs in ("*", "+")):
                continue
            name = action.option_strings[-1]
            choices = [str(each) for each in action.choices or ()]
            value = choices[0] if choices else "1"
            names.add(name)
            # Before --help, which would end the command, and before what is required.
            with pytest.raises(SystemExit, match="2"):
                parser.parse_args([name, value, name, value, "--help"])
            assert capsys.readouterr().err == (
                f"error: {name} is given twice; give all values after one {name}; see "
                f"`{parser.prog} --help`\n"
            )
            with pytest.raises(SystemExit, match="0"):
                parser.parse_args([name, value, value, "--help"])
            capsys.readouterr()
    assert {"--plans", "--batch", "--tp", "--layouts", "--only", "--shapes"} <= names
    words = ["generate", "x", "--prompt", "a", "--prompt", "b"]
    assert parse_words(make_parser(), words).prompt == ["a", "b"]


def test_an_argument_may_be_absent() -> None:
    """As where the config of `--config` may have it."""
    options = parse_words(make_parser(), ["data", "prepare", "--out", "x"])
    assert not hasattr(options, "paths")


@pytest.mark.parametrize(("line", "told"), [("", "doctor"), ("bench", "inference")])
def test_no_command_shows_the_help(line: str, told: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"usage: ladder {line}".rstrip())
    assert f"\n    {told}" in captured.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["convert", "sensitivty", "x"], "sensitivty' (did you mean 'convert sensitivity'?)"),
        (["predict", "validat", "x"], "'predict validat' (did you mean 'predict validate'?)"),
        (["predict", "x"], "unknown model config 'x'"),
    ],
)  # fmt: skip
def test_a_second_word_that_is_nearly_a_commands_is_no_model(
    words: list[str], told: str, capsys: Captured
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err


def test_a_folder_may_be_named_nearly_as_a_command_or_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "validat").mkdir()
    (tmp_path / "batch=2").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("validat", "batch=2"):
        assert main(["predict", name]) == 2
        assert f"{name} is neither a model folder" in capsys.readouterr().err


def test_overrides_may_follow_several_words(capsys: Captured) -> None:
    """argparse hands them to that option."""
    parser = Parser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only-these", nargs="+")
    parser.add_argument("--files", nargs="+", type=Path)
    parser.add_argument("--rates", nargs="+", type=float)
    line = "a=1 --only-these ladder dtp-1 b.c=2 --files x y d=3 --rates 0.5 1 e=4"
    options = parse_words(parser, line.split())
    assert options.only_these == ["ladder", "dtp-1"]
    assert options.files == [Path("x"), Path("y")]
    assert options.rates == [0.5, 1.0]
    assert sorted(options.overrides) == ["a=1", "b.c=2", "d=3", "e=4"]
    with pytest.raises(SystemExit, match="2"):
        parse_words(parser, ["--only-these", "b=2"])
    assert capsys.readouterr().err.startswith("error: --only-these needs a value before b=2; see `")
    with pytest.raises(SystemExit, match="2"):
        main(["predict", "tiny", "--batch", "1", "b=2"])  # a command without overrides
    assert "--batch=b=2 must be a whole number" in capsys.readouterr().err
