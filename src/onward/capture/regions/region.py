"""Region: what one region runs, as `kernels.Part` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from onward.model_state import Snapshot

TENSOR = object()  # stands in a call's leaves where a tensor does


@dataclass
class CapturedRegion:
    """A part of the model that runs in PyTorch.

    path: of the module in the model. reason: why it is no part of the graph. operator: where it is
    a single one, its name. draws: whether it draws random numbers of torch's. sets: paths of the
    values that its calls set in its own modules.
    """

    path: str
    reason: str
    call: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    module: torch.nn.Module | None = None
    operator: str = ""
    draws: bool = False
    sets: tuple[str, ...] = ()

    def parameters(self) -> Sequence[torch.Tensor]:
        """In the order of the graph's inputs; as they are now."""
        return [] if self.module is None else list(self.module.parameters())

    def buffers(self) -> Sequence[torch.Tensor]:
        return [] if self.module is None else list(self.module.buffers())

    def way_back(self) -> Callable[[], None]:
        """Undoes what calls have set in the modules since; what they write into buffers stays."""
        if self.module is None or not self.sets:
            return _nothing
        return Snapshot(self.module, None).restore

    def run(
        self, xs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The results that are tensors."""
        return self.call(xs, parameters)


@dataclass(frozen=True)
class Form:
    """How a call is put together from its tensors: its tree, and its other leaves."""

    spec: pytree.TreeSpec
    fixed: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Form, list[torch.Tensor]]:
        leaves, spec = pytree.tree_flatten(value)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        fixed = tuple(TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
        return cls(spec, fixed), tensors

    def built(self, tensors: Sequence[torch.Tensor]) -> Any:
        rest = iter(tensors)
        leaves = [next(rest) if x is TENSOR else x for x in self.fixed]
        return pytree.tree_unflatten(leaves, self.spec)


def module_region(
    module: torch.nn.Module, path: str, reason: str, form: Form, draws: bool
) -> CapturedRegion:
    """The call of a module, hooks and all. form: of its arguments and keywords."""
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
    """The call of an operator. form: of its arguments and keywords."""

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
    """In the mode that the capture was in."""
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
