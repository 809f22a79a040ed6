"""The configuration of `ladder data prepare`: a YAML file, options, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ladder.config import build, find, load_mapping
from ladder.models.errors import UserError, check_keys

MOST_LEFT_OUT = 0.1  # the default of max_left_out


@dataclass(frozen=True)
class PrepareConfig:
    """The arguments of `ladder.data.prepare.prepare` that a YAML file may hold.

    paths: a list, or one path; None is this Python's standard library.
    """

    tokenizer: str
    paths: Any = None
    text_field: str = "text"
    chat_field: str = ""
    chat_template: str | None = None
    heldout_fraction: float = 0.05
    max_left_out: float = MOST_LEFT_OUT
    max_tokens: int | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        paths = [self.paths] if isinstance(self.paths, str) else self.paths
        fits = isinstance(paths, list) and paths and all(isinstance(path, str) for path in paths)
        if paths is not None and not fits:
            raise UserError(f"paths={self.paths!r} must be a path or a list of paths")


def load_prepare_config(config: str | None, options: Mapping[str, Any]) -> PrepareConfig:
    """The YAML file `config` (or a name in configs/data), overridden by `options`.

    Raises UserError for a key that does not exist, a value of the wrong type, or no tokenizer.
    """
    data = load_mapping(find("data", config)) if config is not None else {}
    data |= options
    where = f"data config {config!r}" if config else "data config"
    # Before the check below, which would report a mistyped `tokenizer` as missing.
    check_keys(where, data, [item.name for item in fields(PrepareConfig)])
    if "tokenizer" not in data:
        raise UserError(
            "--tokenizer is missing: give a tokenizer.json or its folder, such as `ladder "
            "tokenizer train` writes"
        )
    return build(PrepareConfig, data, where)
