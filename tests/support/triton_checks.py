"""Triton kernels beside their ops' bodies, on the CPU by Triton's interpreter.

`CHECKS` maps a name to a function that raises where a kernel differs. Run as a program, this module
reads names and answers each with a line of JSON: null, or what was raised. It runs in a process of
its own, since Triton reads TRITON_INTERPRET when it is first imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from after_forward import after_forward
from answers import serve
from attention_calls import PATTERNS, SEED, Call
from kernel_calls import assert_equal, bound, raise_input_error, rubbish, spec_of
from op_cases import CASES, ONWARD_CASES, Given, OpCase
from packed_rows import PACKED, Rows
from row_calls import RowCall, calls
from triton_calls import DTYPES, TOLERANCE, launch, maxima_of_devices, near, type_of
from triton_conv_checks import CHECKS as CONV_CHECKS
from triton_grid_checks import CHECKS as GRID_CHECKS
from triton_group_norm_checks import CHECKS as GROUP_NORM_CHECKS
from triton_loss_checks import CHECKS as LOSS_CHECKS
from triton_row_checks import CHECKS as ROW_CHECKS
from triton_update_checks import CHECKS as UPDATE_CHECKS

from onward.graph.evaluate import evaluate
from onward.graph.types import DType
from onward.kernels import TRITON, KernelArguments, torch_dtype

CHECKS: dict[str, Callable[[], None]] = {}


# ---- the sample calls of every op


def run_case(case: OpCase, dtype: DType) -> None:
    (kernel,) = TRITON[case.op]
    call = bound(after_forward(case), dtype)
    before = [None if x is None else x.clone() for x in call.inputs]
    outputs = [rubbish(t) for t in call.spec.outputs]
    scratch = [rubbish(t) for t in kernel.scratch(call.spec)]
    args = KernelArguments(call.spec.attrs, call.inputs, outputs, scratch)
    kernel.bind(args)()
    raise_input_error(kernel, args)
    if dtype == DType.FLOAT:
        assert_equal(outputs, call.want, **({} if case.op == "Dropout" else TOLERANCE))
    else:
        for y, want in zip(outputs, call.want, strict=True):
            assert tuple(y.shape) == want.shape
            exactly = case.op == "Dropout" or not y.is_floating_point()
            allowed = 0.0 if exactly else 5e-3
            np.testing.assert_allclose(
                y.double().numpy(), want.astype(np.float64), rtol=allowed, atol=allowed
            )
    for x, kept in zip(call.inputs, before, strict=True):
        if x is not None and kept is not None:
            assert torch.equal(x.nan_to_num(), kept.nan_to_num()), "an input was written to"


for _case in CASES + ONWARD_CASES:
    for _dtype in DTYPES:
        if _case.op in TRITON and TRITON[_case.op][0].unsupported(spec_of(_case, _dtype)) is None:
            CHECKS[f"case {_case} {_dtype.name.lower()}"] = partial(run_case, _case, _dtype)


# ---- larger calls of attention


def has_lowest(call: str) -> bool:
    """Whether f32's lowest number is among what a call adds to its scores."""
    return "least" in call or "low bias" in call


def columns(x: torch.Tensor) -> torch.Tensor:
    """x[B,H,T,K] in the middle third of a buffer [B,T,3*H*K], as a product of q, k, v leaves it."""
    B, H, T, K = x.shape
    room = torch.full((B, T, 3 * H * K), 1.0, dtype=x.dtype)
    y = room[..., H * K : 2 * H * K].view(B, T, H, K).transpose(1, 2)
    y.copy_(x)
    return y


def assert_gaps_kept(y: torch.Tensor) -> None:
    """Asserts that a kernel wrote nothing beside the columns that are its own."""
    B, H, T, K = y.shape
    room = torch.as_strided(y, (B, T, 3 * H * K), (T * 3 * H * K, 3 * H * K, 1), 0)
    assert (room[..., : H * K] == 1).all() and (room[..., 2 * H * K :] == 1).all()


@dataclass(frozen=True)
class Attention:
    """One call of attention and its gradient, in batches or on packed rows. sharing: heads of
    queries that share one of keys."""

    call: Call | Rows
    dtype: DType = DType.FLOAT
    sharing: int = 1

    def __str__(self) -> str:
        shared = f" sharing{self.sharing}" if self.sharing > 1 else ""
        return f"{self.call}{shared} {self.dtype.name.lower()}"

    @property
    def attrs(self) -> dict[str, Any]:
        return self.call.attrs

    def operands(self) -> list[torch.Tensor | None]:
        """dy, q, k, v, mask, seed, offset, coordinates of queries and of keys, bias."""
        last: list[torch.Tensor | None]
        if isinstance(self.call, Rows):
            tensors, mask = self.call.tensors(), None
            last = [torch.from_numpy(x) for x in self.call.at] + [None]
        else:
            tensors, mask = self.call.tensors()
            last = [None, None, self.call.bias()]
        dy, q, k, v = tensors
        k, v = (x[:, : x.shape[1] // self.sharing] for x in (k, v))
        drop = [SEED, torch.tensor(7)] if self.call.ratio else [None, None]
        low = torch_dtype(self.dtype)
        made = [dy, q, k, v, mask, *drop, *last]
        return [x if x is None or not x.is_floating_point() else x.to(low) for x in made]

    def bodies(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """y, peaks and totals; dq, dk, dv and dbias: by the ops' bodies in fp64; in fp32
        where the mask adds f32's lowest number, beside which fp64 would still see the scores."""
        exact = DType.FLOAT if has_lowest(str(self.call)) else DType.DOUBLE
        given = [
            None if x is None else Given(x.double().numpy() if x.is_floating_point() else x.numpy())
            for x in self.operands()
        ]
        dy, rest, last = given[0], given[1:7], given[7:]
        case = OpCase("FlashAttention", (*rest, *last), self.attrs)
        made = list(evaluate(case.graph(exact), case.feeds(exact)).values())
        saved = [Given(x) for x in made]
        case = OpCase("FlashAttentionGrad", (dy, *rest, *saved, *last), self.attrs)
        grads = evaluate(case.graph(exact), case.feeds(exact)).values()
        return [torch.tensor(x) for x in made], [torch.tensor(x) for x in grads]

    def __call__(self) -> None:
        dy, q, k, v, mask, seed, offset, q_at, k_at, bias = self.operands()
        assert dy is not None and q is not None and k is not None and v is not None
        dy, q, k, v = (columns(x) for x in (dy, q, k, v))
        y = columns(torch.empty_like(dy))
        rows = [torch.empty(q.shape[:3]) for _ in range(2)]
        rest, last = [q, k, v, mask, seed, offset], [q_at, k_at, bias]
        launch("FlashAttention", self.attrs, [*rest, *last], [y, *rows])
        grads = [columns(torch.empty_like(x)) for x in (q, k, v)]
        biases = [] if bias is None else [torch.empty_like(bias)]
        launch(
            "FlashAttentionGrad", self.attrs, [dy, *rest, y, *rows, *last], [*grads, *biases]
        )  # fmt: skip
        for written in (y, *grads):
            assert_gaps_kept(written)
        (truth, *_), gradients = self.bodies()
        names = ("y", "dq", "dk", "dv", "dbias")
        for name, have, want in zip(
            names, (y, *grads, *biases), (truth, *gradients), strict=False
        ):  # fmt: skip
            near(name, have, want, q.dtype)


_SIZED = Call(B=1, H=1, Q=150, S=170, K=16, E=16)
_LARGE: list[tuple[Call, int]] = [
    (replace(_SIZED, causal=causal, ratio=ratio), 1)
    for causal in (False, True) for ratio in (0.0, 0.3)
] + [
    (replace(_SIZED, S=150, mask=f"{low}{kind} 150,150", causal=causal), 1)
    for kind in PATTERNS
    for low in ("", "least added ", "infinite added ") for causal in (False, True)[: 2 - bool(low)]
    if low != "infinite added " or kind not in ("few", "above")  # rows of -inf alone are NaN
] + [
    (replace(_SIZED, mask="few 150,170", fill=fill), 1) for fill in (-3e38, -1e9, -1.5, 0.5)
] + [
    (replace(_SIZED, mask=f"{kind} 150,170", fill=-3e38, fill_is_added=True, softcap=cap), 1)
    for kind, cap in (("few", 0.0), ("above", 0.0), ("few", 1.5))
] + [
    (replace(_SIZED, B=2, mask="nothing 2,1,150,170"), 1),
    (replace(_SIZED, B=2, mask="bool 2,1,1,170", ratio=0.1), 1),
    *[(replace(_SIZED, softcap=cap, mask="behind 150,170", fill=f), 1)
      for cap in (0.2, 20.0) for f in (None, -1e9)],
    *[(replace(_SIZED, B=2, S=150, biases=n, causal=causal), 1)
      for n in (1, 2) for causal in (False, True)],
    (replace(_SIZED, B=2, biases=1, softcap=1.5, ratio=0.2, mask="window 150,170", fill=-1e9), 1),
    *[(replace(_SIZED, biases=1, low_bias=True, mask=f"{kind} 150,170", fill=fill), 1)
      for kind in ("below", "few", "above", "documents") for fill in (None, -1e9)],
    *[(replace(_SIZED, S=150, biases=1, low_bias=True, causal=causal), 1)
      for causal in (False, True)],
    *[(replace(_SIZED, H=4, S=150, causal=True, ratio=0.1), n) for n in (2, 4)],
    *[(replace(_SIZED, Q=70, S=70, K=n, E=n, causal=True), 1) for n in (40, 80, 100, 128, 200)],
    (replace(_SIZED, Q=70, S=70, K=24, E=40), 1),
    (replace(_SIZED, Q=170, S=33, causal=True), 1),
    *[(replace(_SIZED, B=2, H=2, Q=70, S=70, ratio=0.4, sample_dim=n), 1) for n in (0, 1, 2)],
]  # fmt: skip
_ROWS = [
    *[(Rows(name, causal), 1) for name in PACKED for causal in (False, True)],
    *[(Rows(name, True, 0.3, K=7, E=18, H=2), 2) for name in PACKED],
]
for _call, _sharing in (*_LARGE, *_ROWS):
    for _dtype in DTYPES:
        if has_lowest(str(_call)) and _dtype == DType.FLOAT16:
            continue  # f32's lowest number is no fp16
        _made = Attention(_call, _dtype, _sharing)
        CHECKS[f"{'packed' if isinstance(_call, Rows) else 'attention'} {_made}"] = _made


def run_with_precision(precision: str) -> None:
    """Attention where torch's flag of a backend's products is set, after which its older flag
    `allow_tf32` raises."""
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        Attention(_SIZED)()
    finally:
        products.fp32_precision = before


for _precision in ("tf32", "ieee"):
    CHECKS[f"precision {_precision} float"] = partial(run_with_precision, _precision)


def run_with_blocks(capability: str | tuple[int, int], made: Attention) -> None:
    """Attention by the blocks of another device."""
    with patch("onward.kernels.triton.attention.capability_of", lambda device: capability):
        made()


for _capability in ((8, 0), "gfx942"):
    for _call in (
        replace(_SIZED, S=150, causal=True),
        replace(_SIZED, Q=70, S=90, K=128, E=128, mask="few 70,90"),
        Rows("whole", True, 0.3, K=7, E=18, H=2),
    ):
        for _dtype in DTYPES:
            _made = Attention(_call, _dtype)
            CHECKS[f"attention by blocks of {_capability} {_made}"] = partial(
                run_with_blocks, _capability, _made
            )


# ---- masks whose ends lie further apart than 31 bits count


def run_far(turned: bool) -> None:
    """Few pages of the mask's memory are touched. turned: whether its columns lie apart."""
    n, apart, g = 18, 1 << 27, torch.Generator().manual_seed(5)
    room = torch.empty(n * apart, dtype=torch.bool)
    mask = room.as_strided((n, n), (1, apart) if turned else (apart, 1))
    mask.copy_((torch.rand(n, n, generator=g) > 0.5) | torch.eye(n, dtype=torch.bool))
    dy, q, k, v = torch.randn(4, 1, 1, n, 16, generator=g)
    y, rows = torch.empty_like(dy), [torch.empty(1, 1, n) for _ in range(2)]
    grads, attrs = [torch.empty_like(x) for x in (q, k, v)], {"scale": 0.25, "is_causal": 0}
    given: list[torch.Tensor | None] = [q, k, v, mask, None, None]
    launch("FlashAttention", attrs, given, [y, *rows])
    launch("FlashAttentionGrad", attrs, [dy, *given, y, *rows], grads)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        near_by = mask.clone(memory_format=torch.contiguous_format)
        truth = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], near_by
        )
        wanted = torch.autograd.grad(truth, leaves, dy.double())
    for have, want in zip((y, *grads), (truth.detach(), *wanted), strict=True):
        near("numbers", have, want)


for _turned in (False, True):
    CHECKS[f"attention far {'columns' if _turned else 'rows'} float"] = partial(run_far, _turned)


# ---- scores far below their soft cap, where tanh is nearly its argument


def run_far_below_the_cap() -> None:
    """Probabilities are as near to fp64 as those of eager PyTorch: 1 - exp(-2x) would lose digits
    of a small x."""
    g, cap = torch.Generator().manual_seed(5), 50.0
    q, k = 0.55 * torch.randn(2, 1, 2, 64, 64, generator=g)
    v = torch.eye(64).expand(1, 2, 64, 64).contiguous()  # results are the probabilities
    y, rows = torch.empty_like(q), [torch.empty(1, 2, 64) for _ in range(2)]
    attrs = {"scale": 0.125, "is_causal": 0, "softcap": cap}
    launch("FlashAttention", attrs, [q, k, v, None, None, None], [y, *rows])

    def probabilities(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(a @ b.mT * 0.125 / cap) * cap).softmax(-1)

    truth = probabilities(q.double(), k.double())
    ours, eager = (
        float(((x.double() - truth) / truth).abs().mean()) for x in (y, probabilities(q, k))
    )
    assert ours <= 2.0 * eager, f"{ours:.1e} from fp64 in the mean, eager {eager:.1e}"


CHECKS["attention far below the cap float"] = run_far_below_the_cap

# ---- addends of the scores in fp32 beside products of low precision


@dataclass(frozen=True)
class WideAddend(Attention):
    """Attention in fp16 whose bias, or mask of numbers, is f32."""

    def __str__(self) -> str:
        return f"beside f32 {super().__str__()}"

    def operands(self) -> list[torch.Tensor | None]:
        assert isinstance(self.call, Call)
        *given, _ = super().operands()
        mask = self.call.tensors()[1]
        return [*given[:4], mask, *given[5:], self.call.bias()]


for _call in (
    *[replace(_SIZED, B=2, S=150, biases=n, causal=causal)
      for n in (1, 2) for causal in (False, True)],
    replace(_SIZED, B=2, biases=1, softcap=1.5, ratio=0.2, mask="window 150,170", fill=-1e9),
    *[replace(_SIZED, biases=1, low_bias=True, mask=f"{kind} 150,170")
      for kind in ("few", "below")],
    *[replace(_SIZED, S=150, mask=f"{added} added {kind} 150,150", ratio=ratio)
      for added in ("least", "infinite") for kind, ratio in (("window", 0.0), ("behind", 0.2))],
    replace(_SIZED, B=2, mask="infinite 2,1,150,170", biases=2),
):  # fmt: skip
    _made = WideAddend(_call, DType.FLOAT16)
    CHECKS[f"attention {_made}"] = _made


# ---- queries that are not numbers


@dataclass(frozen=True)
class Odd(Attention):
    """Attention of queries of which some are NaN."""

    def __str__(self) -> str:
        return f"of NaN {super().__str__()}"

    def operands(self) -> list[torch.Tensor | None]:
        dy, q, *rest = super().operands()
        assert q is not None
        q[..., 1::5, :] = torch.nan
        return [dy, q, *rest]

    def __call__(self) -> None:
        """y and dq are NaN where the body's are. Of dk and dv the body is NaN also for keys that no
        such query sees, by 0 times NaN."""
        dy, q, k, v, mask, seed, offset, q_at, k_at, bias = self.operands()
        assert dy is not None and q is not None and k is not None and v is not None
        y, rows = torch.empty_like(dy), [torch.empty(q.shape[:3]) for _ in range(2)]
        rest, last = [q, k, v, mask, seed, offset], [q_at, k_at, bias]
        grads = [torch.empty_like(x) for x in (q, k, v)]
        attrs = {n: x for n, x in self.attrs.items() if n != "bias_gradient"}
        with maxima_of_devices():
            launch("FlashAttention", attrs, [*rest, *last], [y, *rows])
            launch("FlashAttentionGrad", attrs, [dy, *rest, y, *rows, *last], grads)
        (truth, *_), gradients = self.bodies()
        for name, have, want in zip(("y", "dq"), (y, grads[0]), (truth, gradients[0]), strict=True):
            odd = want.isnan()
            assert odd.any() and not odd.all() and torch.equal(have.isnan(), odd), name
            near(name, have[~odd], want[~odd])
        for name, have, want in zip(("dk", "dv"), grads[1:], gradients[1:3], strict=True):
            assert have.isnan().any() and (want.isnan() | ~have.isnan()).all(), name


_ODD: list[Call | Rows] = [
    *[replace(_SIZED, S=150, causal=causal, ratio=ratio)
      for causal, ratio in ((False, 0.0), (True, 0.0), (True, 0.3))],
    *[replace(_SIZED, S=150, mask=f"{kind} 150,150", causal=causal)
      for kind, causal in (("window", True), ("above", False), ("few", False), ("few", True))],
    *[replace(_SIZED, mask="infinite 150,170", biases=n) for n in (0, 1)],
    replace(_SIZED, mask="few 150,170", fill=-1e9, softcap=1.5),
    *[Rows(name, causal) for name in ("whole", "hidden within", "queries without keys")
      for causal in (False, True)],
]  # fmt: skip
for _call in _ODD:
    for _dtype in DTYPES:
        _made = Odd(_call, _dtype)
        CHECKS[f"attention {_made}"] = _made


# ---- dropout to the bit


def kept_of(sizes: tuple[int, ...], attrs: dict[str, Any]) -> np.ndarray:
    """Returns a mask of the probabilities that the body of Dropout keeps."""
    ones = Given(np.ones(sizes, np.float32))
    attrs = {name: attrs[name] for name in ("ratio", "site", "sample_dim")}
    case = OpCase("Dropout", (ones, Given(SEED.numpy()), Given(np.array(7))), attrs)
    (y,) = evaluate(case.graph(), case.feeds()).values()
    return np.asarray(y) != 0


def run_mask(call: Call | Rows, dtype: DType) -> None:
    """Values that are the identity show the probabilities as dropped."""
    _, q, k, _, _, seed, offset, q_at, k_at, _ = Attention(call, dtype).operands()
    assert q is not None and k is not None
    B, H, Q, _ = q.shape
    S = k.shape[2]
    q, k = q * 0.01, k * 0.01  # so that none is lost to rounding
    v = torch.eye(S, dtype=q.dtype).expand(B, H, S, S)
    y = torch.empty((B, H, Q, S), dtype=q.dtype)
    rows = [torch.empty(q.shape[:3]) for _ in range(2)]
    launch("FlashAttention", call.attrs, [q, k, v, None, seed, offset, q_at, k_at], [y, *rows])
    if isinstance(call, Rows):
        q_rows, k_rows = call.at
        places = 1 + int(max(q_rows[:, 1].max(), k_rows[:, 1].max()))
        sequences = 1 + int(q_rows[:, 0].max())
        padded = kept_of((sequences, H, places, places), call.attrs)
        # [Q,S,H] -> [H,Q,S]; a hidden key's place means nothing
        at = np.clip(k_rows[:, 1], 0, places - 1)
        want = padded[q_rows[:, :1], :, q_rows[:, 1:], at[None]].transpose(2, 0, 1)
        seen = q_rows[:, :1] == k_rows[:, 0]
        if call.causal:
            seen = seen & (k_rows[:, 1] <= q_rows[:, 1:])
        np.testing.assert_array_equal(y[0].numpy() != 0, want & seen)
    else:
        want = kept_of((B, H, Q, S), call.attrs)
        np.testing.assert_array_equal(y.numpy() != 0, want & np.tri(Q, S, dtype=bool)
                                      if call.causal else want)  # fmt: skip


_MASKED: list[Call | Rows] = [
    *[replace(_SIZED, B=2, H=2, Q=70, S=130, ratio=0.35, sample_dim=n) for n in (0, 1, 2)],
    replace(_SIZED, Q=130, S=130, ratio=0.1, causal=True),
    *[Rows(name, causal, 0.35, H=3)
      for name in ("holes", "hidden and holes", "begin anywhere") for causal in (False, True)],
]  # fmt: skip
for _call in _MASKED:
    for _dtype in DTYPES:
        CHECKS[f"mask {_call} {_dtype.name.lower()}"] = partial(run_mask, _call, _dtype)


# ---- the linear head with its loss

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "bias": {"bias": True},
    "weights": {"weights": True},
    "smoothing": {"label_smoothing": 0.1},
    "ignored": {"ignored": True, "bias": True},
    "all": {"bias": True, "weights": True, "label_smoothing": 0.2, "ignored": True},
    "one block": {"rows": 100},
    "infinite": {"dloss": float("inf"), "bias": True},
    "bad label": {"label": 70},
    "negative label": {"label": -1},
}


def run_loss(op: str, form: dict[str, Any], dtype: DType) -> None:
    """Loss and gradients of 37 rows in blocks of 16, beside PyTorch's cross-entropy in fp64."""
    low, g = torch_dtype(dtype), torch.Generator().manual_seed(3)
    n, d, classes = 37, 16, 70
    x, w = (torch.randn(*size, generator=g).to(low) for size in ((n, d), (classes, d)))
    bias = torch.randn(classes, generator=g) if "bias" in form else None
    weights = torch.rand(classes, generator=g) + 0.1 if "weights" in form else None
    labels = torch.randint(0, classes, (n,), generator=g)
    if "ignored" in form:
        labels[::3] = -100
    if "label" in form:
        labels[5] = form["label"]
    dloss = torch.tensor(form.get("dloss", 0.75))
    attrs = {"ignore_index": -100, "reduction": form.get("reduction", "mean"),
             "rows": form.get("rows", 16)}  # fmt: skip
    attrs |= {"label_smoothing": form["label_smoothing"]} if "label_smoothing" in form else {}
    inputs: list[torch.Tensor | None] = [x, w, bias, labels, weights]
    outputs = [] if op == "LinearCrossEntropyGrad" else [torch.empty(())]
    if op != "LinearCrossEntropy":
        inputs.insert(0, dloss)
        outputs += [torch.empty_like(x), torch.empty(w.shape)]
        outputs += [] if bias is None else [torch.empty_like(bias)]
    flag = launch(op, attrs, inputs, outputs)
    (kernel,) = TRITON[op]
    assert kernel.input_error is not None
    error = kernel.input_error(KernelArguments(attrs, inputs, outputs, [], flag), flag.tolist())
    if "label" in form:
        assert isinstance(error, IndexError), error
        return
    assert error is None
    leaves = [x.double(), w.double(), *([] if bias is None else [bias.double()])]
    for leaf in leaves:
        leaf.requires_grad_()
    z = leaves[0] @ leaves[1].t() + (0.0 if bias is None else leaves[2])
    loss = torch.nn.functional.cross_entropy(
        z, labels, None if weights is None else weights.double(), ignore_index=-100,
        reduction=attrs["reduction"], label_smoothing=attrs.get("label_smoothing", 0.0),
    )  # fmt: skip
    want = [] if op == "LinearCrossEntropyGrad" else [loss.detach()]
    if op != "LinearCrossEntropy":
        want += torch.autograd.grad(loss, leaves, dloss.double())
    for i, (have, truth) in enumerate(zip(outputs, want, strict=True)):
        if dloss.isfinite() or (i == 0 and len(outputs) != len(leaves)):
            near(f"output {i}", have, truth, low if have.dim() else None)
        else:  # the step is refused: it is enough that no gradient is finite where eager's is not
            assert not have[~truth.isfinite()].isfinite().any(), f"output {i}"


for _op in ("LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep"):
    for _form in FORMS:
        for _dtype in DTYPES:
            CHECKS[f"loss {_op} {_form} {_dtype.name.lower()}"] = partial(
                run_loss, _op, FORMS[_form], _dtype
            )


def run_odd_loss(smoothing: float, dtype: DType) -> None:
    """A row that is NaN makes the loss NaN, and of the gradients of rows its own alone."""
    g = torch.Generator().manual_seed(3)
    x, w = (torch.randn(*size, generator=g).to(torch_dtype(dtype)) for size in ((9, 16), (70, 16)))
    x[2] = torch.nan
    attrs = {"ignore_index": -100, "reduction": "sum", "rows": 4, "label_smoothing": smoothing}
    inputs = [torch.tensor(1.0), x, w, None, torch.arange(9), None]
    loss, dx, dw = torch.empty(()), torch.empty_like(x), torch.empty(w.shape)
    with maxima_of_devices():
        launch("LinearCrossEntropyStep", attrs, inputs, [loss, dx, dw])
    assert loss.isnan() and dw.isnan().all()
    assert torch.equal(dx.isnan().all(1), torch.arange(9) == 2) and dx.isnan().sum() == 16


for _smoothing in (0.0, 0.1):
    for _dtype in DTYPES:
        CHECKS[f"loss NaN LinearCrossEntropyStep {_smoothing} {_dtype.name.lower()}"] = partial(
            run_odd_loss, _smoothing, _dtype
        )

CHECKS |= GRID_CHECKS | ROW_CHECKS | GROUP_NORM_CHECKS | LOSS_CHECKS | UPDATE_CHECKS | CONV_CHECKS


# ---- norms, gated units, rotary embeddings


def of_doubles(call: RowCall) -> list[torch.Tensor]:
    """The outputs of a call by its op's body in fp64."""
    given = [None if x is None else Given(x.numpy()) for x in call.inputs]
    attrs = {k: int(DType.DOUBLE) if k in ("x_type", "y_type") else v
             for k, v in call.attrs.items()}  # fmt: skip
    case = OpCase(call.op, tuple(given), attrs)
    found = evaluate(case.graph(DType.DOUBLE), case.feeds(DType.DOUBLE)).values()
    return [torch.tensor(np.asarray(y)) for y in found]


def run_rows(make: Callable[[], RowCall]) -> None:
    """The numbers of the body, nothing written around an output, and the same bits where an output
    lies in an input that the kernel may overwrite."""
    call = make()
    rooms = [y if y._base is None else y._base for y in call.outputs]
    before = [room.clone() for room in rooms]
    with patch("onward.kernels.triton.rms_norm._PROGRAMS", call.programs):
        launch(call.op, call.attrs, call.inputs, call.outputs)
    for i, (y, want) in enumerate(zip(call.outputs, of_doubles(call), strict=True)):
        near(f"output {i}", y, want)
        before[i].as_strided(y.size(), y.stride(), y.storage_offset()).copy_(y)
    assert all(map(torch.equal, before, rooms)), "written around an output"
    for out, source in TRITON[call.op][0].inplace:
        if out >= len(call.outputs) or source >= len(call.inputs):
            continue
        inputs = [None if x is None else x.clone() for x in call.inputs]
        over, want = inputs[source], call.outputs[out]
        if over is not None and type_of(over) == type_of(want) and over.is_contiguous():
            outputs = [torch.empty_like(y) for y in call.outputs]
            outputs[out] = over
            with patch("onward.kernels.triton.rms_norm._PROGRAMS", call.programs):
                launch(call.op, call.attrs, inputs, outputs)
            assert torch.equal(over, want), f"output {out} over input {source}"


for _dtype in DTYPES:
    for _name, _make in calls(_dtype):
        CHECKS[f"rows {_name} {_dtype.name.lower()}"] = partial(run_rows, _make)


def checked(name: str) -> None:
    with torch.no_grad() if "loss" not in name else torch.enable_grad():
        CHECKS[name]()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(checked)
