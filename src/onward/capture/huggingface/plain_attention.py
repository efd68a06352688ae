"""Recognizes an `eager_attention_forward` that is `softmax(scale q k^T + bias + mask) v` alone."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from onward.model_state.code import module_of

Function = Callable[..., Any]


def plain_functions(model: torch.nn.Module) -> dict[Function, set[str]]:
    """Returns the `eager_attention_forward` of each file of the model's classes, with the forms in
    which it computes `softmax(scale q k^T + bias + mask) v`. They are found by calling it on random
    numbers, so that attention sinks, soft caps and the like show."""
    found: dict[Function, set[str]] = {}
    classes = {c for m in model.modules() for c in type(m).__mro__}
    for file in {module_of(c) for c in classes}:
        function = getattr(sys.modules.get(file), "eager_attention_forward", None)
        if inspect.isfunction(function) and function not in found:
            found[function] = _forms(function)
    return found


def _forms(function: Function) -> set[str]:
    """Returns those of "scale", "no scale", "bias", "groups" in which a function is plain; none if
    not with a scale. groups: several query heads share a key head."""
    parameters = inspect.signature(function).parameters
    if _reads_its_keywords(function) or not _agrees(function, scaling=0.3):
        return set()
    forms = {"scale"}
    if _agrees(function, scaling=None):
        forms.add("no scale")
    if "position_bias" in parameters and _agrees(function, scaling=0.3, biased=True):
        forms.add("bias")
    if _agrees(function, scaling=0.3, groups=2):
        forms.add("groups")
    return forms


def _reads_its_keywords(function: Function) -> bool:
    """Returns whether the function's body reads its `**kwargs`."""
    rest = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind == p.VAR_KEYWORD
    ]
    for step in dis.get_instructions(function):
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith("LOAD") and any(name in names for name in rest):
            return True
    return False


def _agrees(
    function: Function, scaling: float | None, biased: bool = False, groups: int = 1
) -> bool:
    """Returns whether a function gives the formula's numbers, also for queries that see few keys or
    none."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = numbers(2, 4, 3, 6), numbers(2, 4 // groups, 5, 6), numbers(2, 4 // groups, 5, 6)
    mask = torch.zeros(2, 1, 3, 5)
    mask[0, :, 1, 2:] = mask[1, :, 2, :] = torch.finfo(torch.float32).min
    wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ wide_k.transpose(2, 3) * (6**-0.5 if scaling is None else scaling)
    more: dict[str, Any] = {}
    if biased:
        more["position_bias"] = numbers(1, 4, 3, 5)
        scores = scores + more["position_bias"]
    module = SimpleNamespace(num_key_value_groups=groups, training=False)
    for added in (None, mask):
        whole = scores if added is None else scores + added
        want = (whole.softmax(-1) @ wide_v).transpose(1, 2)
        try:
            have, _ = function(module, q, k, v, added, scaling=scaling, dropout=0.0, **more)
        except Exception:  # it reads attributes that this module lacks
            return False
        if have.shape != want.shape or not torch.allclose(have, want, rtol=1e-5, atol=1e-5):
            return False
    return True


__all__ = ["plain_functions"]
