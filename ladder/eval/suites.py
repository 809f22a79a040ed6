"""Suites (configs/eval) and tasks of `ladder eval --tasks`, loaded by lm-evaluation-harness."""

from __future__ import annotations

import importlib.util
import logging
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladder.config import FILES, build, configs_folder, find, load_yaml
from ladder.eval import offline
from ladder.infer.settings import check_count
from ladder.models.errors import UserError, nearest

TASKS = Path(__file__).parent / "tasks"
SEED = 1234  # of few-shot examples, as in the harness
REFUSED = {  # the harness's flags of unsupported tasks, and their meaning
    "UNSAFE_CODE": "runs programs that the model wrote, which `ladder eval` does not",
    "MULTIMODAL": "has images or audio, which the models cannot read",
}
COLUMNS = "its config may name a column that its data lacks, or a row may be incomplete"


@dataclass(frozen=True)
class SuiteTask:
    """A task, group or tag of the harness. num_fewshot: None keeps the task's own number."""

    task: str
    num_fewshot: int | None = None


def entries(names: Sequence[str], num_fewshot: int | None) -> list[SuiteTask]:
    """The entries of `names`: suites (or their YAML files) and tasks, each once.

    num_fewshot: replaces that of every task.
    """
    known = {path.stem for path in (configs_folder() / "eval").glob("*.yaml")}
    found: list[SuiteTask] = []
    for name in names:
        if name in known or name.endswith(FILES):
            found += load_suite(name)
        else:
            found.append(SuiteTask(name))
    for entry in found:
        if sum(other.task == entry.task for other in found) > 1:
            raise UserError(f"--tasks names {entry.task!r} twice; name it once")
    if num_fewshot is None:
        return found
    return [SuiteTask(entry.task, num_fewshot) for entry in found]


def load_suite(name: str) -> list[SuiteTask]:
    """The tasks of a suite from configs/eval, or of a YAML file."""
    path = find("eval", name)
    data = load_yaml(path)
    if not isinstance(data, list) or not data or not all(isinstance(each, dict) for each in data):
        raise UserError(f"{path} must hold a list of tasks, as `- {{task: piqa, num_fewshot: 5}}`")
    found = [build(SuiteTask, each, f"task {i} of {path}") for i, each in enumerate(data, start=1)]
    for entry in found:
        if entry.num_fewshot is not None:
            check_count(f"task {entry.task!r} of {path}: num_fewshot", entry.num_fewshot, 0)
    return found


def require_lm_eval() -> None:
    """Raise UserError if lm-evaluation-harness is not installed; silence its log."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "`ladder eval` needs lm-evaluation-harness, which is not installed: "
            "pip install -e '.[eval]' in the project's folder"
        )
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork a threaded process
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval.api.task

    # Its progress bars count the construction of requests, which takes no time, on every rank.
    lm_eval.api.task.tqdm = lambda rows, **_: rows


def check_include(include: Path | None) -> None:
    """Raise UserError unless `include` is a folder with YAML files, or None."""
    if include is not None and next(include.glob("**/*.yaml"), None) is None:
        raise UserError(
            f"--include-path={include} holds no YAML file; give the folder of your tasks, each a "
            f"YAML file of lm-evaluation-harness"
        )


def own(chosen: Sequence[SuiteTask], include: Path | None = None) -> set[str]:
    """The tasks of the offline suite that `chosen` leads to, also by groups of `include`."""
    return _leaves(_manager(include), chosen) & {*offline.TASKS}


def _manager(include: Path | None, data: Path | None = None, defaults: bool = False) -> Any:
    """The harness's index of our tasks, those of `include` and, by `defaults`, its own."""
    from lm_eval.tasks import TaskManager

    folders = [str(TASKS)] if include is None else [str(TASKS), str(include)]
    return TaskManager(
        include_path=folders, include_defaults=defaults, metadata={"folder": str(data)}
    )


def _leaves(manager: Any, chosen: Iterable[SuiteTask]) -> set[str]:
    """The names of the tasks that `chosen` leads to by groups and tags; also unknown names."""
    left: list[Any] = [entry.task for entry in chosen]
    seen: set[str] = set()
    found: set[str] = set()
    while left:
        each = left.pop()
        if isinstance(each, dict):  # in a group: one with options, or a group defined there
            members = each.get("task")
            each = each.get("group", members)
            if isinstance(members, list) and each not in manager.task_index:
                left += members
                continue
        if not isinstance(each, str) or each in seen:
            continue
        seen.add(each)
        entry = manager.task_index.get(each)
        if each in manager.all_tags:
            left += entry.tags
        elif entry is not None and isinstance((entry.cfg or {}).get("task"), list):
            left += entry.cfg["task"]
        else:
            found.add(each)
    return found


def load(
    chosen: Sequence[SuiteTask], data: Path | None, include: Path | None = None
) -> dict[str, dict[str, Any]]:
    """The tasks with their documents, as the argument of the harness's `evaluate`.

    data: the folder that `ladder.eval.offline.build_tasks` wrote, for our own tasks. include: a
    folder of further tasks, which replace tasks of the same names.

    Raises UserError for an unknown task, and for one that cannot be loaded or run.
    """
    manager = _manager(include, data)
    if not _leaves(manager, chosen) <= {*manager.all_subtasks}:
        manager = _manager(include, data, defaults=True)  # some ten thousand files
    for entry in chosen:
        if entry.task not in manager.all_tasks:
            where = "" if include is None else f" or of --include-path={include}"
            suites = sorted(path.stem for path in (configs_folder() / "eval").glob("*.yaml"))
            hint = nearest(entry.task, [*suites, *manager.all_tasks])
            raise UserError(
                f"--tasks: {entry.task!r} is no task of lm-evaluation-harness{where} and no suite"
                f"{hint}; suites: {', '.join(suites)}; `lm_eval ls tasks` lists the tasks"
            )
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for entry in chosen:
        found = _load(manager, entry.task)
        for name, task in found["tasks"].items():
            if name in loaded["tasks"]:
                raise UserError(f"--tasks names {name!r} twice, once in {entry.task!r}; leave one")
            for flag, does in REFUSED.items():
                if getattr(task, flag, False):
                    raise UserError(f"task {name!r} {does}; leave it out")
            shots = task.get_config("num_fewshot")
            if task.OUTPUT_TYPE == "loglikelihood_rolling":
                shots = 0  # a whole text; the harness puts no examples before it
            # A task that sets 0 has no examples.
            if entry.num_fewshot is not None and shots != 0:
                shots = entry.num_fewshot
            _check_shots(name, task, shots or 0)
            task.set_config(key="num_fewshot", value=shots or 0)
            task.build_all_requests = _named(name, task.build_all_requests)
        for key in loaded:
            loaded[key].update(found[key])
    return loaded


def _check_shots(name: str, task: Any, shots: int) -> None:
    """Raise UserError unless the harness can draw so many few-shot examples for each document."""
    check_count(f"task {name!r}: num_fewshot", shots, 0)
    from lm_eval.api.samplers import SAMPLER_REGISTRY

    sampler: Any = getattr(task, "sampler", None)
    if not shots or type(sampler) not in SAMPLER_REGISTRY.values():  # a sampler of the task's own
        return
    rows, besides = len(sampler.df), ""
    if task.fewshot_cfg.split == task.get_config("test_split"):  # as the harness's sampler compares
        rows, besides = max(rows - 1, 0), " besides the one that is scored"
    if shots > rows:
        raise UserError(
            f"num_fewshot={shots}: task {name!r} has {rows} row{'' if rows == 1 else 's'} of "
            f"examples{besides}; lower it to {rows} or less (--num-fewshot)"
        )


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        found = manager.load([name])
    except ImportError as error:
        raise UserError(
            f"task {name!r} needs a package that is not installed ({_line(error)}); pip install -e "
            f"'.[eval]' in the project's folder, or the extra of lm_eval that the task asks for"
        ) from error
    except OSError as error:  # from the hub's client and from datasets
        raise UserError(
            f"task {name!r} cannot be loaded ({_line(error)}); its data comes from the Hugging "
            f"Face hub, which needs a network or a filled cache; `--tasks offline` needs neither"
        ) from error
    except Exception as error:  # from the task's own code
        # The errors of datasets for a file without a line, and for a split without a row.
        if isinstance(error, StopIteration) or "out of bounds for size 0" in str(error):
            raise UserError(
                f"task {name!r} cannot be loaded: a split of its data is empty; fill it, or leave "
                f"the task out"
            ) from error
        raise UserError(f"task {name!r} cannot be loaded ({_line(error)}); {COLUMNS}") from error
    assert isinstance(found, dict)
    return found


def _named(name: str, build_requests: Callable[..., None]) -> Callable[..., None]:
    """The harness's function `build_requests`, with errors that name the task."""

    def build_named(**options: Any) -> None:
        try:
            build_requests(**options)
        except UserError:
            raise
        except Exception as error:  # from the task's own code
            message = f"the requests of task {name!r} cannot be built ({_line(error)}); {COLUMNS}"
            raise UserError(message) from error

    return build_named


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def seed(tasks: dict[str, dict[str, Any]]) -> None:
    """Reset the harness's random generators, so that it draws the same examples for every model."""
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=SEED)
