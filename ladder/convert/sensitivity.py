"""`ladder convert sensitivity`: the cost of converting layers to a ladder, before any training.

Each layer, and each suffix of layers (the paper's choice: Ladder Residual, arXiv 2501.06589, 4.2),
is converted alone and the model is run on held-out text. Measured are the divergence of its
predictions from the original model's, and bits per byte.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ladder.checkpoint import newest, read_config, trained_length, trained_within_documents
from ladder.data.prepared import TokenData, check_tokenizer, heldout_order, open_data, text_bytes
from ladder.data.verify import check_shards
from ladder.files import check_writable, make_folder, refuse_inside, write_text
from ladder.infer.cache import reading
from ladder.infer.load import load_for_inference
from ladder.models.documents import starts_of
from ladder.models.errors import UserError
from ladder.models.layers import vocabulary_start
from ladder.models.loss import teacher_losses, token_losses
from ladder.models.plan import Plan
from ladder.models.presets import resolve_plan
from ladder.models.transformer import Transformer
from ladder.next_step import free, say_next
from ladder.parallel import launch
from ladder.parallel.sharding import local_tensor
from ladder.progress import Progress

SEQ_LEN = 1024  # tokens; fewer if the model was trained with fewer, or has a shorter context


@dataclass(frozen=True)
class Cost:
    """The cost of converting `layers` to a ladder.

    divergence: KL(original || converted) in nats per token. bits_per_byte: of the converted model.
    """

    layers: tuple[int, ...]
    divergence: float
    bits_per_byte: float


@dataclass(frozen=True)
class SensitivityReport:
    """The costs of single layers and of suffixes of layers.

    original: bits per byte of the original model. singles: sorted by divergence. suffixes: the
    shortest first. plan: the better of `chosen` and `suffix`, with the layers that are a ladder
    already, as the text of a plan; empty if the model's plan cannot be written as such a text.
    """

    original: float
    tokens: int
    singles: tuple[Cost, ...]
    suffixes: tuple[Cost, ...]
    chosen: Cost  # the layers with the lowest single costs
    suffix: Cost  # the same number of layers, from the end
    plan: str


def turned(plan: Plan, layers: Iterable[int]) -> Plan:
    """The plan with the records of `layers` replaced by those of a ladder."""
    layers = set(layers)
    ladder = resolve_plan("ladder", plan.num_layers)
    pairs = zip(plan.layers, plan.sublayers, ladder.sublayers, strict=True)
    records = tuple(new if layer in layers else old for layer, old, new in pairs)
    return replace(plan, sublayers=records, name=f"{plan.name}, {named(layers)}")


def ranges(layers: Iterable[int]) -> list[tuple[int, int]]:
    """The first and the last layer of each run of layers that follow one another."""
    found: list[tuple[int, int]] = []
    for layer in sorted(layers):
        if found and layer == found[-1][1] + 1:
            found[-1] = found[-1][0], layer
        else:
            found.append((layer, layer))
    return found


def named(layers: Iterable[int], preset: str = "ladder") -> str:
    """The text of a plan in which `layers` are that preset: ladder@3-5,ladder@9."""
    parts = (str(a) if a == b else f"{a}-{b}" for a, b in ranges(layers))
    return ",".join(f"{preset}@{part}" for part in parts)


def worded(plan: Plan, layers: Iterable[int]) -> str:
    """The text of `plan` with `layers` as a ladder; empty if the plan is no standard or hybrid."""
    found = {*layers}
    standard, ladder = (resolve_plan(name, plan.num_layers) for name in ("standard", "ladder"))
    records = zip(
        plan.layers, plan.sublayers, standard.sublayers, ladder.sublayers, strict=True
    )  # fmt: skip
    for layer, own, plain, turned_over in records:
        if own != plain and own != turned_over and layer not in found:
            return ""
        found |= {layer} if own == turned_over else set()
    name = named(found)
    same = turned(plan, found).sublayers == resolve_plan(name, plan.num_layers).sublayers
    return name if same else ""


def free_layers(plan: Plan) -> list[int]:
    """The layers that can be converted. Raises UserError if the weights do not fit a ladder."""
    ladder = resolve_plan("ladder", plan.num_layers)
    if [r.kind for r in plan.sublayers] != [r.kind for r in ladder.sublayers] or not all(
        plan.equal_reads
    ):
        raise UserError(
            f"plan {plan.name!r} has other norms than a ladder, so no layer can be converted "
            f"without training; give a model of plan 'standard' or a hybrid"
        )
    pairs = zip(plan.layers, plan.sublayers, ladder.sublayers, strict=True)
    found = sorted({layer for layer, old, new in pairs if old != new})
    if not found:
        raise UserError(
            f"plan {plan.name!r} is a ladder throughout: no layer is left to convert; give a model "
            f"of plan 'standard' or a hybrid"
        )
    return found


@torch.no_grad()
def costs(
    model: Transformer,
    data: TokenData,
    sets: Sequence[tuple[int, ...]],
    seq_len: int,
    windows: int | None,
    batch: int,
    title: str,
    original: Transformer | None = None,
    cache: str = "auto",
    mask_documents: bool = False,
) -> tuple[int, list[Cost]]:
    """The number of tokens, and the costs of the unchanged model and of each set of layers.

    windows: the number of held-out windows; None: all. original: the model from which divergence is
    measured, with the same ranks and vocabulary (for example the one from which `model` was
    converted). None: `model` itself, whose divergence is then 0. cache: the type of the keys and
    values that `model` attends to (`ladder.infer.cache.reading`), for data without documents.
    mask_documents: each token attends only to its own document, for models trained so.
    """
    config, reducer = model.config, model.reducer
    first = vocabulary_start(config.vocab_size, reducer.ranks)
    device = local_tensor(model.lm_head.weight).device
    plans = [config.plan, *(turned(config.plan, layers) for layers in sets)]
    sums = torch.zeros(len(plans), 2, dtype=torch.float64)  # divergence, nats
    tokens = text = done = 0
    heldout = data.windows("heldout", seq_len)
    batches = list(heldout_order(heldout, windows, batch))
    passes = len(batches) * len(plans)
    with Progress(title, passes, "passes", quiet=launch.rank() != 0) as progress:
        for chosen in batches:
            inputs, targets = heldout.read(chosen)
            begins = heldout.begins(chosen, inputs, data.eos_id if mask_documents else None)
            documents = None if begins is None else starts_of(begins).to(device)
            given, wanted = inputs.to(device), targets.to(device)
            tokens += int((targets >= 0).sum())
            text += int(text_bytes(data, targets).sum())
            theirs = (
                None if original is None else original(given, documents=documents, gather=False)
            )
            inputs_of = {"documents": documents, **reading(model, given, cache)}
            for n, plan in enumerate(plans):
                logits = model(given, gather=False, plan=plan, **inputs_of)
                theirs = logits if theirs is None else theirs
                nats = token_losses(logits, wanted, first, reducer, model.runtime.losses)
                apart = teacher_losses(logits, theirs, wanted, 1.0, reducer)
                sums[n] += torch.stack((apart.double().sum(), nats.double().sum())).cpu()
                done += 1
                progress.update(done, plan.name)
    if not sums.isfinite().all():
        raise UserError("the model's predictions are not finite; load it with --dtype float32")
    return tokens, [
        Cost(layers, float(divergence) / tokens, float(nats) / math.log(2) / text)
        for layers, (divergence, nats) in zip(((), *sets), sums, strict=True)
    ]


def check_layers(plan: Plan, wished: int) -> list[int]:
    """The layers that can be converted. Raises UserError if they are fewer than `wished`."""
    free = free_layers(plan)
    if not 1 <= wished <= len(free):
        raise UserError(
            f"--layers={wished} must be 1 to {len(free)}, the number of layers that can be "
            f"converted"
        )
    return free


def measure_sensitivity(
    model: Transformer,
    data: TokenData,
    wished: int,
    seq_len: int,
    windows: int,
    batch: int,
    mask_documents: bool = False,
) -> SensitivityReport:
    """The costs of each layer, of each suffix, and of the `wished` cheapest layers together."""
    free = check_layers(model.config.plan, wished)
    singles = [(layer,) for layer in free]
    suffixes = [tuple(free[-n:]) for n in range(1, len(free) + 1)]

    def measure(sets: Sequence[tuple[int, ...]], title: str) -> tuple[int, list[Cost]]:
        return costs(
            model, data, sets, seq_len, windows, batch, title, mask_documents=mask_documents
        )

    tokens, (own, *found) = measure([*singles, *suffixes], "layers")
    ranked = sorted(found[: len(free)], key=lambda cost: cost.divergence)
    by_suffix = found[len(free) :]
    best = tuple(sorted(cost.layers[0] for cost in ranked[:wished]))
    known = {cost.layers: cost for cost in found}
    if best not in known:
        known[best] = measure([best], "choice")[1][1]
    chosen, suffix = known[best], by_suffix[wished - 1]
    better = min(chosen, suffix, key=lambda cost: cost.divergence)
    return SensitivityReport(
        own.bits_per_byte, tokens, tuple(ranked), tuple(by_suffix), chosen, suffix,
        worded(model.config.plan, better.layers),
    )  # fmt: skip


def text(report: SensitivityReport) -> str:
    """The report as text."""

    def line(cost: Cost, name: str) -> str:
        more = cost.bits_per_byte - report.original
        return f"{name:24}{cost.divergence:12.5f}{cost.bits_per_byte:15.4f}{more:+10.4f}"

    head = f"{'as a ladder':24}{'nats a token':>12}{'bits per byte':>15}{'change':>10}"
    count = len(report.chosen.layers)
    lines = [
        f"original: {report.original:.4f} bits per byte, {report.tokens:,} tokens",
        f"\none layer at a time, the cheapest first\n{head}",
        *(line(cost, str(cost.layers[0])) for cost in report.singles),
        f"\nthe last layers together\n{head}",
        *(line(cost, named(cost.layers)) for cost in report.suffixes),
        f"\n{count} layers: those with the lowest single costs, and the last ones\n{head}",
        line(report.chosen, "cheapest"),
        line(report.suffix, "last"),
        f"\n--plan {report.plan}" if report.plan else "\nconvert them in the model's own plan",
    ]
    return "\n".join(lines)


def sensitivity_command(options: argparse.Namespace) -> int:
    """Run `ladder convert sensitivity` on this rank; rank 0 prints. See its --help."""
    for name in ("windows", "batch"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name}={getattr(options, name)} must be 1 or more")
    launch.join(options.device)
    if options.out is not None:
        if options.out.is_dir():
            raise UserError(f"--out={options.out} is a folder; name a file in it")
        if options.out.exists():
            raise UserError(f"--out={options.out} exists; name another file, or remove it first")
        refuse_inside(options.out, [options.model, options.data])
        if launch.rank() == 0:
            check_writable(options.out)
    launch.agree(vars(options))
    data, folder = open_data(options.data), newest(options.model)
    if launch.rank() == 0:
        check_shards(data, "heldout")
    config = read_config(folder)
    check_tokenizer(data, folder, f"--data={options.data}", str(options.model))
    if data.vocab_size > config.vocab_size:
        raise UserError(
            f"--data={options.data} has {data.vocab_size} tokens and the model vocab_size="
            f"{config.vocab_size}; prepare the text with the model's own tokenizer"
        )
    room = config.max_seq_len
    trained = trained_length(folder)
    seq_len = options.seq_len or min(SEQ_LEN, trained or room)
    if not 1 <= seq_len <= room:
        raise UserError(f"--seq-len={seq_len} must be 1 to the model's max_seq_len={room}")
    check_layers(config.plan, options.layers)
    model = load_for_inference(folder, reducer="async", dtype=options.dtype, device=options.device)
    within = trained_within_documents(folder)
    report = measure_sensitivity(
        model, data, options.layers, seq_len, options.windows, options.batch, within
    )
    if launch.rank() == 0:
        apart = "; attention within each document, as trained" * within
        print(f"windows of {seq_len:,} tokens{', as trained' * (seq_len == trained)}{apart}")
        print(text(report))
        if options.out is not None:
            found: dict[str, Any] = {
                "model": str(options.model), "seq_len": seq_len, "mask_documents": within,
            }  # fmt: skip
            make_folder(options.out.parent)
            write_text(options.out, json.dumps({**found, **asdict(report)}, indent=1) + "\n")
        if report.plan:
            source = options.model if options.model.name else options.model.resolve()
            out = free(source.with_name(f"{source.name}-hybrid"))
            say_next("convert", source, "--plan", report.plan, "--out", out)
    return 0
