"""Guards watch what code reads in other ways than as a plain global: keys alone, code under a
library's decorator, modules within packages, folders that have a library's name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onward
from onward.model_state import Sweep, Walk
from onward.model_state.code import is_aside, is_own, origin

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
Read = Callable[[Any], float]


class Reading(nn.Module):
    """A model whose loss is in proportion to what `read` returns, squared."""

    def __init__(self, read: Read | None = None, **held: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.read = read
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by = 1.0 if self.read is None else self.read(self)
        return (self.inner(x) * by).square().mean()


def assert_noticed(model: nn.Module, change: Callable[[Any], None]) -> None:
    """The sweep of each step sees the change, and so does a comparison of the facts."""
    before = Walk(model, None)
    sweep = Sweep(before)
    assert sweep.same()
    facts = Walk(model, None).facts
    assert facts == before.facts
    change(model)
    assert not sweep.same()
    assert Walk(model, None).facts != facts


def assert_follows(model: nn.Module, change: Callable[[Any], None]) -> None:
    """A step after the change has eager's loss, which the change moves."""
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    before = trainer.train_step(X).loss
    change(model)
    with torch.no_grad(), onward.eager():
        expected = model(X)
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(trainer.train_step(X).loss, expected)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Imports a module of the user's, in a package, from its text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)

    def made(package: str, **texts: str) -> Any:
        folder = tmp_path / package
        folder.mkdir()
        for name, text in {"__init__": "", **texts}.items():
            (folder / f"{name}.py").write_text(text)
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
        origin.cache_clear()
        return [importlib.import_module(f"{package}.{name}") for name in texts][-1]

    yield made
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)
    origin.cache_clear()


# ---- keys


def other_keys(model: Any) -> None:
    a, b = model.flags.values()
    model.flags.clear()
    model.flags.update({"c": a, "b": b})


def another_order(model: Any) -> None:
    model.flags.move_to_end("a")
    model.flags.move_to_end("c")


def other_attributes(model: Any) -> None:
    del model.one, model.two
    model.three = model.two = True


def another_child(model: Any) -> None:
    children = model.flags._modules
    a, b = children.pop("a"), children.pop("b")
    children.update({"c": a, "b": b})


MAPPINGS: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "dict": ({"flags": {"a": True, "b": True}}, other_keys),
    "dict of functions": ({"flags": {"a": torch.relu, "b": torch.relu}}, other_keys),
    "ordered dict": ({"flags": OrderedDict(a=1.0, b=1.0, c=1.0)}, another_order),
    "attributes": ({"one": True, "two": True}, other_attributes),
    "modules": ({"flags": nn.ModuleDict({"a": nn.Tanh(), "b": nn.ReLU()})}, another_child),
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_other_keys_of_the_same_values_are_noticed(kind: str) -> None:
    held, change = MAPPINGS[kind]
    assert_noticed(Reading(**held), change)


def test_a_step_follows_a_changed_key() -> None:
    model = Reading(lambda m: 2.0 if "a" in m.flags else 1.0, flags={"a": True, "b": True})
    assert_follows(model, other_keys)


# ---- code under a library's decorator

GAIN = 1.0
COUNT = 0


@torch.no_grad()
def without_grad() -> float:
    return GAIN


@torch.autocast("cpu", enabled=False)
def without_autocast() -> float:
    return GAIN


@contextlib.contextmanager
def context() -> Iterator[float]:
    yield GAIN


def in_context() -> float:
    with context() as found:
        return found


@functools.singledispatch
def dispatched(x: object) -> float:
    return 0.0


@dispatched.register
def _(x: float) -> float:
    return GAIN


def plain() -> float:
    return GAIN


not_compiled: Any = torch.compiler.disable(plain)


@torch.enable_grad()
@torch.no_grad()
def twice() -> float:
    return GAIN


@torch.no_grad()
def counted() -> float:
    global COUNT
    COUNT += 1
    return float(COUNT)


class Decorated(nn.Linear):
    @torch.no_grad()
    def gain(self) -> float:
        return GAIN

    @functools.singledispatchmethod
    def by_type(self, x: object) -> float:
        return 0.0

    @by_type.register
    def _(self, x: float) -> float:
        return GAIN


class DecoratedForward(nn.Linear):
    @torch.enable_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * GAIN


@pytest.fixture
def gain() -> Iterator[Callable[[Any], None]]:
    """Changes the global that the functions read; afterwards it is as before."""
    yield lambda _: globals().update(GAIN=2.0)
    globals().update(GAIN=1.0, COUNT=0)


DECORATED: dict[str, Read] = {
    "no_grad": lambda _: without_grad(),
    "autocast": lambda _: without_autocast(),
    "contextmanager": lambda _: in_context(),
    "singledispatch": lambda _: dispatched(1.0),
    "compiler.disable": lambda _: not_compiled(),
    "two": lambda _: twice(),
    "method": lambda m: m.other.gain(),
    "singledispatchmethod": lambda m: m.other.by_type(1.0),
}


@pytest.mark.parametrize("decorator", DECORATED)
def test_a_global_under_a_decorator_is_watched(decorator: str, gain: Callable[[Any], None]) -> None:
    assert_noticed(Reading(DECORATED[decorator], other=Decorated(4, 4)), gain)


def test_a_decorated_forward_is_looked_into(gain: Callable[[Any], None]) -> None:
    assert_noticed(nn.Sequential(DecoratedForward(4, 4)), gain)


def test_a_function_registered_later_is_noticed() -> None:
    def of_ints(x: int) -> float:
        return 3.0

    assert_noticed(
        Reading(DECORATED["singledispatch"]), lambda _: dispatched.register(int, of_ints) and None
    )


def test_a_step_follows_what_a_decorated_function_reads(gain: Callable[[Any], None]) -> None:
    assert_follows(Reading(DECORATED["no_grad"]), gain)


def test_a_side_effect_under_a_decorator_is_refused(gain: Callable[[Any], None]) -> None:
    model = Reading(lambda _: counted())
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(onward.OnwardError, match="COUNT"):
        trainer.train_step(X)


# ---- methods that are called without their name


class Base:
    def __init__(self) -> None:
        self.by = GAIN

    def more(self) -> float:
        return GAIN


class Made(Base):
    def __init__(self) -> None:
        super().__init__()


class Inherits(Base):
    def __init__(self) -> None:
        pass


class New:
    by: float

    def __new__(cls) -> New:
        made = super().__new__(cls)
        made.by = GAIN
        return made


@dataclass
class Factory:
    by: float = field(default_factory=lambda: GAIN)


@dataclass
class After:
    by: float = 0.0

    def __post_init__(self) -> None:
        self.by = GAIN


class Meta(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.by = GAIN
        return made


class OfMeta(metaclass=Meta):
    by: float


class Said:
    def __str__(self) -> str:
        return str(GAIN)


class Overrides(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(4, 2, 8, dropout=0.0, batch_first=True)

    def _ff_block(self, x: torch.Tensor) -> torch.Tensor:
        return super()._ff_block(x) * GAIN


class Chosen(nn.Linear):
    kind = "relu"
    whole = "method_of_its_name"

    def act_relu(self) -> float:
        return GAIN

    @staticmethod
    def tanh_act() -> float:
        return GAIN

    def method_of_its_name(self) -> float:
        return GAIN

    def not_called(self) -> float:
        return UNREAD


UNREAD = 0.0
CALLS: dict[str, Read] = {
    "__init__": lambda _: Made().by,
    "method of a base": lambda _: Inherits().more(),
    "__new__": lambda _: New().by,
    "default_factory": lambda _: Factory().by,
    "__post_init__": lambda _: After().by,
    "metaclass": lambda _: OfMeta().by,
    "__str__": lambda _: float(str(Said())),
    "computed": lambda m: getattr(m.other, "act_" + m.other.kind)(),
    "computed, its end": lambda m: getattr(m.other, f"{'tanh'}_act")(),
    "held": lambda m: getattr(m.other, m.other.whole)(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_without_the_methods_name_is_watched(call: str, gain: Callable[[Any], None]) -> None:
    assert_noticed(Reading(CALLS[call], other=Chosen(4, 4)), gain)


def test_a_method_that_a_library_calls_is_watched(gain: Callable[[Any], None]) -> None:
    assert_noticed(nn.Sequential(Overrides()), gain)


@pytest.mark.parametrize("call", ["computed", "held"])
def test_a_method_that_no_code_calls_is_not_watched(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep(Walk(Reading(CALLS[call], other=Chosen(4, 4)), None))
    monkeypatch.setitem(globals(), "UNREAD", 1.0)
    assert sweep.same()


def test_a_step_follows_what_a_constructor_reads(gain: Callable[[Any], None]) -> None:
    assert_follows(Reading(CALLS["__init__"]), gain)


# ---- modules of the user's own

SETTINGS = """
SCALE = 1.0
TABLE = {"a": 1.0}
UNREAD = 0
def get(): return SCALE
class Box:
    by = 1.0
"""
READER = """
import own_package
def dotted(m): return own_package.settings.SCALE
def element(m): return own_package.settings.TABLE["a"]
def function(m): return own_package.settings.get()
def class_attribute(m): return own_package.settings.Box.by
def attribute(m): return m.held.SCALE
def in_a_list(m): return m.several[0].get()
def closure(held):
    def read(m): return held.SCALE
    return read
in_closure = closure(own_package.settings)
def imported(m):
    import own_package.settings as found
    return found.SCALE
def imported_whole(m):
    import own_package.settings
    return own_package.settings.SCALE
def imported_name(m):
    from own_package.settings import TABLE
    return TABLE["a"]
def imported_near(m):
    from . import settings
    return settings.SCALE
def imported_from_near(m):
    from .settings import TABLE
    return TABLE["a"]
"""
READERS = [
    "dotted", "element", "function", "class_attribute", "attribute", "in_a_list", "in_closure",
    "imported", "imported_whole", "imported_name", "imported_near", "imported_from_near",
]  # fmt: skip


def of_package(name: str, own_folder: Callable[..., Any]) -> tuple[Reading, Any]:
    """A model that reads a module of the user's in the way of that name, and that module."""
    reader = own_folder("own_package", settings=SETTINGS, reader=READER)
    settings = reader.own_package.settings
    return Reading(getattr(reader, name), held=settings, several=[settings]), settings


def double(settings: Any) -> None:
    settings.SCALE = settings.TABLE["a"] = settings.Box.by = 2.0


@pytest.mark.parametrize("name", READERS)
def test_a_module_is_watched_however_it_is_reached(
    name: str, own_folder: Callable[..., Any]
) -> None:
    model, settings = of_package(name, own_folder)
    assert_noticed(model, lambda _: double(settings))


@pytest.mark.parametrize("name", READERS)
def test_what_no_code_reads_of_a_module_may_change(
    name: str, own_folder: Callable[..., Any]
) -> None:
    model, settings = of_package(name, own_folder)
    sweep = Sweep(Walk(model, None))
    settings.UNREAD = 1
    assert sweep.same()


@pytest.mark.parametrize("name", ["dotted", "attribute", "imported_name"])
def test_a_step_follows_a_module(name: str, own_folder: Callable[..., Any]) -> None:
    model, settings = of_package(name, own_folder)
    assert_follows(model, lambda _: double(settings))


def test_a_module_that_the_forward_imports_first_costs_no_capture(
    own_folder: Callable[..., Any], captures: list[int]
) -> None:
    model, _ = of_package("imported", own_folder)
    del sys.modules["own_package.settings"]
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    trainer.train_step(X)
    first = len(captures)
    trainer.train_step(X)
    trainer.train_step(X)
    assert len(captures) == first == 1
    double(sys.modules["own_package.settings"])
    with torch.no_grad(), onward.eager():
        expected = model(X)
    torch.testing.assert_close(trainer.train_step(X).loss, expected)


# ---- folders that have a library's name

LAYERS = """
import torch
SCALE = 1.0
def scaled(x): return x * SCALE
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.by = 1.0
    def forward(self, x): return scaled(self.inner(x)) * self.by
"""


IN_FOLDERS: dict[str, Callable[[Any, Any], None]] = {
    "attribute": lambda model, _: setattr(model[0], "by", 2.0),
    "submodule": lambda model, _: setattr(model[0], "inner", nn.Identity()),
    "frozen": lambda model, _: setattr(model[0].inner.weight, "requires_grad", False),
    "global": lambda _, layers: setattr(layers, "SCALE", 2.0),
}


@pytest.mark.parametrize("change", IN_FOLDERS)
@pytest.mark.parametrize("folder", ["datasets", "lightning"])
def test_a_folder_that_has_a_librarys_name_is_watched(
    folder: str, change: str, own_folder: Callable[..., Any]
) -> None:
    layers = own_folder(folder, layers=LAYERS)
    assert_noticed(nn.Sequential(layers.Layer()), lambda m: IN_FOLDERS[change](m, layers))


def test_an_installed_library_stays_aside() -> None:
    import accelerate

    assert is_aside("accelerate") and is_aside("accelerate.utils.anything")
    assert origin("accelerate.state") == "opaque"
    assert not is_own(accelerate.Accelerator.__init__)
