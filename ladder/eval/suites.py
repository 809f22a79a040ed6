"""What `--tasks` names: suites of configs/eval and tasks, loaded into lm-evaluation-harness."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladder.config import FILES, build, configs_folder, find, load_yaml
from ladder.models.errors import UserError

TASKS = Path(__file__).parent / "tasks"
OWN = "local_"  # how the names of our own tasks begin
SEED = 1234  # of few-shot examples, as in the harness
REFUSED = {  # what the harness says of a task, and what it means
    "UNSAFE_CODE": "runs programs that the model wrote, which `ladder eval` does not",
    "MULTIMODAL": "shows more than text, which the models cannot read",
}
COLUMNS = "its config may name a column that its data lacks, or a row may be incomplete"


@dataclass(frozen=True)
class Entry:
    """A task, group or tag of the harness. num_fewshot: None leaves it what the task says."""

    task: str
    num_fewshot: int | None = None


def entries(names: Sequence[str], num_fewshot: int | None) -> list[Entry]:
    """The tasks that `names` stand for: suites (or their YAML files) and tasks, each once.

    num_fewshot: replaces that of every task.
    """
    known = {path.stem for path in (configs_folder() / "eval").glob("*.yaml")}
    found: list[Entry] = []
    for name in names:
        if name in known or name.endswith(FILES):
            found += load_suite(name)
        else:
            found.append(Entry(name))
    for entry in found:
        if sum(other.task == entry.task for other in found) > 1:
            raise UserError(f"--tasks names {entry.task!r} twice; name it once")
    if num_fewshot is None:
        return found
    return [Entry(entry.task, num_fewshot) for entry in found]


def load_suite(name: str) -> list[Entry]:
    """The tasks of a suite from configs/eval, or of a YAML file."""
    path = find("eval", name)
    data = load_yaml(path)
    if not isinstance(data, list) or not data or not all(isinstance(each, dict) for each in data):
        raise UserError(f"{path} must hold a list of tasks, as `- {{task: piqa, num_fewshot: 5}}`")
    return [build(Entry, each, f"task {i} of {path}") for i, each in enumerate(data, start=1)]


def require_lm_eval() -> None:
    """Raise UserError unless lm-evaluation-harness can be imported; keep it quiet."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "`ladder eval` needs lm-evaluation-harness, which is not installed: "
            "pip install 'ladder[eval]'"
        )
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork beside our threads
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import lm_eval.api.task

    # Its bars count examples that become requests, which takes no time, on every rank.
    lm_eval.api.task.tqdm = lambda rows, **_: rows


def check_include(include: Path | None) -> None:
    """Raise UserError unless `include` is a folder with YAML files, or None."""
    if include is not None and next(include.glob("**/*.yaml"), None) is None:
        raise UserError(
            f"--include-path={include} holds no YAML file; give the folder of your tasks, each a "
            f"file as lm-evaluation-harness reads them"
        )


def load(
    chosen: Sequence[Entry], data: Path | None, include: Path | None = None
) -> dict[str, dict[str, Any]]:
    """The tasks, their documents read, as the harness's `evaluate` takes them.

    data: the folder that `ladder.eval.offline.build` wrote, where any is our own. include: a folder
    of further tasks, which replace those of the same names.

    Raises UserError for a name that is no task's, and for a task that cannot be loaded or run.
    """
    from lm_eval.tasks import TaskManager

    def index(defaults: bool) -> Any:
        folders = [str(TASKS)] if include is None else [str(TASKS), str(include)]
        metadata = {"folder": str(data)}
        return TaskManager(include_path=folders, include_defaults=defaults, metadata=metadata)

    manager = index(defaults=False)
    known = set(manager.all_subtasks)  # a group may name any task
    if any(not entry.task.startswith(OWN) and entry.task not in known for entry in chosen):
        manager = index(defaults=True)  # some ten thousand files
    for entry in chosen:
        if entry.task not in manager.all_tasks:
            near = difflib.get_close_matches(entry.task, manager.all_tasks, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            where = "" if include is None else f" or of --include-path={include}"
            suites = sorted(path.stem for path in (configs_folder() / "eval").glob("*.yaml"))
            raise UserError(
                f"--tasks: {entry.task!r} is no task of lm-evaluation-harness{where}{hint} and no "
                f"suite; "
                f"suites: {', '.join(suites)}; `lm_eval ls tasks` lists the tasks"
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
            # A task that says 0 of itself has none to give.
            if entry.num_fewshot is not None and shots != 0:
                shots = entry.num_fewshot
            task.set_config(key="num_fewshot", value=shots or 0)
            task.build_all_requests = _named(name, task.build_all_requests)
        for key in loaded:
            loaded[key].update(found[key])
    return loaded


def _load(manager: Any, name: str) -> dict[str, Any]:
    try:
        found = manager.load([name])
    except ImportError as error:
        raise UserError(
            f"task {name!r} needs a package that is not installed ({_line(error)}); pip install "
            f"'ladder[eval]', or the extra of lm_eval that the task asks for"
        ) from error
    except OSError as error:  # of the hub's client and of datasets
        raise UserError(
            f"task {name!r} cannot be loaded ({_line(error)}); its data comes from the Hugging "
            f"Face hub, which takes a network or a filled cache; `--tasks offline` needs neither"
        ) from error
    except Exception as error:  # of the task's own code
        raise UserError(f"task {name!r} cannot be loaded ({_line(error)}); {COLUMNS}") from error
    assert isinstance(found, dict)
    return found


def _named(name: str, build_requests: Callable[..., None]) -> Callable[..., None]:
    """The harness's own function, whose errors name the task."""

    def build_named(**options: Any) -> None:
        try:
            build_requests(**options)
        except UserError:
            raise
        except Exception as error:  # of the task's own code
            message = f"task {name!r} cannot be written down ({_line(error)}); {COLUMNS}"
            raise UserError(message) from error

    return build_named


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def seed(tasks: dict[str, dict[str, Any]]) -> None:
    """Have the harness draw the same examples for every model: its tasks go on where they were."""
    random.seed(0)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=SEED)
