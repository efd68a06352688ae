"""Never stale: whatever a forward reads may be changed between two steps, and the next step is
eager's of the changed model. A table of changes, each of which moves eager's loss."""

from __future__ import annotations

import copy
import enum
import functools
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onward

GLOBAL = 1.0
GLOBAL_LIST = [1.0, 2.0]
UNREAD = 0


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


def tripled(x: torch.Tensor) -> torch.Tensor:
    return 3.0 * x


def through_global(x: torch.Tensor) -> torch.Tensor:
    """A function of a function that reads a global."""
    return x * factor()


def factor() -> float:
    return GLOBAL * GLOBAL_LIST[0]


def with_default(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x * by


def with_attribute(x: torch.Tensor) -> torch.Tensor:
    return x * with_attribute.by  # type: ignore[attr-defined]


with_attribute.by = 1.0  # type: ignore[attr-defined]


class Kind(enum.Enum):
    PLAIN = 1.0
    STRONG = 3.0


@dataclass
class Options:
    gain: float = 1.0
    inner: dict[str, list[float]] = field(default_factory=lambda: {"gains": [1.0, 1.0]})


@dataclass(slots=True)
class Slotted:
    gain: float = 1.0


class Level:
    """A plain object that holds another, and computes."""

    bias = 0.0

    def __init__(self, depth: int) -> None:
        self.gain = 1.0
        self.below = Level(depth - 1) if depth else None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain + self.bias
        return self.below.apply(x) if self.below is not None else x


class Values(nn.Module):
    """Reads a plain attribute of every kind; the loss is in proportion to each."""

    WEIGHT = 1.0
    WEIGHTS = (1.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)
        self.which = "inner"
        self.scale, self.count, self.flag, self.nothing = 1.0, 1, False, None
        self.pair, self.kind, self.dtype = (1.0, (1.0, 2.0)), Kind.PLAIN, torch.float32
        self.coefficients, self.nested = [1.0, 1.5], {"a": {"b": [1.0]}, "order": [0.5, 2.0]}
        self.chosen, self.queue = {0, 1}, deque([1.0, 1.0])
        self.options, self.slotted, self.level = Options(), Slotted(), Level(1)
        self.space = types.SimpleNamespace(gain=1.0, more=types.SimpleNamespace(gain=1.0))
        self.partial = functools.partial(torch.add, alpha=1.0)
        self.function = tripled
        self.functions = [through_global, with_default, with_attribute]
        self.closure = cell_of(1.0)
        self.mask, self.masks = torch.ones(8), [torch.ones(8)]
        self.array, self.number = np.ones(8, dtype=np.float32), np.float32(1.0)
        self.ordered = OrderedDict(a=2.0, b=3.0)
        self.register_buffer("tilt", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gain = self.scale * self.count * (1.2 if self.flag else 1.0) * self.pair[1][0]
        gain *= self.kind.value * self.coefficients[0] * self.nested["a"]["b"][0] * self.queue[0]
        gain *= self.options.gain * self.options.inner["gains"][1] * self.slotted.gain
        gain *= self.space.gain * self.space.more.gain * self.WEIGHT * self.WEIGHTS[0]
        gain *= float(self.number) * self.helper() * self.size * len(self.chosen)
        gain *= torch.finfo(self.dtype).bits / 32 * (0.9 if self.nothing is None else 1.0)
        for i, value in enumerate([*self.ordered.values(), *self.nested["order"]]):
            gain *= value ** (0.1 * i)
        h = self.level.apply(getattr(self, self.which)(x)) * gain
        for f in (self.function, self.closure, *self.functions):
            h = f(h)
        h = self.partial(h, h)
        h = h * self.mask * self.masks[0] * torch.from_numpy(self.array)
        for tensor in (self.other.bias, self.tilt, self.mask):
            h = h * getattr(tensor, "gain", 1.0)
        return h.square().mean()

    def helper(self) -> float:
        return 1.0

    @property
    def size(self) -> float:
        return 1.0

    def never_called(self) -> int:
        return UNREAD


class Block(nn.Module):
    POWER = 1.0

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("shift", torch.linspace(0.0, 1.0, 8))
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.drop(self.inner(x)) * self.gain + self.shift) * self.POWER


class Modules(nn.Module):
    """Modules in containers, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleDict({"one": nn.Linear(8, 5), "two": nn.Linear(8, 5)})
        self.scales = nn.ParameterList([torch.ones(8), torch.full((8,), 0.5)])
        self.activation: Callable[..., torch.Tensor] = torch.tanh
        self.extra: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for p in self.scales:
            x = x * p
        x = self.activation(x)
        if self.extra is not None:
            x = self.extra(x)
        return sum(head(x).square().mean() for head in self.heads.values())  # type: ignore


def cell_of(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of a variable that its closure holds; `set` writes the variable."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * value

    def write(new: float) -> None:
        nonlocal value
        value = new

    scaled.set = write  # type: ignore[attr-defined]
    return scaled


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
RATE = 1e-3


class Pair:
    """A model under a Trainer, and its twin under plain PyTorch."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = make().train()
        self.twin = copy.deepcopy(self.model)
        if isinstance(self.model, Values):
            self.model.closure = cell_of(1.0)  # a copy shares a function
        self.start = [p.detach().clone() for p in self.model.parameters()]
        optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.trainer = onward.Trainer(self.model, optimizer)
        self.changed: set[str] = set()

    @property
    def loss(self) -> float:
        return float(self.twin(X).detach())

    def restart(self) -> None:
        """The first weights again, where they still fit."""
        with torch.no_grad():
            for model in (self.model, self.twin):
                for p, start in zip(model.parameters(), self.start, strict=False):
                    if p.shape == start.shape:
                        p.copy_(start)

    def step(self) -> None:
        """One step of each; they agree."""
        held = {id(p) for g in self.trainer.optimizer.param_groups for p in g["params"]}
        self.twin.zero_grad()
        loss = self.twin(X)
        loss.backward()
        got = self.trainer.train_step(X).loss
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                if id(p) in held and q.requires_grad and q.grad is not None:
                    q.sub_(RATE * q.grad)
        torch.testing.assert_close(got, loss.detach(), rtol=2e-5, atol=0)
        for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def values() -> Pair:
    """One for all changes: each adds to those before."""
    return Pair(Values)


@pytest.fixture(scope="module")
def modules() -> Pair:
    return Pair(Modules)


Change = Callable[[Any], None]


def call(*lines: str) -> Change:
    """Runs statements in which `m` is the model."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for line in lines:
                exec(line, globals() | {"m": model})

    return change


def set_class(cls: type, name: str, value: Any) -> Change:
    return lambda _: setattr(cls, name, value)


def set_global(name: str, value: Any) -> Change:
    return lambda _: globals().__setitem__(name, value)


def new_forward(model: Any) -> None:
    plain = model.blocks[0].forward
    model.blocks[0].forward = lambda x: plain(x) * 1.2


def bound_forward(model: Any) -> None:
    def forward(self: Block, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.inner(x)) + self.shift

    model.blocks[1].forward = types.MethodType(forward, model.blocks[1])


def class_forward(self: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.cos(self.inner(x)) * self.gain + self.shift


class Other(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 0.7 + self.shift


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5


def code_reloaded(_: Any) -> None:
    """What an editor's reloading does."""
    with_default.__code__ = (lambda x, by=1.0: x * by * 1.1).__code__


def parametrize(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.blocks[0].inner, "weight", Halved())


OF_VALUES: dict[str, Change] = {
    "float": call("m.scale = 1.5"),
    "float back": call("m.scale = 1.0"),
    "int": call("m.count = 2"),
    "bool": call("m.flag = True"),
    "string": call("m.which = 'other'"),
    "none": call("m.nothing = 2"),
    "tuple": call("m.pair = (1.0, (0.5, 2.0))"),
    "enum": call("m.kind = Kind.STRONG"),
    "dtype": call("m.dtype = torch.float64"),
    "list element": call("m.coefficients[0] = 0.5"),
    "list reversed": call("m.coefficients.reverse()"),
    "list inserted": call("m.coefficients.insert(0, 0.8)"),
    "list popped": call("m.nested['order'].pop()"),
    "list emptied": call("m.nested['order'].clear()"),
    "list filled": call("m.nested['order'].append(3.0)"),
    "nested list element": call("m.nested['a']['b'][0] = 0.7"),
    "nested dict replaced": call("m.nested['a'] = {'b': [0.9]}"),
    "nested dict updated": call("m.nested['a'].update(b=[1.1])"),
    "set added": call("m.chosen.add(2)"),
    "set removed": call("m.chosen.discard(1)"),
    "deque": call("m.queue.appendleft(0.9)"),
    "ordered dict moved": call("m.ordered.move_to_end('a')"),
    "ordered dict key": call("m.ordered['c'] = 1.1"),
    "dataclass": call("m.options.gain = 1.1"),
    "dataclass, nested": call("m.options.inner['gains'][1] = 0.9"),
    "dataclass replaced": call("m.options = Options(gain=0.8)"),
    "slots": call("m.slotted.gain = 1.1"),
    "namespace": call("m.space.gain = 0.9"),
    "namespace in a namespace": call("m.space.more.gain = 1.1"),
    "object": call("m.level.gain = 1.2"),
    "object in an object": call("m.level.below.gain = 0.8"),
    "class attribute of an object": set_class(Level, "bias", 0.3),
    "method of an object's class": set_class(Level, "apply", lambda self, x: x * 0.9),
    "function": call("m.function = torch.sin"),
    "own function": call("m.function = doubled"),
    "function in a list": call("m.functions.append(tripled)"),
    "function's default": call("with_default.__defaults__ = (1.2,)"),
    "function's attribute": lambda _: setattr(with_attribute, "by", 0.8),
    "function's code": code_reloaded,
    "partial": call("m.partial = functools.partial(torch.add, alpha=0.5)"),
    "partial's keywords": call("m.partial.keywords['alpha'] = 0.4"),
    "closure": call("m.closure.set(1.3)"),
    "global": set_global("GLOBAL", 0.8),
    "global list": call("GLOBAL_LIST[0] *= 1.1"),
    "global function": set_global("factor", lambda: 0.8),
    "tensor": call("m.mask = torch.linspace(0.5, 1.0, 8)"),
    "tensor in place": call("m.mask.mul_(1.2)"),
    "tensor's data in place": call("m.mask.data.mul_(0.9)"),
    "tensor in a list": call("m.masks[0] = torch.linspace(1.0, 0.5, 8)"),
    "tensor in a list, in place": call("m.masks[0][3] = 2.0"),
    "array": call("m.array = np.full(8, 1.1, dtype=np.float32)"),
    "array in place": call("m.array[2] = 5.0"),
    "numpy number": call("m.number = np.float32(1.1)"),
    "class attribute": set_class(Values, "WEIGHT", 1.1),
    "class tuple": set_class(Values, "WEIGHTS", (0.9, 1.0)),
    "class attribute hidden": call("m.WEIGHT = 1.3"),
    "method of the class": set_class(Values, "helper", lambda self: 0.9),
    "method on the instance": call("m.helper = lambda: 1.1"),
    "property of the class": set_class(Values, "size", property(lambda self: 0.9)),
    "attribute of a parameter": call("m.other.bias.gain = 0.9"),
    "attribute of a parameter again": call("m.other.bias.gain = 1.4"),
    "attribute of a parameter gone": call("del m.other.bias.gain"),
    "attribute of a buffer": call("m.tilt.gain = 1.2"),
    "attribute of a tensor": call("m.mask.gain = 0.8"),
    "tensor as an attribute": call("m.tilt.gain = torch.full((8,), 1.1)"),
    "its numbers": call("m.tilt.gain.mul_(0.7)"),
}

OF_MODULES: dict[str, Change] = {
    "attribute": call("m.blocks[1].gain = 1.2"),
    "ratio": call("m.blocks[0].drop.p = m.blocks[1].drop.p = 1.0"),
    "flag": lambda m: m.blocks[1].drop.eval() and None,
    "flags of a subtree": lambda m: m.blocks.eval() and None,
    "flags back": lambda m: m.train() and None,
    "ratio back": call("m.blocks[0].drop.p = m.blocks[1].drop.p = 0.0"),
    "activation": call("m.activation = torch.sin"),
    "class attribute": set_class(Block, "POWER", 1.1),
    "forward of the class": set_class(Block, "forward", class_forward),
    "forward on the instance": new_forward,
    "forward bound": bound_forward,
    "forward off the instance": call("del m.blocks[1].forward"),
    "class": call("m.blocks[1].__class__ = Other"),
    "added": call("m.extra = Halved()"),
    "replaced": call("m.extra = nn.Tanh()"),
    "removed": call("m.extra = None"),
    "reordered": call("m.blocks._modules = dict(zip('01', reversed(list(m.blocks))))"),
    "in a dict": call("m.heads['two'] = copy.deepcopy(m.heads['one'])"),
    "out of a dict": call("m.heads.pop('two')"),
    "shared": call("m.blocks[0] = m.blocks[1]"),
    "appended": call("m.blocks.append(nn.LayerNorm(8))"),
    "its number": call("m.blocks[2].eps = 2.0"),
    "buffer": call("m.blocks[1].shift = torch.full((8,), 0.3)"),
    "buffer in place": call("m.blocks[1].shift.mul_(0.5)"),
    "parameter replaced": call("m.scales[0] = nn.Parameter(torch.full((8,), 1.2))"),
    "parameter appended": call("m.scales.append(nn.Parameter(torch.full((8,), 0.9)))"),
    "parameter tied": call("m.scales[1] = m.scales[0]"),
    "parameter of another size": call("m.scales[2].data = torch.full((1,), 0.8)"),
    "parameter turned": call("m.heads['one'].weight.data = torch.ones(5, 8).cumsum(1)"),
    "weights written": call("m.heads['one'].weight.mul_(0.5)"),
    "parametrization": parametrize,
}


# What a change undoes or builds on; it runs before it where it has not run in this process yet.
NEEDS = {
    "float back": "float",
    "flag": "ratio",
    "attribute of a parameter gone": "attribute of a parameter again",
    "its numbers": "tensor as an attribute",
    "flags of a subtree": "ratio",
    "flags back": "flags of a subtree",
    "ratio back": "ratio",
    "forward off the instance": "forward bound",
    "removed": "replaced",
    "its number": "appended",
    "parameter of another size": "parameter appended",
}


@pytest.fixture(scope="module", autouse=True)
def restored() -> Iterator[None]:
    """What the changes do to classes and to this module is undone."""
    changed = {
        Values: ("WEIGHT", "WEIGHTS", "helper", "size"),
        Block: ("POWER", "forward"),
        Level: ("bias", "apply"),
    }
    held = [(c, name, vars(c)[name]) for c, names in changed.items() for name in names]
    names, defaults, code = dict(globals()), with_default.__defaults__, with_default.__code__
    values = list(GLOBAL_LIST)
    yield
    for cls, name, attribute in held:
        setattr(cls, name, attribute)
    globals().update(names)
    GLOBAL_LIST[:] = values
    with_default.__defaults__, with_default.__code__ = defaults, code
    with_attribute.by = 1.0  # type: ignore[attr-defined]


def assert_noticed(pair: Pair, changes: dict[str, Change], name: str) -> None:
    if name in NEEDS and NEEDS[name] not in pair.changed:
        assert_noticed(pair, changes, NEEDS[name])
    pair.changed.add(name)
    pair.restart()
    pair.step()
    before = pair.loss
    for model in (pair.model, pair.twin):
        changes[name](model)
    assert not math.isclose(pair.loss, before, rel_tol=2e-4), "eager shows nothing of the change"
    pair.step()


@pytest.mark.parametrize("change", OF_VALUES)
def test_a_changed_value_holds_from_the_next_step_on(values: Pair, change: str) -> None:
    assert_noticed(values, OF_VALUES, change)


@pytest.mark.parametrize("change", OF_MODULES)
def test_a_changed_module_holds_from_the_next_step_on(modules: Pair, change: str) -> None:
    assert_noticed(modules, OF_MODULES, change)
