"""A stand-in for an H200: launches compile their kernels for it, and run nothing, on any machine.

    gpu = Gpu()
    with gpu.present():                 # in a process that has not imported Triton's interpreter
        kernels.swiglu(torch.empty(64, 1024, dtype=torch.bfloat16, device="meta"))
    gpu.compiled["_swiglu_kernel: "]    # Machine: its PTX, shared memory, spills

Tensors on the device `meta` take the GPU's way: to the package they are not a CPU's, and they need
no memory, so shapes are those of real models. Arguments are specialised by Triton's own launcher.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests import ROOT

CAPABILITY = (9, 0)
SHARED = 227 * 1024  # bytes that a program may have
PROPERTIES = SimpleNamespace(
    multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024, major=9, minor=0
)
DECLARED = re.compile(r"^@(triton\.)?(jit|kernel\()", re.MULTILINE)

Position = tuple[int, int, int | None, int | None]


@dataclass
class Machine:
    """What became of a launch's kernel. Without machine code, if only the front end has run."""

    ptx: str = ""
    shared: int = 0  # bytes
    registers: int = 0
    spilled: int = 0  # bytes of stores


@dataclass
class Gpu:
    """compiled: of each launch, called "kernel: case". entered: of each Triton function (module,
    name), the positions that its front end has read. case: the name of the launches that follow.
    whole: compile to machine code, and not only to Triton's own IR, in which types are checked.
    """

    compiled: dict[str, Machine] = field(default_factory=dict)
    entered: dict[tuple[str, str], set[Position]] = field(default_factory=dict)
    case: str = ""
    whole: bool = True

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler.code_generator import CodeGenerator
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from ladder import jit

        run, visit, whole = JITFunction.run, CodeGenerator.visit, triton.compiler.compile

        def launched(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Machine:
            made: Machine = run(function, *args, grid=grid, warmup=True, **options)
            name = same = f"{function.__name__}: {self.case}"
            number = 1
            while self.compiled.get(same, made) is not made:
                number += 1
                same = f"{name} ({number})"
            self.compiled[same] = made
            return made

        def visited(generator: Any, node: Any) -> Any:
            if hasattr(node, "lineno"):
                function = generator.jit_fn
                self.entered.setdefault((function.module, function.__name__), set()).add(at(node))
            return visit(generator, node)

        def compiled(source: Any, target: Any, options: Any, **_: Any) -> Machine:
            if not self.whole:
                front_end(source, target, options)
                return Machine()
            log = io.StringIO()
            with contextlib.redirect_stdout(log):  # ptxas's
                made = whole(source, target=target, options=options)
            spilled = re.search(r"(\d+) bytes spill stores", log.getvalue())
            registers = re.search(r"Used (\d+) registers", log.getvalue())
            assert spilled is not None
            assert registers is not None
            shared = made.metadata.shared
            return Machine(made.asm["ptx"], shared, int(registers[1]), int(spilled[1]))

        target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )
        with contextlib.ExitStack() as patched:

            def patch(where: Any, **stand_ins: Any) -> None:
                for name, stand_in in stand_ins.items():
                    patched.enter_context(mock.patch.object(where, name, stand_in))

            patch(JITFunction, run=launched)
            patch(CodeGenerator, visit=visited)
            patch(triton.compiler, compile=compiled)
            patch(triton.knobs.nvidia, dump_ptxas_log=True)
            patch(jit, has_dependent_launch=lambda device: True)
            patch(
                torch.cuda,
                device=lambda device: contextlib.nullcontext(),
                get_device_capability=lambda device=None: CAPABILITY,
                get_device_properties=lambda device=None: PROPERTIES,
                get_device_name=lambda device=None: "NVIDIA H200",
            )
            # Results of an earlier run would have no log.
            folder = patched.enter_context(tempfile.TemporaryDirectory())
            patch(triton.knobs.cache, dir=folder)
            yield


def front_end(source: Any, target: Any, options: Any) -> None:
    """Make and verify Triton's IR: types, shapes and what a kernel calls are checked here."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    options = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    stages["ttir"](module, {})


def at(node: Any) -> Position:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def functions() -> list[Any]:
    """The package's Triton functions, those of modules that nobody has imported yet, too."""
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    for path in sorted((ROOT / "ladder").rglob("*.py")):
        if DECLARED.search(path.read_text("utf-8")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            module = importlib.import_module(name)
            own = [each for each in vars(module).values() if isinstance(each, JITFunction)]
            found += [each for each in own if each.module == name]
    return found


def unread(function: Any, entered: dict[tuple[str, str], set[Position]]) -> list[str]:
    """The statements, and the sides of conditional expressions, that no front end has read.

    An `if` whose condition is known when a kernel is compiled leaves one side unread, and an error
    there is seen by whoever first launches the kernel with another constant.
    """
    wanted: list[Any] = []
    for node in ast.walk(function.parse()):
        if isinstance(node, ast.stmt) and not _is_text(node):
            wanted.append(node)
        if isinstance(node, ast.IfExp):
            wanted += [node.body, node.orelse]
    seen = entered.get((function.module, function.__name__), set())
    lines = function.src.splitlines()
    left = sorted({n.lineno for n in wanted if at(n) not in seen})
    return [f"{_place(function, line)}: {lines[line - 1].strip()}" for line in left]


def odd_defaults(function: Any) -> list[str]:
    """The defaults that Triton 3.6 does not take where a kernel leaves the argument out."""
    from triton import language as tl

    taken = (int, float, type(None), tl.constexpr, tl.dtype)
    return [
        f"{_place(function, 1)}: {each.name}={each.default!r}"
        for each in function.signature.parameters.values()
        if each.default is not each.empty and not isinstance(each.default, taken)
    ]


def _place(function: Any, line: int) -> str:
    """File and line of a function's line, counted from its `def`."""
    decorators = len(function.raw_src) - len(function.src.splitlines())
    name = function.module.replace(".", "/")
    return f"{name}.py:{function.starting_line_number + decorators + line - 1}"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
