"""The laws of the house that no other tool checks: who may import whom, and what never enters.

A law is changed here, in a visible diff, or not at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "onward"

# The import law: a module may import from a lower level, never from a higher one. Modules of
# different names on one level never import each other (the five stages, integrations beside
# recipes). cli comes last because it runs recipes. `onward` itself is the package's public face,
# which pulls in train, so that only what stands above train may import from it.
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset(
        {
            "checkpoint",
            "data",
            "forks",
            "import_signals",
            "memory_amounts",
            "mesh_sizes",
            "shards",
            "signals",
        }
    ),
    frozenset({"option_conflicts", "option_readers", "uncollected"}),
    frozenset({"option_fields"}),
    frozenset({"options"}),
    frozenset({"environment"}),
    frozenset({"graph", "reporting"}),
    frozenset({"captured", "loss", "model_state"}),
    frozenset({"capture", "differentiate", "distribute", "rewrite", "kernels"}),
    frozenset({"onnx_models", "plan"}),
    frozenset({"execute", "simulate"}),
    frozenset({"journal"}),
    frozenset({"extend"}),
    frozenset({"cache_files"}),
    frozenset({"graph_cache"}),
    frozenset({"capture_cache"}),
    frozenset({"compile"}),
    frozenset({"prepare"}),
    frozenset({"explanation"}),
    frozenset({"meshes"}),
    frozenset({"train"}),
    frozenset({"fitting", "module"}),
    frozenset({"training_session"}),
    frozenset({"onward"}),
    frozenset({"integrations", "recipes"}),
    frozenset({"cli"}),
)
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}

# Where tensors are touched. Everything else must run where torch is not installed.
# compile.py computes nothing with tensors, but hands the user's module from capture to execute.
TORCH_ALLOWED = frozenset(
    {
        "checkpoint", "data", "fitting", "model_state", "capture", "kernels", "execute",
        "capture_cache", "compile", "prepare", "train", "explanation", "module", "integrations",
        "onnx_models", "recipes", "cli", "reporting", "training_session",
    }
)  # fmt: skip

# The rooms of capture, in the order of the flow: each imports from those before it alone.
CAPTURE = (
    "weighted_losses", "request", "dtypes", "held_sizes", "mode_reads", "custom_ops", "regions",
    "aten", "huggingface", "masked_rows", "expert_loops", "output_tree", "trace", "translate",
    "batch_guards", "side_effects", "captured_module", "batch_leaves", "graph_inputs",
    "buffer_updates", "evaluation", "archive", "traced", "stages", "graph_module", "export",
)  # fmt: skip

PUBLIC_NAMES = [
    "CaptureError",
    "CheckpointError",
    "EagerWarning",
    "FitOptions",
    "LossScale",
    "LossSpikeError",
    "Module",
    "ModuleOptions",
    "NonfiniteError",
    "OnwardError",
    "OutOfMemoryError",
    "Reporter",
    "StepResult",
    "Trainer",
    "TrainerOptions",
    "TrainingSession",
    "WeightedLosses",
    "__version__",
    "accelerate",
    "data",
    "eager",
    "evaluate",
    "explain",
    "fit",
    "loss",
    "optim",
]

MAX_LINES = 600
FORBIDDEN_MODULE_NAMES = frozenset({"utils", "common", "helpers", "helper", "base", "manager"})
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
LOCAL_PATH = re.compile(r"(?<![\w.])(/home/|/root/|/work/|/tmp/|/Users/|/mnt/|[A-Z]:\\\\)")


class Import(NamedTuple):
    """One imported module, as written at `line` of `path`."""

    path: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The top-level part a file belongs to: `graph`, `compile`; `onward` for `__init__`."""
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return {"__init__": "onward", "__main__": "cli"}.get(part, part)


def imports(path: Path) -> Iterator[Import]:
    """Each import in a file, also inside functions and under TYPE_CHECKING.

    `from onward import graph` counts as `onward.graph`; relative imports are made absolute; an
    `import_module("...")` with a literal name counts as an import.
    """
    package = ("onward", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                anchor = package[: len(package) - node.level + 1]
                module = ".".join((*anchor, module) if module else anchor)
            if module == "onward":
                for alias in node.names:
                    inner = f"onward.{alias.name}"
                    yield Import(path, node.lineno, inner if alias.name in LEVEL_OF else module)
            else:
                yield Import(path, node.lineno, module)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else None
            name = called.id if isinstance(called, ast.Name) else name
            literal = node.args[0]
            if (
                name in {"import_module", "__import__"}
                and isinstance(literal, ast.Constant)
                and isinstance(literal.value, str)
            ):
                yield Import(path, node.lineno, literal.value)


def target_of(module: str) -> str | None:
    """The part of Onward that a module name points into; None for other packages."""
    first, _, rest = module.partition(".")
    if first != "onward":
        return None
    return rest.partition(".")[0] or "onward"


def may_import(part: str, target: str) -> bool:
    """The import law for one pair of parts."""
    if part in {target, "onward"}:
        return True
    return LEVEL_OF[target] < LEVEL_OF[part]


def test_law_itself() -> None:
    assert may_import("plan", "kernels")
    assert may_import("cli", "onward")
    assert may_import("cli", "recipes")
    assert not may_import("rewrite", "differentiate")
    assert not may_import("kernels", "plan")
    assert not may_import("train", "onward")
    assert target_of("onward.graph.types") == "graph"
    assert target_of("onwards.graph") is None


def test_every_part_has_a_level() -> None:
    strangers = {str(path.relative_to(ROOT)) for path in sources() if part_of(path) not in LEVEL_OF}
    assert not strangers, f"give them a level in LEVELS, or a better place: {sorted(strangers)}"


def test_imports_follow_the_flow() -> None:
    broken = [
        str(found)
        for path in sources()
        for found in imports(path)
        if (target := target_of(found.module)) is not None
        and (target not in LEVEL_OF or not may_import(part_of(path), target))
    ]
    assert not broken, "\n".join(broken)


def room_of(module: str) -> str:
    """The room of capture that `onward.capture.<room>...` names; "" for the folder itself."""
    return (*module.split("."), "", "")[2]


def test_every_room_of_capture_has_its_place() -> None:
    held = {path.name.removesuffix(".py") for path in (PACKAGE / "capture").iterdir()}
    assert held - {"__init__", "__pycache__"} == {*CAPTURE}


def test_rooms_of_capture_import_only_what_stands_before_them() -> None:
    broken = []
    for path in sorted((PACKAGE / "capture").rglob("*.py")):
        room = path.relative_to(PACKAGE / "capture").parts[0].removesuffix(".py")
        for found in imports(path) if room != "__init__" else ():
            if not (found.module + ".").startswith("onward.capture."):
                continue
            other = room_of(found.module)
            if other != room and (not other or CAPTURE.index(other) > CAPTURE.index(room)):
                broken.append(str(found))
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("folder", ["capture", "model_state"])
def test_every_room_says_what_comes_in_and_goes_out(folder: str) -> None:
    inner = [p for p in sorted((PACKAGE / folder).rglob("__init__.py")) if p.parent.name != folder]
    rooms = inner if folder == "capture" else [PACKAGE / folder / "__init__.py"]
    for path in rooms:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert all(word in text for word in ("In: ", "Out: ", "Imports: ")), path.relative_to(ROOT)


def module_name(path: Path) -> str:
    """The dotted name of a file of the package; of an `__init__.py` its folder's."""
    parts = ("onward", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(path: Path, known: frozenset[str]) -> Iterator[str]:
    """The modules of the package that a file imports, also inside functions and for types alone;
    `from onward.graph import build` is of `onward.graph.build`, not of `onward.graph`."""
    package = ("onward", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*anchor, *filter(None, [node.module])))
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield from [inner] if inner in known else [module] if module in known else []


def rings(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """The sets of modules that reach one another (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in open_:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            at = open_.index(module)
            ring = open_[at:]
            del open_[at:]
            if len(ring) > 1:
                found.append(sorted(ring))

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def test_a_ring_is_found() -> None:
    graph = {"a": "b", "b": "cd", "c": "a", "d": "", "e": "fa", "f": "e"}
    assert rings({m: frozenset(to) for m, to in graph.items()}) == [["a", "b", "c"], ["e", "f"]]


def test_no_modules_import_one_another_in_a_ring() -> None:
    known = frozenset(map(module_name, sources()))
    graph = {
        name: frozenset(modules_imported(path, known)) - {name}
        for path in sources()
        if (name := module_name(path)) != "onward"  # the public face: its names come at first use
    }
    graph = {name: to & graph.keys() for name, to in graph.items()}
    assert not rings(graph)


# What modules above `train` read of other objects though its name begins with an underscore.
PRIVATE_READ: dict[str, str] = {
    "_as_graph": "recipes/first_step.py stands in for what an accelerated model does with a call",
    "_in_eager": "recipes/first_step.py stands in for what an accelerated model does with a call",
    "_C": "torch's own functions in C, which have no public name",
    "_cdata": "the identity of a storage, which torch gives by no public name",
    "_set_grad_enabled": "a node of a graph of torch.compile's calls it",
    "_modules": "a node of a graph of torch.compile's is looked up without a module's own getattr",
    "_opt_called": "torch's schedulers look at it",
    "_wrapped_by_lr_sched": "torch's schedulers look at it",
    "_is_overflow": "accelerate's optimizers say by it that a step was left out",
    "_get_name": "what a module calls itself in its own repr",
    "_call_has_training_arg": "Keras's own train_step reads it, which ours stands in for",
    "_compile_loss": "Keras's own train_step reads it, which ours stands in for",
    "_compile_metrics": "Keras's own train_step reads it, which ours stands in for",
    "_compute_loss": "Keras's own train_step reads it, which ours stands in for",
    "_flatten_layers": "Keras's own train_step reads it, which ours stands in for",
    "_loss_tracker": "Keras's own train_step reads it, which ours stands in for",
    "_symbolic_build": "Keras's own train_step reads it, which ours stands in for",
}


def private_reads(path: Path) -> Iterator[tuple[str, str]]:
    """The place and the name of each attribute with one underscore of what is not `self`, `cls`,
    `super()` or of a class in the same file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    reads = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
    ]
    own = {
        node.attr
        for node in reads
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls")
    }
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    own |= {node.name for node in ast.walk(tree) if isinstance(node, functions)}
    for node in reads:
        if node.attr not in own and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield f"{path.relative_to(ROOT)}:{node.lineno} reads {ast.unparse(node)}", node.attr


def private_names(folder: str) -> frozenset[str]:
    """Attributes with one underscore that classes in this folder of the package have."""
    found: set[str] = set()
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return frozenset(name for name in found if re.match(r"_(?!_)", name))


def test_nobody_above_train_reads_what_is_private() -> None:
    found = [
        read
        for folder in ("explanation", "recipes", "integrations")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for read in private_reads(path)
    ]
    assert not [place for place, name in found if name not in PRIVATE_READ]
    unused = PRIVATE_READ.keys() - {name for _, name in found}
    assert not unused, f"nothing reads these any more: {unused}"


def test_a_trainer_is_read_by_its_public_names_alone() -> None:
    private = private_names("train")
    assert {"_updates", "_steps", "_window", "_last", "_lock"} <= private
    broken = [
        place
        for path in sources()
        if LEVEL_OF[part_of(path)] >= LEVEL_OF["explanation"] and part_of(path) != "train"
        for place, name in private_reads(path)
        if name in private
    ]
    assert not broken, "read `Trainer.snapshot()`: " + "\n".join(broken)


def test_torch_is_imported_only_where_tensors_are_touched() -> None:
    broken = [
        str(found)
        for path in sources()
        if part_of(path) not in TORCH_ALLOWED
        for found in imports(path)
        if found.module.partition(".")[0] == "torch"
    ]
    assert not broken, "\n".join(broken)


def test_nothing_unpickles() -> None:
    picklers = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib"}
    broken = [
        str(found)
        for path in sources()
        for found in imports(path)
        if found.module.partition(".")[0] in picklers
    ]
    assert not broken, "\n".join(broken)


def test_environment_is_read_only_in_its_module() -> None:
    names = {"environ", "environb", "getenv", "putenv"}
    broken = []
    for path in sources():
        if path == PACKAGE / "environment.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            attribute = isinstance(node, ast.Attribute) and node.attr in names
            imported = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in names for alias in node.names)
            )
            if attribute or imported:
                line = getattr(node, "lineno", 0)
                broken.append(f"{path.relative_to(ROOT)}:{line}")
    assert not broken, f"read the environment in environment.py: {broken}"


def test_public_names_are_frozen() -> None:
    import onward

    assert sorted(onward.__all__) == PUBLIC_NAMES
    missing = [name for name in PUBLIC_NAMES if not hasattr(onward, name)]
    assert not missing


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks"])
def test_files_stay_short(folder: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"more than {MAX_LINES} lines: split by idea: {long}"


def test_modules_are_named_for_what_they_hold() -> None:
    folders = (PACKAGE, ROOT / "benchmarks")
    broken = [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in folder.rglob("*")
        if path.stem.lower() in FORBIDDEN_MODULE_NAMES
    ]
    assert not broken, f"name the idea: {broken}"


def test_results_and_documents_hold_no_local_paths() -> None:
    files = [p for name in ("benchmarks", "docs") for p in (ROOT / name).rglob("*")]
    broken = [
        str(path.relative_to(ROOT))
        for path in sorted(files)
        if path.suffix in {".md", ".json", ".py", ".svg"}
        and LOCAL_PATH.search(path.read_text(encoding="utf-8"))
    ]
    assert not broken, "\n".join(broken)


def test_sources_hold_no_local_paths_and_nothing_unfinished() -> None:
    broken = []
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix not in {".py", ".pyi", ".cpp", ".h", ".cu", ".toml", ".json", ".md"}:
            continue
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.isascii() or UNFINISHED.search(line) or LOCAL_PATH.search(line):
                broken.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not broken, "\n".join(broken)


# The drop-in Trainer has the name of the class of transformers whose place it takes.
SAME_NAME = frozenset({"Trainer"})


def test_no_public_class_name_stands_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert set(twice) == SAME_NAME, f"name what each is: {twice}"
