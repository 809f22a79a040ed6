"""Specifications of plans: forms, round trips, errors."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ladder.models import ModelConfig, Plan, SublayerRecord, UserError, resolve_plan
from ladder.models.preset_table import PRESETS
from ladder.models.presets import layers_named
from tests.samples import PLANS, both, full_model, sample_tokens, small_config, virtual

L = 6  # layers


# Forms of a specification


def test_string_of_ranges() -> None:
    """Catches a desync range that counts "every nth" from the model's start, or does not end with
    a `residual` reduce where another preset follows."""
    plan = resolve_plan("desync-4x@1-3,ladder@5", L)
    reduces = [record.reduce for record in plan.sublayers]
    assert reduces[:2] + reduces[8:] == ["output"] * 6
    assert reduces[2:8] == ["none", "none", "none", "residual", "none", "residual"]
    assert [record.own_lag for record in plan.sublayers] == [0] * 10 + [1, 1]
    assert resolve_plan(" ladder@5 , desync-4x@ 1 - 3 ", L).sublayers == plan.sublayers


@pytest.mark.parametrize("form", PRESETS)
def test_presets_say_whether_they_scale(form: str) -> None:
    """A plan has a T of its own if its preset is `scaled`, and then its records hold sqrt(T)."""
    name, degree = re.sub("[A-Z]", "2", form), 9
    plan = resolve_plan(name, L, degree)
    scales = {record.own_scale for record in plan.sublayers} - {1.0}
    assert scales == ({3.0} if PRESETS[form].scaled else set())
    assert plan.tp_degree == (degree if PRESETS[form].scaled else None)
    if PRESETS[form].whole:
        with pytest.raises(UserError, match=f"preset '{name}' covers the whole model only"):
            resolve_plan(f"{name}@0-1", L, degree)
    else:
        on_a_range = resolve_plan(f"{name}@0-1", L, degree)
        assert on_a_range.tp_degree == plan.tp_degree


def test_forms_agree() -> None:
    """String, list of ranges, list of records and mapping are the same plan."""
    text = resolve_plan("desync-2x@0-3,ladder@4-5", L)
    ranges = [{"layers": "0-3", "preset": "desync-2x"}, {"layers": "4-5", "preset": "ladder"}]
    records = text.to_dict()["sublayers"]
    for spec in (
        ranges,
        ranges[::-1],
        records,
        {"layers": ranges},
        {"sublayers": records},
        {"name": "mine", "sublayers": records},
        list(text.sublayers),
        {"name": "mine", "sublayers": [text.sublayers[0], *records[1:]]},
        text,
    ):
        assert resolve_plan(spec, L).sublayers == text.sublayers
    assert resolve_plan({"name": "mine", "layers": ranges}, L).name == "mine"


def test_written_in_yaml() -> None:
    """A hand-written plan is as good as a preset: lag 2, then desync, then parallel at lag 1."""
    spec = yaml.safe_load(
        """
        name: by hand
        layers:
          - {layers: 0-1, attention: {own_lag: 2, peer_lag: 2}, mlp: {own_lag: 2, peer_lag: 2}}
          - {layers: 2-4, preset: desync-2x}
          - layers: 5
            attention+mlp: {own_lag: 1, peer_lag: 1}
        """
    )
    plan = resolve_plan(spec, L)
    middle = [
        SublayerRecord("attention", reduce="none"),
        SublayerRecord("mlp", reduce="residual"),
    ] * 3
    assert list(plan.sublayers) == [
        *both(own_lag=2, peer_lag=2) * 2,
        *middle,
        SublayerRecord("attention+mlp", 1, 1),
    ]
    assert plan.name == "by hand"
    assert plan.layers == (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5)


def test_an_entry_may_leave_out_what_is_standard() -> None:
    plan = resolve_plan([{"layers": "0-5", "mlp": {"peer_lag": 1}}], L)
    assert plan.sublayers == (SublayerRecord("attention"), SublayerRecord("mlp", peer_lag=1)) * L


def test_lag_two_blocks_once() -> None:
    """Two outputs in flight at the end: one was overlapped, the last was not."""
    plan = resolve_plan(PLANS["lag 2"], 4)
    assert (plan.collectives, sum(plan.blocking)) == (8, 1)
    assert [[landing.output for landing in read] for read in plan.landings] == [
        [], [], [], [0], [1], [2], [3], [4], [5, 6, 7]
    ]  # fmt: skip


def test_desync_then_ladder() -> None:
    """A `residual` reduce lands at once although its reader lags. Catches the lag winning over it,
    which would leave the ladder layers on residuals that differ."""
    plan = resolve_plan("desync-2x@0-1,ladder@2-3", 4)
    assert plan.equal_reads == (True, False, True, False, True, True, True, True, True)
    outputs = [[landing.output for landing in read] for read in plan.landings]
    assert outputs == [[], [0], [1], [2], [3], [], [4], [5], [6, 7]]
    assert plan.blocking == (False, True, False, True, False, False, False, True)


@pytest.mark.parametrize("name", PLANS)
def test_round_trip(name: str) -> None:
    """Saved and loaded a plan, and a config, is itself; also once more through YAML."""
    plan = resolve_plan(PLANS[name], 4, 2)
    config = small_config(plan, 2, plan.depends_on_tp)
    assert resolve_plan(plan.to_dict(), 4) == plan
    assert ModelConfig.from_dict(config.to_dict()) == config
    again = yaml.safe_load(yaml.safe_dump(config.to_dict()))
    assert ModelConfig.from_dict(again) == config


def test_plans_saved_when_residual_was_called_stream() -> None:
    """A saved `reduce: stream`, and one written by hand, is read as `residual`, and saved as such.

    Catches one that is refused, or that is another plan than the same one of today."""
    plan = resolve_plan("desync-2x", 2)
    assert [record.reduce for record in plan.sublayers] == ["none", "residual"] * 2
    saved = small_config(plan, 2, True, num_layers=2).to_dict()
    old = json.loads(json.dumps(saved).replace('"residual"', '"stream"'))
    assert old != saved
    assert resolve_plan(old["plan"], 2) == plan
    assert ModelConfig.from_dict(old).to_dict() == saved
    layers = [{"layers": "0-1", "attention": {"reduce": "none"}, "mlp": {"reduce": "stream"}}]
    assert resolve_plan(layers, 2).sublayers == plan.sublayers
    with pytest.raises(UserError, match=r"sublayer 1 .*reduce=residual while output 0 is still"):
        resolve_plan([{"layers": 0, "mlp": {"own_lag": 1, "reduce": "stream"}}], 1)


# Errors: each names the field, its value and what to do


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("laddder", ["plan 'laddder'", "did you mean 'ladder'"]),
        ("desync-1x", ["desync-1x", "standard"]),
        ("desync-0x", ["desync-0x"]),
        ("desync-x", ["plan 'desync-x'"]),
        ("dtp-2", ["tp_degree"]),
        ("accumulate-4x", ["'accumulate-4x' depends on T", "tp_degree=4"]),
        ("accumulate-1x", ["accumulate-1x is `standard`"]),
        ("accumulate-4x-lag1", ["'accumulate-4x-lag1' depends on T", "tp_degree=4"]),
        ("accumulate-4x-lag0", ["'accumulate-4x-lag0'", "1 or more"]),
        ("accumulate-0x-lag1", ["'accumulate-0x-lag1'", "1 or more"]),
        ("accumulate-4x-lag", ["plan 'accumulate-4x-lag'", "did you mean"]),
        ("accumulate-4x-lag9999999999", ["more than 9 digits"]),
        ("dtp-12", ["dtp-12", "12"]),
        ("none@0-2", ["none", "whole model"]),
        ("hybrid@0-2", ["hybrid", "whole model"]),
        ("dtp-1@0-2", ["dtp-1", "whole model"]),
        ("ladder@", ["layers=''"]),
        ("ladder@a-b", ["layers='a-b'"]),
        ("ladder@3-2", ["layers='3-2'", "0-5"]),
        ("ladder@4-6", ["layers='4-6'", "0-5"]),
        ("ladder@0-3,standard@3-5", ["layer 3 twice"]),
        ("", ["plan ''"]),
        (7, ["plan=7"]),
        (None, ["plan=None"]),
        ([], ["[]"]),
        (["ladder"], ["mapping"]),
        ("my-plan.yaml", ["plan='my-plan.yaml' names a file", "load_plan('my-plan.yaml')"]),
        (Path("a/b@c.json"), ["plan='a/b@c.json' names a file"]),
        ([{"layers": "0-4", "preset": "ladder"}], ["layers 5 of the model's 0-5"]),
        ([{"layers": "2", "preset": "ladder"}], ["lacks layers 0-1, 3-5 of"]),
        ([{"preset": "ladder"}], ["entry 0", "layers"]),
        ([{"layers": "0-5", "preset": "ladder", "mlp": {}}], ["entry 0", "preset"]),
        ([{"layers": "0-5", "presset": "ladder"}], ["presset", "did you mean 'preset'"]),
        ([{"layers": "0-5", "attention+mlp": {}, "mlp": {}}], ["attention+mlp"]),
        ([{"layers": "0-5", "attention": {"own_lags": 1}}], ["own_lags", "'own_lag'"]),
        ([{"layers": "0-5", "attention": 2}], ["attention", "entry 0"]),
        ([{"layers": "0-5", "attention": "own_lag"}], ["attention", "entry 0"]),
        ([{"layers": "0-5", "mlp": {"kind": "mlp"}}],
         ["unknown key 'kind' of mlp of entry 0", "known: own_lag, peer_lag, reduce, own_scale"]),
        ({"name": "x"}, ["plan 'x' needs one of the keys layers and sublayers"]),
        ({"layers": [], "sublayers": []}, ["layers", "sublayers"]),
        ({"layer": [{"layers": "0-5", "preset": "ladder"}]}, ["'layer'", "layers"]),
        ({"sublayers": "ladder"}, ["ladder"]),
        ({"name": "mine", "layers": 3}, ["plan 'mine' has 3 as its list", "{layers: 0-5, preset"]),
        ({"name": "mine", "layers": [3]},
         ["each entry of plan 'mine' must be a mapping, as {layers: 0-5, preset: ladder}"]),
        ([{"kind": "attention"}, "mlp"], ["as {kind: mlp, own_lag: 1}"]),
        ({"name": "mine", "layers": [{"layers": "0-5", "mlp": {"own_lags": 1}}]},
         ["unknown key 'own_lags' of mlp of entry 0 of plan 'mine' (did you mean 'own_lag'?)"]),
        ([{"kind": "attention"}, {"kind": "mlp"}], ["1 layer ", "6"]),
        ([{"kind": "attention"}, {"own_lag": 1}], ["entry 0", "layers"]),
    ],
)  # fmt: skip
def test_a_bad_specification_names_what_is_wrong(spec: Any, words: list[str]) -> None:
    """Never a TypeError or KeyError from within, never a plan that was not meant."""
    with pytest.raises(UserError) as error:
        resolve_plan(spec, L)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ([{"layers": "0-3", "preset": "ladder"}, {"layers": 4}], 5),
        ({"layers": [{"layers": "3-0"}]}, 4),  # refused with the model's layers in the line
        ({"sublayers": [{"kind": "attention"}, {"kind": "mlp"}, {"kind": "attention+mlp"}]}, 2),
        ([{"layers": "0-x"}], None), ([{"layers": "1" * 99}], None), ([{}], None),
        ([], None), ([3], None), ({"layers": 3}, None), ({}, None), ("ladder@0-3", None), (7, None),
    ],
)  # fmt: skip
def test_the_layers_that_a_plan_names(spec: Any, layers: int | None) -> None:
    assert layers_named(spec) == layers


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"kind": "atention"}, ["kind", "atention", "did you mean 'attention'"]),
        ({"kind": "mlp"}, ["kind", "sublayer 0", "attention"]),
        ({"own_lag": -1}, ["own_lag=-1", "sublayer 0"]),
        ({"peer_lag": -1}, ["peer_lag=-1", "sublayer 0"]),
        ({"own_lag": 1.0}, ["own_lag=1.0"]),
        ({"own_lag": True}, ["own_lag=True"]),
        ({"peer_lag": "1"}, ["peer_lag='1'"]),
        ({"reduce": "sum"}, ["reduce", "'sum'", "output, residual, accumulated, none"]),
        ({"reduce": None}, ["reduce", "None"]),
        ({"own_scale": 0}, ["own_scale=0"]),
        ({"own_scale": -1.0}, ["own_scale=-1.0"]),
        ({"own_scale": math.nan}, ["own_scale=nan"]),
        ({"own_scale": math.inf}, ["own_scale=inf"]),
        ({"own_scale": "x"}, ["own_scale='x'"]),
        ({"own_scale": 1e6}, ["own_scale=1000000.0", "above 0 and below 1e6"]),
        ({"own_scale": 2.0, "reduce": "residual"}, ["own_scale=2.0", "residual"]),
        ({"own_scale": 2.0, "reduce": "accumulated"}, ["own_scale=2.0", "accumulated"]),
    ],
)
def test_a_bad_record_names_its_field(record: dict[str, Any], words: list[str]) -> None:
    """The error names every field, its value and its position."""
    first = {"kind": "attention", **record}
    with pytest.raises(UserError) as error:
        resolve_plan([first, {"kind": "mlp"}], 1)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("degree", [-4, 0])
@pytest.mark.parametrize("plan", ["dtp-2", "standard"])
def test_a_degree_below_one_is_refused(plan: str, degree: int) -> None:
    with pytest.raises(UserError, match=f"tp_degree={degree} must be"):
        resolve_plan(plan, L, degree)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6.0, None), r"num_layers=6\.0 must be a whole number from 1 to 10,000"),
        ((True, None), "num_layers=True must be a whole number"),
        ((6, "2"), "tp_degree='2' must be a whole number from 1 to 65,536"),
        ((6, True), "tp_degree=True must be a whole number"),
    ],
)
def test_sizes_that_are_no_whole_numbers_are_refused(sizes: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_plan("dtp-2", *sizes)


def test_a_plan_of_a_list_is_one_of_a_tuple() -> None:
    records = [SublayerRecord("attention"), SublayerRecord("mlp")]
    plan = Plan(records)  # type: ignore[arg-type]
    assert plan == Plan(tuple(records))
    assert hash(plan) == hash(Plan(tuple(records)))
    records.append(SublayerRecord("attention+mlp"))
    assert len(plan.sublayers) == 2
    with pytest.raises(UserError, match=r"sublayer 0 of plan 'custom' is \{'kind': 'attention'\}"):
        Plan(({"kind": "attention"},))  # type: ignore[arg-type]


def test_a_path_that_is_no_plans_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "plan.txt").write_text("[{kind: attention+mlp}]")
    with pytest.raises(UserError, match=r"is a file, but a plan's file .* of \.yaml, \.yml"):
        resolve_plan(str(tmp_path / "plan.txt"), L)
    (tmp_path / "desync").mkdir()  # a folder is no plan's file
    for name in ("none.txt", "desync"):
        with pytest.raises(UserError, match="unknown plan"):
            resolve_plan(str(tmp_path / name), L)


def test_whole_numbers_of_numpy_are_taken() -> None:
    plan = resolve_plan("dtp-2", np.int64(L), np.int32(2))  # type: ignore[arg-type]
    assert plan == resolve_plan("dtp-2", L, 2)
    assert type(plan.tp_degree) is int


def test_records_of_another_degree_are_refused() -> None:
    """dtp scales by sqrt(T): its records of T = 4 with T = 2 are another model."""
    old = small_config("dtp-2", tp_degree=4)
    saved = {**old.to_dict(), "tp_degree": 2}
    message = r"plan 'dtp-2' with tp_degree=2 .* of another T, tp_degree=4; .* set tp_degree=4"
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(saved)
    with pytest.raises(UserError, match=message):
        replace(old, tp_degree=2)
    with pytest.raises(UserError, match=message):
        small_config(yaml.safe_load(yaml.safe_dump(old.plan.to_dict())), tp_degree=2)
    assert ModelConfig.from_dict({**saved, "plan": "dtp-2"}) == small_config("dtp-2", tp_degree=2)
    assert ModelConfig.from_dict(old.to_dict()) == old
    del saved["plan"]["tp_degree"]  # as earlier versions wrote it
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict(saved)
    again = ModelConfig.from_dict({**saved, "tp_degree": 4})
    assert again == old
    assert again.plan.tp_degree == 4
    # Records of one's own are what they say, whatever the name or T.
    records = old.plan.to_dict()["sublayers"]
    assert small_config(records, tp_degree=2).plan.sublayers[0].own_scale == 2.0
    small_config({"name": "dtp-2", "sublayers": records}, tp_degree=2)
    with pytest.raises(UserError, match="with tp_degree=2 holds records of another T"):
        small_config({"tp_degree": 4, "sublayers": records}, tp_degree=2)
    with pytest.raises(UserError, match="tp_degree='4' of plan 'custom' must be a whole number"):
        small_config({"tp_degree": "4", "sublayers": records}, tp_degree=2)
    records[0]["peer_lag"] = 1
    own = small_config({"name": "dtp-2", "sublayers": records}, tp_degree=2)
    assert own.plan.sublayers[0].peer_lag == 1
    small_config({"name": "my dtp-2", "sublayers": records}, tp_degree=2)


@pytest.mark.parametrize("name", ["accumulate-4x", "ladder@0-1,accumulate-2x@2-3",
                                  "accumulate-2x-lag1"])  # fmt: skip
def test_accumulate_of_another_degree_is_refused(name: str) -> None:
    old = small_config(name, tp_degree=4)
    with pytest.raises(UserError, match=r"holds records of another T, .* set tp_degree=4"):
        replace(old, tp_degree=2)
    assert replace(old, plan=name, tp_degree=2) == small_config(name, tp_degree=2)


def test_numbers_that_yaml_reads_as_strings() -> None:
    """YAML's 1e-3 is a string, for it has no dot."""
    fields = yaml.safe_load("{own_scale: 1e-3}")
    plan = resolve_plan([{"layers": "0-5", "mlp": fields}], L)
    assert plan.sublayers[1] == SublayerRecord("mlp", own_scale=1e-3)
    scaling = yaml.safe_load("{factor: 1e1, original_max_position_embeddings: '16'}")
    config = small_config(rope_scaling=scaling)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 10.0
    assert config.rope_scaling.original_max_position_embeddings == 16
    for value in ("x", "nan", "inf", None):
        with pytest.raises(UserError, match=r"rope_scaling\.factor="):
            small_config(rope_scaling={"factor": value})


def test_sublayers_make_whole_layers() -> None:
    """Catches a plan whose records are as many as they should be but in another order."""
    attention, mlp, both_ = (SublayerRecord(kind) for kind in ("attention", "mlp", "attention+mlp"))
    for records in (
        (),
        (attention,),
        (mlp, attention),
        (attention, attention, mlp),
        (attention, both_),
        (both_, mlp),
        (attention, mlp, mlp),
        (attention, mlp, attention),
    ):
        with pytest.raises(UserError):
            Plan(records)
    assert Plan((both_, attention, mlp)).layers == (0, 1, 1)


@pytest.mark.parametrize(
    "records",
    [
        [SublayerRecord("attention"), SublayerRecord("mlp", own_lag=1, reduce="residual")],
        [SublayerRecord("attention"), SublayerRecord("mlp", peer_lag=1, reduce="residual")],
        [
            SublayerRecord("attention", reduce="none"),
            SublayerRecord("mlp", own_lag=1, reduce="residual"),
        ],
        [
            SublayerRecord("attention"),
            SublayerRecord("mlp", own_lag=9, peer_lag=9, reduce="residual"),
        ],
    ],
)
def test_residual_reduce_needs_nothing_in_flight(records: list[SublayerRecord]) -> None:
    """Outputs in flight would be summed T times, or lost."""
    with pytest.raises(UserError, match=r"sublayer 1 .*reduce=residual.*lag"):
        Plan(tuple(records))


def test_groups_begin_with_equal_residuals_and_have_nothing_in_flight() -> None:
    """The sum replaces what own parts added since its group began: what was in flight then would be
    lost, and what only this rank had read before would stay."""
    for fields, message in (
        ({"attention": {}, "mlp": {"peer_lag": 1, "reduce": "accumulated"}},
         r"sublayer 3 .*\(sublayers 3 to 3, .* while output 2.*; set own_lag=0 and peer_lag=0 for "
         r"sublayer 3 \(now own_lag=0, peer_lag=1\)"),
        ({"attention": {"own_lag": 2, "reduce": "none"}, "mlp": {"reduce": "accumulated"}},
         r"sublayer 2 .*\(sublayers 2 to 3, .* while output 1.*\(now own_lag=2, peer_lag=0\)"),
        ({"attention": {"own_scale": 2.0}, "mlp": {"reduce": "accumulated"}},
         r"differ at sublayer 3 .*group of sublayer 3 .*set reduce=residual for sublayer 2"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            resolve_plan([{"layers": 0}, {"layers": 1, **fields}], 2)


def test_sums_in_flight_that_have_no_meaning() -> None:
    """Each is refused with the sublayer, the option and the remedy."""
    late = {"reduce": "accumulated", "own_scale": 2.0}
    for fields, message in (
        # A sum has the own parts, which this read leaves out.
        ([{"layers": 0, "attention": {"reduce": "none"}, "mlp": {"reduce": "accumulated"}},
          {"layers": 1, "attention": {"own_lag": 1}}],
         r"sublayer 2 .* sum of sublayer 1 .* before the own part .* own_lag must not be above"),
        # Nothing reads output 1, or 3, before the sum.
        ([{"layers": 0, "mlp": late}, {"layers": 1}],
         r"own_scale=2\.0 of sublayer 1 .* must be 1: no sublayer reads"),
        ([{"layers": 0}, {"layers": 1, "mlp": late}],
         r"own_scale=2\.0 of sublayer 3 .* must be 1"),
        # An output in flight that is of no group, behind one that is.
        ([{"layers": 0, "mlp": late},
          {"layers": 1, "attention": {"peer_lag": 2}, "mlp": {"peer_lag": 2, **late}}],
         r"sublayer 3 .*while output 2, of no group, is still in flight; .*peer_lag=2\)"),
        ([{"layers": 0, "mlp": late}, {"layers": 1, "mlp": {"reduce": "residual", "peer_lag": 1},
                                       "attention": {"peer_lag": 2}}],
         r"sublayer 3 .*reduce=residual while output 2 is still in flight"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            resolve_plan(fields, 2)
    with pytest.raises(UserError, match=r"sublayer 66 .* sum of sublayer 0 .*65 newer .*peer_lag"):
        resolve_plan("accumulate-1x-lag65", 40, 2)
    assert resolve_plan("accumulate-1x-lag64", 40, 2).longest_flight == 64


def test_residual_reduce_may_lag_where_all_has_landed() -> None:
    """At the start, and right after another one, a lag finds nothing in flight, so it lags not."""
    lagging = Plan(
        (SublayerRecord("attention", 3, 3, "residual"), SublayerRecord("mlp", 1, 2, "residual"))
    )
    at_once = Plan(
        (SublayerRecord("attention", 0, 0, "residual"), SublayerRecord("mlp", 0, 0, "residual"))
    )
    assert lagging.landings == at_once.landings
    models = [full_model(small_config(plan, 2, True, num_layers=1), 3)
              for plan in (lagging, at_once)]  # fmt: skip
    tokens = sample_tokens(models[0].config, 1)
    found = [virtual(model, 2)(tokens) for model in models]
    assert torch.isfinite(found[0]).all()
    assert torch.equal(*found)
