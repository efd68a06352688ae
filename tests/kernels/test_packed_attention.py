"""FlashAttention of packed rows: the body in fp64, PyTorch sequence by sequence, padded batches."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import SEED, level, run, type_of, wide  # noqa: F401
from op_cases import Given, OpCase
from packed_rows import PACKED, Rows, packed, whole
from torch.nn import functional as F

from onward.graph.evaluate import evaluate
from onward.graph.types import DType, parse_type
from onward.kernels import NATIVE, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")


def ours_packed(rows: Rows, place: Any = wide) -> dict[str, torch.Tensor]:
    dy, q, k, v = (place(x) for x in rows.tensors())
    drop = [SEED, torch.tensor(7)] if rows.ratio else [None, None]
    at = [torch.from_numpy(x) for x in rows.at]
    y, numbers = place(torch.empty(dy.shape)), [torch.empty(q.shape[:3]) for _ in range(2)]
    grads = [place(torch.empty(x.shape)) for x in (q, k, v)]
    grads += [torch.full_like(x, torch.nan) for x in rows.bias]
    run("FlashAttention", rows.attrs, [q, k, v, None, *drop, *at, *rows.bias], [y, *numbers])
    inputs = [dy, q, k, v, None, *drop, y, *numbers, *at, *rows.bias]
    run("FlashAttentionGrad", rows.attrs, inputs, grads)
    return dict(zip(RESULTS, (y, *numbers, *grads), strict=False))


RESULTS = ("y", "peak", "total", "dq", "dk", "dv", "dbias")


@functools.cache
def bodies(rows: Rows, dtype: DType) -> dict[str, torch.Tensor]:
    """y, the softmax's peaks and totals, and the gradients, computed by the ops' bodies."""
    dy, q, k, v = (Given(x.numpy()) for x in rows.tensors())
    drop = (Given(SEED.numpy()), Given(np.array(7))) if rows.ratio else (None, None)
    at = [Given(x) for x in (*rows.at, *(x.numpy() for x in rows.bias))]
    case = OpCase("FlashAttention", (q, k, v, None, *drop, *at), rows.attrs)
    made = list(evaluate(case.graph(dtype), case.feeds(dtype)).values())
    saved = [Given(x) for x in made]
    case = OpCase("FlashAttentionGrad", (dy, q, k, v, None, *drop, *saved, *at), rows.attrs)
    made += evaluate(case.graph(dtype), case.feeds(dtype)).values()
    return {name: torch.tensor(x) for name, x in zip(RESULTS, made, strict=False)}


PACKED_ROWS = [
    *[Rows(name, causal) for name in PACKED for causal in (False, True)],
    *[Rows(name, causal, 0.3, K=7, E=18, H=1) for name in PACKED for causal in (False, True)],
    Rows("whole", True, 0.1, H=3, K=64, E=64),
    *[Rows(name, biased=True) for name in PACKED],
    *[Rows(name, True, 0.3, K=7, E=18, H=3, biased=True) for name in PACKED],
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("rows", PACKED_ROWS, ids=str)
def test_packed_rows_no_farther_from_fp64_than_twice_the_body(rows: Rows) -> None:
    exact, plain = bodies(rows, DType.DOUBLE), bodies(rows, DType.FLOAT)
    lowest = exact["peak"] < -1e30  # rows with no key have the lowest number, or -inf by a bias
    for name, have in ours_packed(rows).items():
        truth, eager = exact[name], plain[name].double()
        if name == "peak":
            none = -torch.inf if rows.biased else torch.finfo(torch.float32).min
            assert torch.equal(have == none, lowest)
            have, truth, eager = (torch.where(lowest, 0.0, x) for x in (have, truth, eager))
        assert have.isfinite().all()
        distance = float((have.double() - truth).norm())
        allowed = 2 * float((eager - truth).norm()) + 1e-7 * float(truth.norm())
        # where the truth is zero (a query with one key) eager may be exactly right by luck
        allowed += 6e-8 * float(exact["dv"].norm()) * (float(truth.norm()) < 1e-12)
        assert distance <= allowed, f"{name}: {distance:.3e}, allowed {allowed:.3e}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["whole", "holes", "some ask", "hidden within", "blocks"])
def test_packed_rows_are_as_many_attentions(name: str, causal: bool) -> None:
    """PyTorch's own in fp64, sequence by sequence."""
    rows = Rows(name, causal, K=6, E=10)
    dy, q, k, v = (x.double() for x in rows.tensors())
    q_at, k_at = map(torch.from_numpy, rows.at)
    have = ours_packed(rows)
    want = {"y": torch.zeros_like(dy), **dict(zip(RESULTS[3:6], map(torch.zeros_like, (q, k, v)),
                                                  strict=True))}  # fmt: skip
    for sequence in q_at[:, 0].unique():
        own, keys = ((at[:, 0] == sequence).nonzero()[:, 0] for at in (q_at, k_at))
        parts = [x[:, :, i].requires_grad_() for x, i in ((q, own), (k, keys), (v, keys))]
        allowed = torch.ones(len(own), len(keys), dtype=torch.bool)
        if causal:
            allowed = q_at[own, 1][:, None] >= k_at[keys, 1]
        seen = allowed.any(1)
        y = F.scaled_dot_product_attention(
            parts[0][:, :, seen], parts[1], parts[2], allowed[seen], scale=rows.attrs["scale"]
        )
        grads = torch.autograd.grad(y, parts, dy[:, :, own[seen]])
        want["y"][:, :, own[seen]] = y.detach()
        for x, i, name in zip(grads, (own, keys, keys), RESULTS[3:6], strict=True):
            want[name][:, :, i] = x
    for name, truth in want.items():
        torch.testing.assert_close(have[name].double(), truth, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["holes", "hidden and holes", "begin anywhere", "some ask"])
def test_packed_rows_draw_the_mask_of_the_padded_batch(name: str) -> None:
    """Values that are the identity show the probabilities as dropped."""
    rows = Rows(name, ratio=0.35, H=3)
    q_at, k_at = rows.at
    _, q, k, _ = rows.tensors()
    v = torch.eye(len(k_at)).expand(1, 3, -1, -1)
    y = torch.empty(1, 3, len(q_at), len(k_at))
    numbers = [torch.empty(1, 3, len(q_at)) for _ in range(2)]
    at = [torch.from_numpy(x) for x in rows.at]
    run("FlashAttention", rows.attrs, [q, k, v, None, SEED, torch.tensor(9), *at], [y, *numbers])
    sequences, places = int(q_at[:, 0].max()) + 1, int(k_at[:, 1].max()) + 1
    ones = Given(np.ones((sequences, 3, places, places), np.float32))
    attrs = {name: rows.attrs[name] for name in ("ratio", "site", "sample_dim")}
    case = OpCase("Dropout", (ones, Given(SEED.numpy()), Given(np.array(9))), attrs)
    (padded,) = evaluate(case.graph(), case.feeds()).values()
    kept = padded[q_at[:, :1], :, q_at[:, 1:], k_at[:, 1][None]].transpose(2, 0, 1) != 0
    kept &= q_at[:, :1] == k_at[:, 0]
    np.testing.assert_array_equal(y[0].numpy() != 0, kept)


@pytest.mark.parametrize("name", ["holes", "some ask", "hidden within", "keys without queries"])
def test_where_packed_rows_lie_changes_no_bit(name: str) -> None:
    rows = Rows(name, causal=True, ratio=0.2, K=7, E=18)
    want = ours_packed(rows, torch.Tensor.contiguous)
    for result, have in ours_packed(rows, wide).items():
        assert torch.equal(have, want[result]), result


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["whole", "one sequence", "blocks", "hidden within", "some ask"])
def test_threads_change_no_bit_of_packed_rows(name: str, biased: bool) -> None:
    rows = Rows(name, causal=True, ratio=0.3, H=1 + biased, biased=biased)
    want = ours_packed(rows)
    torch.set_num_threads(2)
    try:
        have = ours_packed(rows)
    finally:
        torch.set_num_threads(1)
    for result in want:
        assert torch.equal(have[result], want[result]), result


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_packed_rows_at_all(queries: int, keys: int, ratio: float) -> None:
    PACKED[name := f"{queries} and {keys}"] = packed((range(queries), range(keys)))
    have = ours_packed(Rows(name, ratio=ratio), torch.Tensor.contiguous)
    assert not any(have[name].any() for name in ("y", "dq", "dk", "dv"))
    assert (have["peak"] == torch.finfo(torch.float32).min).all()
    assert (have["total"] == keys).all()


def test_a_launch_reads_the_coordinates_anew() -> None:
    """One launch serves other sequences with as many rows: addresses are bound, coordinates are
    not."""
    rows = Rows("whole", causal=True)
    _, q, k, v = rows.tensors()
    at = [torch.from_numpy(x.copy()) for x in rows.at]
    y, *numbers = torch.empty_like(v), *(torch.empty(q.shape[:3]) for _ in range(2))
    (kernel,) = NATIVE["FlashAttention"]
    inputs = [q, k, v, None, None, None, *at]
    types = tuple(type_of(x) for x in inputs)
    scratch = [
        torch.empty([int(n) for n in t.shape], dtype=torch_dtype(t.dtype))  # type: ignore[arg-type]
        for t in kernel.scratch(KernelSpec("FlashAttention", rows.attrs, types, ()))
    ]
    launch = kernel.bind(KernelArguments(rows.attrs, inputs, [y, *numbers], scratch))
    launch()
    assert torch.equal(y, ours_packed(rows)["y"])
    other = whole(65, 200)
    for have, want in zip(at, other, strict=True):
        have.copy_(torch.from_numpy(want))
    launch()
    PACKED["65 and 200"] = other
    assert torch.equal(y, ours_packed(Rows("65 and 200", causal=True))["y"])


@pytest.mark.parametrize("op", ["FlashAttention", "FlashAttentionGrad"])
def test_the_scratch_grows_with_the_rows(op: str) -> None:
    """What is planned for many packed rows has room for fewer."""
    (kernel,) = NATIVE[op]

    def sizes(n: int, m: int) -> list[int]:
        q, k, v = (f"f32[1,2,{rows},{w}]" for rows, w in ((n, 7), (m, 7), (m, 18)))
        kinds = [q, k, v, None, None, None]
        if op == "FlashAttentionGrad":
            row = f"f32[1,2,{n}]"
            kinds = [f"f32[1,2,{n},18]", *kinds, f"f32[1,2,{n},18]", row, row]
        kinds += [f"i64[{n},2]", f"i64[{m},2]"]
        types = tuple(None if t is None else parse_type(t) for t in kinds)
        call = KernelSpec(op, {"scale": 1.0, "is_causal": 0}, types, ())
        assert kernel.unsupported(call) is None
        return [t.nbytes for t in kernel.scratch(call)]

    rows = (0, 1, 15, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 5000)
    for other in (0, 3, 700):
        for small, large in itertools.pairwise(rows):
            for fixed in ((other, small), (other, large)), ((small, other), (large, other)):
                less, more = (sizes(*n) for n in fixed)
                assert all(a <= b for a, b in zip(less, more, strict=True))
