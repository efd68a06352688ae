"""What a forward reads, however long the way there is."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import onward


def chained(length: int) -> dict[str, object]:
    """`f0` calls `f1`, and so on; the last one reads `FACTOR`."""
    lines = ["FACTOR = 1.0"]
    lines += [f"def f{i}(x):\n    return f{i + 1}(x)" for i in range(length)]
    lines += [f"def f{length}(x):\n    return x * FACTOR"]
    scope: dict[str, object] = {"__name__": "__main__"}
    exec("\n".join(lines), scope)
    return scope


class Chained(torch.nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.inner, self.function = torch.nn.Linear(3, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(x)).sum()  # type: ignore[operator]


def test_a_long_chain_of_functions_is_followed_to_its_end() -> None:
    scope = chained(sys.getrecursionlimit() // 5)
    model = Chained(scope["f0"])
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(2, 3)
    before = float(trainer.train_step(x).loss)
    scope["FACTOR"] = 3.0
    after = trainer.train_step(x).loss
    torch.testing.assert_close(after, torch.tensor(3 * before))


WRITTEN = """
import torch
FACTOR = 1.0
class Held:
    n = 1.0
    def __init__(self): self.m = 1.0
def scaled(x): return x * FACTOR
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.held = torch.nn.Linear(3, 1), Held()
    def forward(self, x): return scaled(self.inner(x) * self.held.n * self.held.m).sum()
"""
CHANGES = ["FACTOR = 3.0", "Held.n = 3.0", "model.held.m = 3.0", "model.held.n = 3.0"]


def _without_names() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(WRITTEN, scope)
    return scope


def _in_a_module_of_a_name() -> dict[str, Any]:
    made = types.ModuleType("written_in_memory")
    sys.modules["written_in_memory"] = made
    exec(WRITTEN, vars(made))
    return vars(made)


def _called_by_a_name() -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "written_elsewhere"}
    exec(WRITTEN, scope)
    return scope


def _called_as_type() -> dict[str, Any]:
    """Whose `Held` has no `__module__` at all."""
    head, _, tail = WRITTEN.partition("class Held:")
    _, _, tail = tail.partition("def scaled")
    made = "def init(self): self.m = 1.0\nHeld = type('Held', (), {'n': 1.0, '__init__': init})\n"
    scope: dict[str, Any] = {}
    exec(f"{head}{made}def scaled{tail}", scope)
    assert not hasattr(scope["Held"], "__module__")
    return scope


def _loaded_by_its_path(folder: Path) -> dict[str, Any]:
    file = folder / "written_in_a_file.py"
    file.write_text(WRITTEN)
    spec = importlib.util.spec_from_file_location("written_in_a_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ["names", "module", "name", "type", "path"])
def test_code_however_it_came_is_looked_into(way: str, change: str, tmp_path: Path) -> None:
    made = {
        "names": _without_names,
        "module": _in_a_module_of_a_name,
        "name": _called_by_a_name,
        "type": _called_as_type,
        "path": lambda: _loaded_by_its_path(tmp_path),
    }
    scope = made[way]()
    scope["model"] = model = scope["Model"]()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(2, 3)
    torch.testing.assert_close(trainer.train_step(x).loss, model(x).detach())
    exec(change, scope)
    torch.testing.assert_close(trainer.train_step(x).loss, model(x).detach())
