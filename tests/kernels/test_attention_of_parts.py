"""FlashAttentionGrad on some of a row's keys, given the row's numbers over all of them: the parts'
gradients add up to those of PyTorch in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import SEED, Call, level, run, wide  # noqa: F401
from op_cases import Given, OpCase, Real

from onward.graph.evaluate import evaluate
from onward.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")


def in_parts(call: Call, ends: list[int], packed: bool = False) -> list[torch.Tensor]:
    """dq, dk, dv from the kernel, one call for each run of keys up to the next end. packed: whether
    rows have coordinates, by which dropout draws."""
    (dy, q, k, v), mask = call.tensors()
    dy, q, k, v = (wide(x) for x in (dy, q, k, v))
    drop = [SEED, torch.tensor(7)] if call.ratio else [None, None]
    at = [coordinates(n) if packed else None for n in (call.Q, call.S)]
    y, *rows = torch.empty(dy.shape), *(torch.empty(q.shape[:3]) for _ in range(2))
    run("FlashAttention", call.attrs, [q, k, v, mask, *drop, *at], [y, *rows])
    delta = (dy * y).sum(-1)
    dq, made = torch.zeros(q.shape), [torch.empty(k.shape), torch.empty(v.shape)]
    for first, end in zip([0, *ends], [*ends, call.S], strict=True):
        some = slice(first, end)
        seen = mask if mask is None or mask.shape[-1] == 1 else mask[..., some].contiguous()
        keys = None if at[1] is None else at[1][some].contiguous()
        grads = [torch.empty(x.shape) for x in (q, k[:, :, some], v[:, :, some])]
        given: list[Any] = [dy, q, wide(k[:, :, some]), wide(v[:, :, some]), seen, *drop, None]
        run("FlashAttentionGrad", call.attrs, [*given, *rows, at[0], keys, None, delta], grads)
        dq += grads[0]
        made[0][:, :, some], made[1][:, :, some] = grads[1:]
    return [dq, *made]


def coordinates(rows: int) -> torch.Tensor:
    """The coordinates i64[rows,2] of one sequence that begins behind its first positions."""
    return torch.stack([torch.zeros(rows, dtype=torch.int64), torch.arange(rows) + 3], 1)


def by_torch(call: Call, dtype: torch.dtype) -> list[torch.Tensor]:
    """dq, dk, dv by PyTorch, whose rows without a key to see give 0."""
    (dy, q, k, v), mask = call.tensors()
    dy, q, k, v = (x.to(dtype).requires_grad_() for x in (dy, q, k, v))
    allowed = torch.ones(call.Q, call.S, dtype=torch.bool)
    allowed = allowed.tril() if call.causal else allowed
    allowed = allowed if mask is None else allowed & mask
    s = q @ k.mT * call.attrs["scale"]
    s = call.softcap * torch.tanh(s / call.softcap) if call.softcap else s
    p = s.masked_fill(~allowed, torch.finfo(dtype).min).softmax(-1)
    p = torch.where(allowed, p, 0.0)
    return list(torch.autograd.grad(p @ v, (q, k, v), dy))


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        (Call(), [2]),
        (Call(Q=70, S=90, K=16, E=24), [40]),
        (Call(Q=65, S=700, K=8), [300, 301]),
        (Call(Q=70, S=90, softcap=2.0), [30, 60]),
        (Call(Q=70, S=90, mask="bool 2,1,1,90"), [89]),
        (Call(Q=70, S=90, mask="bool 2,1,70,90"), [45]),
        (Call(Q=70, S=90, mask="nothing 2,1,70,90"), [45]),
        (Call(Q=200, S=200, mask="window 1,1,200,200"), [64, 150]),
        (Call(Q=96, S=96, causal=True), [96]),
    ],
    ids=str,
)
def test_parts_add_up(call: Call, ends: list[int]) -> None:
    """At most three times eager's distance to fp64, as where one call goes by several blocks."""
    if ends == [call.S]:
        ends = []
    exact, plain = by_torch(call, torch.float64), by_torch(call, torch.float32)
    for have, truth, eager in zip(in_parts(call, ends), exact, plain, strict=True):
        distance = float((have.double() - truth).norm())
        allowed = 3 * float((eager.double() - truth).norm()) + 2e-7 * float(truth.norm())
        assert distance <= allowed, f"{distance:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_goes_by_coordinates(causal: bool) -> None:
    """Against the op's body on all keys, by onnx's reference evaluator, which finds delta by
    itself."""
    call = Call(B=1, H=2, Q=40, S=40, causal=causal, ratio=0.3)
    (dy, q, k, v), _ = call.tensors()
    at = [Given(coordinates(40).numpy())] * 2
    drop = (Given(SEED.numpy()), Given(np.array(7)))
    qkv = [Given(x.numpy()) for x in (q, k, v)]
    forward = OpCase("FlashAttention", (*qkv, None, *drop, *at), call.attrs)
    saved = [Given(np.asarray(x)) for x in evaluate(forward.graph(), forward.feeds()).values()]
    whole = OpCase(
        "FlashAttentionGrad", (Given(dy.numpy()), *qkv, None, *drop, *saved, *at), call.attrs
    )
    want = evaluate(whole.graph(), whole.feeds()).values()
    for have, truth in zip(in_parts(call, [7, 31], packed=True), want, strict=True):
        torch.testing.assert_close(have, torch.tensor(truth), rtol=1e-5, atol=1e-5)


def test_a_call_without_y_or_delta_is_refused() -> None:
    x, row = Real((1, 2, 4, 8)), Real((1, 2, 4))
    case = OpCase(
        "FlashAttentionGrad", (x, x, x, x, None, None, None, None, row, row),
        {"scale": 1.0, "is_causal": 0},
    )  # fmt: skip
    with pytest.raises(ValueError, match="neither y nor the sums of dy"):
        case.graph()
    wrong = OpCase(
        case.op, (*case.inputs, None, None, None, Real((1, 2, 8))), {"scale": 1.0, "is_causal": 0}
    )
    with pytest.raises(ValueError, match="no number for each row"):
        wrong.graph()
