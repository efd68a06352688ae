"""The suite's law: scripts import the suite, which imports no script, goes in no circle, and reads
nothing of Onward that is private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))
SUITE = sorted((BENCHMARKS / "suite").rglob("*.py"))

MAX_LINES = 300
MAX_SCRIPT_LINES = 110
# modules that may import onward.kernels: step_benchmark reads the table of GPUs and their rates
KERNELS_KNOWN_BY = {"kernel_table", "step_benchmark"}
# private names of other packages that have no public one
OF_OTHERS = {
    "_scaled_dot_product_flash_attention_for_cpu": "an operator of ATen",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "an operator of ATen",
    "_apply_liger_kernel_to_instance": "what Liger's pages tell to call for a model that is there",
}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import, also inside functions; the name is "" for `import module`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            for alias in node.names:
                yield node.module or "", alias.name


def suite_modules(path: Path) -> set[str]:
    """The modules of the suite that a file imports; for `from suite import x`, x."""
    names = {path.stem for path in SUITE}
    found: set[str] = set()
    for module, name in imported(path):
        package, _, inner = module.partition(".")
        if package == "suite":
            found.add(inner or name)
    assert found <= names, f"{path.name} imports what the suite lacks: {sorted(found - names)}"
    return found


def test_there_are_scripts_and_a_suite() -> None:
    assert len(SCRIPTS) >= 12
    assert {"cases", "engines", "worker", "measurement", "machine", "report", "cli"} <= {
        path.stem for path in SUITE
    }


def test_nothing_imports_a_script() -> None:
    scripts = {path.stem for path in SCRIPTS}
    broken = [
        f"{path.name} imports {module}"
        for path in [*SUITE, *SCRIPTS]
        for module, _ in imported(path)
        if module.partition(".")[0] in {*scripts, "benchmarks", "tests"}
    ]
    assert not broken, "\n".join(broken)


def test_the_suite_has_no_circles() -> None:
    order = TopologicalSorter({path.stem: suite_modules(path) for path in SUITE})
    assert set(order.static_order()) == {path.stem for path in SUITE}


def test_every_module_of_the_suite_is_used() -> None:
    used = {name for path in [*SUITE, *SCRIPTS] for name in suite_modules(path)}
    asked = {  # by processes of their own
        text.removeprefix("suite.")
        for path in SUITE
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(text := node.value, str)
        if text.startswith("suite.")
    }
    assert {path.stem for path in SUITE} - used - asked == {"__init__"}


def test_one_module_knows_the_kernels() -> None:
    knowing = {
        path.stem
        for path in [*SUITE, *SCRIPTS]
        for module, name in imported(path)
        if f"{module}.{name}".startswith("onward.kernels")
    }
    assert knowing == KERNELS_KNOWN_BY


def private_reads(source: ast.Module) -> Iterator[str]:
    """Reads of private names: all but an object's own, and modules of torch that begin so."""
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute):
            hidden = re.match(r"_(?!_\w+__$)", node.attr) or node.attr == "__doc__"
            owner = ast.unparse(node.value)
            called = f"{owner}.{node.attr}"
            own = owner in {"self", "cls", "torch"} or node.attr in OF_OTHERS
            if hidden and not own and called != "os._exit":
                yield f"line {node.lineno}: {called}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for part in [*module.split("."), *(alias.name for alias in node.names)]:
                inner = module.startswith(("suite", "onward"))
                if inner and part.startswith("_") and part != "__version__":
                    yield f"line {node.lineno}: {module}: {part}"
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"getattr", "vars", "setattr"}
            and any(
                isinstance(a, ast.Constant) and re.match(r"_(?!_\w+__$)", str(a.value))
                for a in node.args
            )
        ):
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    "text",
    ["trainer._train", "trainer.plan._x.y", "from onward.plan import _kept", "Environment.__doc__",
     "getattr(trainer, '_last')"],
)  # fmt: skip
def test_a_private_read_is_seen(text: str) -> None:
    assert list(private_reads(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["self._x", "__doc__", "torch._dynamo.reset()", "a.__class__", "os._exit(0)"]
)
def test_an_own_name_is_none(text: str) -> None:
    assert not list(private_reads(ast.parse(text)))


def test_nothing_private_is_read() -> None:
    broken = [
        f"{path.name}, {found}"
        for path in [*SUITE, *SCRIPTS]
        for found in private_reads(tree(path))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("paths", "most"), [(SUITE, MAX_LINES), (SCRIPTS, MAX_SCRIPT_LINES)], ids=["suite", "scripts"]
)
def test_files_are_short(paths: list[Path], most: int) -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {name: lines for name, lines in lengths.items() if lines > most}


def test_documents_name_what_there_is() -> None:
    """Each `NAME.py` of the document is a script or a module; each script and module is named."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:benchmarks/)?((?:suite/)?\w+\.py)\b", text))
    there = {path.relative_to(BENCHMARKS).as_posix() for path in [*SUITE, *SCRIPTS]}
    assert named <= there
    assert {path.name for path in SCRIPTS} <= named
    table = text[text.index("| modules |") :]
    modules = set(re.findall(r"`(\w+)`", table))
    assert {path.stem for path in SUITE} - {"__init__"} <= modules
