"""The form in which each parameter's optimizer state is kept, and conversions between forms.

A form is a key of `Optimizer.forms`; "" is the parameter's own precision. Conversions go through
that precision and round to nearest; a round trip from bf16 or 8-bit codes gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onward.errors import OnwardError
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.ops.optimizers import Optimizer as Record
from onward.graph.types import DType, Type
from onward.kernels import moments, torch_dtype

SMALL = 4096  # elements; below, 8 bits save nothing (bitsandbytes has the same limit)
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_OWN = "fp32"  # the option's name of the form ""


class StateForms:
    """Chooses the form of each parameter's state, as the option asks.

    bf16: every fp32 parameter. 8bit: every fp32 parameter except those with fewer than 4096
    elements and embeddings, whose rows have gradients of very different sizes; these stay fp32.
    Parameters of other dtypes keep their own. is_table: whether a parameter is an embedding's.
    Raises OnwardError for a form that the optimizer does not have.
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
        """Whether all state is kept in the parameters' own precision."""
        return not self._asked

    def of(self, parameter: torch.Tensor) -> str:
        """The form of this parameter's state."""
        if not self._asked or parameter.dtype != torch.float32:
            return ""
        if self._asked == "8bit" and (parameter.numel() < SMALL or self._is_table(parameter)):
            return ""
        return self._asked


def tensors_of(record: Record, form: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that hold a parameter's state, by name, on the meta device."""
    if not form:
        return {slot: torch.empty_like(parameter, device="meta") for slot in record.slots}
    types = record.tensors(form, Type(DType.FLOAT, tuple(parameter.shape)))
    return {
        name: torch.empty(type.shape, dtype=torch_dtype(type.dtype), device="meta")  # type: ignore[arg-type]
        for name, type in types.items()
    }


def found_form(record: Record, tensors: Mapping[str, torch.Tensor], parameter: torch.Tensor) -> str:
    """The form of saved tensors, recognized by their names and dtypes."""
    for form in record.forms:
        expected = tensors_of(record, form, parameter)
        first = next(iter(expected))
        more = set(expected) - set(record.slots)
        low = getattr(tensors.get(first), "dtype", None) == expected[first].dtype
        if more & set(tensors) or (low and parameter.dtype == torch.float32 and not more):
            return form
    return ""


def shown(tensors: Mapping[str, torch.Tensor], form: str, slot: str) -> torch.Tensor:
    """Returns a slot in the parameter's precision; a copy unless it is kept so."""
    if form == "8bit":
        return moments.dequantized(tensors[slot], tensors[f"{slot}_absmax"], _SIGNED[slot])
    return tensors[slot].float() if form == "bf16" else tensors[slot]


def kept(x: torch.Tensor, form: str, slot: str) -> dict[str, torch.Tensor]:
    """Converts a slot from the parameter's precision to this form; returns its tensors by name."""
    if form == "8bit":
        signed = _SIGNED[slot]
        # a negative second moment has no square root; NaN, as in torch
        x = x if signed else torch.where(x < 0.0, torch.nan, x)
        codes, absmax = moments.quantized(x, signed)
        return {slot: codes, f"{slot}_absmax": absmax}
    return {slot: x.to(torch.bfloat16) if form == "bf16" else x}


def converted(
    tensors: Mapping[str, torch.Tensor], form: str, into: str, slots: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Converts state from one form to another."""
    found: dict[str, torch.Tensor] = {}
    for slot in slots:
        found |= kept(shown(tensors, form, slot), into, slot)
    return found
