"""The code of a model that lies in its folder, for processes without ladder (trust_remote_code).

transformers makes a package of a folder's Python files, flat, and finds them by reading
`from .name import`. So every file of ours that the model needs is written under its dotted name
with underscores, and its imports of ours with it; nothing else of it changes.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tokenizers import Tokenizer

import ladder
from ladder.files import write_text

MODELING = "ladder.hf.modeling"
IMPORT = re.compile(r"^( *)from (ladder(?:\.\w+)+) import", re.MULTILINE)
NAMES = "tokenizer.json", "tokenizer_config.json"
TOKENIZER = (*NAMES, "special_tokens_map.json", "chat_template.jinja")


def flat(module: str) -> str:
    return module.replace(".", "_")


AUTO_MAP = {
    "AutoConfig": f"{flat(MODELING)}.LadderConfig",
    "AutoModelForCausalLM": f"{flat(MODELING)}.LadderForCausalLM",
}


def bundle() -> dict[str, str]:
    """File name -> text, of the model's module and all of ours that it imports."""
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


def copy_tokenizer(source: Path, folder: Path, end: int | None) -> None:
    """end: the token that ends a text, by its id, where the source does not name one."""
    for path in (path for name in TOKENIZER for path in source.glob(name)):
        shutil.copyfile(path, folder / path.name)
    if end is None or not (folder / NAMES[0]).is_file() or (folder / NAMES[1]).is_file():
        return
    token = Tokenizer.from_file(str(folder / NAMES[0])).id_to_token(end)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
    write_text(folder / NAMES[1], json.dumps(config, indent=1) + "\n")
