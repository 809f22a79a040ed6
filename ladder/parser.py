"""Command lines: argparse whose errors are one line, with key=value overrides among the options."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ladder.models.errors import TYPES, brief, nearest, unknown

OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")  # key=value, for a recipe
REWORDED = (  # argparse's messages that do not name the remedy
    (r"argument (\S+): expected one argument",
     r"\1 needs a value (one that begins with - is given as \1=VALUE)"),
    (r"argument (\S+): expected at least one argument", r"\1 needs a value"),
    (r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value: leave out \2"),
    (r"argument (\S+): not allowed with argument (\S+)", r"\1 and \2 exclude each other"),
    (r"the following arguments are required: (.*)", r"missing: \1"),
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, as UserError's, and exit with code 2.

    Its subparsers are of this class, too. The namespace holds the command's parser as `parser`,
    which `parse_words` removes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in (None, "store"):
            self.register("action", name, _Store)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: COMMAND"):  # `ladder` alone: a first look at it
            self.print_help(sys.stderr)
            self.exit(2)
        for pattern, words in REWORDED:
            message = re.sub(pattern, words, message, flags=re.DOTALL)
        self.exit(2, f"error: {brief(message)}; see `{self.prog} --help`\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            has_overrides = any(each.dest == "overrides" for each in self._actions)
            if has_overrides and action.nargs in ("*", "+") and OVERRIDE.match(arg_string):
                return arg_string  # `parse_words` moves it
            if action.type not in TYPES:
                raise
            self.error(f"{_name(action)}={arg_string} must be {TYPES[action.type]}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.error(str(unknown(_name(action), value, action.choices)))


class _Store(argparse._StoreAction):
    """argparse's own action, but an option of several values is refused a second time, where
    argparse would drop the values of the first."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
        option_string: str | None = None,
    ) -> None:  # fmt: skip
        several = self.option_strings and self.nargs in ("*", "+")
        if several and getattr(namespace, self.dest, self.default) is not self.default:
            name = _name(self)
            parser.error(f"{name} is given twice; give all values after one {name}")
        super().__call__(parser, namespace, values, option_string)


def _name(action: argparse.Action) -> str:
    """What the user calls an option, an argument or (in lower case) the command."""
    if action.option_strings:
        return action.option_strings[-1]
    return "command" if action.metavar == "COMMAND" else str(action.metavar or action.dest)


def parse_words(parser: Parser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line in which `overrides` (key=value) may also follow options.

    words: the command line; None: this process's own.

    argparse itself takes positional arguments in one place only. It also takes a key=value that
    follows an option of several values for one of these values.
    """
    options, rest = parser.parse_known_args(words)
    own: Parser = vars(options).pop("parser")
    strange = [word for word in rest if word.startswith("-")]
    if strange:
        name = strange[0].partition("=")[0]
        known = [each for each in own._option_string_actions if each not in ("-h", "--help")]
        hint = nearest(name, known)
        if hasattr(options, "overrides"):
            key = name.lstrip("-").replace("-", "_")
            hint += f"; a value of the recipe is given without dashes: {key}=VALUE"
        own.error(f"unknown option {name}{hint}")
    for action in own._actions:
        if not action.option_strings:
            given = getattr(options, action.dest, [])
            _refuse_undashed(own, given if isinstance(given, list) else [given])
    _refuse_undashed(own, rest)
    if not hasattr(options, "overrides"):
        if rest:
            own.error(f"unexpected argument {rest[0]!r}: leave it out, or move it to the others")
        return options
    for action in own._actions:
        value = getattr(options, action.dest, None)
        if action.dest == "overrides" or not isinstance(value, list):
            continue
        taken = [item for item in value if OVERRIDE.match(str(item))]  # of a Path, too
        if not taken:
            continue
        if len(taken) == len(value):
            own.error(f"{_name(action)} needs a value before {taken[0]}")
        setattr(options, action.dest, [item for item in value if item not in taken])
        rest = [*map(str, taken), *rest]
    options.overrides = [*options.overrides, *rest]
    return options


def _refuse_undashed(own: Parser, words: Sequence[object]) -> None:
    """Refuse an option that was given as key=value, which argparse takes for an argument."""
    for word in map(str, words):
        key, equals, value = word.partition("=")
        option = "--" + key.replace("_", "-")
        action = own._option_string_actions.get(option)
        if equals and action is not None and not os.path.exists(word):
            said = option if action.nargs == 0 else f"{option} {value}"
            own.error(f"{word} is no argument but an option: give it as {said}")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help with each option's default; where that is a list, the help text itself names it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or isinstance(default, list):
            return action.help
        return super()._get_help_string(action)
