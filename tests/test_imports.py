"""Dependencies point one way: every import of one part of the package by another, in one table; and
what importing it, and asking for a prediction, loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.distributed import PATIENCE

SHARED = "config costs files folders hf_config lock models operator_names progress reader records"
COMPUTED = "jit comm kernels ops parallel"
JOBS = f"{SHARED} {COMPUTED} next_step checkpoint data plans"

# Each part of ladder (a folder or a module), the lowest first, and the parts that it may import:
# all of them in lines before its own, so there is no cycle.
MAY_IMPORT = {
    "models": "",
    "jit": "models",
    "lock": "models",
    "operator_names": "",
    "parser": "models",
    "progress": "",
    "config": "models",
    "costs": "models",
    "hf_config": "models",
    "records": "models",
    "files": "lock models",
    "folders": "files models",
    "reader": "config models",
    "comm": "jit models",
    "kernels": "comm costs jit models",
    "ops": "kernels comm jit config costs models operator_names",
    "parallel": "ops kernels comm jit config costs files models operator_names",
    "next_step": "parallel",
    "plans": "config models next_step",
    "checkpoint": "files folders hf_config models parallel reader",
    "data": "config files lock models next_step parallel progress",
    "train": JOBS,
    "infer": JOBS,
    "convert": f"{JOBS} infer",
    "eval": f"{JOBS} infer",
    "hf": f"{JOBS} convert",
    "bench": f"{JOBS} train infer convert eval hf",
    "perf": f"{JOBS} train infer bench",
    "demo": f"{JOBS} train infer convert eval bench",
    "doctor": "models next_step ops parallel perf",
    "cli": f"{JOBS} train infer convert eval hf bench perf demo doctor parser",
    "__main__": "cli",
}
MODULE = r"ladder(\.\w+)+"
# What ladder.models may import: a saved model's folder carries its code, which needs torch alone.
OF_MODELS = {"torch", "ladder", *sys.stdlib_module_names}


def named(tree: ast.AST) -> Iterator[str]:
    """Modules that the code names: imports, those within functions too, and strings for
    `import_module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, ast.unparse(node)  # all are absolute
            if node.module == "ladder":
                yield from (f"ladder.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)
        elif isinstance(node, ast.Constant) and re.fullmatch(MODULE, str(node.value)):
            yield str(node.value)


def edges(root: Path) -> Iterator[tuple[str, str, str]]:
    """(file, its part, a part that it names) of the package in folder `root`."""
    parts = {path.stem for path in root.iterdir()}
    for path in sorted(root.rglob("*.py")):
        if path.parent == root and path.name == "__init__.py":
            continue
        own = path.relative_to(root).parts[0].removesuffix(".py")
        for module in named(ast.parse(path.read_text())):
            first, *rest = module.split(".")
            if first == "ladder" and rest and rest[0] in parts - {own}:
                yield str(path.relative_to(root)), own, rest[0]


def wrong(root: Path) -> list[str]:
    return [
        f"{file}: {own} imports {other}"
        for file, own, other in edges(root)
        if other not in MAY_IMPORT.get(own, "").split()
    ]


def test_the_table_points_one_way() -> None:
    above: set[str] = set()
    for part, allowed in MAY_IMPORT.items():
        assert set(allowed.split()) <= above, part
        above.add(part)


def test_dependencies_point_one_way() -> None:
    assert wrong(ROOT / "ladder") == []
    parts = {path.stem for path in (ROOT / "ladder").iterdir() if path.suffix == ".py"}
    parts |= {path.parent.name for path in (ROOT / "ladder").glob("*/__init__.py")}
    assert parts - {"__init__"} == set(MAY_IMPORT)


def test_models_import_torch_and_themselves_alone() -> None:
    """An import of the rest of the project would not travel with an exported model."""
    for path in (ROOT / "ladder/models").rglob("*.py"):
        names = set(named(ast.parse(path.read_text())))
        found = {name.split(".")[0] for name in names}
        assert found <= OF_MODELS, (path, found - OF_MODELS)
        assert not any("distributed" in name for name in names), path


@pytest.mark.parametrize(
    "line",
    [
        "from ladder.train.loop import train",
        "import ladder.train.loop",
        "from ladder import train",
        "def f():\n    from ladder.train import loop",
        "if TYPE_CHECKING:\n    import ladder.train",
        "import_module('ladder.train.loop')",
    ],
)
def test_an_import_upwards_is_found(tmp_path: Path, line: str) -> None:
    for name in ("train", "parallel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loop.py").write_text("")
    (tmp_path / "parallel/data.py").write_text(line)
    assert wrong(tmp_path) == ["parallel/data.py: parallel imports train"]


def test_importing_ladder_starts_nothing() -> None:
    code = (
        "import sys, ladder; assert 'torch' not in sys.modules\n"
        "from ladder.cli import main\n"
        "assert main(['plans']) == 0\n"
        "assert main(['train', 'tiny', 'lrr=1', '--nproc', '2']) == 2\n"
        "assert main(['train', 'tiny', 'plan=ladder@8']) == 2\n"
        "for ranks in ('1', '2'):\n"
        "    assert main(['generate', '/no', '--prompt', 'x', '--nproc', ranks]) == 2\n"
        "    assert main(['eval', '/no', '--nproc', ranks]) == 2\n"
        "assert main(['convert', '/no', '--out', '/no/x']) == 2\n"
        "assert 'torch' not in sys.modules\n"
        "import ladder.models, ladder.parallel.sharding, ladder.train.loop, ladder.infer.engine\n"
        "import torch.distributed as dist; assert not dist.is_initialized()\n"
        "for name in ('transformers', 'matplotlib', 'datasets', 'lm_eval', 'pandas'):\n"
        "    assert name not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=PATIENCE)


def test_predictions_do_not_import_torch() -> None:
    """That takes longer than they do. Only prompts that may run by operators ask their table."""
    code = (
        "import sys\n"
        "from ladder.cli import main\n"
        "for words in ('', '--weights fp8', '--train --batch 1', '--prefill', '--tp-degree 8'):\n"
        "    assert main(['predict', 'llama-3-8b', *words.split()]) == 0, words\n"
        "assert main(['predict', 'llama-3-70b', '--json']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=PATIENCE)
