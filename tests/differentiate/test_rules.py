"""Every gradient rule in fp64, against central differences and against torch's autograd.

The calls come from one table (`op_cases.py`); a rule without a call fails a test here. Both the
function and its gradient are evaluated by onnx's reference evaluator, not by our kernels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradient_calls import CALLS, STATISTICS
from onnx.reference import ReferenceEvaluator
from op_cases import Known, OpCase, Real, cases_of
from torch.nn import functional as F

from onward.differentiate import vjp
from onward.differentiate.rule_table import RULES
from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.file import to_proto
from onward.graph.graph import Graph, array_of, type_of
from onward.graph.ops import named
from onward.graph.types import DType

ONE = {"cotangent.loss": np.array(1.0)}
STEP = 1e-5


def loss_of(case: OpCase, leave_out: frozenset[int] = frozenset()) -> Graph:
    """The call and, as `loss`, the sum of its results times fixed random weights."""
    graph = case.graph(DType.DOUBLE)
    rng = np.random.default_rng(zlib.crc32(case.label.encode()))
    b = Builder(graph)
    terms = []
    for i, y in enumerate(graph.outputs.values()):
        if i in leave_out | STATISTICS.get(case.op, set()):
            continue
        shape = [int(n) for n in type_of(y).shape]  # type: ignore[arg-type]
        weights = np.asarray(rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape))
        dims = list(range(len(shape)))
        product = b.Mul(b.cast(y, DType.DOUBLE), weights)
        terms.append(b.reduce_sum(product, dims, keepdims=False) if dims else product)
    total = terms[0]
    for term in terms[1:]:
        total = b.Add(total, term)
    graph.outputs = {"loss": total}
    return graph


Evaluate = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]

# The reference evaluator computes Erf in fp32, whatever its input: these run on our kernels.
FP32_INSIDE = frozenset({"Erf", "Gelu", "BiasActivation", "GatedActivation"})


def by_kernels(case: OpCase) -> bool:
    """Whether Onward's kernels evaluate the call: the reference evaluator's ConvTranspose has no
    groups."""
    return case.op in FP32_INSIDE or (case.op == "Conv" and "group" in case.attrs)


def gradients(
    graph: Graph, names: list[str], feeds: dict[str, np.ndarray], run: Evaluate = evaluate
) -> dict[str, Any]:
    step = vjp(graph, ["loss"], names)
    step.outputs.pop("loss")
    return run(step, feeds | ONE)


def numeric(loss: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """Central differences, one element at a time."""
    out = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = x.copy()
            moved[i] += sign * STEP
            ends.append(loss(moved))
        out[i] = (ends[0] - ends[1]) / (2 * STEP)
    return out


def check(
    graph: Graph, case: OpCase, run: Evaluate | None = None, untrained: tuple[Any, ...] = ()
) -> None:
    """Assert every gradient of the call. run: the evaluator; by default that of onnx."""
    feeds = case.feeds(DType.DOUBLE)
    have = gradients(graph, case.real, feeds, run or evaluate)
    session = ReferenceEvaluator(to_proto(graph))
    for name in case.real:

        def loss(x: np.ndarray, name: str = name) -> float:
            with np.errstate(all="ignore"):
                moved = {**feeds, name: x}
                y: Any = (
                    list(session.run(None, moved)) if run is None else [run(graph, moved)["loss"]]
                )
            return float(np.asarray(y[0]))

        want = numeric(loss, feeds[name])
        if untrained:
            want[untrained] = 0.0
        got = have.get(f"grad.{name}", np.zeros_like(want))
        assert got.dtype == np.float64
        assert got.shape == want.shape
        assert np.abs(got - want).max(initial=0.0) <= 1e-6 * (1.0 + np.abs(want).max(initial=0.0))


# Ops without a derivative to compare with: WithGradient is given its gradient (test_own_gradients),
# and updates that round what they keep have steps. Scores to which a lowest number is added do not
# move by a difference, whose gradient is autograd's by definition.
_NONE = ("WithGradient", "AdamUpdateBf16", "AdamUpdate8Bit")
DIFFERENCES = [
    c
    for c in CALLS
    if c.attrs.get("to") != DType.FLOAT and c.op not in _NONE and "fill_is_added" not in c.attrs
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", DIFFERENCES, ids=str)
def test_rules_equal_central_differences(case: OpCase, execute: Evaluate) -> None:
    padding = (case.attrs["padding_idx"],) if case.op == "Embedding" else ()  # by definition 0
    check(loss_of(case), case, execute if by_kernels(case) else None, padding)


def test_a_cast_to_fp32_hands_on_the_gradient_rounded() -> None:
    cases = [case for case in CALLS if case.attrs.get("to") == DType.FLOAT]
    assert cases
    for case in cases:
        graph = loss_of(case)
        got = gradients(graph, ["x0"], case.feeds(DType.DOUBLE))["grad.x0"]
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, weights_of(graph).astype(np.float32))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("case", "unused"),
    [
        (case, i)
        for case in cases_of("Split", "AddLayerNormalization", "AddRMSNorm")
        for i in range(len(case.graph().outputs))
        if i not in STATISTICS.get(case.op, set())
    ],
    ids=str,
)
def test_results_nobody_uses_have_gradient_zero(case: OpCase, unused: int) -> None:
    check(loss_of(case, frozenset({unused})), case)


def test_every_rule_has_a_call() -> None:
    # Opaque ops, which PyTorch runs and differentiates, are tested in tests/module/test_regions.py.
    assert set(RULES) - named("opaque") <= {case.op for case in CALLS}


# ---- against autograd


def _reduced(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(attrs: dict[str, Any], x: torch.Tensor, dims: Any = None) -> torch.Tensor:
        every = list(range(x.dim()))
        over = every if dims is None or len(dims) == 0 else [int(d) for d in dims]
        return function(x, over, keepdim=bool(attrs.get("keepdims", 1)))

    return call


def _plain(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda attrs, *xs: function(*xs)


def _gemm(attrs: dict[str, Any], a: Any, b: Any, c: Any = None) -> torch.Tensor:
    a = a.t() if attrs.get("transA") else a
    b = b.t() if attrs.get("transB") else b
    y = attrs.get("alpha", 1.0) * (a @ b)
    return y if c is None else y + attrs.get("beta", 1.0) * c


def _layer_norm(attrs: dict[str, Any], x: Any, scale: Any, bias: Any = None) -> torch.Tensor:
    normal = x.shape[attrs.get("axis", -1) % x.dim() :]
    return F.layer_norm(x, normal, scale, bias, attrs.get("epsilon", 1e-5))


def _batch_norm(attrs: dict[str, Any], x: Any, *given: Any) -> torch.Tensor:
    """Batch norm's y. torch has no gradient for given statistics, so these are written out."""
    epsilon = attrs.get("epsilon", 1e-5)
    if attrs.get("training_mode", 0):
        scale, bias = given[:2]
        return F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    scale, bias, mean, var = (v.reshape(-1, *[1] * (x.dim() - 2)) for v in given)
    return (x - mean) / (var + epsilon).sqrt() * scale + bias


def _cross_entropy(attrs: dict[str, Any], x: Any, labels: Any, weight: Any = None) -> torch.Tensor:
    return F.cross_entropy(
        x, labels, weight, ignore_index=attrs.get("ignore_index", -100),
        reduction=attrs.get("reduction", "mean"), label_smoothing=attrs.get("label_smoothing", 0.0),
    )  # fmt: skip


def _cumsum(attrs: dict[str, Any], x: Any, dim: Any) -> torch.Tensor:
    d = int(dim)
    y = x.flip(d).cumsum(d).flip(d) if attrs.get("reverse") else x.cumsum(d)
    return y - x if attrs.get("exclusive") else y


def _gather(attrs: dict[str, Any], x: Any, index: Any) -> torch.Tensor:
    dim = attrs.get("axis", 0) % x.dim()
    rows = x.index_select(dim, index.reshape(-1))
    return rows.reshape(*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])


def _attention(
    attrs: dict[str, Any], q: Any, k: Any, v: Any, mask: Any = None, *more: Any
) -> torch.Tensor:
    """`scaled_dot_product_attention`, whose rows with nothing allowed are taken as 0."""
    q_place, k_place = torch.arange(q.shape[-2]), torch.arange(k.shape[-2])
    allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    _, _, q_at, k_at, bias = [*more, *[None] * 5][:5]  # seed, offset, of packed rows coordinates
    if q_at is not None and k_at is not None:
        (q_sequence, q_place), (k_sequence, k_place) = (at.unbind(1) for at in (q_at, k_at))
        allowed = q_sequence[:, None] == k_sequence
        if bias is not None:
            bias = bias[:, :, q_place][..., torch.where(k_sequence < 0, 0, k_place)]
    if attrs.get("is_causal"):
        allowed = allowed & (q_place[:, None] >= k_place)
    added = bias
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        added = mask if bias is None else mask + bias
    empty = ~allowed.any(-1, keepdim=True)
    hides = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~(allowed | empty), -torch.inf)
    hides = hides if added is None else hides + added
    if "softcap" in attrs or "fill" in attrs:  # which torch's has not
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores, cap = q @ k.mT * attrs["scale"], attrs.get("softcap")
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        if attrs.get("fill_is_added"):
            return (scores + torch.where(allowed, 0.0, attrs["fill"])).softmax(-1) @ v
        if "fill" in attrs:
            scores = scores if bias is None else scores + bias
            return scores.masked_fill(~allowed, attrs["fill"]).softmax(-1) @ v
        return torch.where(empty, 0.0, (scores + hides).softmax(-1) @ v)
    y = F.scaled_dot_product_attention(q, k, v, hides, scale=attrs["scale"], enable_gqa=True)
    return torch.where(empty, 0.0, y)


def _convolution(transposed: bool) -> Callable[..., torch.Tensor]:
    def call(attrs: dict[str, Any], x: Any, w: Any, bias: Any = None) -> torch.Tensor:
        rank = x.dim() - 2
        pads = attrs.get("pads", [0] * 2 * rank)
        if pads[:rank] != pads[rank:]:  # as onnx has it: the last element of the result is left out
            y = call({**attrs, "pads": [0] * 2 * rank}, x, w, bias) if transposed else None
            if y is not None:
                return y[..., pads[0] : y.shape[-1] - pads[1]]
            x, pads = F.pad(x, pads), [0] * 2 * rank
        return torch.convolution(
            x, w, bias, attrs.get("strides", [1] * rank), pads[:rank],
            attrs.get("dilations", [1] * rank), transposed,
            attrs.get("output_padding", [0] * rank), attrs.get("group", 1),
        )  # fmt: skip

    return call


def _max_pool(attrs: dict[str, Any], x: Any) -> torch.Tensor:
    rank = x.dim() - 2
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
    pads = attrs.get("pads", [0] * rank)[:rank]
    return pool(
        x, attrs["kernel_shape"], attrs.get("strides", [1] * rank), pads,
        attrs.get("dilations", [1] * rank),
    )  # fmt: skip


def _bias_activation(attrs: dict[str, Any], x: Any, bias: Any) -> torch.Tensor:
    u = x + bias
    match attrs["activation"]:
        case "gelu_tanh":
            return F.gelu(u, approximate="tanh")
        case name:
            return getattr(F, name)(u)


def _gated(attrs: dict[str, Any], gate: Any, up: Any) -> torch.Tensor:
    return _bias_activation(attrs, gate, torch.zeros((), dtype=gate.dtype)) * up


def _rms_norm(attrs: dict[str, Any], x: Any, scale: Any) -> torch.Tensor:
    return F.rms_norm(x, scale.shape, scale, attrs["epsilon"])


def _rotary(attrs: dict[str, Any], x: Any, cos: Any, sin: Any) -> torch.Tensor:
    """Rotary embedding by the matrix that turns a row, made of unit rows."""
    turns = cos.shape[-1]
    unit = torch.eye(turns, dtype=x.dtype)
    if attrs["interleaved"]:
        turned = torch.stack([-unit[:, 1::2], unit[:, ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-unit[:, turns // 2 :], unit[:, : turns // 2]], -1)
    y, rest = x[..., :turns], x[..., turns:]
    other = (y * sin) @ turned.t() if attrs["transposed"] else (y @ turned) * sin
    return torch.cat([y * cos + other, rest], -1)


def _ctc(attrs: dict[str, Any], x: Any, targets: Any, steps: Any, lengths: Any) -> torch.Tensor:
    """torch's CTC loss, with the gradient of the counted steps' probabilities taken out."""
    loss = F.ctc_loss(x, targets, steps, lengths, attrs["blank"], reduction="none")
    counted = torch.arange(x.shape[0])[:, None] < steps
    total = (x.exp() * counted[:, :, None]).sum((0, 2))
    return loss - total + total.detach()


TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "Neg": _plain(torch.neg), "Abs": _plain(torch.abs), "Sqrt": _plain(torch.sqrt),
    "Exp": _plain(torch.exp), "Log": _plain(torch.log), "Sin": _plain(torch.sin),
    "Cos": _plain(torch.cos), "Tanh": _plain(torch.tanh), "Sigmoid": _plain(torch.sigmoid),
    "Relu": _plain(torch.relu), "Reciprocal": _plain(torch.reciprocal), "Erf": _plain(torch.erf),
    "Add": _plain(torch.add), "Sub": _plain(torch.sub), "Mul": _plain(torch.mul),
    "Div": _plain(torch.div), "Pow": _plain(torch.pow), "Max": _plain(torch.maximum),
    "Min": _plain(torch.minimum), "Where": _plain(torch.where), "MatMul": _plain(torch.matmul),
    "Gelu": lambda a, x: F.gelu(x, approximate=a.get("approximate", "none")),
    "BiasActivation": _bias_activation, "GatedActivation": _gated, "RMSNorm": _rms_norm,
    "Rotary": _rotary,
    "Softmax": lambda a, x: torch.softmax(x, a.get("axis", -1)),
    "LogSoftmax": lambda a, x: torch.log_softmax(x, a.get("axis", -1)),
    "Expand": lambda a, x, s: x.expand(torch.broadcast_shapes(x.shape, tuple(s.tolist()))),
    "Concat": lambda a, *xs: torch.cat(xs, a["axis"]),
    "Transpose": lambda a, x: x.permute(a.get("perm") or list(reversed(range(x.dim())))),
    "GatherElements": lambda a, x, i: x.gather(a.get("axis", 0), i),
    "Embedding": lambda a, w, i: F.embedding(i, w, padding_idx=a["padding_idx"]),
    "ReduceSum": _reduced(torch.sum), "ReduceMean": _reduced(torch.mean),
    "ReduceMax": _reduced(torch.amax), "ReduceMin": _reduced(torch.amin),
    "Gemm": _gemm, "LayerNormalization": _layer_norm, "CumSum": _cumsum, "Gather": _gather,
    "SoftmaxCrossEntropyLoss": _cross_entropy, "CrossEntropyLoss": _cross_entropy,
    "Attention": _attention, "FlashAttention": _attention,
    "Conv": _convolution(False), "ConvTranspose": _convolution(True),
    "CTCLoss": _ctc, "MaxPool": _max_pool, "BatchNormalization": _batch_norm,
    "GroupNorm": lambda a, x, w=None, bias=None: F.group_norm(
        x, a["groups"], w, bias, a["epsilon"]
    ),
}  # fmt: skip


def weights_of(graph: Graph) -> np.ndarray:
    """The constant factor of the loss of a call with one result."""
    node = graph.outputs["loss"].producer()
    if node is not None and node.op_type != "Mul" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    assert node is not None and node.op_type == "Mul"
    weights = array_of(node.inputs[1])
    assert weights is not None
    return np.array(weights)


def compare_with_autograd(case: OpCase, run: Evaluate) -> None:
    running = frozenset({1, 2} if case.op == "BatchNormalization" else ())
    graph, feeds = loss_of(case, running), case.feeds(DType.DOUBLE)
    have = gradients(graph, case.real, feeds, run)
    tensors: list[torch.Tensor | None] = []
    for i, item in enumerate(case.inputs):
        if f"x{i}" in feeds:
            tensors.append(torch.tensor(feeds[f"x{i}"], requires_grad=f"x{i}" in case.real))
        else:
            tensors.append(torch.tensor(item.array) if isinstance(item, Known) else None)
    y = TORCH[case.op](case.attrs, *tensors)
    loss = (y * torch.from_numpy(weights_of(graph))).sum()
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    wants = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    for name, want in zip(case.real, wants, strict=True):
        got = have.get(f"grad.{name}", np.zeros(want.shape))
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-10, atol=1e-12)


# Attention with dropout has no counterpart in torch: torch draws other masks.
AS_IN_TORCH = [case for case in CALLS if case.op in TORCH and not case.attrs.get("ratio")]


@pytest.mark.parametrize("case", AS_IN_TORCH, ids=str)
def test_rules_equal_autograd(case: OpCase, execute: Evaluate) -> None:
    compare_with_autograd(case, execute if by_kernels(case) else evaluate)


def _has_kernels(case: OpCase) -> bool:
    """Whether kernels take the call; not a softmax over an inner dim, a scaled Gemm, logits of
    three dims or uneven pads."""
    x = case.inputs[0]
    inner = (
        case.op in ("Softmax", "LogSoftmax")
        and isinstance(x, Real)
        and case.attrs.get("axis", -1) % len(x.shape) != len(x.shape) - 1
    )
    deep = case.op == "SoftmaxCrossEntropyLoss" and isinstance(x, Real) and len(x.shape) > 2
    pads = case.attrs.get("pads", []) if case.op.startswith("Conv") else []
    if pads[: len(pads) // 2] != pads[len(pads) // 2 :]:
        return False
    return not inner and not deep and "alpha" not in case.attrs


@pytest.mark.parametrize("case", [c for c in AS_IN_TORCH if _has_kernels(c)], ids=str)
def test_rules_run_by_our_kernels_equal_autograd(case: OpCase, execute: Evaluate) -> None:
    compare_with_autograd(case, execute)
