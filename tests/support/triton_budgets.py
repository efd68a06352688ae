"""The committed figures of compiled Triton kernels, and which kernels there are.

`kernels/triton_budgets.json` holds, for each kernel, call, dtype and target, what the compiler made
of it; `triton_compiled.py` measures and writes them. Nothing here imports Triton.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from onward.kernels import triton

TABLE = Path(__file__).resolve().parents[1] / "kernels" / "triton_budgets.json"
DEVICE_MODULES = sorted(Path(triton.__file__).parent.glob("*_device.py"))
# By target: the shared memory of one block, at most, as its maker states it. The kernels of sm_80
# are those of all 8.x and 12.x, of which A10, L4 and RTX 4090 have less than the A100's 163 KB.
TARGETS = {"sm_80": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@dataclass(frozen=True)
class Figures:
    """What the compiler made of one kernel.

    registers: of a thread, on AMD of vectors; spilled: bytes of a thread; shared: bytes of a
    block. load, store: bits of the widest access to global memory, 0 where there is none. scalars:
    registers of scalars, on AMD.
    """

    registers: int
    spilled: int
    shared: int
    load: int
    store: int
    scalars: int = 0

    def worse(self, budget: Figures) -> list[str]:
        """What is worse here than in the budget."""
        narrow = {"load", "store"}
        found = []
        for name in (f.name for f in fields(self)):
            have, most = getattr(self, name), getattr(budget, name)
            if have < most if name in narrow else have > most:
                found.append(f"{name} {have}, in the table {most}")
        return found

    def or_worse(self, other: Figures) -> Figures:
        """The worse figure of each of two launches of a kernel."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Figures(*(min(p) if i in (3, 4) else max(p) for i, p in enumerate(pairs)))


# "module.function" -> "call dtype" -> target -> figures
Budgets = dict[str, dict[str, dict[str, Figures]]]


@dataclass(frozen=True)
class Table:
    """triton: the version of Triton whose figures these are."""

    triton: str
    budgets: Budgets

    @staticmethod
    def read() -> Table:
        held = json.loads(TABLE.read_text(encoding="utf-8"))
        return Table(held["triton"], {
            kernel: {
                call: {target: Figures(*numbers) for target, numbers in targets.items()}
                for call, targets in calls.items()
            }
            for kernel, calls in held["kernels"].items()
        })  # fmt: skip

    def text(self) -> str:
        """The JSON of the table, one line for each call of a kernel."""
        names = json.dumps([f.name for f in fields(Figures)])
        parts = []
        for kernel, calls in sorted(self.budgets.items()):
            lines = [
                f"   {json.dumps(call)}: {_line(targets)}"
                for call, targets in sorted(calls.items())
            ]
            parts.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(lines) + "\n  }")
        head = f' "triton": {json.dumps(self.triton)},\n "fp_fusion": true,\n "figures": {names},\n'
        return "{\n" + head + ' "kernels": {\n' + ",\n".join(parts) + "\n }\n}\n"

    def calls(self) -> set[str]:
        return {call for calls in self.budgets.values() for call in calls}


def _line(targets: dict[str, Figures]) -> str:
    return json.dumps({t: [*astuple(targets[t])] for t in TARGETS if t in targets})


# ---- the kernels that there are


Modules = Mapping[str, ast.Module]  # by name, without `_device`


def device_modules() -> Modules:
    return {
        path.stem.removesuffix("_device"): ast.parse(path.read_text(encoding="utf-8"))
        for path in DEVICE_MODULES
    }


def _jitted(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions of a module that Triton compiles, by name."""
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
    }


def kernel_names(modules: Modules) -> set[str]:
    """What the host launches, as "module.function": the functions that Triton compiles, no other
    one of the module names and no other module imports."""
    helpers: set[str] = set()
    for module, tree in modules.items():
        functions = _jitted(tree)
        for own, function in functions.items():
            said = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            helpers |= {f"{module}.{name}" for name in said & set(functions) - {own}}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("_device"):
                source = str(node.module).rpartition(".")[2].removesuffix("_device")
                helpers |= {f"{source}.{name.name}" for name in node.names}
    return {f"{m}.{name}" for m, tree in modules.items() for name in _jitted(tree)} - helpers
