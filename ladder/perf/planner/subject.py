"""What a question is about: a model with its plans, and a machine at each of its TP degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.config import configs_folder, load_plan, model_config
from ladder.models.config import ModelConfig
from ladder.models.eight_bits import EIGHT_BITS
from ladder.models.errors import UserError, unknown
from ladder.models.presets import resolve_plan, stated_degree
from ladder.perf.machine import BETWEEN_GPUS, Machine, with_links_of
from ladder.perf.nodes import has_degrees, load, relatives
from ladder.plans import CHECKPOINT


@dataclass(frozen=True)
class Subject:
    """A model. shape: its config with the plan `standard`. own: a folder's config with its own
    plan. stored: the type in which a folder stores matrices, if they are in 8 bits."""

    name: str
    shape: ModelConfig
    own: ModelConfig | None = None
    stored: str | None = None

    def refusal(self, tp: int) -> str:
        """Why a TP degree does not divide the shape; empty if it does."""
        try:
            self.shape.check_divides(tp, "TP")
        except UserError as error:
            return str(error).partition("; ")[0]  # without the remedy: nobody asked for it
        return ""

    def divides(self, tp: int) -> bool:
        """Whether a TP degree divides the shape."""
        return not self.refusal(tp)

    def config(self, plan: str, tp: int, tp_degree: int | None) -> ModelConfig:
        """The config with a plan. tp_degree: T, if the user gave one; else it is that of the plan's
        file, or `tp`. Raises UserError for a plan that does not exist."""
        if plan == CHECKPOINT:
            if self.own is None:
                raise UserError(
                    f"--plans {CHECKPOINT}, the plan of a folder, needs MODEL to be a folder; "
                    f"{self.name!r} is a shape"
                )
            return self.own
        spec = load_plan(plan)
        degree = tp_degree or stated_degree(spec) or tp
        try:
            found = resolve_plan(spec, self.shape.num_layers, degree)
            of_plan = degree if found.depends_on_tp else None
            return replace(self.shape, plan=found, tp_degree=of_plan)
        except UserError as error:
            if spec is plan:  # a preset, which is named
                raise
            raise UserError(f"--plans {plan}: {error}") from error


def subject(name: str) -> Subject:
    """The model of a name in configs/models, of a YAML file, or of a folder or its config.json.

    Raises UserError if there is none.
    """
    if (configs_folder() / "models" / f"{name}.yaml").is_file():
        return Subject(name, model_config(name))
    path = Path(name)
    if path.name == "config.json":
        path = path.parent
    if name and path.is_dir():
        from ladder.checkpoint import newest, read_stored  # slow to import

        own, stored = read_stored(newest(path))
        plain = replace(own, plan="standard", tp_degree=None)  # type: ignore[arg-type]
        return Subject(str(path), plain, own, stored)
    return Subject(name, model_config(name))


def weights_of(about: Subject, asked: str | None) -> str:
    """How matrices are stored: as asked for, or else as in the folder. Raises UserError for an
    unknown type, and for one that the folder does not hold."""
    kinds = ("bf16", *EIGHT_BITS)
    if asked is not None and asked not in kinds:
        raise unknown("type of --weights", asked, kinds)
    if asked and about.stored and asked != about.stored:
        raise UserError(
            f"--weights={asked}: {about.name} holds {about.stored} weights; leave it out, or give "
            f"the folder that it was converted from"
        )
    return asked or about.stored or "bf16"


def machines(names: Sequence[str], records: Sequence[Path] = ()) -> dict[int, Machine]:
    """The first machine at each TP degree for which some file has collectives, by degree.

    Collectives of fewer GPUs come from the further files, and from shipped ones of the same GPU.
    records: files from which the first machine is calibrated.
    """
    first, *more = (load(name) for name in names)
    if records:
        from ladder.perf.prediction.fitting import calibrated  # slow to import

        first = calibrated(first, *records)
    for name, each in zip(names[1:], more, strict=True):
        if each.gpu != first.gpu:
            raise UserError(
                f"--machine {name}: it has {each.gpu}, and {names[0]} {first.gpu}; give files of "
                f"one kind of GPU"
            )
    more += relatives(first)
    found = {first.gpus: first}
    if first.gpus > 1:
        own = tuple(each for each in first.curves if each.name not in BETWEEN_GPUS)
        found[1] = replace(first, gpus=1, curves=own, links=())
    for each in more:
        if each.gpus not in found and first.gpus % each.gpus == 0:
            found[each.gpus] = with_links_of(first, each)
    return dict(sorted(found.items()))


def degrees(found: Subject, known: dict[int, Machine], asked: Sequence[int] | None) -> list[int]:
    """The TP degrees to compare. Raises UserError for one of `asked` that is not possible."""
    if not asked:
        return [each for each in known if found.divides(each)]  # 1 always does
    most = max(known)
    for each in dict.fromkeys(asked):
        if each not in known:
            name = known[most].name
            remedy = f"ladder bench machine --nproc {each} --out FILE, and --machine {name} FILE"
            if each < 1 or most % each:
                remedy = f"give {', '.join(map(str, known))}, or another --machine"
            raise UserError(f"--tp={each}: machine {name!r} has {has_degrees(known)}; {remedy}")
        found.shape.check_divides(each, "--tp")
    return sorted(set(asked))


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise UserError for the first name that is not known."""
    for name in names:
        if name not in known:
            raise unknown(what, name, known)
