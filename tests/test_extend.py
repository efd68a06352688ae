"""The door for others: what meets is refused, plugins load once, and an addition is few files."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from additions import ADDITIONS

import onward
from onward import extend
from onward.capture.aten import TABLE
from onward.differentiate.rule_table import RULES
from onward.errors import OnwardError
from onward.graph.ops import OPS, OWN, STANDARD, named
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.kernels import KERNELS
from onward.rewrite import FORWARD, STEP
from onward.rewrite.rows.demand import DEMAND
from onward.rewrite.rows.packer import PACK

PACKAGE = Path(onward.__file__).parent
PROGRAM = Path(__file__).parent / "support" / "additions_program.py"


def tables() -> list[Any]:
    """Copies of all tables that can be registered in."""
    return [
        *(dict(t) for t in (OPS, OWN, STANDARD, OPTIMIZERS, RULES, DEMAND, PACK, KERNELS, TABLE)),
        list(FORWARD), list(STEP), set(named("elementwise")),
    ]  # fmt: skip


# ---- names that meet


def same(call: Any) -> Any:
    return call.type()


def rule(b: Any, dys: Any, ys: Any, xs: Any, attrs: Any) -> Any: ...
def body(b: Any, inputs: Any, attrs: Any) -> Any: ...
def bind(args: Any) -> Any: ...
def bias_activation(graph: Any, context: Any) -> int: ...
def my_pass(graph: Any) -> int: ...


class AdamW:
    """A description with the name of an existing optimizer."""


class Other:
    """A description with a new name."""


def described(description: type, torch: str = "mine.Optimizer", op: str = "MineUpdate") -> Any:
    update = extend.Op(op, same, body)
    return extend.Optimizer(description, torch, update, (), {})


def before_noop(item: Any, stage: Any = "forward") -> None:
    extend.rewrite_pass(item, stage, before="noop", reason="for no reason")


# registrations, each with the part of the library that already has the name
MEETING: dict[str, tuple[Callable[[], None], str]] = {
    "op": (lambda: extend.op(extend.Op("GeluGrad", same, body)), "onward.graph.ops.activation."),
    "op of the standard": (
        lambda: extend.op(extend.Op("Tanh", same)), "onward.graph.ops.elementwise.",
    ),
    "gradient": (lambda: extend.gradient("Tanh", rule), "onward.differentiate.rules."),
    "kernel": (
        lambda: extend.kernel("Gelu", extend.Kernel("aten.gelu", bind)), "onward.kernels.aten.",
    ),
    "translation": (
        lambda: extend.translation("gelu.default", rule), "onward.capture.aten.elementwise._gelu",
    ),
    "optimizer": (lambda: extend.optimizer(described(AdamW)), "onward.graph.ops.optimizers.adam."),
    "optimizer of a class": (
        lambda: extend.optimizer(described(Other, torch="torch.optim.SGD")),
        "onward.graph.ops.optimizers.sgd.SGD",
    ),
    "optimizer's op": (
        lambda: extend.optimizer(described(Other, op="SGDUpdate")),
        "onward.graph.ops.optimizers.sgd._sgd",
    ),
    "pass": (
        lambda: before_noop(extend.FusionPass(bias_activation)),
        "onward.rewrite.bias_activation.bias_activation",
    ),
    "pass of another list": (
        lambda: before_noop(extend.FusionPass(bias_activation), "step"),
        "onward.rewrite.bias_activation.bias_activation",
    ),
}  # fmt: skip


def refusal(call: Callable[[], None]) -> str:
    before = tables()
    with pytest.raises(OnwardError) as error:
        call()
    assert type(error.value) is OnwardError
    assert tables() == before, "nothing is half registered"
    text = str(error.value)
    assert "\n" not in text and "fix: " in text
    return text


@pytest.mark.parametrize("name", MEETING)
def test_names_that_meet_are_refused_with_both_places(name: str) -> None:
    call, place = MEETING[name]
    text = refusal(call)
    assert place in text and f"{__name__}." in text, text


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no record": (lambda: extend.op("Gelu"), "fix: pass an onward.extend.Op"),  # type: ignore[arg-type]
    "no kernel": (lambda: extend.kernel("Gelu", bind), "onward.extend.Kernel"),  # type: ignore[arg-type]
    "no optimizer": (lambda: extend.optimizer(Other), "Optimizer"),  # type: ignore[arg-type]
    "no pass": (lambda: before_noop(my_pass), "Pass or .*FusionPass"),
    "an op without a body": (lambda: extend.op(extend.Op("Mine", same)), "ONNX has no op Mine"),
    "an op in small letters": (lambda: extend.op(extend.Op("mine", same, body)), "'mine'"),
    "an own view": (lambda: extend.op(extend.Op("Mine", same, body, view=True)), "be a view"),
    "a gradient of nothing": (lambda: extend.gradient("Mine", rule), "there is no op Mine"),
    "a gradient of a sign": (lambda: extend.gradient("Sign", rule), "Sign has no gradient"),
    "a kernel of nothing": (
        lambda: extend.kernel("Mine", extend.Kernel("mine", bind)), "there is no op Mine",
    ),
    "a translation of no overload": (lambda: extend.translation("gelu", rule), "gelu.default"),
    "a pass without a place": (
        lambda: extend.rewrite_pass(extend.Pass(my_pass), reason="so"), "lacks a position",
    ),
    "a pass in two places": (
        lambda: extend.rewrite_pass(
            extend.Pass(my_pass), before="noop", after="noop", reason="so"
        ), "lacks a position",
    ),
    "a pass without a reason": (
        lambda: extend.rewrite_pass(extend.Pass(my_pass), before="noop", reason=""), "or a reason",
    ),
    "a pass beside none": (
        lambda: extend.rewrite_pass(extend.Pass(my_pass), before="nope", reason="so"),
        "one of known_conditions, fuse_composites, fuse_attention,",
    ),
    "a pass beside one of the other list": (
        lambda: extend.rewrite_pass(extend.Pass(my_pass), "step", after="bias_activation",
                                    reason="so"),
        "of the list 'step'",
    ),
    "a pass of no stage": (
        lambda: before_noop(extend.Pass(my_pass), "plan"), "forward or precision or step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused(name: str) -> None:
    call, message = WRONG[name]
    assert re.search(message, refusal(call))


def test_the_very_same_again_changes_nothing() -> None:
    before = tables()
    extend.op(OPS["GeluGrad"])
    extend.gradient("Tanh", RULES["Tanh"])
    for kernel in KERNELS["Gelu"]:
        extend.kernel("Gelu", kernel)
    extend.translation("gelu.default", TABLE["gelu.default"])
    extend.optimizer(OPTIMIZERS["AdamW"])
    before_noop(FORWARD[3])
    assert tables() == before


def test_all_that_is_public_is_there() -> None:
    assert all(hasattr(extend, name) for name in extend.__all__)
    functions = ["op", "gradient", "kernel", "translation", "optimizer", "rewrite_pass"]
    assert {*functions} <= {*extend.__all__}


# ---- installed plugins


class Installed:
    """Entry points of a plugin module that is made here."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.module = ModuleType("some_plugins")
        patch.setitem(sys.modules, "some_plugins", self.module)
        patch.setattr(extend, "entry_points", lambda group: self.entries[group])
        self.entries: dict[str, list[EntryPoint]] = {extend.GROUP: []}

    def add(self, name: str, function: Callable[[], Any]) -> None:
        setattr(self.module, name, function)
        self.entries[extend.GROUP].append(EntryPoint(name, f"some_plugins:{name}", extend.GROUP))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(monkeypatch)


def test_plugins_are_called_once_in_the_order_of_their_names(installed: Installed) -> None:
    called: list[str] = []
    for name in ("second", "first", "third"):
        installed.add(name, lambda name=name: called.append(name))
    plugins = extend.Plugins()
    for _ in range(3):
        plugins.load()
    assert called == ["first", "second", "third"]


def test_no_thread_goes_on_before_the_plugins_are_there(installed: Installed) -> None:
    called: list[float] = []

    def slow() -> None:
        time.sleep(0.05)
        called.append(time.perf_counter())

    installed.add("slow", slow)
    plugins, start = extend.Plugins(), threading.Barrier(8)
    seen: list[int] = []

    def work() -> None:
        start.wait()
        plugins.load()
        seen.append(len(called))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 8


def test_a_plugin_may_need_the_plugins_itself(installed: Installed) -> None:
    plugins, called = extend.Plugins(), []
    installed.add("nested", lambda: (called.append(1), plugins.load()))
    plugins.load()
    assert called == [1]


def test_a_plugin_that_fails_names_itself_each_time(installed: Installed) -> None:
    tried: list[int] = []

    def broken() -> None:
        tried.append(1)
        raise RuntimeError("no such\nthing")

    installed.add("broken", broken)
    plugins = extend.Plugins()
    for _ in range(2):
        text = refusal(plugins.load)
        assert "'broken' (some_plugins:broken)" in text and "RuntimeError: no such thing" in text
    assert tried == [1]


@pytest.mark.parametrize("value", ["some_plugins:nothing", "no_such_module:register"])
def test_a_plugin_that_is_not_there_is_named(installed: Installed, value: str) -> None:
    installed.entries[extend.GROUP].append(EntryPoint("lost", value, extend.GROUP))
    assert f"'lost' ({value})" in refusal(extend.Plugins().load)


def test_an_interrupted_load_is_done_again(installed: Installed) -> None:
    called: list[int] = []

    def stopped() -> None:
        called.append(1)
        if len(called) == 1:
            raise KeyboardInterrupt

    installed.add("stopped", stopped)
    plugins = extend.Plugins()
    with pytest.raises(KeyboardInterrupt):
        plugins.load()
    plugins.load()
    assert called == [1, 1]


@pytest.mark.parametrize("first", ["Trainer", "Compiler", "optim"])
def test_what_needs_plugins_loads_them(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny import mlp

    from onward.compile import Compiler
    from onward.kernels import host

    loaded: list[str] = []
    for module in ("onward.compile", "onward.train.trainer", "onward.train.optim"):
        monkeypatch.setattr(f"{module}.load_plugins", lambda: loaded.append("here"))
    make: dict[str, Callable[[], Any]] = {
        "Trainer": lambda: onward.Trainer(mlp(), onward.optim.SGD(), lambda y, t: y.sum()),
        "Compiler": lambda: Compiler(host()),
        "optim": lambda: hasattr(onward.optim, "NoSuchOptimizer"),
    }
    make[first]()
    assert loaded == ["here"]


# ---- how many files an addition touches


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with every addition."""
    package = tmp_path_factory.mktemp("additions") / "onward"
    shutil.copytree(PACKAGE, package)
    for addition in ADDITIONS.values():
        for path, edit in addition.edits.items():
            file = package / path
            before = file.read_text(encoding="utf-8") if file.exists() else ""
            file.write_text(edit(before), encoding="utf-8")
    return package


@pytest.fixture(scope="module")
def added(copied: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": str(copied.parent)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert Path(found["from"]).parent == copied
    return found


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_touches_few_files(name: str) -> None:
    addition = ADDITIONS[name]
    assert 0 < len(addition.edits) <= addition.limit


def test_the_copy_differs_in_these_files_alone(copied: Path) -> None:
    def differing(pair: filecmp.dircmp[str], at: str = "") -> set[str]:
        here = {f"{at}{name}" for name in (*pair.left_only, *pair.right_only, *pair.diff_files)}
        inner = (differing(sub, f"{at}{name}/") for name, sub in pair.subdirs.items())
        return here.union(*inner)

    touched = {path for addition in ADDITIONS.values() for path in addition.edits}
    ignored = ["__pycache__", ".pytest_cache"]
    assert differing(filecmp.dircmp(PACKAGE, copied, ignore=ignored)) == touched


def test_added_op_translation_and_optimizer_train_as_in_pytorch(added: Any) -> None:
    found = added["trained"]
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-5)
    assert found["weights"] < 1e-5
    assert found["eager"][-1] != found["eager"][0]
    assert found["kernels"].count("aten.asinh") == 1


def test_added_op_has_the_row_rule_of_its_trait(added: Any) -> None:
    assert added["trained"]["rows"] == 0.25, "of the labels a quarter is read"


def test_added_pass_is_run_and_listed(added: Any) -> None:
    assert added["trained"]["passes"]["double_negation"] == 1
    assert "aten.Neg" not in added["trained"]["kernels"]


def test_added_gradient_rule_is_torchs(added: Any) -> None:
    assert added["norm"] < 1e-12


def test_an_op_that_is_registered_later_is_seen_by_every_table(added: Any) -> None:
    """An op without a gradient rule is differentiated through its body."""
    found = added["later"]
    assert found["losses"] == pytest.approx(found["eager"], rel=1e-5)
    assert found["rows"] == 0.25, "by the row rule that it was registered with"


def test_what_is_registered_later_is_for_later_graphs(added: Any) -> None:
    """A gradient rule or kernel that is registered later serves later graphs; those that exist
    stay."""
    found = added["later"]
    assert found["kept"]
    assert found["then"] == 1 and found["apart"] < 1e-5
    assert "added.unit_row" not in found["kernels"]
