"""Configs from YAML files and key=value overrides, validated once and immutable."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ladder.models.config import ModelConfig
from ladder.models.errors import TYPES, UserError, check_keys, reason, unknown
from ladder.models.presets import FILES

T = TypeVar("T")
# Values of options, defined here so that the command line needs no import of torch, which is slow.
DTYPES = ("float32", "bfloat16")
CHECKPOINTING = ("none", "full", "selective")
# Limits far above any real config. Beyond them Python raises RecursionError or takes minutes.
DEEPEST = 100  # nested lists and mappings
LONGEST = 500  # digits of an integer
LARGEST = 10**6  # values, with each use of a YAML alias counted
# YAML 1.1 would read 010 as 8, 1_0 as 10 and 1:30 as 90, which nobody means.
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")


def configs_folder() -> Path:
    """The folder of the package's configs: inside the package, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def load_yaml(path: Path) -> Any:
    """The data of a YAML file. Raises UserError if it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: invalid UTF-8, or an invalid path
        raise UserError(
            f"cannot read {path}: {reason(error)}; give the path of a YAML file"
        ) from error
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """A YAML loader of plain data, with limits; dates stay text, numbers are decimal.

    A key that is given twice is refused: yaml itself keeps the last one's value.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # yaml's own
        first: [each for each in found if each[0] != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= DEEPEST:  # the scanner gets slower with each level
            self._refuse(f"nested more than {DEEPEST} deep", self.get_mark())
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEEPEST:
            self._refuse(f"nested more than {DEEPEST} deep", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        given = set()
        for key, _ in node.value:  # without merged keys (<<), which may be given again
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in given:
                    self._refuse(f"key {key.value!r} given twice", key.start_mark)
                given.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: Any) -> None:
        super().flatten_mapping(node)
        if len(node.value) > LARGEST:
            self._refuse(f"more than {LARGEST:,} keys, including merged ones", node.start_mark)

    def whole_number(self, node: Any) -> int:
        if len(node.value) > LONGEST:
            self._refuse(f"a number of {len(node.value):,} digits", node.start_mark)
        if not DECIMAL.fullmatch(self.construct_scalar(node)):
            self._refuse_number(node)
        return int(node.value)

    def any_number(self, node: Any) -> float:
        if {"_", ":"} & {*self.construct_scalar(node)}:
            self._refuse_number(node)
        return float(self.construct_yaml_float(node))

    def _refuse_number(self, node: Any) -> None:
        remedy = "write it in decimal, without leading zeros, _ or :, or in quotes if it is text"
        self._refuse(f"the number {node.value}: {remedy}", node.start_mark)

    def _refuse(self, what: str, mark: Any) -> None:
        raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.whole_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.any_number)


def parse_yaml(text: str) -> Any:
    """The plain data of a YAML text. Raises ValueError, in one line, if invalid or too large."""
    try:
        data = yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem or error.context}{where}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: from the conversion of a tag
        raise ValueError(" ".join(str(error).split())) from error
    _check_plain(data)
    return data


def parse_json(text: str | bytes, most: float = LARGEST) -> Any:
    """The plain data of a JSON text. Raises ValueError, in one line, if invalid or too large.

    most: the maximum number of values.
    """
    try:
        data = json.loads(text, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError(f"nested more than {DEEPEST} deep") from error
    _check_plain(data, most)
    return data


def read_entries(path: Path, what: str, remedy: str) -> list[dict[str, Any]]:
    """The entries of a JSON table: a file with a list of mappings.

    Raises UserError, which ends with `remedy`, for any other file. what: the table's name in
    errors, such as `the dispatch table`.
    """
    try:
        entries = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {what} {path}: {reason(error)}; {remedy}") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{what} {path} must be a list of entries, each with keys; {remedy}")
    return entries


def _whole_number(text: str) -> int:
    if len(text) > LONGEST:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def _check_plain(data: Any, most: float = LARGEST) -> None:
    """Raise ValueError for data that is too deep or too large, or has text that is not UTF-8."""
    todo, count = [(data, 1)], 0
    while todo:
        value, depth = todo.pop()
        count += 1
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if count > most:
            raise ValueError(f"more than {most:,} values, counting each use of an alias")
        if isinstance(value, str):
            check_text(value)
        elif isinstance(value, Mapping):
            todo += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list):
            todo += [(each, depth + 1) for each in value]
        elif not isinstance(value, int | float | None):
            raise ValueError(f"a value of the type {type(value).__name__}")


def check_text(text: str) -> None:
    """Raise ValueError for text that cannot be written to a file or used as a path."""
    if "\0" in text:
        raise ValueError("text with a NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text that is not UTF-8, at character {error.start}") from error


def load_mapping(path: Path) -> dict[str, Any]:
    data = load_yaml(path)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UserError(f"{path} must hold keys and values, one `key: value` a line")
    return data


def find(kind: str, name: str) -> Path:
    """The YAML or JSON file `name`: a path, or a name in configs/`kind`.

    A name in configs takes precedence over a file or folder in the working directory.
    """
    path = Path(name)
    if name.endswith(FILES):
        return path
    folder = configs_folder() / kind
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name in known:
        return folder / f"{name}.yaml"
    if path.is_file():
        return path
    what = f"{kind.removesuffix('s')} config"
    if (name and path.is_dir()) or "/" in name:
        state = "is a folder" if path.is_dir() else "does not exist"
        raise UserError(f"{what} {name!r} {state}; give a YAML file, or one of {', '.join(known)}")
    raise unknown(what, name, known)


def load_plan(spec: Any) -> Any:
    """A plan's specification; the path of a YAML or JSON file is replaced by the file's data."""
    if isinstance(spec, str | PathLike) and str(spec).endswith(FILES):
        data = load_yaml(Path(spec))
        if not data:
            raise UserError(f"the plan {spec} is empty; give it `layers` or a list of records")
        data = _printed_plan(data, spec)
        return {"name": Path(spec).stem, **data} if isinstance(data, dict) else data
    return spec


def _printed_plan(data: Any, path: Any) -> Any:
    """The plan in what `ladder plans NAME --json` prints, without its costs; other data as it is.

    Raises UserError for several plans.
    """
    plans = data if isinstance(data, list) else [data]
    if not all(isinstance(each, dict) and {"sublayers", "reads"} <= {*each} for each in plans):
        return data
    if len(plans) > 1:
        raise UserError(
            f"the plan {path} holds {len(plans)} plans; give a file of one, as `ladder plans NAME "
            f"--json` prints it"
        )
    return {key: plans[0][key] for key in ("name", "tp_degree", "sublayers") if key in plans[0]}


def model_config(
    model: Any,
    plan: Any = "standard",
    tp_degree: int | None = None,
    **overrides: Any,
) -> ModelConfig:
    """The config of a named shape (or YAML path, or mapping with `name` and overrides).

    Raises UserError if the mapping has a key that is also an argument here.
    """
    spec = dict(model) if isinstance(model, Mapping) else {"name": model}
    for key in ("plan", "tp_degree", *overrides):
        if key in spec:
            remedy = (
                "the vocabulary comes from the data, leave it out"
                if key == "vocab_size"
                else f"set the top-level key instead, {key}={spec[key]}"
            )
            raise UserError(f"model.{key}={spec[key]!r} is no part of the shape: {remedy}")
    name = spec.pop("name", None)
    if not isinstance(name, str):
        raise UserError(f"model={model!r} must be a name, a YAML path, or a mapping with a name")
    path = find("models", name)
    data = {**load_mapping(path), **spec, **overrides}
    data |= {"plan": load_plan(plan), "tp_degree": tp_degree}
    return build(ModelConfig, data, where=f"model {name!r}")


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Inside a `with`, errors begin with `option`, such as `teacher=runs/a`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{option}: {error}") from error


def apply_overrides(
    data: dict[str, Any], overrides: Sequence[str], texts: Collection[str] = ()
) -> dict[str, Any]:
    """`data` with each `key=value` set; `model.num_layers=2` reaches into a mapping.

    Values are parsed as YAML, so `betas=[0.9,0.95]`, `tensorboard=false` and `lr=3e-4` work. The
    value of a key in `texts` is taken literally, as in `out=2026` and `out=[a]`, unless quoted.

    Of a key that is given twice the later value counts. Raises UserError for `model=tiny` after
    `model.num_layers=2`, which it would undo.
    """
    data = dict(data)
    given: list[str] = []
    for n, item in enumerate(overrides):
        key, equals, value = item.partition("=")
        outer, dot, inner = key.partition(".")
        if not equals or not outer or (dot and not inner):
            asked = "KEY=VALUE"
            if item and not equals:  # perhaps the value is the next word
                following = [each for each in overrides[n + 1 : n + 2] if "=" not in each]
                asked = f"{item}={following[0] if following else 'VALUE'}"
            raise UserError(f"override {item!r} is not of the form key=value; write {asked}")
        for before in given:
            if before.startswith(f"{key}."):
                raise UserError(
                    f"override {item!r} comes after {before!r}, which it would undo; give {item} "
                    f"first"
                )
        given.append(item)
        try:
            check_text(item)
            plain = key in texts and not value.startswith(("'", '"'))
            parsed = value if plain else parse_yaml(value)
        except ValueError as error:
            raise UserError(f"the value of override {item!r} is not valid YAML: {error}") from error
        if inner:
            base = data.get(outer, {})
            if not isinstance(base, str | Mapping):
                raise UserError(
                    f"override {item!r} reaches into {outer}={base!r}, which has no keys; set "
                    f"{outer} to a name or a mapping first"
                )
            data[outer] = {**({"name": base} if isinstance(base, str) else base), inner: parsed}
        else:
            data[outer] = parsed
    return data


def text_fields(cls: type[Any]) -> list[str]:
    """The names of a config dataclass's text fields."""
    return [item.name for item in fields(cls) if str(item.type) in ("str", "str | None")]


def build(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """A frozen config dataclass from plain data. Raises UserError for unknown keys, wrong types."""
    items = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    check_keys(where, data, list(items))
    for name, item in items.items():
        if item.default is MISSING and item.default_factory is MISSING and name not in data:
            raise UserError(f"{where} lacks {name}; add `{name}: ...` there")
    return cls(**{key: _typed(key, value, str(items[key].type)) for key, value in data.items()})


def _typed(key: str, value: Any, kind: str) -> Any:
    """`value` converted to the annotation `kind`; for example, YAML reads 3e-4 as a string."""
    if value is None and kind.endswith("| None"):
        return None
    base = kind.removesuffix("| None").strip()
    known = {each.__name__: each for each in TYPES}
    must = f"a list of numbers, for example {key}=[0.9,0.99]"
    if base in known:
        must = TYPES[known[base]]
    said = f"{key} has no value: it" if value is None else f"{key}={value!r}"
    wrong = UserError(f"{said} must be {must}")
    if base == "float":
        try:
            # Python reads 1_0e-4 as 10e-4.
            odd = isinstance(value, bool) or (isinstance(value, str) and "_" in value)
            return _raise(wrong) if odd else float(value)
        except (TypeError, ValueError, OverflowError):
            raise wrong from None
    if base.startswith("tuple[float"):
        if not isinstance(value, list | tuple):
            raise wrong
        return tuple(_typed(key, item, "float") for item in value)
    simple = known.get(base)
    if simple is None:
        return value
    if not isinstance(value, simple) or (simple is int and isinstance(value, bool)):
        if simple is str and isinstance(value, int | float):
            raise UserError(f"{key}={value!r} is a number or a switch, not text; put it in quotes")
        raise wrong
    return value


def _raise(error: Exception) -> Any:
    raise error
