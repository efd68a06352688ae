"""The native kernels on bf16 and fp16: what the op's f32 body between casts gives.

The oracle is onnx's reference evaluator on that body. A result is within one unit of its last place
(two where sums have another order), beside what f32 kernels are allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from casts import between_casts
from kernel_calls import Bound, rubbish, spec_of
from op_cases import CASES, ONWARD_CASES, Known, OpCase
from test_kernels import TOLERANCE, launch, run

from onward.graph.evaluate import evaluate
from onward.graph.graph import array_of
from onward.graph.types import LOW, DType, Type
from onward.kernels import ATEN, NATIVE, Kernel, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.native.library import Library, files, library, usable

pytestmark = pytest.mark.skipif(library() is None, reason="no native library here")

# Ops whose kernels take tensors of less than f32.
TAKEN = {
    "Gelu", "GeluGrad", "Relu", "BiasActivation", "BiasActivationGrad", "GatedActivation",
    "GatedActivationGrad", "FlashAttention", "FlashAttentionGrad", "Dropout",
    "Rotary", "ReduceSum", "ReduceL2", "AllFinite", "WideSum",
}  # fmt: skip
# Ops that take some low tensors beside others of f32; no sample call has such a mix.
MIXED = {
    "AddLayerNormalization", "AddLayerNormalizationGrad", "AddRMSNorm", "AddRMSNormGrad",
    "AdamUpdate",
}  # fmt: skip
# The op rounds its logits, unlike its body: test_low_cross_entropy.py
ROUNDS = {"LinearCrossEntropy"}
EACH_LOW = pytest.mark.parametrize("dtype", sorted(LOW), ids=str)
CALLS = [
    (case, kernel, dtype)
    for case in CASES + ONWARD_CASES
    for kernel in NATIVE.get(case.op, ())
    for dtype in sorted(LOW)
    if case.op in TAKEN and kernel.unsupported(spec_of(case, dtype)) is None
]


def tensor(array: np.ndarray) -> torch.Tensor:
    dtype = DType.from_numpy(array.dtype)
    if dtype not in LOW:
        return torch.tensor(array)
    return torch.tensor(array.astype(np.float32)).to(torch_dtype(dtype))


def bound(case: OpCase, dtype: DType) -> Bound:
    (node,), feeds = case.graph(dtype), case.feeds(dtype)
    inputs: list[torch.Tensor | None] = []
    for i, value in enumerate(node.inputs):
        array = None if value is None else feeds.get(f"x{i}", array_of(value))
        inputs.append(None if array is None else tensor(array))
    want = evaluate(between_casts(case, dtype), feeds)
    return Bound(spec_of(case, dtype), inputs, [np.asarray(y) for y in want.values()])


def spacing(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A unit in the last place, as f32."""
    limits = torch.finfo(dtype)
    exponent = x.abs().clamp(min=limits.smallest_normal).float().log2().floor()
    return 2.0**exponent * limits.eps


def assert_near(have: list[torch.Tensor], want: list[np.ndarray], ulps: int) -> None:
    for y, expected in zip(have, want, strict=True):
        truth = tensor(expected)
        assert y.dtype == truth.dtype and y.shape == truth.shape
        if y.dtype not in (torch.bfloat16, torch.float16):
            loose: dict[str, Any] = TOLERANCE
            np.testing.assert_allclose(y.numpy(), expected, **loose)
            continue
        wide, exact = y.float(), truth.float()
        allowed = ulps * spacing(exact, y.dtype) + TOLERANCE["atol"]
        same = (wide == exact) | (wide.isnan() & exact.isnan())
        assert bool((same | ((wide - exact).abs() <= allowed)).all())


def ulps_of(op: str) -> int:
    return 2 if op.endswith("Grad") or "Attention" in op or op.startswith("Reduce") else 1


def test_each_op_that_takes_low_tensors_is_here() -> None:
    accepting = {
        case.op
        for case in CASES + ONWARD_CASES
        for kernel in NATIVE.get(case.op, ())
        if kernel.unsupported(spec_of(case, DType.BFLOAT16)) is None
    }
    assert accepting == TAKEN | ROUNDS
    assert {case.op for case, _, _ in CALLS} == TAKEN


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "kernel", "dtype"), CALLS, ids=[f"{c}-{k.name}-{d}" for c, k, d in CALLS]
)
def test_kernels_compute_what_the_f32_body_between_casts_does(
    case: OpCase, kernel: Kernel, dtype: DType
) -> None:
    call = bound(case, dtype)
    before = [None if x is None else x.clone() for x in call.inputs]
    have = run(kernel, call, call.inputs)
    assert_near(have, call.want, ulps_of(case.op))
    for x, kept in zip(call.inputs, before, strict=True):
        if x is not None and kept is not None:
            assert torch.equal(x.nan_to_num(), kept.nan_to_num()), "an input was written to"
    for out, source in kernel.inplace:
        shared = call.inputs[source] if source < len(call.inputs) else None
        if shared is None or out >= len(have) or isinstance(case.inputs[source], Known):
            continue
        if shared.dtype == have[out].dtype and shared.shape == have[out].shape:
            inputs = [None if x is None else x.clone() for x in call.inputs]
            outputs = [rubbish(t) for t in call.spec.outputs]
            (moved,) = (x for i, x in enumerate(inputs) if i == source)
            assert moved is not None
            outputs[out] = moved
            launch(kernel, call, inputs, outputs)
            for y, plain in zip(outputs, have, strict=True):
                assert torch.equal(y.nan_to_num(), plain.nan_to_num())


@EACH_LOW
@pytest.mark.parametrize("op", sorted(TAKEN | MIXED))
def test_other_mixtures_are_refused_in_words(op: str, dtype: DType) -> None:
    """A call with one operand of another dtype is refused, with the reason in words."""
    case = next(c for c in CASES + ONWARD_CASES if c.op == op)
    (kernel,) = NATIVE[op]
    spec = spec_of(case, dtype)
    at, first = next((i, t) for i, t in enumerate(spec.inputs) if t is not None)
    inputs = list(spec.inputs)
    inputs[at] = first.with_dtype(DType.DOUBLE)
    wrong = KernelSpec(op, spec.attrs, tuple(inputs), spec.outputs)
    reason = kernel.unsupported(wrong)
    assert reason is not None and reason.endswith(" tensors")


# ---- every number


@pytest.fixture(params=usable())
def build(request: pytest.FixtureRequest) -> Library:
    return Library(files()[request.param])


def everything(dtype: torch.dtype) -> torch.Tensor:
    """Every number of the dtype, infinities, NaN and subnormal ones among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where two tensors have equal bits, or both NaN."""
    words = torch.int16 if x.element_size() == 2 else torch.int32
    return (x.view(words) == y.view(words)) | (x.isnan() & y.isnan())


@EACH_LOW
def test_every_number_is_read_and_written(build: Library, dtype: DType) -> None:
    """relu reads and writes every number of the dtype, also at sizes that are no multiple of a
    vector."""
    x = everything(torch_dtype(dtype))
    for n in (x.numel(), x.numel() - 1, 33, 17, 3, 1):
        for part in (x[:n], x[-n:], x[31744:][:n]):
            y = torch.zeros_like(part)
            build.launch("onward_activation", x=part, y=y, n=part.numel(), kind=2)()
            want = torch.where(part.float() < 0, torch.zeros(()), part.float()).to(part.dtype)
            assert bool(same_bits(y, want).all())


@EACH_LOW
def test_results_are_rounded_to_the_nearest_even(build: Library, dtype: DType) -> None:
    """Rounding shows in dx of a norm's gradient: with dy = 0 it is the f32 input dr in the low
    dtype."""
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), dtype=torch.int64)
    words[: 1 << 14] &= ~0x1FFF  # ties of both formats
    words[1 << 13 : 3 << 13] |= 0x1000
    numbers = words.to(torch.int32).view(torch.float32)
    numbers[-9:] = torch.tensor(
        [65504.0, 65519.99, 65520.0, -65520.0, 3.3895e38, 3.4e38, 2.0**-24, 2.0**-25, 1.5 * 2**-25]
    )
    y = torch.empty(numbers.shape, dtype=torch_dtype(dtype))
    x = torch.zeros_like(y)
    zero, one, partial = torch.zeros(1), torch.ones(1), torch.empty(1)
    rows = numbers.numel()
    r, dresidual = torch.ones(rows), torch.empty(rows)
    build.launch(
        "onward_add_rms_norm_grad", dy=x, dr=numbers, r=r, scale=one,
        dresidual=dresidual, dscale=zero, dx=y, partial=partial, tiles=1, rows=rows,
        features=1, epsilon=1.0, seed=None, offset=None, site=0, threshold=0, factor=1.0,
        sizes=[rows], rank=1, sample_dim=-1, coordinates=None, width=0,
    )()  # fmt: skip
    want = (numbers + 0.0).to(y.dtype)
    assert bool(same_bits(y, want)[~(want == 0)].all())
    assert bool((y[want == 0] == 0).all())


# ---- attention over more keys than one block holds


@EACH_LOW
@pytest.mark.parametrize(
    ("queries", "keys", "causal", "groups"), [(70, 1100, 0, 1), (300, 300, 1, 2), (65, 600, 0, 2)]
)
def test_attention_in_blocks_rounds_its_results_once(
    dtype: DType, queries: int, keys: int, causal: int, groups: int
) -> None:
    """Results differ from torch's fp64 attention by little more than one rounding of each
    number."""
    torch.manual_seed(0)
    low, f32 = torch_dtype(dtype), torch.float32
    q, dy = (torch.randn(1, 2, queries, 20).to(low) for _ in range(2))
    k, v = (torch.randn(1, groups, keys, 20).to(low) for _ in range(2))
    attrs = {"scale": 0.3, "is_causal": causal}
    row = torch.full((1, 2, queries), torch.nan)
    y, peak, total = called(
        "FlashAttention", attrs, [q, k, v], [torch.full_like(q, torch.nan), row, row.clone()]
    )
    assert peak.dtype == total.dtype == f32
    given = [dy, q, k, v, None, None, None, y, peak, total]
    grads = called(
        "FlashAttentionGrad", attrs, given, [torch.full_like(x, torch.nan) for x in (q, k, v)]
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    heads = [x.repeat_interleave(2 // groups, 1) for x in exact[1:]]
    truth = torch.nn.functional.scaled_dot_product_attention(
        exact[0], heads[0], heads[1], scale=0.3, is_causal=bool(causal)
    )
    wanted = [truth, *torch.autograd.grad(truth, exact, dy.double())]
    eps = torch.finfo(low).eps
    for have, want in zip([y, *grads], wanted, strict=True):
        difference, want = have.double() - want.detach(), want.detach()
        # rounded once: half a unit of each number; y's rounding is in the gradients' deltas too
        assert float(difference.norm()) <= 0.6 * eps * float(want.norm())


@EACH_LOW
def test_the_gradient_of_a_low_bias_is_summed_in_f32(dtype: DType) -> None:
    """The gradient of a bias is a sum over the samples that share it, rounded once at the end."""
    torch.manual_seed(0)
    low = torch_dtype(dtype)
    shape = (40, 2, 5, 4)
    q, k, v, dy = (torch.randn(shape).to(low) for _ in range(4))
    bias = torch.randn(1, 2, 5, 5).to(low)
    attrs = {"scale": 0.3, "is_causal": 0, "bias_gradient": 1}
    row = torch.full(shape[:3], torch.nan)
    forward = [q, k, v, None, None, None, None, None, bias]
    y, peak, total = called(
        "FlashAttention", attrs, forward, [torch.full_like(q, torch.nan), row, row.clone()]
    )
    given = [dy, q, k, v, None, None, None, y, peak, total, None, None, bias]
    *_, dbias = called(
        "FlashAttentionGrad", attrs, given, [torch.full_like(x, torch.nan) for x in (q, k, v, bias)]
    )
    exact = bias.double().requires_grad_()
    mask = exact.expand(40, 2, 5, 5)
    truth = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=0.3
    )
    (want,) = torch.autograd.grad(truth, exact, dy.double())
    assert dbias.dtype == low
    allowed = 0.51 * spacing(want, low) + 1e-5
    assert bool(((dbias.double() - want).abs() <= allowed).all())


# ---- masks, angles and updates


@EACH_LOW
def test_masks_are_those_of_f32(dtype: DType) -> None:
    attrs, low = {"ratio": 0.3, "site": 7, "sample_dim": 0}, torch_dtype(dtype)
    drawn = [torch.tensor([5, 2**32 - 1]), torch.tensor(3)]
    for size in ((3, 5), (17, 65), (2, 3, 1030)):
        ones = torch.ones(size)
        (plain,) = called("Dropout", attrs, [ones, *drawn], [torch.empty(size)])
        (have,) = called("Dropout", attrs, [ones.to(low), *drawn], [torch.empty(size).to(low)])
        assert torch.equal(have, plain.to(low))


@EACH_LOW
def test_what_dropout_makes_too_large_is_infinite(dtype: DType) -> None:
    low = torch_dtype(dtype)
    x = torch.tensor([[torch.finfo(low).max, torch.inf, -torch.inf, torch.nan]] * 16).to(low)
    x = torch.cat([x, torch.full((16, 1), torch.finfo(low).smallest_normal / 4).to(low)], 1)
    attrs = {"ratio": 0.5, "site": 7, "sample_dim": -1}
    drawn = [torch.tensor([5, 6])]
    (y,) = called("Dropout", attrs, [x, *drawn], [torch.empty_like(x)])
    (mask,) = called("Dropout", attrs, [torch.ones(x.shape), *drawn], [torch.empty(x.shape)])
    want = torch.where(mask > 0, x.float() * 2, torch.zeros(())).to(low)
    assert want.isinf().any() and bool(same_bits(y, want).all())


@EACH_LOW
@pytest.mark.parametrize("interleaved", [0, 1])
def test_angles_may_be_f32(dtype: DType, interleaved: int) -> None:
    low = torch_dtype(dtype)
    x, angle = torch.randn(2, 3, 5, 38).to(low), torch.randn(1, 1, 5, 34)
    cos, sin = angle.cos(), angle.sin()
    attrs = {"interleaved": interleaved, "transposed": 0}
    (y,) = called("Rotary", attrs, [x, cos, sin], [torch.empty_like(x)])
    (plain,) = called("Rotary", attrs, [x.float(), cos, sin], [torch.empty(x.shape)])
    assert torch.equal(y, plain.to(low))
    (kernel,) = NATIVE["Rotary"]
    spec = spec_with("Rotary", attrs, [x.float(), cos.to(low), sin.to(low)], [x.float()])
    assert kernel.unsupported(spec) == f"float and {dtype.name.lower()} tensors"


@EACH_LOW
@pytest.mark.parametrize("n", [1, 7, 10_007])
def test_an_update_takes_a_low_gradient(dtype: DType, n: int) -> None:
    """A low gradient gives the bits of the same gradient cast to f32 first."""
    torch.manual_seed(0)
    g = torch.randn(n).to(torch_dtype(dtype))
    p, m, v = torch.randn(n), torch.randn(n), torch.rand(n)
    hyper = [torch.tensor(x, dtype=torch.float64) for x in (0.1, 0.9, 0.99, 1e-8, 0.1)]
    rest = [m, v, None, *hyper, torch.tensor(3), torch.tensor(0.7)]
    have, want = (
        called("AdamUpdate", {"decoupled": 1}, [p, x, *rest], [torch.empty(n) for _ in range(3)])
        for x in (g, g.float())
    )
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize("op", ["AdamUpdate", "SGDUpdate"])
def test_torch_takes_no_gradient_of_another_dtype(op: str) -> None:
    p, g = Type(DType.FLOAT, (5,)), Type(DType.BFLOAT16, (5,))
    (kernel,) = ATEN[op]
    reason = kernel.unsupported(KernelSpec(op, {}, (p, g, p, p), (p, p, p)))
    assert reason == "a gradient of bfloat16 for a parameter of float"


@pytest.mark.parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
@EACH_LOW
def test_gradients_of_several_dtypes_are_finite_or_not(dtype: DType, bad: float | None) -> None:
    low = torch_dtype(dtype)
    for size in (1, 33, 70_001):
        x, y = torch.full((size,), torch.finfo(low).max).to(low), torch.zeros(())
        x[0] = torch.finfo(low).smallest_normal / 2
        if bad is not None:
            x[-1] = bad
        found = torch.zeros((), dtype=torch.bool)
        called("AllFinite", {}, [None, y, x, torch.randn(3)], [found])
        assert bool(found) == (bad is None)
        called("AllFinite", {}, [torch.tensor(torch.inf).to(low), x], [found])
        assert bool(found) == (bad is None)


# ---- norms of f32 sums, whose x and y are low


def spec_with(op: str, attrs: dict[str, Any], inputs: list[Any], outputs: list[Any]) -> KernelSpec:
    def type(x: torch.Tensor | None) -> Type | None:
        kinds = (DType.FLOAT, *LOW, DType.INT64, DType.DOUBLE, DType.BOOL)
        names = {torch_dtype(d): d for d in kinds}
        return None if x is None else Type(names[x.dtype], tuple(x.shape))

    return KernelSpec(op, attrs, tuple(map(type, inputs)), tuple(map(type, outputs)))  # type: ignore[arg-type]


def called(op: str, attrs: dict[str, Any], inputs: list[Any], outputs: list[Any]) -> list[Any]:
    (kernel,) = NATIVE[op]
    spec = spec_with(op, attrs, inputs, outputs)
    assert kernel.unsupported(spec) is None
    scratch = [rubbish(t) for t in kernel.scratch(spec)]
    kernel.bind(KernelArguments(attrs, inputs, outputs, scratch))()
    return outputs


X_AND_Y = [
    (x, y)
    for x in (torch.float32, torch.bfloat16, torch.float16)
    for y in (torch.float32, torch.bfloat16, torch.float16)
    if torch.float32 in (x, y) or x == y
]


@pytest.mark.parametrize("size", [(3, 5), (17, 64), (40, 257), (5, 1100)], ids=str)
@pytest.mark.parametrize("ratio", [None, 0.0, 0.3])
@pytest.mark.parametrize(("x_type", "y_type"), X_AND_Y, ids=str)
@pytest.mark.parametrize("op", ["AddLayerNormalization", "AddRMSNorm"])
def test_a_norm_with_casts_inside_has_the_bits_of_casts_around_it(
    op: str, x_type: torch.dtype, y_type: torch.dtype, ratio: float | None, size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer, (rows, features) = op == "AddLayerNormalization", size
    drop = {} if ratio is None else {"ratio": ratio, "site": 3, "sample_dim": 0}
    drawn = [] if ratio is None else [torch.tensor([5, 2**32 - 1]), torch.tensor(3)]
    attrs = {"epsilon": 1e-5, **drop}
    x, residual, dr = torch.randn(size).to(x_type), torch.randn(size), torch.randn(size)
    dy = torch.randn(size).to(y_type)
    x[0, 0], dy[-1, -1] = torch.inf, torch.nan
    scale, bias = torch.randn(features), torch.randn(features)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype)

    stats = [(rows, 1)] * 2 if layer else []
    weights = [scale, bias] if layer else [scale]
    has_dx = ratio is not None or x_type != torch.float32
    dx_type = {} if x_type == torch.float32 else {"x_type": int(DType.BFLOAT16)}
    found: list[list[torch.Tensor]] = []
    for inside in (True, False):
        given, dtype = (x, y_type) if inside else (x.float(), torch.float32)
        outputs = [new(*size, dtype=dtype), *[new(*s) for s in stats], new(*size)]
        y, *saved, r = called(op, attrs, [given, residual, *weights, *drawn], outputs)
        saved_in = [r, scale, *saved]
        inputs = [dy if inside else dy.float(), dr, *saved_in, *drawn]
        outputs = [new(*size), *[new(features) for _ in weights]]
        if has_dx:
            outputs.append(new(*size, dtype=x_type if inside else torch.float32))
        grad = drop if layer else attrs
        if not inside and ratio is None and has_dx:
            *results, _ = called(f"{op}Grad", grad | dx_type, inputs, outputs)
            results.append(results[0].clone())
        else:
            results = called(f"{op}Grad", grad | dx_type, inputs, outputs)
        if has_dx:
            results = [*results[:-1], results[-1].to(x_type)]
        found.append([y.to(y_type), *saved, r, *results])
    for have, want in zip(*found, strict=True):
        assert have.dtype == want.dtype
        assert bool(same_bits(have, want).all())


def test_norms_of_two_low_types_are_refused() -> None:
    (kernel,) = NATIVE["AddRMSNorm"]
    f32, bf16, fp16 = (Type(d, (3, 5)) for d in (DType.FLOAT, DType.BFLOAT16, DType.FLOAT16))
    scale = Type(DType.FLOAT, (5,))
    for inputs, outputs, reason in (
        ((bf16, f32, scale), (fp16, f32), "float16 and bfloat16 tensors"),
        ((bf16, bf16, scale), (bf16, bf16), "bfloat16 tensors"),
        ((bf16, f32, scale.with_dtype(DType.BFLOAT16)), (bf16, f32), "bfloat16 tensors"),
    ):
        assert kernel.unsupported(KernelSpec("AddRMSNorm", {}, inputs, outputs)) == reason
