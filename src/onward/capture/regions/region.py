"""CapturedRegion: what one region runs; the implementation of `kernels.EagerPart`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from onward.model_state import Snapshot

TENSOR = object()  # placeholder for a tensor among the leaves of a call


@dataclass
class CapturedRegion:
    """A submodule or a single operator that runs in PyTorch.

    path: the module's path in the model. reason: why it is not in the graph. call: (inputs,
    parameters) -> the results that are tensors. module: None for an operator. operator: its name;
    "" for a module. draws: whether it draws torch's random numbers. sets: paths of the values that
    its calls set in its own modules.
    """

    path: str
    reason: str
    call: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    module: torch.nn.Module | None = None
    operator: str = ""
    draws: bool = False
    sets: tuple[str, ...] = ()

    def parameters(self) -> Sequence[torch.Tensor]:
        """Returns the module's present parameters, in the order of the op's inputs."""
        return [] if self.module is None else list(self.module.parameters())

    def buffers(self) -> Sequence[torch.Tensor]:
        """Returns the module's present buffers."""
        return [] if self.module is None else list(self.module.buffers())

    def way_back(self) -> Callable[[], None]:
        """Returns a function that undoes what later calls set in the modules; it does not restore
        buffers' numbers."""
        if self.module is None or not self.sets:
            return _nothing
        return Snapshot(self.module, None).restore

    def run(
        self, xs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Runs the region on the tensors among its arguments. Returns the results that are tensors.
        parameters: to use in place of the module's own."""
        return self.call(xs, parameters)


@dataclass(frozen=True)
class Form:
    """The structure of a call's arguments or results without their tensors.

    spec: the tree. fixed: its leaves, with TENSOR in place of each tensor."""

    spec: pytree.TreeSpec
    fixed: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Form, list[torch.Tensor]]:
        """Returns the structure of a value, and its tensors."""
        leaves, spec = pytree.tree_flatten(value)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        fixed = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        return cls(spec, fixed), tensors

    def built(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns a value of this structure with these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if x is TENSOR else x for x in self.fixed]
        return pytree.tree_unflatten(leaves, self.spec)


def module_region(
    module: torch.nn.Module, path: str, reason: str, form: Form, draws: bool
) -> CapturedRegion:
    """Returns the region of a module's call, with its hooks and present training flags. form: the
    structure of (args, kwargs)."""
    flags = [m.training for m in module.modules()]
    names = [n for n, _ in module.named_parameters()]

    def call(
        xs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        args, kwargs = form.built(xs)
        own = list(module.parameters())
        with _in_mode(module, flags):
            if all(p is q for p, q in zip(parameters, own, strict=True)):
                made = module(*args, **kwargs)
            else:
                given = dict(zip(names, parameters, strict=True))
                made = functional_call(module, given, args, kwargs)
        return [y for y in pytree.tree_leaves(made) if isinstance(y, torch.Tensor)]

    return CapturedRegion(path, reason, call, module, draws=draws)


def operator_region(
    target: Any, path: str, reason: str, name: str, form: Form, draws: bool
) -> CapturedRegion:
    """Returns the region of an operator's call. form: the structure of (args, kwargs)."""

    def call(
        xs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        args, kwargs = form.built(xs)
        made = target(*args, **kwargs)
        return [y for y in pytree.tree_leaves(made) if isinstance(y, torch.Tensor)]

    return CapturedRegion(path, reason, call, operator=name, draws=draws)


def _nothing() -> None:
    pass


@contextmanager
def _in_mode(module: torch.nn.Module, flags: Sequence[bool]) -> Any:
    """A context in which the modules within have these training flags."""
    modules = list(module.modules())
    before = [m.training for m in modules]
    if before == list(flags):
        yield
        return
    for m, flag in zip(modules, flags, strict=True):
        m.training = flag
    try:
        yield
    finally:
        for m, flag in zip(modules, before, strict=True):
            m.training = flag


__all__ = ["TENSOR", "CapturedRegion", "Form", "module_region", "operator_region"]
