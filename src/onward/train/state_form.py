"""The form in which each parameter's optimizer state is kept, and conversions between forms.

A form is a key of `Optimizer.forms`; "" is the parameter's own precision. Conversions go through
that precision and round to nearest; a round trip from bf16 or 8-bit codes gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from onward.distribute.tensor import TensorCut
from onward.errors import OnwardError
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.ops.optimizers import Optimizer as Record
from onward.graph.ops.optimizers.record import Group
from onward.graph.types import FLOATING, DType, Type
from onward.kernels import moments, torch_dtype

SMALL = 4096  # elements; below, 8 bits save nothing (bitsandbytes has the same limit)
_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_OWN = "fp32"  # the option's name of the form ""
_DTYPES = {torch_dtype(dtype): dtype for dtype in FLOATING}


def no_settings(parameter: torch.Tensor) -> Group:
    """The settings of a parameter where no slot depends on any: none."""
    return {}


class StateForms:
    """Chooses the form of each parameter's state, as the option asks, and which slots it has.

    bf16: every fp32 parameter. 8bit: every fp32 parameter except those with fewer than 4096
    elements and embeddings, whose rows have gradients of very different sizes; these stay fp32.
    Parameters of other dtypes keep their own. is_table: whether a parameter is an embedding's.
    group_of: the settings of a parameter. Raises OnwardError for a form that the optimizer does not
    have.
    """

    def __init__(
        self,
        optimizer_state: str,
        record: Record,
        is_table: Callable[[torch.Tensor], bool],
        group_of: Callable[[torch.Tensor], Group] = no_settings,
    ) -> None:
        self._record, self._is_table, self._group_of = record, is_table, group_of
        self._asked = "" if optimizer_state == _OWN else optimizer_state
        if self._asked and self._asked not in record.forms:
            able = [r.said for r in OPTIMIZERS.values() if self._asked in r.forms]
            raise OnwardError(
                f"optimizer_state={optimizer_state!r} is not supported for {record.said}; fix: "
                f"use {' or '.join(able)}, or optimizer_state={_OWN!r}"
            )

    @property
    def are_own(self) -> bool:
        """Whether all state is kept in the parameters' own precision."""
        return not self._asked

    def asked(self, optimizer_state: str) -> StateForms:
        """The forms for another value of the option. Raises OnwardError for one that the optimizer
        does not have."""
        return StateForms(optimizer_state, self._record, self._is_table, self._group_of)

    def check(self, groups: Iterable[Group]) -> None:
        """Raises OnwardError where a group has a setting that the form asked for does not have."""
        reasons = (self._record.plain(group) for group in groups) if self._asked else ()
        for reason in reasons:
            if reason:
                raise OnwardError(
                    f"optimizer_state={self._asked!r} is not supported with {reason}; fix: "
                    f"optimizer_state={_OWN!r}, or leave out {reason}"
                )

    def slots(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The slots that the updates of this parameter read and write."""
        group = self._group_of(parameter)
        types = tensors_of(self._record, "", parameter)
        return tuple(slot for slot in types if self._record.kept(group, slot))

    def counted(self, parameter: torch.Tensor) -> bool:
        """Whether torch keeps a count of updates for this parameter."""
        return self._record.of(self._group_of(parameter)).counted

    def is_elementwise(self, parameter: torch.Tensor) -> bool:
        """Whether each element of this parameter is updated by itself."""
        return self._record.of(self._group_of(parameter)).elementwise

    def start(self, parameter: torch.Tensor, slot: str) -> float:
        """The number that fills a slot of this parameter before its first update."""
        return self._record.start(self._group_of(parameter), slot)

    def of(self, parameter: torch.Tensor) -> str:
        """The form of this parameter's state."""
        if not self._asked or parameter.dtype != torch.float32:
            return ""
        if self._asked == "8bit" and (parameter.numel() < SMALL or self._is_table(parameter)):
            return ""
        return self._asked

    def nbytes(self, parameter: torch.Tensor, part: torch.Tensor) -> int:
        """The bytes of this parameter's state. part: like the part of it that this rank updates."""
        form = self.of(parameter)
        tensors = tensors_of(self._record, form, part)
        kept = tensors if form else self.slots(parameter)
        return sum(tensors[name].nbytes for name in kept)


def fits_blocks(record: Record, form: str, parameter: torch.Tensor, cut: TensorCut) -> bool:
    """Whether a part of a parameter along a dim is whole blocks of state in a form."""
    if not form:
        return True
    in_blocks = any(name not in record.slots for name in record.forms[form].tensors)
    dim = cut.sharding.dim
    assert dim is not None, "a cut is along a dim"
    rows = cut.inner(parameter.shape[dim]) * cut.sharding.pieces
    elements = parameter.numel() // parameter.shape[dim] * rows
    return not in_blocks or elements % record.forms[form].block == 0


def tensors_of(record: Record, form: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that may hold a parameter's state, by name, on the meta device."""
    dtype = DType.FLOAT if form else _DTYPES.get(parameter.dtype, DType.FLOAT)
    own = Type(dtype, tuple(parameter.shape))
    found: dict[str, torch.Tensor] = {}
    for name, type in record.tensors(form, own).items():
        if type is own:
            found[name] = torch.empty_like(parameter, device="meta")
        elif type is not None:
            shape = [int(size) for size in type.shape]  # type: ignore[arg-type]
            found[name] = torch.empty(shape, dtype=torch_dtype(type.dtype), device="meta")
    return found


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
    tensors: Mapping[str, torch.Tensor], form: str, into: str, slots: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Converts these slots of a state from one form to another."""
    found: dict[str, torch.Tensor] = {}
    for slot in slots:
        found |= kept(shown(tensors, form, slot), into, slot)
    return found
