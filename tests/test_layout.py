"""Where tests lie: in the folders of `ladder`, and no test file takes anything from another."""

from __future__ import annotations

import ast

from tests import ROOT


def imported(node: ast.AST) -> list[str]:
    """The modules, and possible modules, that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


def test_no_test_file_is_imported() -> None:
    """Helpers of several tests are in conftest.py or in modules that are no tests."""
    names = {path.stem for path in ROOT.glob("tests/**/test_*.py")}
    for path in ROOT.glob("tests/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in imported(node):
                of_tests = name.startswith(("tests.", "."))
                assert not (of_tests and names & set(name.split("."))), (path, name)


def test_folders_are_those_of_what_they_test() -> None:
    for folder in (ROOT / "tests").glob("*/__init__.py"):
        name = folder.parent.name
        assert (ROOT / "ladder" / name).is_dir() or name == "benchmarks", name
