"""The modules of a list that a loop over experts takes by number: one module for all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module, ModuleList

from onward.capture.expert_loops.batched_turn import Each, Loop, is_each, of_loop

log = logging.getLogger("onward")
_of_list: Any = ModuleList.__getitem__
_told: list[bool] = []  # one line a process


def one_of_modules(modules: ModuleList, number: Any) -> Any:
    """`modules[number]`, which stands for `ModuleList.__getitem__` during a trace."""
    if not is_each(number) or number.values is None:
        return _of_list(modules, number)
    loop = number.loop
    if max(loop.now) >= len(modules) or number.values != [*range(loop.groups)]:
        return _of_list(modules, int(number))
    own = [_of_list(modules, g) for g in range(min(loop.groups, len(modules)))]
    kinds = _kinds(own)
    kind = loop.ask([*kinds, *range(len(own), loop.groups)])  # modules that differ: a turn each
    if len(loop.now) == 1 < loop.groups:
        return own[loop.now[0]]
    # an expert of another kind has no rows in this turn: any module of this kind stands for it
    own = [m if k == kind else own[kind] for m, k in zip(own, kinds, strict=True)]
    if torch.is_grad_enabled() and not loop.of_all and not _told:
        _told.append(True)
        log.warning(
            "the model loops over experts in a torch.nn.ModuleList: an expert that gets no "
            "token in a batch has gradients of zero here, and grad=None in eager PyTorch, so "
            "that momentum and weight decay still move its parameters (docs/guarantees.md, "
            "Not promised)"
        )
    return Experts(loop, own[: max(loop.now) + 1])


class Experts:
    """One callable for modules that are alike, each of which is called with its expert's rows."""

    def __init__(self, loop: Loop, modules: Sequence[Module]) -> None:
        self._loop, self._modules = loop, modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._as_each():
            return self._modules[0](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise of_loop(f"{name} of modules")

    @contextmanager
    def _as_each(self) -> Iterator[None]:
        """Runs its body with the parameters of all modules in the place of the first one's."""
        inner = [*zip(*(m.modules() for m in self._modules), strict=True)]
        before = [dict(same[0]._parameters) for same in inner]
        stacked: dict[int, Each] = {}
        try:
            for same in inner:
                for name, first in same[0]._parameters.items():
                    if first is None:
                        continue
                    if id(first) not in stacked:
                        all_ = [m._parameters[name] for m in same]
                        stacked[id(first)] = Each(self._loop, torch.stack(all_))  # type: ignore[arg-type]
                    same[0]._parameters[name] = stacked[id(first)]  # type: ignore[assignment]
            yield
        finally:
            for same, own in zip(inner, before, strict=True):
                same[0]._parameters.update(own)


def _kinds(modules: Sequence[Module]) -> list[int]:
    """The first module of each one's kind: those that differ in the numbers of parameters alone."""
    kinds: list[int] = []
    for i, module in enumerate(modules):
        firsts = (k for k in dict.fromkeys(kinds) if _alike(modules[k], module))
        kinds.append(next(firsts, i))
    return kinds


def _alike(one: Module, other: Module) -> bool:
    mine, others = [*one.modules()], [*other.modules()]
    return len(mine) == len(others) and all(map(_same, mine, others))


def _same(one: Module, other: Module) -> bool:
    if _kind(one) is not _kind(other) or one._buffers or other._buffers:
        return False
    if any(v for m in (one, other) for k, v in vars(m).items() if k.endswith("_hooks")):
        return False
    if [*one._modules] != [*other._modules] or [*one._parameters] != [*other._parameters]:
        return False
    pairs = zip(one._parameters.values(), other._parameters.values(), strict=True)
    if not all(_fitting(a, b) for a, b in pairs):
        return False
    mine, others = _settings(one), _settings(other)
    return [*mine] == [*others] and all(_equal(mine[k], others[k]) for k in mine)


def _kind(module: Module) -> type:
    """A module's class; an export gives each module one of its own before that."""
    kind = type(module)
    while any(base.__name__.endswith("AttrProxy") for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return kind


def _fitting(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)


def _settings(module: Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if not k.startswith("_")}


def _equal(a: Any, b: Any) -> bool:
    simple = (bool, int, float, str, torch.Size, torch.dtype, type(None))
    return a is b or (type(a) is type(b) and type(a) in simple and a == b)
