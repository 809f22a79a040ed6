"""UserError: a user's mistake in one line; and checks and words that its messages share."""

import difflib
from collections.abc import Collection, Iterable


class UserError(ValueError):
    """A mistake that the user can mend.

    The message names the option, its value and the remedy; the command line prints it without a
    traceback and exits with 2.
    """


def brief(text: str, most: int = 2000) -> str:
    """A text without its middle, where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {text[-(most // 2) :]}"


def unknown(what: str, name: object, choices: Iterable[str]) -> UserError:
    """The error for a `name` that is none of the `choices`: names the nearest, lists them all."""
    choices = list(choices)
    near = difflib.get_close_matches(str(name), choices, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return UserError(f"unknown {what} {name!r}{hint}; known: {', '.join(choices)}")


def is_plain_name(value: object) -> bool:
    """Whether it is the name of a file in a folder, and leads nowhere else."""
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & {*value}


def kind_of(value: object) -> str:
    """The type of a value that is not what it should be, with its article: `an int`, `a list`."""
    name = "null" if value is None else type(value).__name__
    return name if value is None else f"a{'n' if name[0] in 'aeiou' else ''} {name}"


def check_keys(what: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raise UserError for the first of the `given` keys that is not `allowed`."""
    for key in given:
        if key not in allowed:
            raise unknown(f"key of {what}", key, allowed)
