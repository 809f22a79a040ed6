"""The code in a model's folder, for processes without ladder (trust_remote_code).

transformers makes a flat package of the Python files in a folder, which it finds by their
`from .name import` lines. So every module that the model needs is written to a file with its dotted
name, with underscores for dots, and its imports are changed accordingly.
"""

from __future__ import annotations

import re
from pathlib import Path

import ladder
from ladder.files import write_text

MODELING = "ladder.hf.modeling"
IMPORT = re.compile(r"^( *)from (ladder(?:\.\w+)+) import", re.MULTILINE)


def flat(module: str) -> str:
    return module.replace(".", "_")


AUTO_MAP = {
    "AutoConfig": f"{flat(MODELING)}.LadderConfig",
    "AutoModelForCausalLM": f"{flat(MODELING)}.LadderForCausalLM",
}


def bundle() -> dict[str, str]:
    """File name -> text of the model's module and of all ladder modules that it imports."""
    root = Path(ladder.__file__).parent.parent
    found: dict[str, str] = {}
    todo = [MODELING]
    while todo:
        module = todo.pop()
        name = f"{flat(module)}.py"
        if name in found:
            continue
        path = Path(*module.split(".")).with_suffix(".py")
        text = (root / path).read_text(encoding="utf-8")
        assert not re.search(r"^ *import ladder", text, re.MULTILINE), module
        todo += [match[2] for match in IMPORT.finditer(text)]
        text = IMPORT.sub(lambda match: f"{match[1]}from .{flat(match[2])} import", text)
        origin = f"# {path.as_posix()} of ladder {ladder.__version__}, Apache-2.0\n"
        found[name] = origin + text
    return found


def write_code(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in bundle().items():
        write_text(folder / name, text)
