"""Captures that a run before has kept: what decides a capture and is another in the next run makes
it be captured again, and the next run's numbers are eager PyTorch's. A run is a program whose
modules are imported anew; nothing of one is left for the next but files on disk."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kept_program
import numpy as np
import pytest
import tiny
import torch
from torch import nn

import onward
from onward import capture_cache
from onward.capture import surroundings

HELPER = """
import json
import torch
with open(FILE) as file:
    READ = json.load(file)["scale"]
OFFSETS = [0.25, {"deep": 0.5}]
SIGN = 1.0
class Nested:
    def __init__(self): self.inner = 0.5
NESTED = Nested()
def shifted(x, by=0.125, *, slope=1.0):
    if torch.get_default_dtype() == torch.float64:
        x = x * 2
    return (x + by + OFFSETS[0] + OFFSETS[1]["deep"] + NESTED.inner) * READ * SIGN * slope
"""
PARTS = """
FACTOR = 1.5
"""
MODEL = """
import os
import sys
import torch
from torch import nn
from torch.nn import functional as F
import kept_package.parts
from kept_helper import shifted

FLAG = sys.argv[-1] == "--triple"

class Config:
    def __init__(self):
        self.gain = 1.0
        self.unread = 1.0

class Switch(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x

def scaled_by(n):
    def scaled(x):
        return x * n
    return scaled

class Model(nn.Module):
    slope = 0.5
    def __init__(self):
        super().__init__()
        self.config, self.scaled, self.count = Config(), scaled_by(2.0), 3
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.switch = Switch()
        self.register_buffer("weights", torch.ones(4))
    @property
    def half(self):
        return 0.5
    def tail(self, x):
        return self.scaled(x) * kept_package.parts.FACTOR
    def forward(self, x, y=None):
        h = torch.tanh(self.first(x)) * self.slope
        h = shifted(self.switch(h)) * self.config.gain
        for _ in range(self.count):
            h = h + F.softplus(self.second(h)) * 1.0 * self.half
        if FLAG:
            h = h * 3
        h = self.tail(h) * self.weights
        return ((h - (0 if y is None else y)) ** 2).mean()
"""
Change = Callable[["Program"], None]


class Program:
    """Modules in a folder, as one run imports them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        self.texts = {"kept_model": MODEL, "kept_helper": HELPER, "kept_package/parts": PARTS}
        self.data = {"scale": 1.0}
        self.loss_fn: Any = None
        self.modules: dict[str, types.ModuleType] = {}
        self.x, self.y = torch.linspace(-1, 1, 12).view(3, 4), torch.zeros(3, 4)
        self.model: Any = None

    def edit(self, name: str, old: str, new: str) -> None:
        assert self.texts[name].count(old) >= 1, old
        self.texts[name] = self.texts[name].replace(old, new)

    def load(self) -> None:
        """Imports the modules anew, and makes the model."""
        file = self.folder / "data.json"
        file.write_text(json.dumps(self.data))
        (self.folder / "kept_package").mkdir(exist_ok=True)
        for name, text in {"kept_package/__init__": "", **self.texts}.items():
            path = self.folder / f"{name}.py"
            path.write_text(textwrap.dedent(text).replace("FILE", repr(str(file)), 1))
        for name in [n for n in sys.modules if n.startswith("kept_") and n != "kept_captures"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        found = importlib.import_module("kept_model")
        torch.set_default_dtype(torch.float32)
        self.modules = {n: m for n, m in sys.modules.items() if n.startswith("kept_")}
        torch.manual_seed(0)
        self.model = found.Model()

    def __getitem__(self, name: str) -> Any:
        return self.modules[name]


class Exports:
    """Counts calls of torch.export.export."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._real = 0, torch.export.export
        monkeypatch.setattr(torch.export, "export", self._counted)

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._real(*args, **kwargs)

    def taken(self) -> int:
        found, self.count = self.count, 0
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the program, which is the same in all tests, and of what is kept of it."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty one."""
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(surroundings, "STARTED", float("inf"))  # the programs are written here
    # pytest says there which test runs
    monkeypatch.setattr(surroundings, "NOISE", {*surroundings.NOISE, "PYTEST_CURRENT_TEST"})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Exports:
    return Exports(monkeypatch)


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.syspath_prepend(str(folder))
    yield Program(folder, monkeypatch)
    for name in [n for n in sys.modules if n.startswith("kept_") and n != "kept_captures"]:
        del sys.modules[name]


@pytest.fixture
def kept(
    folder: Path, program: Program, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> Program:
    """The program, of which a run before has kept the capture."""
    monkeypatch.setenv("ONWARD_CACHE", str(folder / "cache"))
    runs(program, None, before=False)
    if exports.taken():
        runs(program, None, before=False)
    assert exports.taken() == 0
    return program


def losses(program: Program, ours: bool) -> list[float]:
    """Of two steps of SGD."""
    optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
    found = []
    x, y, loss_fn = program.x, program.y, program.loss_fn
    if ours:
        trainer = onward.Trainer(program.model, optimizer, loss_fn)
        for _ in range(2):
            step = trainer.train_step(x, y) if loss_fn is None else trainer.train_step(x, target=y)
            found.append(float(step.loss))
        return found
    for _ in range(2):
        optimizer.zero_grad()
        loss = program.model(x, y) if loss_fn is None else loss_fn(program.model(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def runs(program: Program, change: Change | None, before: bool) -> list[float]:
    """A run of the program as it is now. change: applied before its import, or behind it."""
    results = []
    for ours in (False, True):
        if change is not None and before and not ours:
            change(program)
        program.load()
        if change is not None and not before:
            change(program)
        results.append(losses(program, ours))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    return results[1]


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
    "a wider layer": lambda p: setattr(p.model, "first", nn.Linear(4, 4, bias=False)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BEFORE)
def test_what_is_written_otherwise_is_captured_again(
    name: str, kept: Program, exports: Exports
) -> None:
    runs(kept, BEFORE[name], before=True)
    assert exports.taken() == 1


@pytest.mark.sample(3)
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


@pytest.mark.sample(3)
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
    changes = [None, BEHIND["a setting"], BEHIND["a tie"], BEHIND["a number of the model"]]
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
        stages = [s for s in trainer.report()["compile_seconds"] if "capture" in s]
        assert stages == [stage] + ["capture cache"] * (stage == "capture")


def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
    scores = (q @ k.transpose(2, 3) * 0.25).tril()
    return (scores @ v).transpose(1, 2).contiguous(), None


def _registered(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers import AttentionInterface

    patch.setitem(AttentionInterface._global_mapping, "sdpa", attention)


def _activation(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.activations import NewGELUActivation

    patch.setattr(NewGELUActivation, "forward", lambda self, x: torch.tanh(x))


def _layer(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.pytorch_utils import Conv1D

    plain = Conv1D.forward
    patch.setattr(Conv1D, "forward", lambda self, x: plain(self, x) * 0.5)


def _eager(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.set_attn_implementation("eager")


def _eager_patched(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    _eager(patch, model)
    patch.setattr(modeling_gpt2, "eager_attention_forward", attention)


def _mask(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    patch.setattr(modeling_gpt2, "create_causal_mask", lambda *args, **kwargs: None)


def _loss(patch: pytest.MonkeyPatch, model: Any) -> None:
    from transformers.loss import loss_utils

    plain = loss_utils.LOSS_MAPPING["ForCausalLM"]
    other = lambda *args, **kwargs: plain(*args, **kwargs) * 2  # noqa: E731
    patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", other)


def _untied(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _setting(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.config.output_hidden_states = True


def _scale(patch: pytest.MonkeyPatch, model: Any) -> None:
    for block in model.transformer.h:
        block.attn.scale_attn_weights = False


def _dropout(patch: pytest.MonkeyPatch, model: Any) -> None:
    model.transformer.drop.p = 0.5


def _functional(patch: pytest.MonkeyPatch, model: Any) -> None:
    patch.setattr(nn.functional, "cross_entropy", lambda x, labels, **more: x.square().mean())


OF_TRANSFORMERS: dict[str, Callable[[pytest.MonkeyPatch, Any], None]] = {
    "an attention that is registered": _registered, "an activation": _activation,
    "a layer": _layer, "the attention that is asked for": _eager, "its function": _eager_patched,
    "a mask's function": _mask, "a loss that is registered": _loss, "a tie": _untied,
    "a setting": _setting, "an attribute of a layer": _scale, "a rate": _dropout,
    "a function of torch's": _functional,
}  # fmt: skip


def two_losses(model: Any, batch: Any, ours: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if ours:
        trainer = onward.Trainer(model, optimizer)
        return [float(trainer.train_step(**batch).loss) for _ in range(2)]
    found = []
    for _ in range(2):
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.fixture
def kept_gpt2(folder: Path, exports: Exports, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A batch, and GPT-2 of which a run before has kept the capture."""
    monkeypatch.setenv("ONWARD_CACHE", str(folder / "cache"))
    batch = tiny.batch(2, 8, padding="right")
    two_losses(tiny.gpt2(dropout=0.0), batch, ours=True)
    if exports.taken():
        two_losses(tiny.gpt2(dropout=0.0), batch, ours=True)
    assert exports.taken() == 0
    return batch


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_what_is_another_in_transformers_is_captured_again(
    name: str, kept_gpt2: Any, exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for ours in (True, False):
        model = tiny.gpt2(dropout=0.0)
        with monkeypatch.context() as patch:
            OF_TRANSFORMERS[name](patch, model)
            results.append(two_losses(model, kept_gpt2, ours))
    if name != "a rate":  # whose masks are others than eager's
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert exports.taken() == 1


def test_what_a_forward_sets_once_is_set_where_its_capture_is_read(exports: Exports) -> None:
    labels = {
        "single_label_classification": torch.arange(4) % 3,
        "multi_label_classification": torch.ones(4, 3),
    }
    for expected in (1, 0):
        for kind, given in labels.items():
            batch = {**tiny.batch(4, 8), "labels": given}
            model: Any = tiny.bert(dropout=0.0, classes=3)
            assert model.config.problem_type is None
            ours = two_losses(model, batch, ours=True)
            assert exports.taken() == expected
            assert model.config.problem_type == kind
            assert vars(model.config)["problem_type"] == kind
            eager = tiny.bert(dropout=0.0, classes=3)
            optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
            want = []
            for _ in range(2):
                loss = eager(**batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                want.append(float(loss.detach()))
            torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)
            model = tiny.bert(dropout=0.0, classes=3)  # where it is set before, nothing is
            model.config.problem_type = kind
            two_losses(model, batch, ours=True)
            assert exports.taken() == expected


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


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", kept_program.RUNS)
def test_each_way_to_train_reads_what_it_has_captured(name: str, exports: Exports) -> None:
    found = []
    for expected in (1, 0):
        torch.manual_seed(0)
        found.append(kept_program.RUNS[name]())
        assert exports.taken() == expected
    assert found[0] == found[1]


def test_a_second_process_reads_all_that_the_first_has_captured(tmp_path: Path) -> None:
    names = ["gpt2", "bert", "the Trainer in its place"]
    first, second = (_process(PROGRAM, *names, cache=tmp_path) for _ in range(2))
    assert {name: count for name, (_, count, _) in first.items()} == dict.fromkeys(names, 1)
    assert {name: count for name, (_, count, _) in second.items()} == dict.fromkeys(names, 0)
    assert {n: x[0] for n, x in first.items()} == {n: x[0] for n, x in second.items()}


OWN = """
import json, sys, torch, onward
with open(sys.argv[1]) as file:
    SCALE = json.load(file)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.names = {"one": 1.0, "two": 2.0}
    def forward(self, x):
        for name in self.names:
            x = self.layer(x) * SCALE * self.names[name]
        return (x ** 2).mean()
count, real = [0], torch.export.export
def counted(*args, **kwargs):
    count[0] += 1
    return real(*args, **kwargs)
torch.export.export = counted
torch.manual_seed(0)
model = Model()
eager = float(model(torch.ones(3, 4)).detach())
trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(json.dumps([eager, float(trainer.train_step(torch.ones(3, 4)).loss), count[0]]))
"""


def test_a_second_process_of_a_program_whose_file_says_something_else(tmp_path: Path) -> None:
    program, data = tmp_path / "own.py", tmp_path / "scale.json"
    program.write_text(OWN)
    os.utime(program, (1000, 1000))
    for scale, expected in ((1.0, 1), (2.0, 1)):
        data.write_text(json.dumps(scale))
        eager, ours, count = _process(program, str(data), cache=tmp_path)
        assert ours == pytest.approx(eager, rel=1e-5)
        assert count == expected


PROGRAM = Path(__file__).with_name("kept_program.py")


def _process(program: Path, *arguments: str, cache: Path) -> Any:
    variables = {
        **{k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"},
        "ONWARD_CACHE": str(cache / "cache"), "ONWARD_GRAPH_CACHE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    variables.pop("PYTHONHASHSEED", None)
    ran = subprocess.run(
        [sys.executable, str(program), *arguments], env=variables, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])
