"""Updates of many tensors in one launch, by Triton's interpreter: Adam with moments in bf16 and in
codes beside the operators of `kernels/aten`, bit for bit, and norms beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_calls import rubbish

from onward.graph.ops.optimizers.quantization import blocks
from onward.graph.types import DType, Type
from onward.kernels import ATEN, TRITON, KernelArguments, torch_dtype

CHECKS: dict[str, Callable[[], None]] = {}
# tails of a block of codes, of a row of the generator and of a program's block; several programs
SIZES = (1, 255, 256, 1000, 4096, 4097, 9001)
_SEED = torch.tensor([123456789, 987654321])
_ODD = {"inf": float("inf"), "nan": float("nan")}


def _halves(n: int, seed: int, least: int = -255) -> torch.Tensor:
    """Multiples of 1/64, of which sums and squares are exact with rates of a half, so that the
    order of operations decides nothing."""
    drawn = torch.randint(least, 256, (n,), generator=torch.Generator().manual_seed(seed))
    return drawn.float() / 64


def _call(op: str, n: int, low: torch.dtype, more: dict[str, Any], odd: str) -> KernelArguments:
    """One update of n parameters with rates of a half; the outputs are rubbish."""
    g = _halves(n, 2)
    if odd:
        g[n // 2] = _ODD[odd]
    if op == "AdamUpdateBf16":
        moments = [_halves(n, 3).bfloat16(), _halves(n, 4, 0).bfloat16()]
    else:
        moments = []
        for seed in (3, 4):
            codes = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed))
            moments += [codes.to(torch.uint8), _halves(blocks(n), seed + 2, 0)]
    hyper = [torch.tensor(x, dtype=torch.float64) for x in (0.01, 0.5, 0.5, 1e-3, 0.25)]
    drawn = [_SEED] if op == "AdamUpdateBf16" else []
    inputs: list[torch.Tensor | None] = [
        _halves(n, 1), g.to(low), *moments, *hyper, torch.tensor(1), *drawn,
        *([torch.tensor(0.5)] if more.pop("scaled", False) else []),
    ]  # fmt: skip
    outputs = [torch.full_like(x, 77) for x in (inputs[0], *moments) if x is not None]
    attrs = {"decoupled": 1, **({"site": n} if drawn else {}), **more}
    return KernelArguments(attrs, inputs, outputs, [])


_MORE: dict[str, dict[str, Any]] = {
    "plain": {}, "scaled": {"scaled": True}, "coupled": {"decoupled": 0},
    "both": {"scaled": True, "decoupled": 0},
}  # fmt: skip


def _update(op: str, low: DType, more: str, odd: str = "", inplace: bool = False) -> None:
    """One launch for tensors of all sizes, beside one after another."""
    changes = dict(_MORE[more])
    if odd == "later":  # the part of a parameter that begins with its fourth row
        changes["first"], odd = 3072, ""
    sizes = [n for n in SIZES if n > 1] if odd else SIZES
    ours, theirs = (
        [_call(op, n, torch_dtype(low), dict(changes), odd) for n in sizes] for _ in "ab"
    )
    shared = ours[0].inputs
    pairs = 3 if op == "AdamUpdateBf16" else 5
    for call in ours:  # hyperparameters are of all; what is updated is each's own
        call.inputs[pairs + 1 :] = shared[pairs + 1 :]
        if inplace:
            call.outputs[:] = [
                x for x in (call.inputs[0], *call.inputs[2 : pairs + 1]) if x is not None
            ]
    (kernel,), oracle = TRITON[op], ATEN[op][0]
    assert kernel.together is not None
    kernel.together(ours)()
    for ours_of, theirs_of in zip(ours, theirs, strict=True):
        oracle.bind(theirs_of)()
        n = ours_of.y.numel()
        for i, (have, want) in enumerate(zip(ours_of.outputs, theirs_of.outputs, strict=True)):
            if i and have.dtype in (torch.bfloat16, torch.uint8):
                bits = torch.int16 if have.dtype == torch.bfloat16 else torch.uint8
                known = want.isfinite()  # torch's operator makes NaN of infinity
                assert torch.equal(have.view(bits)[known], want.view(bits)[known]), f"{i} of {n}"
                assert torch.equal(have.isfinite(), known), f"not finite in {i} of {n}"
            else:
                torch.testing.assert_close(have, want, rtol=2e-6, atol=2e-6, equal_nan=True)


for _op in ("AdamUpdateBf16", "AdamUpdate8Bit"):
    for _low in (DType.FLOAT, DType.FLOAT16):
        for _more in _MORE:
            name = f"moments {_op} {_more} {_low.name.lower()}"
            CHECKS[name] = partial(_update, _op, _low, _more)
    for _odd in _ODD:
        CHECKS[f"moments {_op} {_odd} float"] = partial(_update, _op, DType.FLOAT, "plain", _odd)
    CHECKS[f"moments {_op} inplace float"] = partial(
        _update, _op, DType.FLOAT, "plain", inplace=True
    )
CHECKS["moments AdamUpdateBf16 later float"] = partial(
    _update, "AdamUpdateBf16", DType.FLOAT, "plain", "later"
)


def _norms(low: DType, odd: str = "") -> None:
    """The norms of tensors of all sizes by one launch, beside PyTorch's in fp64."""
    given = [_halves(n, n).view(1, n).to(torch_dtype(low)) for n in (*SIZES, 1_200_000)]
    if odd:
        given[3][0, 500] = _ODD[odd]
    made = [rubbish(Type(low, ())) for _ in given]
    calls = [
        KernelArguments({"keepdims": 0}, [x], [y], []) for x, y in zip(given, made, strict=True)
    ]
    (kernel,) = TRITON["ReduceL2"]
    assert kernel.together is not None
    kernel.together(calls)()
    want = torch.stack([x.double().norm() for x in given])
    near = 1e-6 if low == DType.FLOAT else 1e-3
    torch.testing.assert_close(
        torch.stack(made).double(), want, rtol=near, atol=0.0, equal_nan=True
    )


for _low in (DType.FLOAT, DType.FLOAT16):
    for _odd in ("", *_ODD):
        CHECKS[f"norms ReduceL2 {_odd or 'plain'} {_low.name.lower()}"] = partial(
            _norms, _low, _odd
        )

__all__ = ["CHECKS"]
