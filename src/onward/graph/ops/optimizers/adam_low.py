"""Adam and AdamW with moments stored in bf16, or in codes of 8 bits.

An update converts the stored moments to f32, computes with these, updates p, and only then rounds
the moments for storage. So p is affected only by the rounding of earlier steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.optimizers.adam_rule import adam
from onward.graph.ops.optimizers.quantization import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    absmax_type,
    codes_type,
    dequantize,
    quantize,
)
from onward.graph.ops.optimizers.record import StateForm
from onward.graph.ops.optimizers.rounding import ROW, lower, rounded, upper, words
from onward.graph.ops.random import seed_type
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value

HYPERPARAMETERS = 5  # lr, beta1, beta2, eps, weight decay; followed by the update's number


def _bf16(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    p, g, m, v, *scalars, seed = [x for x in inputs[:11] if x is not None]
    scale = inputs[11] if len(inputs) > 11 else None
    dtype = type_of(p).dtype
    moments = [b.cast(x, dtype) for x in (m, v)]
    new_p, new_m, new_v = adam(b, [p, g, *moments], scalars, scale, attrs["decoupled"])
    drawn = words(b, p, seed, attrs["site"], int(attrs.get("first", 0)))
    kept = rounded(b, new_m, lower(b, drawn)), rounded(b, new_v, upper(b, drawn))
    return [new_p, *(b.cast(x, type_of(y).dtype) for x, y in zip(kept, (m, v), strict=True))]


def _bf16_types(call: Call) -> list[Type]:
    p, seed = call.type(0), call.type(10)
    if any(call.type(i).shape != p.shape for i in (2, 3)) or seed != seed_type():
        raise ValueError(f"{call.op_type}: moments and a seed that are not those of {p}")
    return [p, call.type(2), call.type(3)]


def _8bit(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    p, g, m, m_absmax, v, v_absmax, *scalars = [x for x in inputs[:12] if x is not None]
    scale = inputs[12] if len(inputs) > 12 else None
    dtype = type_of(p).dtype
    moments = [
        dequantize(b, m, m_absmax, SIGNED, dtype),
        dequantize(b, v, v_absmax, UNSIGNED, dtype),
    ]
    new_p, new_m, new_v = adam(b, [p, g, *moments], scalars, scale, attrs["decoupled"])
    kept = [new_p]
    for x, map, absmax in ((new_m, SIGNED, m_absmax), (new_v, UNSIGNED, v_absmax)):
        codes, largest = quantize(b, x, map)
        kept += [codes, b.cast(largest, type_of(absmax).dtype)]
    return kept


def _8bit_types(call: Call) -> list[Type]:
    p = call.type(0)
    for codes, absmax in ((2, 3), (4, 5)):
        if call.type(codes) != codes_type(p) or call.type(absmax).shape != absmax_type(p).shape:
            raise ValueError(
                f"{call.op_type}: {call.type(codes)} and {call.type(absmax)} are not the codes of "
                f"{p} and the largest of its blocks"
            )
    return [p, *(call.type(i) for i in range(2, 6))]


_P, _M, _BLOCKS, _WIDE = "f32[4,6]", "u8[3,171]", "f32[3]", "f32[3,171]"
_SCALARS = ("f64[]",) * HYPERPARAMETERS + ("i64[]",)

_UPDATE_BF16 = Op(
    name="AdamUpdateBf16",
    infer=_bf16_types,
    body=_bf16,
    doc="p', m', v' of AdamUpdate, with m' and v' rounded stochastically to numbers of bf16, "
    "without bias, as a function of (seed, site, element). `first`: the number of the first "
    "element, where p is a part of a parameter; a multiple of 1024. Inputs: p f[*], g f[*], m and "
    "v bf16[*] (or wider, with such numbers), lr, beta1, beta2, eps, weight decay f64[], step "
    "i64[], seed i64[2], scale f[]?.",
    cases=tuple(
        (
            {"decoupled": decoupled, "site": 7, "first": first},
            (_P, _P, _P, _P, *_SCALARS, "i64[2]", *scale),
        )
        for decoupled, first in ((1, 0), (0, 0), (1, 3 * ROW))
        for scale in ((), ("f32[]",))
    ),
)
_UPDATE_8BIT = Op(
    name="AdamUpdate8Bit",
    infer=_8bit_types,
    body=_8bit,
    doc="p', m', v' of AdamUpdate, with moments as 8-bit codes in blocks of 256, each with its "
    "largest absolute value (arXiv 2110.02861). Inputs: p f[*], g f[*], m u8[*], its absmax "
    "f32[blocks], v u8[*], its absmax, lr, beta1, beta2, eps, weight decay f64[], step i64[], "
    "scale f[]?.",
    cases=tuple(
        ({"decoupled": decoupled}, (_WIDE, _WIDE, _M, _BLOCKS, _M, _BLOCKS, *_SCALARS, *scale))
        for decoupled in (1, 0)
        for scale in ((), ("f32[]",))
    ),
)


def _bf16_type(parameter: Type) -> Type:
    return Type(DType.BFLOAT16, parameter.shape)


FORMS = {
    "bf16": StateForm(
        _UPDATE_BF16, {"exp_avg": _bf16_type, "exp_avg_sq": _bf16_type}, drawn=True, block=ROW
    ),
    "8bit": StateForm(
        _UPDATE_8BIT,
        {
            "exp_avg": codes_type,
            "exp_avg_absmax": absmax_type,
            "exp_avg_sq": codes_type,
            "exp_avg_sq_absmax": absmax_type,
        },
        block=BLOCK,
    ),
}  # fmt: skip

__all__ = ["FORMS"]
