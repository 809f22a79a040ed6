"""Configs from YAML files and key=value overrides: loaded once, checked, never changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, check_keys, unknown

T = TypeVar("T")
# As options name them. They stand here since torch, which is slow to import, is not needed here.
DTYPES = ("float32", "bfloat16")
CHECKPOINTING = ("none", "full", "selective")
FILES = (".yaml", ".yml", ".json")  # JSON is read as the YAML that it is


def configs_folder() -> Path:
    """Where the configs that come with the package lie: inside it, or beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def load_yaml(path: Path) -> Any:
    """The data of a YAML file; UserError where it cannot be read or parsed."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; give the path of a YAML file") from error
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise UserError(f"{path} is not valid YAML: {where}") from error


def load_mapping(path: Path) -> dict[str, Any]:
    data = load_yaml(path)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UserError(f"{path} must hold keys and values, one `key: value` a line")
    return data


def find(kind: str, name: str) -> Path:
    """The YAML or JSON file called `name`: a path, or one of configs/`kind`'s names.

    A name is taken before a file or folder of that name in the working directory.
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
    if name and path.is_dir():
        raise UserError(
            f"{what} {name!r} is a folder; give a YAML file, or one of {', '.join(known)}"
        )
    raise unknown(what, name, known)


def load_plan(spec: Any) -> Any:
    """A plan's specification with a path to a YAML or JSON file replaced by what the file says."""
    if isinstance(spec, str) and spec.endswith(FILES):
        data = load_yaml(Path(spec))
        return {"name": Path(spec).stem, **data} if isinstance(data, dict) else data
    return spec


def model_config(
    model: Any,
    plan: Any = "standard",
    tp_degree: int | None = None,
    **overrides: Any,
) -> ModelConfig:
    """The config of a named shape (or YAML path, or mapping with `name` and overrides).

    What the arguments say, the mapping must not: UserError in place of a silent winner.
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


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`data` with each `key=value` set; `model.num_layers=2` reaches into a mapping.

    Values are read as YAML, so `betas=[0.9,0.95]`, `tensorboard=false` and `lr=3e-4` work.
    """
    data = dict(data)
    for item in overrides:
        key, equals, value = item.partition("=")
        outer, dot, inner = key.partition(".")
        if not equals or not outer or (dot and not inner):
            raise UserError(f"override {item!r} is not of the form key=value")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"the value of override {item!r} is not valid YAML") from error
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


def build(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """A frozen config dataclass from plain data, every key known and every value of its type."""
    items = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    check_keys(where, data, list(items))
    for name, item in items.items():
        if item.default is MISSING and item.default_factory is MISSING and name not in data:
            raise UserError(f"{where} lacks {name}; add `{name}: ...` or {name}=... on the command")
    return cls(**{key: _typed(key, value, str(items[key].type)) for key, value in data.items()})


def _typed(key: str, value: Any, kind: str) -> Any:
    """`value` as the annotation `kind` wants it; YAML reads 3e-4 as a string, for instance."""
    wrong = UserError(f"{key}={value!r} is not of the type {kind}")
    if value is None and kind.endswith("| None"):
        return None
    base = kind.removesuffix("| None").strip()
    if base == "float":
        try:
            return float(value) if not isinstance(value, bool) else _raise(wrong)
        except (TypeError, ValueError, OverflowError):
            raise wrong from None
    if base.startswith("tuple[float"):
        if not isinstance(value, list | tuple):
            raise wrong
        return tuple(_typed(key, item, "float") for item in value)
    simple = {"int": int, "bool": bool, "str": str}.get(base)
    if simple is None:
        return value
    if not isinstance(value, simple) or (simple is int and isinstance(value, bool)):
        raise wrong
    return value


def _raise(error: Exception) -> Any:
    raise error
