"""Calls of gradients on what a forward has left, where kernels rely on it."""

from __future__ import annotations

import numpy as np
from op_cases import Given, OpCase, Real

from onward.graph.evaluate import evaluate
from onward.graph.types import DType

_OF_ROWS = (8, 9, 13)  # inputs of FlashAttentionGrad: highest scores, totals, sums of dy * y


def after_forward(case: OpCase) -> OpCase:
    """A call of FlashAttentionGrad whose y, highest scores and totals are those of the forward, and
    one of MaxPoolGrad with indices that a forward finds; any other call as it is. Kernels may take
    a row's sum of dy * y for that of its probabilities' gradients, and look for an element only in
    the windows that hold it."""
    if case.op == "MaxPoolGrad":
        attrs = {k: v for k, v in case.attrs.items() if k != "sizes"}
        dy, index = case.inputs
        assert isinstance(dy, Real) and isinstance(index, Given)
        x = Real((*index.array.shape[:2], *case.attrs["sizes"]))
        pool = OpCase("MaxPool", (x,), attrs, case.label)
        _, found = evaluate(pool.graph(), pool.feeds()).values()
        return OpCase(case.op, (dy, Given(np.asarray(found))), case.attrs, case.label)
    if case.op != "FlashAttentionGrad":
        return case
    drawn = [
        *(None if x is None else case.drawn(i, DType.FLOAT) for i, x in enumerate(case.inputs))
    ]
    given = tuple(
        None if x is None else Given(x, accumulated=i in _OF_ROWS) for i, x in enumerate(drawn)
    )
    at = (*given, *[None] * 13)[10:13]
    forward = OpCase("FlashAttention", (*given[1:7], *at), case.attrs, case.label)
    found = evaluate(forward.graph(), forward.feeds())
    y, *rows = (np.asarray(y) for y in found.values())
    saved = (None if given[7] is None else Given(y), *(Given(x, accumulated=True) for x in rows))
    return OpCase(case.op, (*given[:7], *saved, *given[10:]), case.attrs, case.label)
