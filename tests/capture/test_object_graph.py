"""What a forward reads, however long the way there is."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.model_state import Walk, code, walk


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


RECURSIVE = """
FACTOR = 1.0

def flat(x, depth=2):
    return [y for z in x for y in flat(z, depth - 1)] if depth else [x]

def even(x, n): return x * FACTOR if n == 0 else odd(x, n - 1)

def odd(x, n): return x if n == 0 else even(x, n - 1)
"""


@pytest.mark.parametrize("call", ["scaled(x, 4)", "flat([[x]])[0] * FACTOR"])
def test_functions_that_call_themselves_are_walked_once(call: str) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(f"{RECURSIVE}\nscaled = even\ndef called(x): return {call}", scope)
    model = Chained(scope["called"])
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(2, 3)
    before = float(trainer.train_step(x).loss)
    scope["FACTOR"] = 3.0
    torch.testing.assert_close(trainer.train_step(x).loss, torch.tensor(3 * before))


def holding(kind: str) -> Any:
    model: Any = Chained(torch.neg)
    if kind == "many":
        for i in range(20_000):
            setattr(model, f"a{i}", [i])
    elif kind == "deep":
        for _ in range(3000):
            model.held = [getattr(model, "held", None)]
    elif kind == "cycle":
        model.held = {"model": model, "list": [model]}
        model.held["itself"] = model.held
    else:
        model.held = [{i: [float(j) for j in range(30)] for i in range(100)} for _ in range(400)]
    return model


@pytest.mark.parametrize(("kind", "told"), [("many", 0), ("deep", 1), ("cycle", 0), ("wide", 1)])
def test_a_walk_ends_whatever_it_meets(
    kind: str, told: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walk, "_told", [])
    monkeypatch.setattr(walk, "VALUES", 40_000 if kind == "many" else 5_000)
    model = holding(kind)
    with caplog.at_level(logging.WARNING, "onward"):
        seen, again = Walk(model, None), Walk(model, None)
    assert seen.facts == again.facts
    assert len(caplog.messages) == told
    assert all(m.startswith("model.held holds ") and len(m) <= 300 for m in caplog.messages)
    assert len(seen.tensors) == 2


def test_a_slow_walk_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_told", [])
    monkeypatch.setattr(walk, "AT_LEAST", 1_000)
    monkeypatch.setattr(walk, "SECONDS", -1.0)
    seen = Walk(holding("wide"), None)
    assert len(seen.facts) < 100_000
    assert walk._told


@pytest.mark.parametrize(
    ("package", "mark", "whose"),
    [
        ("transformers_of_mine", "modeling_utils", "own"),
        ("vendored_a.transformers", "modeling_utils", "package"),
        ("vendored_b.deep.peft", "peft_model", "package"),
        ("vendored_c.transformers", "my_blocks", "own"),  # a folder of the user's own transformers
    ],
)
def test_a_copy_of_a_library_is_told_by_its_package(
    package: str, mark: str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path
    for part in package.split("."):
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (folder / f"{mark}.py").write_text("def f(x): return x")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module(f"{package}.{mark}")
    assert code.origin(module.__name__) == whose
    assert code.is_own(module.f) == (whose == "own")


@pytest.mark.slow
def test_a_checkout_of_transformers(tmp_path: Path) -> None:
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.submodule_search_locations
    (tmp_path / "transformers").symlink_to(found.submodule_search_locations[0])
    program = """
        import torch, transformers, onward
        from transformers import BertConfig, BertForSequenceClassification
        model = BertForSequenceClassification(BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32))
        assert "site-packages" not in transformers.__file__
        trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ids = torch.randint(3, 60, (4, 7))
        for _ in range(2):
            trainer.train_step(input_ids=ids, labels=ids[:, 0] % 2)
        print("trained")
    """
    paths = [str(tmp_path), str(Path(onward.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "trained" in done.stdout, done.stderr[-2000:]
