"""FlashAttention and its gradient: PyTorch's own in fp64 is the truth, and for dropout the body.

Tensors lie in rubbish and in the memory the plan gives them: columns of one wide buffer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import CANARY, PATTERNS, SEED, Call, level, run, type_of, wide  # noqa: F401
from op_cases import Given, OpCase
from torch.nn import functional as F

from onward.graph.evaluate import evaluate
from onward.graph.types import parse_type
from onward.kernels import NATIVE, KernelSpec
from onward.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")


NAMES = ("y", "dq", "dk", "dv", "dbias")


def ours(call: Call, place: Any = wide, offset: int = 7) -> dict[str, torch.Tensor]:
    """y, dq, dk, dv and dbias from the kernels, each tensor placed by `place`."""
    ((dy, q, k, v), mask), bias = call.tensors(), call.bias()
    dy, q, k, v = (place(x) for x in (dy, q, k, v))
    drop = [SEED, torch.tensor(offset)] if call.ratio else [None, None]
    y = place(torch.empty(call.B, call.H, call.Q, call.E))
    rows = [torch.empty(call.B, call.H, call.Q) for _ in range(2)]
    grads = [place(torch.empty(x.shape)) for x in (q, k, v)]
    last: list[Any] = []
    if bias is not None:
        last = [None, None, bias]
        grads.append(torch.full_like(bias, CANARY))
    run("FlashAttention", call.attrs, [q, k, v, mask, *drop, *last], [y, *rows])
    run("FlashAttentionGrad", call.attrs, [dy, q, k, v, mask, *drop, y, *rows, *last], grads)
    return dict(zip(NAMES, (y, *grads), strict=False))


def theirs(call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """y, dq, dk, dv and dbias by PyTorch; rows with nothing to attend to are 0."""
    ((dy, q, k, v), mask), bias = call.tensors(), call.bias()
    dy, q, k, v = (x.to(dtype) for x in (dy, q, k, v))
    leaves = [q, k, v] if bias is None else [q, k, v, bias := bias.to(dtype)]
    for x in leaves:
        x.requires_grad_()
    if call.softcap or call.fill is not None or bias is not None or "least" in call.mask:
        y = by_hand(call, q, k, v, mask, bias)
        grads = torch.autograd.grad(y, leaves, dy)
        return dict(zip(NAMES, (y.detach(), *grads), strict=False))
    allowed = torch.ones(call.Q, call.S, dtype=torch.bool)
    if call.causal:
        allowed = allowed.tril()
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    empty = ~allowed.any(-1, keepdim=True)
    bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~(allowed | empty), -torch.inf)
    if mask is not None and mask.dtype != torch.bool:
        bias = bias + mask.to(dtype)
    y = F.scaled_dot_product_attention(q, k, v, bias, scale=call.attrs["scale"])
    y = torch.where(empty, 0.0, y)
    grads = torch.autograd.grad(y, (q, k, v), dy)
    return dict(zip(("y", "dq", "dk", "dv"), (y.detach(), *grads), strict=True))


def by_hand(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """y from capped and filled scores, as models write it."""
    s = q @ k.mT * call.attrs["scale"]
    s = call.softcap * torch.tanh(s / call.softcap) if call.softcap else s
    s = s if bias is None else s + bias
    empty = torch.zeros((), dtype=torch.bool)
    if mask is not None and mask.dtype == torch.bool:
        if call.fill is not None and call.fill_is_added:
            s, mask = s + torch.where(mask, 0.0, call.fill), torch.ones_like(mask)
        empty = ~mask.any(-1, keepdim=True) & (call.fill is None)
        s = s.masked_fill(~(mask | empty), -torch.inf if call.fill is None else call.fill)
    elif mask is not None:
        s = s + mask
    if call.causal:
        s = s.masked_fill(~torch.ones(call.Q, call.S, dtype=torch.bool).tril(), -torch.inf)
    return torch.where(empty, 0.0, s.softmax(-1) @ v)


def assert_law(call: Call, have: dict[str, torch.Tensor]) -> None:
    """Assert at most twice eager's distance to fp64, plus 1e-7.

    Three times, where eager keeps all probabilities and the kernel goes by several blocks of keys:
    then, as in torch's own kernel, a row's sum of p dp is dy y, and y is rounded.
    """
    written_out = call.softcap or call.fill is not None or "least" in call.mask or call.biases
    times = 3 if written_out and call.S > 256 else 2
    exact, plain = theirs(call, torch.float64), theirs(call, torch.float32)
    for name, truth in exact.items():
        distance = float((have[name].double() - truth).norm())
        allowed = times * float((plain[name].double() - truth).norm()) + 1e-7 * float(truth.norm())
        # where the truth is zero (one key, one query) eager may be exactly right by luck
        allowed += 6e-8 * float(exact["dv"].norm()) * (float(truth.norm()) < 1e-12)
        assert distance <= allowed, f"{name}: {distance:.3e}, allowed {allowed:.3e}"


LOW = (torch.finfo(torch.float32).min, -1e9, -1e4, -1.5, 0.5)
CALLS = [
    Call(),
    Call(causal=True),
    Call(Q=1, S=1),
    Call(Q=1, S=9),
    Call(Q=9, S=1),
    Call(Q=3, S=7, causal=True),
    Call(Q=7, S=3, causal=True),
    *[
        Call(B=1, H=1, Q=n, S=n, K=16, E=16, causal=causal)
        for n in (63, 64, 65, 130)
        for causal in (False, True)
    ],
    Call(B=1, H=3, Q=70, S=300, K=20, E=12),
    Call(B=1, H=1, Q=300, S=521, K=12, E=20, causal=True),
    Call(B=1, H=1, Q=600, S=270, K=12, E=4, causal=True),
    *[Call(Q=35, S=35, K=n, E=n, causal=True) for n in (1, 2, 7, 17, 64, 100, 128)],
    Call(Q=20, S=21, K=3, E=33),
    *[Call(mask=f"bool {shape}") for shape in ("2,2,5,5", "2,1,1,5", "1,1,5,5", "5,5", "2,2,5,1")],
    *[Call(mask=f"real {shape}") for shape in ("2,2,5,5", "1,2,1,5", "5,5", "1", "2,1,5,1")],
    Call(Q=70, S=270, mask="infinite 70,270"),
    Call(Q=70, S=270, K=6, mask="bool 2,1,1,270"),
    Call(B=1, H=2, Q=70, S=1100, K=4, E=6),
    Call(B=1, H=1, Q=1100, S=1100, K=4, E=4, causal=True),
    Call(B=1, H=1, Q=20, S=2300, K=4, E=6, mask="infinite 20,2300"),
    Call(B=1, H=1, Q=9, S=2100, K=4, E=6, mask="real 9,2100"),
    Call(B=2, H=1, Q=9, S=2100, K=4, E=6, mask="nothing 2,1,9,2100"),
    Call(mask="nothing 2,1,5,5"),
    Call(Q=67, S=67, mask="nothing 2,2,67,67", causal=True),
    Call(Q=67, S=270, mask="nothing 2,1,1,270"),
    *[
        Call(B=2, H=2, Q=n, S=n, K=5, E=6, mask=f"{low}{kind} 2,1,{n},{n}")
        for kind in PATTERNS for n in (70, 300) for low in ("", "least added ", "infinite added ")
        if (low, kind) != ("infinite added ", "few")
    ],
    *[
        Call(B=1, H=1, Q=q, S=s, K=4, E=4, mask=f"{low}{kind} {q},{s}")
        for kind in PATTERNS for q, s in ((90, 1500), (1100, 1100)) for low in ("", "least added ")
    ],
    *[Call(Q=130, S=130, mask=f"{kind} 130,130", causal=True) for kind in PATTERNS],
    *[
        Call(Q=70, S=n, K=5, E=6, mask=f"{kind} 2,1,70,{n}", fill=fill)
        for kind in PATTERNS for n in (70, 300) for fill in LOW
    ],
    *[
        Call(B=1, H=1, Q=9, S=1500, K=4, E=4, mask=f"{kind} 9,1500", fill=-3e38)
        for kind in PATTERNS
    ],
    *[Call(Q=70, S=300, mask="nothing 2,1,70,300", fill=fill) for fill in (-3e38, -1e9)],
    *[
        Call(Q=70, S=n, K=5, E=6, mask=f"{kind} 2,1,70,{n}", softcap=cap, biases=biases,
             fill=-3e38, fill_is_added=True)
        for kind in (*PATTERNS, "nothing") for n in (70, 300)
        for cap, biases in ((0.0, 0), (1.5, 0), (0.0, 1))
    ],
    *[Call(Q=35, S=n, softcap=cap) for n in (9, 300, 1100) for cap in (0.2, 2.0, 50.0)],
    *[Call(Q=70, S=70, softcap=1.5, causal=causal, mask="bool 2,1,1,70")
      for causal in (False, True)],
    *[Call(Q=70, S=300, softcap=1.5, mask=f"{kind} 70,300", fill=-1e9) for kind in PATTERNS],
    Call(Q=70, S=300, softcap=1.5, mask="least added behind 70,300"),
    *[
        Call(B=3, Q=q, S=s, K=5, E=6, biases=biases, causal=causal)
        for q, s in ((5, 5), (67, 67), (70, 300), (300, 70), (9, 1100))
        for biases in (1, 3) for causal in (False, True)
    ],
    *[
        Call(Q=70, S=n, K=5, E=6, biases=biases, mask=f"{low}{kind} 2,1,70,{n}")
        for kind in PATTERNS for n in (70, 300) for low, biases in (("", 1), ("least added ", 2))
    ],
    *[Call(Q=70, S=300, biases=1, mask="nothing 2,1,70,300", fill=f) for f in (None, -1e9, -1.5)],
    *[Call(Q=70, S=300, biases=2, softcap=1.5, mask="behind 70,300", fill=f) for f in (-1e9, 0.5)],
    *[
        Call(Q=70, S=n, K=5, E=6, biases=1, low_bias=True, mask=f"{kind} 2,1,70,{n}", fill=fill)
        for kind in (*PATTERNS, "nothing") for n in (70, 300) for fill in (None, *LOW[:3])
        if (kind, n) != ("ends", 300)
    ],
    *[
        Call(Q=70, S=n, K=5, E=6, biases=2, low_bias=True, causal=causal)
        for n in (70, 300) for causal in (False, True)
    ],
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_no_farther_from_fp64_than_twice_eager(call: Call) -> None:
    have = ours(call)
    if "infinite" not in call.mask:
        assert all(t.isfinite().all() for t in have.values())
    assert_law(call, have)


def test_rows_with_nothing_to_attend_to_are_zero() -> None:
    call = Call(Q=4, S=6, mask="nothing 2,1,1,6")
    have = ours(call)
    assert not have["y"][0].any()
    assert not any(have[name][0].any() for name in ("dq", "dk", "dv"))
    assert have["y"][1].any()


def test_a_mask_that_adds_the_lowest_number_everywhere_spreads_evenly() -> None:
    """Attention spreads evenly over such a row, as in eager; its log-sum-exp alone would have lost
    the number of keys."""
    (dy, q, k, v), _ = Call(Q=3, S=6).tensors()
    mask = torch.full((2, 1, 1, 6), torch.finfo(torch.float32).min)
    y, dv = torch.empty_like(dy), torch.empty_like(v)
    rows = [torch.empty(2, 2, 3) for _ in range(2)]
    attrs = Call(Q=3, S=6).attrs
    run("FlashAttention", attrs, [q, k, v, mask], [y, *rows])
    grads = [torch.empty_like(q), torch.empty_like(k), dv]
    run("FlashAttentionGrad", attrs, [dy, q, k, v, mask, None, None, y, *rows], grads)
    torch.testing.assert_close(y, v.mean(2, keepdim=True).expand(y.shape))
    torch.testing.assert_close(dv, dy.sum(2, keepdim=True).expand(dv.shape) / 6)


# ---- places


def turned(x: torch.Tensor) -> torch.Tensor:
    """The tensor with its dims reversed in memory, so that neighbours in the last dim lie far
    apart."""
    return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


@pytest.mark.parametrize(
    "call", [Call(Q=9, S=35, K=7, E=18), Call(Q=70, S=70, causal=True)], ids=str
)
def test_where_tensors_lie_changes_no_bit(call: Call) -> None:
    want = ours(call, torch.Tensor.contiguous)
    for name, have in ours(call, wide).items():
        assert torch.equal(have, want[name]), name
    (dy, q, k, v), _ = call.tensors()
    y, *rows = torch.empty_like(dy), *(torch.empty(2, 2, call.Q) for _ in range(2))
    run("FlashAttention", call.attrs, [turned(q), turned(k), turned(v)], [y, *rows])
    grads = [torch.empty_like(x) for x in (q, k, v)]
    inputs = [turned(dy), turned(q), turned(k), turned(v), None, None, None, turned(y), *rows]
    run("FlashAttentionGrad", call.attrs, inputs, grads)
    torch.testing.assert_close(y, want["y"], rtol=1e-5, atol=1e-6)
    for name, have in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(have, want[name], rtol=1e-5, atol=1e-6)


def test_outputs_may_be_columns_of_one_buffer() -> None:
    """dq, dk, dv side by side, as the gradient of one product wants them; no gap is written to."""
    call = Call(B=2, H=3, Q=10, S=10, K=7, E=7, causal=True)
    want = ours(call)
    room = torch.full((2, 10, 4 * 21), CANARY)
    columns = room[..., :63].unflatten(2, (3, 3, 7)).unbind(2)
    grads = [x.transpose(1, 2) for x in columns]
    (dy, q, k, v), _ = call.tensors()
    y, *rows = torch.empty_like(dy), *(torch.empty(2, 3, 10) for _ in range(2))
    run("FlashAttention", call.attrs, [q, k, v], [y, *rows])
    run("FlashAttentionGrad", call.attrs, [dy, q, k, v, None, None, None, y, *rows], grads)
    for name, have in zip(("dq", "dk", "dv"), grads, strict=True):
        assert torch.equal(have, want[name])
    assert (room[..., 63:] == CANARY).all()


@pytest.mark.parametrize(
    "call",
    [
        Call(B=1, H=1, Q=200, S=200, causal=True, ratio=0.3),
        Call(B=1, H=3, Q=130, S=70, ratio=0.3),
        Call(B=4, H=2, Q=65, S=65, causal=True),
        Call(B=4, H=2, Q=65, S=65, biases=1),
        Call(B=4, H=2, Q=65, S=300, biases=4),
    ],
    ids=str,
)
def test_threads_change_no_bit(call: Call) -> None:
    want = ours(call)
    torch.set_num_threads(2)
    try:
        have = ours(call)
    finally:
        torch.set_num_threads(1)
    for name in want:
        assert torch.equal(have[name], want[name]), name


# ---- dropout


@pytest.mark.parametrize(
    "call",
    [
        *[Call(Q=6, S=7, ratio=0.4, sample_dim=d) for d in (-1, 0, 1, 2)],
        Call(Q=70, S=290, K=3, E=5, B=1, ratio=0.2),
        Call(Q=67, S=67, K=3, E=5, B=1, causal=True, ratio=0.5),
        Call(ratio=0.3, mask="bool 2,1,1,5"),
        Call(ratio=0.3, mask="real 5,5"),
        Call(ratio=0.3, mask="nothing 2,1,5,5", causal=True),
        Call(ratio=0.3, mask="nothing 2,1,5,5", fill=-1e9),
        Call(ratio=0.3, mask="nothing 2,1,5,5", fill=-3e38, fill_is_added=True),
    ],
    ids=str,
)
def test_dropout_equals_the_body(call: Call) -> None:
    (dy, q, k, v), mask = call.tensors()
    items = [Given(x.numpy()) for x in (q, k, v)]
    masks = None if mask is None else Given(mask.numpy())
    drop = (Given(SEED.numpy()), Given(np.array(7)))
    case = OpCase("FlashAttention", (*items, masks, *drop), call.attrs)
    y, peak, total = evaluate(case.graph(), case.feeds()).values()
    rows = [torch.empty(call.B, call.H, call.Q) for _ in range(2)]
    out = torch.empty_like(dy)
    run("FlashAttention", call.attrs, [q, k, v, mask, SEED, torch.tensor(7)], [out, *rows])
    for have, want in zip((out, *rows), (y, peak, total), strict=True):
        np.testing.assert_allclose(have.numpy(), want, rtol=2e-5, atol=2e-6)
    saved = (Given(y), Given(peak), Given(total))
    inputs = (Given(dy.numpy()), *items, masks, *drop, *saved)
    case = OpCase("FlashAttentionGrad", inputs, call.attrs)
    want = evaluate(case.graph(), case.feeds())
    have = ours(call)
    for name, expected in zip(("dq", "dk", "dv"), want.values(), strict=True):
        np.testing.assert_allclose(have[name].numpy(), expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("sample_dim", [-1, 0, 1, 2])
def test_the_mask_is_that_of_dropout_to_the_bit(sample_dim: int) -> None:
    """Values that are the identity show the probabilities as dropped."""
    call = Call(B=2, H=3, Q=70, S=81, E=81, ratio=0.35, sample_dim=sample_dim)
    (_, q, k, _), _ = call.tensors()
    v = torch.eye(81).expand(2, 3, 81, 81)
    y = torch.empty(2, 3, 70, 81)
    rows = [torch.empty(2, 3, 70) for _ in range(2)]
    run("FlashAttention", call.attrs, [q, k, v, None, SEED, torch.tensor(2**33 + 5)], [y, *rows])
    attrs = {name: call.attrs[name] for name in ("ratio", "site", "sample_dim")}
    ones = Given(np.ones((2, 3, 70, 81), np.float32))
    case = OpCase("Dropout", (ones, Given(SEED.numpy()), Given(np.array(2**33 + 5))), attrs)
    (want,) = evaluate(case.graph(), case.feeds()).values()
    np.testing.assert_array_equal(y.numpy() != 0, want != 0)


# ---- what is refused, and the exponential


def spec(q: str, k: str, v: str, mask: str | None = None, **attrs: Any) -> KernelSpec:
    types = [parse_type(t) for t in (q, k, v)] + [None if mask is None else parse_type(mask)]
    return KernelSpec("FlashAttention", {"scale": 1.0, "is_causal": 0, **attrs}, tuple(types), ())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (spec("f32[3,5,4]", "f32[3,5,4]", "f32[3,5,4]"), "3 dims"),
        (spec("f32[2,4,5,4]", "f32[1,4,5,4]", "f32[1,4,5,4]"), "share"),
        (spec("f32[2,4,5,4]", "f32[2,2,5,4]", "f32[2,1,5,4]"), "share"),
        (spec("f32[2,1,5,4]", "f32[2,1,0,4]", "f32[2,1,0,4]"), "no elements"),
        (spec("f32[2,1,5,0]", "f32[2,1,5,0]", "f32[2,1,5,4]"), "no elements"),
        (spec("f64[2,1,5,4]", "f64[2,1,5,4]", "f64[2,1,5,4]"), "double"),
        (spec("f32[2,1,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]", "f32[5,5]", is_causal=1), "causal"),
        (spec("f32[2,1,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]", ratio=1.0), "dropped"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_kernels_say_what_they_do_not_cover(call: KernelSpec, reason: str) -> None:
    (kernel,) = NATIVE["FlashAttention"]
    assert reason in (kernel.unsupported(call) or "")


def test_coordinates_that_are_absent_are_no_packed_rows() -> None:
    (kernel,) = NATIVE["FlashAttention"]
    call = spec("f32[2,1,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]")
    absent = replace(call, inputs=(*call.inputs, None, None, None, None))
    assert kernel.unsupported(absent) is None
    assert kernel.scratch(absent) == kernel.scratch(call)
