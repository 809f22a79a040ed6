"""Resolving the specification of a plan, a name or records, to a Plan.

A specification is one of
- a preset's name: `standard`, `parallel`, `ladder`, `hybrid`, `desync-4x`, `accumulate-4x`,
  `accumulate-8x-lag4`, `dtp-2`, `none`;
- presets on ranges of layers, standard elsewhere: `ladder@16-31`, `desync-2x@0-7,ladder@8-15`;
- a list of ranges, each with a preset or with the records of its layers:
  `[{layers: 0-7, preset: desync-2x}, {layers: 8-15, attention: {own_lag: 2, peer_lag: 2}}]`;
- a list of all records, as `Plan.to_dict` writes it: `[{kind: attention, ...}, ...]`, or as
  SublayerRecords;
- a mapping {name: ..., layers: LIST} or {name: ..., sublayers: LIST} of one of these lists, and
  with tp_degree the only T that it is for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from ladder.models.errors import UserError, check_keys, is_whole, unknown
from ladder.models.plan import Plan, SublayerRecord
from ladder.models.preset_table import PRESETS, Layers, Preset

MOST_LAYERS = 10_000  # of a model: a mistyped number would take endless time
MOST_RANKS = 2**16
SETTINGS = tuple(each.name for each in fields(SublayerRecord) if each.name != "kind")
DIGITS = 9  # most digits of a number in a plan's text
FILES = (".yaml", ".yml", ".json")  # that ladder.config reads; JSON is valid YAML

PlanSpec = str | Plan | Mapping[str, Any] | Sequence[Mapping[str, Any] | SublayerRecord]


def stated_degree(spec: Any) -> Any:
    """The T that a plan's specification states, not yet checked; None if it states none."""
    return spec.get("tp_degree") if isinstance(spec, Mapping) else None


def resolve_plan(spec: PlanSpec, num_layers: int, tp_degree: int | None = None) -> Plan:
    """Resolve `spec` for a model of `num_layers` layers.

    tp_degree: T, if it is part of the model (`dtp-D` scales by its square root); None: the T that
        the specification states, if it does.
    Raises UserError for an invalid plan, and for one of another number of layers or another T.
    """
    num_layers = _whole("num_layers", num_layers, MOST_LAYERS)
    if tp_degree is not None:
        tp_degree = _whole("tp_degree", tp_degree, MOST_RANKS)
    if isinstance(spec, str | os.PathLike) and (file := str(spec)).endswith(FILES):
        raise UserError(
            f"plan={file!r} names a file; read it first: plan=ladder.config.load_plan({file!r})"
        )
    if isinstance(spec, Plan):
        plan = spec
    elif isinstance(spec, str):
        records = tuple(_from_string(spec, num_layers, tp_degree))
        plan = Plan(records, spec, tp_degree if _scaled(spec) else None)
    elif isinstance(spec, Mapping):
        plan = _from_mapping(spec, num_layers, tp_degree)
    elif isinstance(spec, Sequence):
        records = tuple(_from_list(spec, num_layers, tp_degree))
        plan = Plan(records, tp_degree=tp_degree if _scaled(spec) else None)
    else:
        raise UserError(f"plan={spec!r} is neither a preset's name nor a list of records")
    if plan.num_layers != num_layers:
        raise UserError(
            f"plan {plan.name!r} has {plan.num_layers} layer{'s' * (plan.num_layers != 1)} and the "
            f"model {num_layers}; give every layer a record, or choose a model of as many layers"
        )
    if None not in (plan.tp_degree, tp_degree) and plan.tp_degree != tp_degree:
        # Not resolved again silently: the records may come with a model's weights.
        raise UserError(
            f"plan {plan.name!r} with tp_degree={tp_degree} holds records of another T, "
            f"tp_degree={plan.tp_degree}; give its preset's name, to resolve it again, or set "
            f"tp_degree={plan.tp_degree}"
        )
    return plan


def _whole(name: str, value: Any, most: int, where: str = "") -> int:
    """`value`. Raises UserError unless it is a whole number from 1 to `most`."""
    if not is_whole(value) or not 1 <= value <= most:
        raise UserError(f"{name}={value!r}{where} must be a whole number from 1 to {most:,}")
    return int(value)


def _scaled(spec: Any) -> bool:
    """Whether a specification has presets whose records hold the square root of T."""
    if isinstance(spec, str):
        names = [part.strip().partition("@")[0] for part in spec.split(",")]
        return any(found[0].scaled for name in names if (found := _find(name)))
    presets = [each["preset"] for each in spec if isinstance(each, Mapping) and "preset" in each]
    return any(_scaled(str(each)) for each in presets)


def with_degree(spec: Any, num_layers: Any, tp_degree: Any) -> Any:
    """The plan of a saved config, with the T of its records.

    Configs of earlier versions lack it. There the name tells a preset's records from others.
    """
    old = isinstance(spec, Mapping) and "sublayers" in spec and "tp_degree" not in spec
    if not old or tp_degree is None or not _scaled(name := str(spec.get("name"))):
        return spec
    try:
        wanted, found = (resolve_plan(each, num_layers, tp_degree) for each in (name, spec))
        pairs = list(zip(found.sublayers, wanted.sublayers, strict=True))
    except (TypeError, ValueError):  # a name of the user's own; what is wrong is refused later
        return spec
    if any(replace(saved, own_scale=new.own_scale) != new for saved, new in pairs):
        return spec  # a custom plan of that name
    scale = max(saved.own_scale for saved in found.sublayers)
    return {**spec, "tp_degree": round(scale**2)}


def _from_mapping(spec: Mapping[str, Any], num_layers: int, tp_degree: int | None) -> Plan:
    name = str(spec.get("name", "custom"))
    where = f"plan {name!r}"
    check_keys(where, spec, ("name", "layers", "sublayers", "tp_degree"))
    lists = [spec[key] for key in ("layers", "sublayers") if key in spec]
    if len(lists) != 1:
        raise UserError(f"{where} needs one of the keys layers and sublayers, and not both")
    own = stated_degree(spec)
    if own is not None:
        own = _whole("tp_degree", own, MOST_RANKS, f" of {where}")
    degree = own if tp_degree is None else tp_degree
    records = tuple(_from_list(lists[0], num_layers, degree, where))
    return Plan(records, name, tp_degree if own is None and _scaled(lists[0]) else own)


def _from_string(spec: str, num_layers: int, tp_degree: int | None) -> list[SublayerRecord]:
    if "@" not in spec:
        return _preset(spec, range(num_layers), num_layers, tp_degree)
    chosen: dict[int, list[SublayerRecord]] = {}
    for part in spec.split(","):
        name, _, where = part.strip().partition("@")
        layers = _layer_range(where, num_layers, f"plan {spec!r}")
        _claim(chosen, layers, _preset(name, layers, num_layers, tp_degree), f"plan {spec!r}")
    rest = [layer for layer in range(num_layers) if layer not in chosen]
    for layer in rest:
        chosen[layer] = _preset("standard", range(layer, layer + 1), num_layers, tp_degree)
    return [record for layer in range(num_layers) for record in chosen[layer]]


def _from_list(
    entries: Any, num_layers: int, tp_degree: int | None, plan: str = "the plan"
) -> list[SublayerRecord]:
    """The records of a plan's list. plan: the name of the plan in errors."""
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise UserError(
            f"{plan} has {entries!r} as its list of layers or sublayers; give entries, as "
            f"{{layers: 0-{num_layers - 1}, preset: ladder}}"
        )
    entries = [asdict(each) if isinstance(each, SublayerRecord) else each for each in entries]
    if not all(isinstance(entry, Mapping) for entry in entries):
        example = f"layers: 0-{num_layers - 1}, preset: ladder"
        if any(isinstance(entry, Mapping) and "kind" in entry for entry in entries):
            example = "kind: mlp, own_lag: 1"
        raise UserError(f"each entry of {plan} must be a mapping, as {{{example}}}")
    if all("kind" in entry for entry in entries):
        return [
            SublayerRecord.from_dict(e, f"sublayer {n} of {plan}") for n, e in enumerate(entries)
        ]
    chosen: dict[int, list[SublayerRecord]] = {}
    for n, entry in enumerate(entries):
        where = f"entry {n} of {plan}"
        if "layers" not in entry:
            raise UserError(f"{where} has no layers; write for example layers: 0-{num_layers - 1}")
        layers = _layer_range(str(entry["layers"]), num_layers, where)
        rest = {key: value for key, value in entry.items() if key != "layers"}
        _claim(chosen, layers, _entry_records(rest, layers, num_layers, tp_degree, where), where)
    missing = [layer for layer in range(num_layers) if layer not in chosen]
    if missing:
        raise UserError(
            f"{plan} lacks layers {_ranges(missing)} of the model's 0-{num_layers - 1}; add an "
            f"entry for them"
        )
    return [record for layer in range(num_layers) for record in chosen[layer]]


def _ranges(layers: Sequence[int]) -> str:
    """Ascending numbers as text: `0, 4-7`."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def layers_named(spec: Any) -> int | None:
    """How many layers a plan's list has, up to the last one that its ranges or records name.

    None for a preset, and for an invalid list, whose error `resolve_plan` raises.
    """
    if isinstance(spec, Mapping):
        spec = spec.get("layers", spec.get("sublayers"))
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        return None
    entries = [each for each in spec if isinstance(each, Mapping)]
    if all("kind" in each for each in entries):
        return sum(each["kind"] != "mlp" for each in entries) or None
    ends = [end.strip() for each in entries for end in str(each.get("layers")).split("-")]
    if not all(re.fullmatch(rf"[0-9]{{1,{DIGITS}}}", end) for end in ends):
        return None
    return max(map(int, ends)) + 1


def _entry_records(
    entry: Mapping[str, Any], layers: range, num_layers: int, tp_degree: int | None, where: str
) -> list[SublayerRecord]:
    check_keys(where, entry, ("preset", "attention", "mlp", "attention+mlp"))
    if "preset" in entry:
        if len(entry) > 1:
            raise UserError(f"{where} has a preset and records of its own; give one of them")
        return _preset(str(entry["preset"]), layers, num_layers, tp_degree)
    if "attention+mlp" in entry and len(entry) > 1:
        raise UserError(f"{where} has attention+mlp beside attention or mlp; give one of them")
    for kind, given in entry.items():
        if not isinstance(given, Mapping | None):
            raise UserError(f"{kind}={given!r} of {where} must be fields, as {{own_lag: 1}}")
        check_keys(f"{kind} of {where}", given or (), SETTINGS)
    kinds = ("attention+mlp",) if "attention+mlp" in entry else ("attention", "mlp")
    layer = [
        SublayerRecord.from_dict({"kind": kind, **(entry.get(kind) or {})}, f"{kind} of {where}")
        for kind in kinds
    ]
    return layer * len(layers)


def _layer_range(text: str, num_layers: int, where: str) -> range:
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
    if not match:
        raise UserError(f"layers={text!r} of {where} is no range; write for example 0-3, or 5")
    outside = UserError(
        f"layers={text!r} of {where} is outside the model's layers 0-{num_layers - 1}; name some "
        f"of these, or use a model of more layers"
    )
    if len(max(match[1], match[2] or "", key=len)) > DIGITS:
        raise outside
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise UserError(
            f"layers={text!r} of {where} is no range of the model's layers 0-{num_layers - 1}; "
            f"write the lower one first"
        )
    if last >= num_layers:
        raise outside
    return range(first, last + 1)


def _claim(
    chosen: dict[int, list[SublayerRecord]],
    layers: range,
    records: list[SublayerRecord],
    where: str,
) -> None:
    per_layer = len(records) // len(layers)
    for i, layer in enumerate(layers):
        if layer in chosen:
            raise UserError(f"{where} covers layer {layer} twice")
        chosen[layer] = records[i * per_layer : (i + 1) * per_layer]


def _preset(
    name: str, layers: range, num_layers: int, tp_degree: int | None
) -> list[SublayerRecord]:
    """The records of preset `name` on `layers`."""
    if (found := _find(name)) is None:
        raise _unknown_preset(name)
    preset, numbers = found
    if any(len(each) > DIGITS for each in numbers):
        raise UserError(f"plan {name!r} has a number of more than {DIGITS} digits; give a smaller")
    if preset.whole and len(layers) != num_layers:
        raise UserError(
            f"preset {name!r} covers the whole model only, not a range of layers; choose another "
            f"preset, or write the layers' lags into a plan of your own"
        )
    return preset.build(Layers(name, layers, num_layers, tp_degree), *map(int, numbers))


def _find(name: str) -> tuple[Preset, tuple[str, ...]] | None:
    """The preset of this name and the numbers in it; None if there is none."""
    for form, preset in PRESETS.items():
        if match := re.fullmatch(re.sub("[A-Z]", r"(\\d+)", form), name):
            return preset, match.groups()
    return None


def _unknown_preset(name: str) -> UserError:
    if "," in name:
        return UserError(
            f"unknown plan {name!r}: several plans are separated by spaces; one of presets on "
            f"layers has ranges, as ladder@0-3,desync-2x@4-7"
        )
    if os.path.isfile(name):
        return UserError(
            f"plan {name!r} is a file, but a plan's file has a name that ends in one of "
            f"{', '.join(FILES)}; rename the file, or give a preset's name"
        )
    return unknown("plan", name, tuple(PRESETS))
