"""UserError, the one-line error for a user's mistake, and helpers for its messages."""

import difflib
import operator
from collections.abc import Collection, Iterable
from typing import Any


class UserError(ValueError):
    """A mistake that the user can correct.

    The message names the option, its value and the remedy. The command line prints it without a
    traceback and exits with status 2.
    """


TYPES: dict[Any, str] = {  # what a user calls the values of a type
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def brief(text: str, most: int = 2000) -> str:
    """The text, without its middle if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {text[-(most // 2) :]}"


def reason(error: Exception, before: int = 0) -> str:
    """Why a file cannot be read, without an OSError's path, which the error's line already has.

    before: the bytes of a text before those that could not be decoded.
    """
    if isinstance(error, UnicodeDecodeError):
        at, byte = before + error.start, error.object[error.start]
        return f"not UTF-8 text (byte {at} is 0x{byte:02x})"
    return str(getattr(error, "strerror", None) or error)


def unknown(what: str, name: object, choices: Iterable[str], where: str = "") -> UserError:
    """The error for a `name` that is not in `choices`; it suggests the nearest and lists all.

    where: the thing that `name` is a part of, such as `sublayer 1`.
    """
    choices = list(choices)
    return UserError(
        f"unknown {what} {name!r}{where and f' of {where}'}{nearest(name, choices)}; known: "
        f"{', '.join(choices) or 'none'}"
    )


def nearest(name: object, choices: Iterable[str]) -> str:
    """` (did you mean ...?)` with the nearest of `choices`; empty if none is near."""
    near = difflib.get_close_matches(str(name), list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def is_whole(value: object) -> bool:
    """Whether it is an integer, of Python, NumPy or torch; truth values are none."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def is_plain_name(value: object) -> bool:
    """Whether `value` is a file name without a folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and not {"/", "\0"} & {*value}


def kind_of(value: object) -> str:
    """The name of a value's type with its article, for errors: `an int`, `a list`."""
    name = "null" if value is None else type(value).__name__
    return name if value is None else f"a{'n' if name[0] in 'aeiou' else ''} {name}"


def check_keys(what: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Raise UserError for the first key of `given` that is not in `allowed`."""
    for key in given:
        if key not in allowed:
            raise unknown("key", key, allowed, what)
