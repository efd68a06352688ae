"""Captures that a run before has kept: what decides a capture and is another in the next run makes
it be captured again, and the next run's numbers are eager PyTorch's. A run is a program whose
modules are imported anew; nothing of one is left for the next but files on disk."""

from __future__ import annotations

import builtins
import importlib
import math
import random
import sys
import types
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import Exports, exports
from kept_runs import Change, Program, cache, folder, kept, program, runs
from torch import nn

import onward
from onward import capture_cache
from onward.capture import aten
from onward.capture.archive.shape_guards import is_condition
from onward.capture.archive.tree import read_tree
from onward.graph.archive import ArchiveError

__all__ = ["cache", "exports", "folder", "kept", "program"]  # fixtures


def text(name: str, old: str, new: str) -> Change:
    return lambda program: program.edit(name, old, new)


def _set(name: str, attribute: str, value: Any) -> Change:
    return lambda program: setattr(program[name], attribute, value)


def _tied(program: Program) -> None:
    program.model.second.weight = program.model.first.weight


def _instance_forward(program: Program) -> None:
    model, kind = program.model, type(program.model)
    model.forward = types.MethodType(lambda self, x, y: kind.forward(self, x, y) * 3, model)


def _code_replaced(program: Program) -> None:
    def shifted(x, by=0.125, *, slope=1.0):  # type: ignore[no-untyped-def]
        return x * 7

    program["kept_helper"].shifted.__code__ = shifted.__code__


def _hooked(program: Program) -> None:
    program.model.second.register_forward_hook(lambda m, args, out: out * 2)


# applied to the text or to what is read of it
BEFORE: dict[str, Change] = {
    "a constant in the forward": text("kept_model", "* 1.0 * self.half", "* 3.0 * self.half"),
    "a helper that it calls": text("kept_helper", "+ by +", "- by +"),
    "a global of a module": text("kept_helper", "SIGN = 1.0", "SIGN = -1.0"),
    "a global of a package's module": text("kept_package/parts", "1.5", "2.5"),
    "a closure": text("kept_model", "scaled_by(2.0)", "scaled_by(3.0)"),
    "a class attribute": text("kept_model", "slope = 0.5", "slope = 0.75"),
    "a setting": text("kept_model", "self.gain = 1.0", "self.gain = 2.0"),
    "a property": text("kept_model", "return 0.5", "return 0.25"),
    "a file that is read at import": lambda p: p.data.update(scale=3.0),
    "an argument": lambda p: p.patch.setattr(sys, "argv", ["program", "--triple"]),
    "a variable": lambda p: p.patch.setenv("KEPT_ANYTHING", "1"),
}
# applied to objects, no text of which says so
BEHIND: dict[str, Change] = {
    "a global that is set": _set("kept_helper", "SIGN", -1.0),
    "a global of a package's module": lambda p: _set("kept_package.parts", "FACTOR", 4.0)(p),
    "an element of a global list": lambda p: p["kept_helper"].OFFSETS.__setitem__(0, 1.0),
    "an element within one": lambda p: p["kept_helper"].OFFSETS[1].update(deep=2.0),
    "an attribute of a global object": lambda p: setattr(p["kept_helper"].NESTED, "inner", 2.0),
    "a function under a name": lambda p: _set("kept_model", "shifted", lambda x: x * 3)(p),
    "a function's code": _code_replaced,
    "a default": lambda p: setattr(p["kept_helper"].shifted, "__defaults__", (2.0,)),
    "a keyword's default": lambda p: p["kept_helper"].shifted.__kwdefaults__.update(slope=2.0),
    "what a closure holds": lambda p: setattr(p.model.scaled.__closure__[0], "cell_contents", 5.0),
    "a class attribute": lambda p: setattr(type(p.model), "slope", 0.9),
    "a method": lambda p: setattr(type(p.model), "tail", lambda self, x: x * 4),
    "a property": lambda p: setattr(type(p.model), "half", property(lambda self: 2.0)),
    "a method of an instance": _instance_forward,
    "a number of the model": lambda p: setattr(p.model, "count", 1),
    "a setting": lambda p: setattr(p.model.config, "gain", 2.0),
    "the class of a setting": lambda p: setattr(
        p.model, "config", types.SimpleNamespace(gain=2.0, unread=1.0)
    ),
    "another module in a place": lambda p: setattr(p.model, "second", nn.Identity()),
    "a tie": _tied,
    "a parameter that is frozen": lambda p: p.model.first.weight.requires_grad_(False),
    "a flag of a submodule": lambda p: p.model.switch.eval(),
    "a hook": _hooked,
    "torch's own function": lambda p: p.patch.setattr(torch, "tanh", torch.sin),
    "a function of torch.nn's": lambda p: p.patch.setattr(nn.functional, "softplus", torch.sin),
    "a method of torch's layer": lambda p: p.patch.setattr(
        nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight * 2)
    ),
    "whole numbers in the batch": lambda p: setattr(p, "y", torch.ones(3, 4, dtype=torch.long)),
    "a batch of one": lambda p: (setattr(p, "x", p.x[:1]), setattr(p, "y", p.y[:1]))[0],
    "no target": lambda p: setattr(p, "y", None),
    "a default dtype": lambda p: torch.set_default_dtype(torch.float64),
    "what a backward reads": _set("kept_model", "RATE", 3.0),
    "a function of Python's": lambda p: p.patch.setattr(math, "lgamma", lambda x: 5.0),
    "a builtin": lambda p: p.patch.setattr(builtins, "pow", lambda a, b: 9.0),
    "a wider layer": lambda p: setattr(p.model, "first", nn.Linear(4, 4, bias=False)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BEFORE)
def test_what_is_written_otherwise_is_captured_again(
    name: str, kept: Program, exports: Exports
) -> None:
    runs(kept, BEFORE[name], before=True)
    assert exports.taken() == 1


@pytest.mark.sample(5)
@pytest.mark.filterwarnings("ignore::onward.EagerWarning")  # of the hook, which runs in PyTorch
@pytest.mark.parametrize("name", BEHIND)
def test_what_is_set_otherwise_is_captured_again(
    name: str, kept: Program, exports: Exports
) -> None:
    try:
        runs(kept, BEHIND[name], before=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert exports.taken() >= 1


@pytest.mark.parametrize("name", ["cuda.matmul", "mkldnn.conv"])
def test_captures_are_kept_for_each_precision_of_products(
    name: str, kept: Program, exports: Exports
) -> None:
    """PyTorch's flag for all products raises once one part has a precision of its own."""
    part: Any = attrgetter(name)(torch.backends)
    before = part.fp32_precision
    try:
        for taken in (1, 0):
            runs(kept, lambda p: setattr(part, "fp32_precision", "tf32"), before=False)
            assert exports.taken() == taken
    finally:
        part.fp32_precision = before


def test_what_no_capture_reads_may_be_another(kept: Program, exports: Exports) -> None:
    """Numbers of parameters, buffers and batches, and settings that were not read."""

    def other(program: Program) -> None:
        program.model.config.unread = 2.0
        program.model.weights.fill_(3.0)
        program.x, program.y = torch.randn(5, 4), torch.randn(5, 4)

    runs(kept, other, before=False)
    assert exports.taken() == 0


# what code may ask that nothing tells: another run may be told something else
ASKED: dict[str, tuple[str, str]] = {
    "a file": (
        "return x * n", "with open(DATA) as file: n = float(file.read())\n        return x * n",
    ),
    "a file by a module": ("return x * n", "return x * pathlib.Path(DATA).stat().st_size"),
    "the clock": ("return x * n", "return x * (1 + time.time() * 0)"),
    "an import": ("return x * n", "import kept_helper; return x * kept_helper.SIGN"),
    "another package": ("return x * n", "return x * len(yaml.__name__)"),
    "the interpreter": ("return x * n", "return x * len(globals()) ** 0"),
    "the order of a set": (
        "return x * n", "return sum((x * len(k) for k in {'a', 'bb', 'ccc'}), x * 0)",
    ),
    "the order of a set that is made": (
        "return x * n", "return sum((x * len(k) for k in {'a', str(n)}), x * 0)",
    ),
    "a set of the model's": ("return x * n", "return x * len(NAMES)"),
    "a name that is made": ("return x * n", "return getattr(torch, 'initial_seed')() * 0 + x"),
    "the seed": ("return x * n", "return x + 0 * torch.initial_seed()"),
    "a tensor of the module's": ("return x * n", "return x * HELD"),
    "a long list": ("return x * n", "return x * LONG[1500]"),
    "a large array": ("return x * n", "return x * float(LARGE[0])"),
    "an object of another kind": ("return x * n", "return x * len(PATH.name)"),
    "a system's names": ("return x * n", "return x * len(os.sep)"),
    "a file by numpy": ("return x * n", "return x * float(np.fromfile(DATA + 'n')[0])"),
}  # fmt: skip
_TOP = """
import pathlib
import time
import numpy as np
import yaml
DATA = FILE
NAMES = {"a", "b"}
HELD = torch.tensor([2.0])
LONG = [1.0] * 2000
LARGE = np.ones(20_000)
PATH = pathlib.Path("ab")
"""


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ASKED)
def test_code_that_may_ask_more_than_is_told_is_captured_in_each_run(
    name: str, program: Program, exports: Exports
) -> None:
    old, new = ASKED[name]
    program.edit("kept_model", "import sys\n", f"import sys\nimport torch\n{_TOP}")
    program.edit("kept_model", old, new)
    (program.folder / "data.json").write_text("3.0")
    program.data = 3.0  # type: ignore[assignment]
    program.edit("kept_helper", 'json.load(file)["scale"]', "1.0")
    (program.folder / "data.jsonn").write_bytes(b"\0" * 8)
    for _ in range(2):
        runs(program, None, before=True)
        assert exports.taken() >= 1


LOSS = """
def made(power):
    def loss_fn(out, y):
        return (out - y.mean()) ** power
    return loss_fn
"""


class Given(nn.Module):
    """Arguments of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: Any = 1.0, names: Any = (), more: Any = None) -> Any:
        h = self.layer(x.float()) * (scale if type(scale) is float else 7)
        for i, name in enumerate(names):
            h = h * len(name) + i
        if more is not None:
            h = h + more["b"] * 2 + more["a"]
        return (h**2).mean()


ONES = torch.ones(4)
CALLS: tuple[dict[str, Any], ...] = (
    {}, {"scale": 2.0}, {"scale": 3.0}, {"scale": 3}, {"scale": True}, {"names": ("a", "bb")},
    {"names": ("bb", "a")}, {"names": ["bb", "a"]}, {"more": {"a": ONES, "b": ONES * 2}},
    {"more": {"b": ONES * 2, "a": ONES}}, {"x": torch.ones(3, 4, dtype=torch.long)},
    {"x": torch.ones(1, 4)}, {"x": torch.ones(3, 2, 4)},
)  # fmt: skip


def test_arguments_are_told_but_for_the_numbers_of_tensors(exports: Exports) -> None:
    for expected in (1, 0):
        for call in CALLS:
            torch.manual_seed(0)
            model, given = Given(), {"x": torch.ones(3, 4), **call}
            want = model(**given).detach()
            trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            torch.testing.assert_close(trainer.train_step(**given).loss, want)
            assert exports.taken() == expected, call


def test_a_loss_function_with_another_closure(program: Program, exports: Exports) -> None:
    program.texts["kept_loss"] = LOSS

    def given(power: int) -> Change:
        def change(program: Program) -> None:
            program.loss_fn = importlib.import_module("kept_loss").made(power)

        return change

    program.y = torch.ones(3, 4)
    for power, expected in ((2, 1), (2, 0), (4, 1), (4, 0), (2, 0)):
        runs(program, given(power), before=False)
        assert exports.taken() == expected


def test_states_of_a_model_are_kept_side_by_side(program: Program, exports: Exports) -> None:
    named = ("a tie", "a global of a package's module", "what a backward reads")
    changes = [None, *(BEHIND[name] for name in named)]
    for expected in (1, 0):
        for change in changes:
            runs(program, change, before=False)
            assert exports.taken() == expected


def test_it_is_off_where_the_graph_cache_is(
    program: Program, exports: Exports, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")
    for _ in range(2):
        runs(program, None, before=True)
        assert exports.taken() == 1
    assert not cache.exists()


def test_translations_of_others_are_not_kept(kept: Program, exports: Exports) -> None:
    plain = aten.TABLE["softplus.default"]
    kept.patch.setitem(aten.TABLE, "softplus.default", lambda call, *args: plain(call, *args))
    for _ in range(2):
        runs(kept, None, before=False)
        assert exports.taken() == 1


def test_files_that_are_odd_are_captures_again(
    program: Program, exports: Exports, cache: Path
) -> None:
    runs(program, None, before=True)
    exports.taken()
    for path in cache.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    runs(program, None, before=True)
    assert exports.taken() == 1


def test_a_report_says_that_the_capture_was_read(program: Program) -> None:
    for stage in ("capture", capture_cache.READ):
        program.load()
        optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
        trainer = onward.Trainer(program.model, optimizer)
        trainer.train_step(program.x, program.y)
        stages = {s for s in trainer.report()["compile_seconds"] if "capture" in s}
        assert stages == ({stage, "capture cache"} if stage == "capture" else {stage})


@pytest.mark.parametrize("at", ["_Call.__init__", "_Call._read", "_Call._write"])
def test_no_error_of_the_cache_reaches_a_step(
    at: str, kept: Program, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("an object of another kind")

    monkeypatch.setattr(f"onward.capture_cache.{at}", fails)
    runs(kept, None, before=False)
    assert exports.taken() == int(at != "_Call._write")


def test_changes_after_a_capture_was_read_are_seen(kept: Program, exports: Exports) -> None:
    kept.load()
    trainer = onward.Trainer(kept.model, torch.optim.SGD(kept.model.parameters(), lr=0.0))
    eager = kept.model
    for change, expected in (
        (lambda: None, 0),
        (lambda: setattr(eager.config, "unread", 5.0), 0),
        (lambda: setattr(eager.config, "gain", 5.0), 1),
        (lambda: setattr(kept["kept_helper"], "SIGN", -1.0), 1),
    ):
        change()
        found = trainer.train_step(kept.x, kept.y).loss
        torch.testing.assert_close(found, eager(kept.x, kept.y).detach(), rtol=1e-5, atol=1e-6)
        assert exports.taken() == expected


def test_random_numbers_are_where_a_capture_leaves_them(
    kept: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for on in ("1", "0"):
        monkeypatch.setenv("ONWARD_GRAPH_CACHE", on)
        kept.load()
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        trainer = onward.Trainer(kept.model, torch.optim.SGD(kept.model.parameters(), lr=0.1))
        trainer.train_step(kept.x, kept.y)
        states.append((random.random(), np.random.rand(), torch.rand(3).tolist()))
    assert states[0] == states[1]


CONDITIONS = {
    "L['leaves'][0].size()[1] <= 512": True,
    "((-1) + L['leaves'][2].size()[1]) != 1": True,
    "L['leaves'][1].size()[0] == 1 or not L['leaves'][0].size()[0] % 8 == 0": True,
    "(L['leaves'][1].size()[0]*3) // 2 > L['leaves'][0].size()[1]": True,
    "L['leaves'][0].size()[1]": False,
    "1": False,
    "True": False,
    "L['leaves'][0].shape[1] <= 512": False,
    "L['leaves'][0].sum()[1] <= 512": False,
    "L['leaves'][0].size(1)[1] <= 512": False,
    "L['leaves'][-1].size()[1] <= 512": False,
    "L['other'][0].size()[1] <= 512": False,
    "M['leaves'][0].size()[1] <= 512": False,
    "__import__('os').system('true') == 0": False,
    "torch.load('file') == 1": False,
    "[x for x in L] == 1": False,
    "(lambda: 1)() == 1": False,
    "L['leaves'][0].size()[1] ** 99999 == 1": False,
    "L['leaves'][0].size()[1] == 1.0": False,
    "L['leaves'][0].size()[L] == 1": False,
    "1 == 1; 2": False,
    "(" * 300 + "1" + ")" * 300: False,
    "": False,
}


def test_a_condition_on_sizes_is_one_and_nothing_else() -> None:
    assert {text: is_condition(text) for text in CONDITIONS} == CONDITIONS


@pytest.mark.parametrize("form", ["tuple of ours", "", "container", "dataclass", "fields"])
def test_no_class_of_a_files_choice_is_called(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs' classes are known by name; an unknown form of one is refused before that."""
    called = list[object]()

    class Planted:
        def __init__(self, *parts: object) -> None:
            called.append(parts)

    monkeypatch.setattr(sys.modules[__name__], "Planted", Planted, raising=False)
    with pytest.raises(ArchiveError):
        read_tree([["container", form, __name__, "Planted", [], [["computed", 0]]], ["y"]])
    assert not called
