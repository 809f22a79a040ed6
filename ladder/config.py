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
    """The YAML file called `name`: a path, or one of configs/`kind`'s names."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    folder = configs_folder() / kind
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise unknown(f"{kind[:-1] if kind.endswith('s') else kind} config", name, known)
    return folder / f"{name}.yaml"


def load_plan(spec: Any) -> Any:
    """A plan's specification with a path to a YAML file replaced by what the file says."""
    if isinstance(spec, str) and spec.endswith((".yaml", ".yml")):
        data = load_yaml(Path(spec))
        return {"name": Path(spec).stem, **data} if isinstance(data, dict) else data
    return spec


def model_config(
    model: str | Mapping[str, Any],
    plan: Any = "standard",
    tp_degree: int | None = None,
    **overrides: Any,
) -> ModelConfig:
    """The config of a named shape (or YAML path, or mapping with `name` and overrides)."""
    spec = {"name": model} if isinstance(model, str) else dict(model)
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
        if not equals or not key:
            raise UserError(f"override {item!r} is not of the form key=value")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"the value of override {item!r} is not valid YAML") from error
        outer, _, inner = key.partition(".")
        if inner:
            base = data.get(outer, {})
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
        except (TypeError, ValueError):
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
