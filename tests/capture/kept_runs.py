"""A program of the user's own, of which tests run one run after the other; what of a run is left
for the next is on disk."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import Exports

import onward
from onward.capture.archive import surroundings

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
import math
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

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * RATE

RATE = 2.0

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
        h = h + Square.apply(h) * 0.125 * math.lgamma(pow(3, 1))
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the program, which all tests share, and for what the cache stores of it."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder for each test."""
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(surroundings, "STARTED", float("inf"))  # the programs are written here
    # pytest writes the name of the running test into this variable
    monkeypatch.setattr(surroundings, "NOISE", {*surroundings.NOISE, "PYTEST_CURRENT_TEST"})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # the __main__ of a pytest worker is no program with a file
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    return tmp_path / "cache" / "graphs"


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
    """The program after a run that has stored its captures."""
    monkeypatch.setenv("ONWARD_CACHE", str(folder / "cache"))
    runs(program, None, before=False)
    if exports.taken():
        runs(program, None, before=False)
    assert exports.taken() == 0
    return program


def losses(program: Program, ours: bool) -> list[float]:
    """Losses of two steps of SGD."""
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
    """Losses of a run of the program as it is now, equal to eager's. change: edits it, before its
    import or after."""
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
