"""In which form the state of each parameter is kept, and the way from one form to another.

A form is a name of `Optimizer.forms`; "" is the parameter's own precision. Between forms numbers
go through the parameter's precision: what is kept in fewer bits is taken to the nearest. Numbers
that were read from bf16 or from codes are the very same bits there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onward.errors import OnwardError
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.ops.optimizers import Optimizer as Record
from onward.graph.types import DType, Type
from onward.kernels import moments, torch_dtype

SMALL = 4096  # elements; below, 8 bits spare nothing (bitsandbytes draws the line there too)
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_OWN = "fp32"  # the option's word for ""


class StateForms:
    """The forms of one optimizer's state, as the option asks for them.

    bf16: of every fp32 parameter. 8bit: not of parameters with fewer than 4096 elements, nor of
    embeddings, whose rows have gradients of very different sizes; these stay fp32. A parameter of
    another dtype keeps its own. is_table: whether a parameter is an embedding's.
    """

    def __init__(
        self, optimizer_state: str, record: Record, is_table: Callable[[torch.Tensor], bool]
    ) -> None:
        self._record, self._is_table = record, is_table
        self._asked = "" if optimizer_state == _OWN else optimizer_state
        if self._asked and self._asked not in record.forms:
            able = [r.torch for r in OPTIMIZERS.values() if self._asked in r.forms]
            raise OnwardError(
                f"optimizer_state={optimizer_state!r} is not supported for {record.torch}; fix: "
                f"use {' or '.join(able)}, or optimizer_state={_OWN!r}"
            )

    @property
    def are_own(self) -> bool:
        """Whether every parameter has its own precision."""
        return not self._asked

    def of(self, parameter: torch.Tensor) -> str:
        """The form of this parameter's state."""
        if not self._asked or parameter.dtype != torch.float32:
            return ""
        if self._asked == "8bit" and (parameter.numel() < SMALL or self._is_table(parameter)):
            return ""
        return self._asked


def tensors_of(record: Record, form: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that hold a parameter's state, by name; without memory."""
    if not form:
        return {slot: torch.empty_like(parameter, device="meta") for slot in record.slots}
    types = record.tensors(form, Type(DType.FLOAT, tuple(parameter.shape)))
    return {
        name: torch.empty(type.shape, dtype=torch_dtype(type.dtype), device="meta")  # type: ignore[arg-type]
        for name, type in types.items()
    }


def found_form(record: Record, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> str:
    """The form that saved tensors, by name, are of."""
    for form in record.forms:
        expected = tensors_of(record, form, parameter)
        first = next(iter(expected))
        more = set(expected) - set(record.slots)
        low = getattr(tensors.get(first), "dtype", None) == expected[first].dtype
        if more & set(tensors) or (low and parameter.dtype == torch.float32 and not more):
            return form
    return ""


def shown(tensors: Mapping[str, torch.Tensor], form: str, slot: str) -> torch.Tensor:
    """A slot in the parameter's precision: a copy, unless it is kept so."""
    if form == "8bit":
        return moments.dequantized(tensors[slot], tensors[f"{slot}_absmax"], _SIGNED[slot])
    return tensors[slot].float() if form == "bf16" else tensors[slot]


def kept(x: torch.Tensor, form: str, slot: str) -> dict[str, torch.Tensor]:
    """A slot that is given in the parameter's precision, in this form."""
    if form == "8bit":
        signed = _SIGNED[slot]
        # below 0 a second moment has no root, here as in torch
        x = x if signed else torch.where(x < 0.0, torch.nan, x)
        codes, absmax = moments.quantized(x, signed)
        return {slot: codes, f"{slot}_absmax": absmax}
    return {slot: x.to(torch.bfloat16) if form == "bf16" else x}


def converted(
    tensors: Mapping[str, torch.Tensor], form: str, into: str, slots: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """State of one form in another."""
    found: dict[str, torch.Tensor] = {}
    for slot in slots:
        found |= kept(shown(tensors, form, slot), into, slot)
    return found
