"""FlashAttention and its gradient: PyTorch's own in fp64 is the truth, and for dropout the body.

Tensors lie in rubbish and in the memory the plan gives them: columns of one wide buffer.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import Given, OpCase
from torch.nn import functional as F

from onward.graph.evaluate import evaluate
from onward.graph.types import DType, Type, parse_type
from onward.kernels import KERNELS, Need, Use, torch_dtype
from onward.kernels.native import attention
from onward.kernels.native.library import FOLDER, Library, library

LEVELS = sorted(FOLDER.glob("*.so"))
CANARY = 12345.0
SEED = torch.tensor([2**32 - 1, 987654321])

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")


@pytest.fixture(params=LEVELS, ids=lambda path: path.name.partition(".")[0], autouse=True)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Every test runs on both builds."""
    path: Path = request.param
    if "avx2" in path.name and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("the processor lacks AVX2")
    loaded = Library(path)
    monkeypatch.setattr(attention, "library", lambda: loaded)
    return loaded


@dataclass(frozen=True)
class Call:
    """Sizes, mask and dropout of one attention."""

    B: int = 2
    H: int = 2
    Q: int = 5
    S: int = 5
    K: int = 8
    E: int = 8
    causal: bool = False
    mask: str = ""  # kind and shape: "bool 2,1,1,5"
    ratio: float = 0.0
    sample_dim: int = 0

    def __str__(self) -> str:
        kind = f" {self.mask}" if self.mask else ""
        drop = f" drop{self.ratio}@{self.sample_dim}" if self.ratio else ""
        sizes = (self.B, self.H, self.Q, self.S, self.K, self.E)
        return ",".join(map(str, sizes)) + " causal" * self.causal + kind + drop

    @property
    def attrs(self) -> dict[str, Any]:
        attrs = {"scale": 1 / math.sqrt(self.K), "is_causal": int(self.causal)}
        drop = {"ratio": self.ratio, "site": 2**20 + 3, "sample_dim": self.sample_dim}
        return attrs | drop if self.ratio else attrs

    def tensors(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """dy, q, k, v; mask."""
        g = torch.Generator().manual_seed(sum(map(ord, str(self))))
        B, H, Q, S, K, E = self.B, self.H, self.Q, self.S, self.K, self.E
        shapes = [(B, H, Q, E), (B, H, Q, K), (B, H, S, K), (B, H, S, E)]
        tensors = [torch.randn(*shape, generator=g) for shape in shapes]
        kind, _, sizes = self.mask.partition(" ")
        if not kind:
            return tensors, None
        shape = [int(n) for n in sizes.split(",")]
        drawn = torch.randn(shape, generator=g)
        if kind == "bool":
            mask = drawn > -0.8
            mask[..., 0] = True
            return tensors, mask
        if kind == "nothing":  # rows with nothing to attend to
            mask = drawn > 0.0
            mask.reshape(-1, shape[-1])[::2] = False
            return tensors, mask
        if kind == "infinite":
            mask = torch.where(drawn > 0.8, -torch.inf, 0.0)
            mask[..., 0] = 0.0
            return tensors, mask
        return tensors, drawn


def wide(x: torch.Tensor, parts: int = 3) -> torch.Tensor:
    """`x[B,H,T,K]` in columns of a buffer `[B,T,parts*H*K]`, as a product of q, k, v leaves it."""
    B, H, T, K = x.shape
    room = torch.full((B, T, parts * H * K), CANARY)
    y = room[..., H * K : 2 * H * K].view(B, T, H, K).transpose(1, 2)
    y.copy_(x)
    return y


def type_of(x: torch.Tensor | None) -> Type | None:
    if x is None:
        return None
    kinds = {torch.bool: DType.BOOL, torch.int64: DType.INT64, torch.float32: DType.FLOAT}
    return Type(kinds[x.dtype], tuple(x.shape))


def run(
    op: str, attrs: dict[str, Any], inputs: list[torch.Tensor | None], outputs: list[torch.Tensor]
) -> None:
    """One launch; outputs are rubbish before, and nothing is written outside the scratch."""
    (kernel,) = KERNELS[op]
    types = tuple(type_of(x) for x in inputs)
    need = Need(op, attrs, types, tuple(t for y in outputs if (t := type_of(y)) is not None))
    assert kernel.why_not(need) is None
    rooms, scratch = [], []
    for t in kernel.scratch(need):
        shape = [int(n) for n in t.shape]  # type: ignore[arg-type]
        whole = t.dtype == DType.INT32
        rubbish = torch.tensor(-77777, dtype=torch.int32) if whole else torch.tensor(CANARY)
        room = rubbish.repeat(math.prod(shape) + 128)
        if not whole:
            room[64:-64] = torch.nan
        rooms.append((room, rubbish))
        scratch.append(room[64:-64].view(shape))
    for y in outputs:
        y.fill_(torch.nan)
    kernel.bind(Use(attrs, inputs, outputs, scratch))()
    for room, rubbish in rooms:
        assert (room[:64] == rubbish).all() and (room[-64:] == rubbish).all(), "out of the scratch"


def ours(call: Call, place: Any = wide, offset: int = 7) -> dict[str, torch.Tensor]:
    """y, dq, dk, dv from the kernels, each tensor placed by `place`."""
    (dy, q, k, v), mask = call.tensors()
    dy, q, k, v = (place(x) for x in (dy, q, k, v))
    drop = [SEED, torch.tensor(offset)] if call.ratio else [None, None]
    y = place(torch.empty(call.B, call.H, call.Q, call.E))
    rows = [torch.empty(call.B, call.H, call.Q) for _ in range(2)]
    grads = [place(torch.empty(x.shape)) for x in (q, k, v)]
    run("FlashAttention", call.attrs, [q, k, v, mask, *drop], [y, *rows])
    run("FlashAttentionGrad", call.attrs, [dy, q, k, v, mask, *drop, y, *rows], grads)
    return dict(zip(("y", "dq", "dk", "dv"), (y, *grads), strict=True))


def theirs(call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same by PyTorch; rows with nothing to attend to are 0."""
    (dy, q, k, v), mask = call.tensors()
    dy, q, k, v = (x.to(dtype) for x in (dy, q, k, v))
    for x in (q, k, v):
        x.requires_grad_()
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


def assert_law(call: Call, have: dict[str, torch.Tensor]) -> None:
    """At most twice eager's distance to fp64, plus 1e-7."""
    exact, plain = theirs(call, torch.float64), theirs(call, torch.float32)
    for name, truth in exact.items():
        distance = float((have[name].double() - truth).norm())
        allowed = 2 * float((plain[name].double() - truth).norm()) + 1e-7 * float(truth.norm())
        # where the truth is zero (one key, one query) eager may be exactly right by luck
        allowed += 6e-8 * float(exact["dv"].norm()) * (float(truth.norm()) < 1e-12)
        assert distance <= allowed, f"{name}: {distance:.3e}, allowed {allowed:.3e}"


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
]  # fmt: skip


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
    """As eager does; the log-sum-exp of such a row would have lost the number of its keys."""
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
    """All dims the other way round in memory: the last one is far apart."""
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


# ---- packed rows


def packed(*sequences: tuple[Iterable[int], Iterable[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of queries and keys from their positions, sequence by sequence; one number is
    left out after each sequence.
    """
    sides = [
        [(2 * i, place) for i, pair in enumerate(sequences) for place in pair[side]]
        for side in (0, 1)
    ]
    q_at, k_at = (np.array(side, np.int64).reshape(-1, 2) for side in sides)
    return q_at, k_at


def whole(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    return packed(*[(range(n), range(n)) for n in lengths])


def some(n: int, share: float, start: int = 0) -> list[int]:
    """Positions with holes among them."""
    rng = np.random.default_rng(n)
    return [start + int(i) for i in np.flatnonzero(rng.random(n) < share)]


def hidden(
    rows: tuple[np.ndarray, np.ndarray], hide: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The keys that `hide` says are hidden, with positions that mean nothing."""
    queries, keys = rows[0], rows[1].copy()
    off = hide(np.arange(len(keys)))
    keys[off, 0] = -1
    keys[off, 1] = np.random.default_rng(3).integers(-5, 99, len(keys))[off]
    return queries, keys


HOLES = [1, 2, 5, 6, 7, 11]
PACKED: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "one token each": whole(*[1] * 7),
    "one sequence": whole(70),
    "whole": whole(3, 64, 1, 65, 130, 2),
    "begin anywhere": packed(*[(range(s, s + n), range(s, s + n)) for s, n in ((9, 5), (3, 70))]),
    "holes": packed((HOLES, HOLES), (some(90, 0.7), some(90, 0.7)), (some(40, 0.5), range(40))),
    "first tokens ask": packed(*[([0], range(n)) for n in (5, 1, 80)]),
    "last tokens ask": packed(*[([n - 1], range(n)) for n in (5, 1, 80)]),
    "some ask": packed(*[(some(n, 0.2), range(n)) for n in (20, 300, 33)]),
    "before all keys": packed(([0, 1, 4, 5], [4, 6, 7]), (range(70), range(66, 80))),
    "queries without keys": packed((range(3), ()), (range(4), range(4)), (range(2), ())),
    "keys without queries": packed(((), range(3)), (range(4), range(4)), ((), range(2)),
                                   (range(3), range(3)), ((), range(5))),
    "hidden within": hidden(whole(5, 40, 70), lambda i: i % 3 == 1),
    "hidden and holes": hidden(packed((HOLES, HOLES), (HOLES, range(12))), lambda i: i % 4 == 2),
    "hidden at ends": hidden(whole(6, 6, 6), lambda i: i % 6 % 5 == 0),
    "a hidden sequence": hidden(whole(6, 7, 6), lambda i: (i > 5) & (i < 13)),
    "all hidden": hidden(whole(3, 4), lambda i: i >= 0),
    "blocks": whole(300, 1, 521),
    "blocks with holes": packed((some(700, 0.8), some(700, 0.8)), (range(9), range(9))),
    "blocks with hidden": hidden(whole(700, 9), lambda i: (i % 5 == 1) | ((i > 250) & (i < 520))),
    "blocks of the forward": packed((some(1300, 0.1), range(1300)), (range(9), range(9))),
    "blocks of the forward with hidden": hidden(
        packed((some(2500, 0.04), range(2500))), lambda i: (i < 1100) | (i % 3 == 1)),
}  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """One attention of packed rows."""

    name: str
    causal: bool = False
    ratio: float = 0.0
    H: int = 2
    K: int = 4
    E: int = 4

    def __str__(self) -> str:
        drop = f" drop{self.ratio}" * bool(self.ratio)
        return f"{self.name}{' causal' * self.causal}{drop} {self.H},{self.K},{self.E}"

    @property
    def attrs(self) -> dict[str, Any]:
        return Call(K=self.K, causal=self.causal, ratio=self.ratio).attrs

    @property
    def at(self) -> tuple[np.ndarray, np.ndarray]:
        return PACKED[self.name]

    def tensors(self) -> list[torch.Tensor]:
        """dy, q, k, v."""
        q_at, k_at = self.at
        call = Call(B=1, H=self.H, Q=len(q_at), S=len(k_at), K=self.K, E=self.E)
        return call.tensors()[0]


def ours_packed(rows: Rows, place: Any = wide) -> dict[str, torch.Tensor]:
    dy, q, k, v = (place(x) for x in rows.tensors())
    drop = [SEED, torch.tensor(7)] if rows.ratio else [None, None]
    at = [torch.from_numpy(x) for x in rows.at]
    y, numbers = place(torch.empty(dy.shape)), [torch.empty(q.shape[:3]) for _ in range(2)]
    grads = [place(torch.empty(x.shape)) for x in (q, k, v)]
    run("FlashAttention", rows.attrs, [q, k, v, None, *drop, *at], [y, *numbers])
    inputs = [dy, q, k, v, None, *drop, y, *numbers, *at]
    run("FlashAttentionGrad", rows.attrs, inputs, grads)
    return dict(zip(RESULTS, (y, *numbers, *grads), strict=True))


RESULTS = ("y", "peak", "total", "dq", "dk", "dv")


@functools.cache
def bodies(rows: Rows, dtype: DType) -> dict[str, torch.Tensor]:
    """The same from the ops' bodies."""
    dy, q, k, v = (Given(x.numpy()) for x in rows.tensors())
    drop = (Given(SEED.numpy()), Given(np.array(7))) if rows.ratio else (None, None)
    at = [Given(x) for x in rows.at]
    case = OpCase("FlashAttention", (q, k, v, None, *drop, *at), rows.attrs)
    made = list(evaluate(case.graph(dtype), case.feeds(dtype)).values())
    saved = [Given(x) for x in made]
    case = OpCase("FlashAttentionGrad", (dy, q, k, v, None, *drop, *saved, *at), rows.attrs)
    made += evaluate(case.graph(dtype), case.feeds(dtype)).values()
    return {name: torch.tensor(x) for name, x in zip(RESULTS, made, strict=True)}


PACKED_ROWS = [
    *[Rows(name, causal) for name in PACKED for causal in (False, True)],
    *[Rows(name, causal, 0.3, K=7, E=18, H=1) for name in PACKED for causal in (False, True)],
    Rows("whole", True, 0.1, H=3, K=64, E=64),
]


@pytest.mark.parametrize("rows", PACKED_ROWS, ids=str)
def test_packed_rows_no_farther_from_fp64_than_twice_the_body(rows: Rows) -> None:
    exact, plain = bodies(rows, DType.DOUBLE), bodies(rows, DType.FLOAT)
    lowest = exact["peak"] < -1e30  # of rows with no key: the lowest number of their type
    for name, have in ours_packed(rows).items():
        truth, eager = exact[name], plain[name].double()
        assert have.isfinite().all()
        if name == "peak":
            assert torch.equal(have == torch.finfo(torch.float32).min, lowest)
            have, truth, eager = (torch.where(lowest, 0.0, x) for x in (have, truth, eager))
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
    want = {"y": torch.zeros_like(dy), **dict(zip(RESULTS[3:], map(torch.zeros_like, (q, k, v)),
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
        for x, i, name in zip(grads, (own, keys, keys), RESULTS[3:], strict=True):
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


@pytest.mark.parametrize("name", ["whole", "one sequence", "blocks", "hidden within", "some ask"])
def test_threads_change_no_bit_of_packed_rows(name: str) -> None:
    rows = Rows(name, causal=True, ratio=0.3, H=1)
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
    """As many rows in other sequences: the addresses are bound, the counts are not."""
    rows = Rows("whole", causal=True)
    _, q, k, v = rows.tensors()
    at = [torch.from_numpy(x.copy()) for x in rows.at]
    y, *numbers = torch.empty_like(v), *(torch.empty(q.shape[:3]) for _ in range(2))
    (kernel,) = KERNELS["FlashAttention"]
    inputs = [q, k, v, None, None, None, *at]
    types = tuple(type_of(x) for x in inputs)
    scratch = [
        torch.empty([int(n) for n in t.shape], dtype=torch_dtype(t.dtype))  # type: ignore[arg-type]
        for t in kernel.scratch(Need("FlashAttention", rows.attrs, types, ()))
    ]
    launch = kernel.bind(Use(rows.attrs, inputs, [y, *numbers], scratch))
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
    (kernel,) = KERNELS[op]

    def sizes(n: int, m: int) -> list[int]:
        q, k, v = (f"f32[1,2,{rows},{w}]" for rows, w in ((n, 7), (m, 7), (m, 18)))
        kinds = [q, k, v, None, None, None]
        if op == "FlashAttentionGrad":
            row = f"f32[1,2,{n}]"
            kinds = [f"f32[1,2,{n},18]", *kinds, f"f32[1,2,{n},18]", row, row]
        kinds += [f"i64[{n},2]", f"i64[{m},2]"]
        types = tuple(None if t is None else parse_type(t) for t in kinds)
        call = Need(op, {"scale": 1.0, "is_causal": 0}, types, ())
        assert kernel.why_not(call) is None
        return [t.nbytes for t in kernel.scratch(call)]

    rows = (0, 1, 15, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 5000)
    for other in (0, 3, 700):
        for small, large in itertools.pairwise(rows):
            for fixed in ((other, small), (other, large)), ((small, other), (large, other)):
                less, more = (sizes(*n) for n in fixed)
                assert all(a <= b for a, b in zip(less, more, strict=True))


# ---- what is refused, and the exponential


def need(q: str, k: str, v: str, mask: str | None = None, **attrs: Any) -> Need:
    types = [parse_type(t) for t in (q, k, v)] + [None if mask is None else parse_type(mask)]
    return Need("FlashAttention", {"scale": 1.0, "is_causal": 0, **attrs}, tuple(types), ())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (need("f32[3,5,4]", "f32[3,5,4]", "f32[3,5,4]"), "3 dims"),
        (need("f32[2,4,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]"), "shared"),
        (need("f32[2,1,5,4]", "f32[2,1,0,4]", "f32[2,1,0,4]"), "no elements"),
        (need("f32[2,1,5,0]", "f32[2,1,5,0]", "f32[2,1,5,4]"), "no elements"),
        (need("f64[2,1,5,4]", "f64[2,1,5,4]", "f64[2,1,5,4]"), "double"),
        (need("f32[2,1,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]", "f32[5,5]", is_causal=1), "causal"),
        (need("f32[2,1,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]", ratio=1.0), "dropped"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_kernels_say_what_they_do_not_cover(call: Need, reason: str) -> None:
    (kernel,) = KERNELS["FlashAttention"]
    assert reason in (kernel.why_not(call) or "")


def test_coordinates_that_are_absent_are_no_packed_rows() -> None:
    (kernel,) = KERNELS["FlashAttention"]
    call = need("f32[2,1,5,4]", "f32[2,1,5,4]", "f32[2,1,5,4]")
    absent = replace(call, inputs=(*call.inputs, None, None, None, None))
    assert kernel.why_not(absent) is None
    assert kernel.scratch(absent) == kernel.scratch(call)
