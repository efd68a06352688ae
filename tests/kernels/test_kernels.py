"""Every kernel in the table against onnx's reference evaluator, each on its op's sample calls.

Outputs and temporaries are filled with rubbish first, so that a kernel which reads or skips them
fails. An `onward` op is evaluated through its body.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_calls import Bound, assert_equal, bound, raise_input_error, rubbish, spec_of
from op_cases import CASES, ONWARD_CASES, Known, OpCase, cases_of

from onward.graph.graph import type_of
from onward.graph.ops import OWN, named
from onward.graph.ops.collective import STARTS, WAIT
from onward.graph.types import DType, Type
from onward.kernels import KERNELS as ALL
from onward.kernels import TRITON, Kernel, KernelArguments, KernelSpec

# Kernels that run on a processor; test_gpu_kernels.py has the others.
KERNELS = {op: [k for k in held if k not in TRITON.get(op, ())] for op, held in ALL.items()}

# Calls that no kernel takes, with the reason each kernel gives.
REFUSED = {
    "Conv-10": "uneven pads", "ConvTranspose-9": "uneven pads",
    "GatherND-4": "batch_dims",
    "Gemm-13": "alpha or beta", "Gemm-14": "alpha or beta",
    "LogSoftmax-5": "other than the last", "LogSoftmax-6": "other than the last",
    "Max-10": "of 1 inputs", "Max-11": "of 3 inputs", "Min-10": "of 3 inputs",
    "Softmax-5": "other than the last", "Softmax-6": "other than the last",
    "SoftmaxCrossEntropyLoss-21": "more than two dims",
    "SoftmaxCrossEntropyLoss-22": "more than two dims",
    "SoftmaxCrossEntropyLoss-23": "more than two dims",
}  # fmt: skip

# Kernels that take some of their op's calls and leave the others to the next kernel, with what they
# say of those.
PARTIAL = {
    "native.sum_rows": "other dims than leading", "native.norm": "a norm over some dims",
    "native.gather_rows": "not rows", "native.add_rows": "not rows",
    "native.depthwise_conv": "a filter of each channel",
    "native.depthwise_conv_transpose": "a filter of each channel",
    "native.depthwise_conv_weight_grad": "a filter of each channel",
    "native.linear_cross_entropy": "not both of one low type",
    "blas.bf16_linear_cross_entropy": "x is not bfloat16",
    "blas.fp16_linear_cross_entropy": "x is not float16",
    "blas.bf16_gemm": "not all bfloat16", "blas.fp16_gemm": "not all float16",
}  # fmt: skip
LOW_ALONE = {  # test_low_cross_entropy.py, test_low_product.py
    "native.linear_cross_entropy", "blas.bf16_linear_cross_entropy",
    "blas.fp16_linear_cross_entropy", "blas.bf16_gemm", "blas.fp16_gemm",
}  # fmt: skip

# Results whose elements are sums or transcendental functions: the order and the method may differ.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def launch(
    kernel: Kernel, call: Bound, inputs: list[torch.Tensor | None], outputs: list[torch.Tensor]
) -> None:
    scratch = [rubbish(t) for t in kernel.scratch(call.spec)]
    with torch.no_grad():
        kernel.bind(KernelArguments(call.spec.attrs, inputs, outputs, scratch))()


def run(kernel: Kernel, call: Bound, inputs: list[torch.Tensor | None]) -> list[torch.Tensor]:
    outputs = [rubbish(t) for t in call.spec.outputs]
    launch(kernel, call, inputs, outputs)
    return outputs


def strided(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the same numbers whose memory has gaps and the dims in reverse order."""
    order = list(reversed(range(x.dim())))
    room = torch.empty([*(x.shape[d] for d in order), 2], dtype=x.dtype)[..., 1]
    y = room.permute(order)
    y.copy_(x)
    assert x.numel() < 2 or not y.is_contiguous()
    return y


CALLS = [
    (case, kernel)
    for case in CASES + ONWARD_CASES
    if case.label not in REFUSED
    for kernel in KERNELS.get(case.op, ())
    if kernel.name not in PARTIAL or kernel.unsupported(spec_of(case)) is None
]
EACH_CALL = pytest.mark.parametrize(
    ("case", "kernel"), CALLS, ids=[f"{case}-{kernel.name}" for case, kernel in CALLS]
)


@EACH_CALL
def test_kernels_compute_what_the_op_means(case: OpCase, kernel: Kernel) -> None:
    call = bound(case)
    assert kernel.unsupported(call.spec) is None
    before = [None if x is None else x.clone() for x in call.inputs]
    assert_equal(run(kernel, call, call.inputs), call.want, **TOLERANCE)
    for x, kept in zip(call.inputs, before, strict=True):
        if x is not None and kept is not None:
            assert torch.equal(x.nan_to_num(), kept.nan_to_num()), "an input was written to"


# The reference evaluator computes Erf in fp32, whatever its input.
FP64 = [(c, k) for c, k in CALLS if c.op not in ("Erf", "Gelu", "GeluGrad")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "kernel"), FP64, ids=[f"{c}-{k.name}" for c, k in FP64])
def test_kernels_compute_in_fp64_what_they_are_given(case: OpCase, kernel: Kernel) -> None:
    call = bound(case, DType.DOUBLE)
    if kernel.unsupported(call.spec) == "double tensors":
        assert not kernel.name.startswith("aten.")
        return
    loose = {"rtol": 1e-7, "atol": 1e-9} if "Update" in case.op else {"rtol": 1e-12, "atol": 1e-12}
    assert_equal(run(kernel, call, call.inputs), call.want, **loose)


@pytest.mark.sample(1)
@EACH_CALL
def test_a_launch_may_be_repeated(case: OpCase, kernel: Kernel) -> None:
    call = bound(case)
    outputs = [rubbish(t) for t in call.spec.outputs]
    scratch = [rubbish(t) for t in kernel.scratch(call.spec)]
    with torch.no_grad():
        again = kernel.bind(KernelArguments(call.spec.attrs, call.inputs, outputs, scratch))
        again()
        first = [y.clone() for y in outputs]
        for y in outputs:
            y.zero_()
        again()
    assert_equal(outputs, [y.numpy() for y in first])


@pytest.mark.sample(1)
@EACH_CALL
def test_inputs_that_need_not_be_contiguous_are_read_through_their_strides(
    case: OpCase, kernel: Kernel
) -> None:
    call = bound(case)
    inputs = [
        x
        if x is None
        or kernel.contiguous is None
        or i in kernel.contiguous
        or isinstance(case.inputs[i], Known)
        else strided(x)
        for i, x in enumerate(call.inputs)
    ]
    assert_equal(run(kernel, call, inputs), call.want, **TOLERANCE)


@pytest.mark.sample(1)
@EACH_CALL
def test_inputs_are_read_when_a_launch_runs_not_when_it_is_bound(
    case: OpCase, kernel: Kernel
) -> None:
    """Each step's batch is copied into memory that launches were bound to before; of inputs that
    may be strided, a bound launch may not keep a copy either."""
    call = bound(case)
    inputs: list[torch.Tensor | None] = []
    for i, x in enumerate(call.inputs):
        if x is None or isinstance(case.inputs[i], Known):
            inputs.append(x)
            continue
        straight = kernel.contiguous is None or i in kernel.contiguous
        place = torch.empty_like(x) if straight else strided(x)
        whole = not x.is_floating_point()
        inputs.append(
            place.fill_(torch.iinfo(x.dtype).min if whole and x.dtype != torch.bool else 1)
        )
    outputs = [rubbish(t) for t in call.spec.outputs]
    scratch = [rubbish(t) for t in kernel.scratch(call.spec)]
    args = KernelArguments(call.spec.attrs, inputs, outputs, scratch)
    with torch.no_grad():
        bound_launch = kernel.bind(args)
        for place, x in zip(inputs, call.inputs, strict=True):
            if place is not None and x is not None and place is not x:
                place.copy_(x)
        bound_launch()
    raise_input_error(kernel, args)
    assert_equal(outputs, call.want, **TOLERANCE)


def _pairs(case: OpCase, kernel: Kernel) -> list[tuple[int, int]]:
    """Pairs (output, input) of one type that the kernel may compute in place for this call."""
    graph = case.graph()
    node = next(iter(graph))
    return [
        (o, i)
        for o, i in kernel.inplace
        if i < len(node.inputs)
        and o < len(node.outputs)
        and node.inputs[i] is not None
        and not isinstance(case.inputs[i], Known)
        and type_of(node.inputs[i]) == type_of(node.outputs[o])
    ]


IN_PLACE = [(case, kernel, pair) for case, kernel in CALLS for pair in _pairs(case, kernel)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("case", "kernel", "pair"), IN_PLACE, ids=[f"{c}-{o}-over-{i}" for c, _, (o, i) in IN_PLACE]
)
def test_an_output_may_lie_in_the_input_it_has_a_right_to(
    case: OpCase, kernel: Kernel, pair: tuple[int, int]
) -> None:
    call = bound(case)
    want = run(kernel, call, call.inputs)
    out, source = pair
    inputs = [None if x is None else x.clone() for x in call.inputs]
    outputs = [rubbish(t) for t in call.spec.outputs]
    shared = inputs[source]
    assert shared is not None
    outputs[out] = shared
    launch(kernel, call, inputs, outputs)
    assert_equal(outputs, [y.numpy() for y in want])


def test_every_in_place_right_has_a_call() -> None:
    rights = {
        (op, pair)
        for op, kernels in KERNELS.items()
        for kernel in kernels
        for pair in kernel.inplace
        if op != WAIT and op not in STARTS  # among ranks: tests/execute/test_exchanges.py
    }
    compare = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    never = {(op, pair) for op in compare for pair in ((0, 0), (0, 1))}  # of another type
    assert rights - never == {(case.op, pair) for case, _, pair in IN_PLACE}


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES + ONWARD_CASES, ids=str)
def test_what_a_kernel_does_not_cover_it_refuses(case: OpCase) -> None:
    spec = spec_of(case)
    for kernel in KERNELS.get(case.op, ()):
        reason = kernel.unsupported(spec)
        if case.label in REFUSED:
            assert reason is not None
            assert REFUSED[case.label] in reason or PARTIAL.get(kernel.name, "\0") in reason
        elif reason is not None:
            assert PARTIAL[kernel.name] in reason


def test_every_kernel_has_a_call() -> None:
    planned = {"Contiguous"}  # what the plan puts in: no op of any graph
    planned |= named("opaque")  # what PyTorch runs: tests/module/test_regions.py
    assert set(KERNELS) - planned == {case.op for case, _ in CALLS}
    taken = {(case.op, kernel.name) for case, kernel in CALLS}
    assert {
        (op, k.name)
        for op in set(KERNELS) - planned
        for k in KERNELS[op]
        if k.name not in LOW_ALONE
    } == taken
    # what one kernel leaves another takes
    cases = {case.label for case in CASES + ONWARD_CASES if case.op in KERNELS}
    assert {case.label for case, _ in CALLS} == cases - set(REFUSED)


def test_a_contiguous_copy_is_a_copy() -> None:
    x = strided(torch.randn(3, 5, 2))
    type = Type(DType.FLOAT, (3, 5, 2))
    (kernel,) = KERNELS["Contiguous"]
    call = Bound(KernelSpec("Contiguous", {}, (type,), (type,)), [x], [x.numpy()])
    assert_equal(run(kernel, call, [x]), call.want)


# ---- dropout: every bit


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.DOUBLE, DType.FLOAT16], ids=str)
@pytest.mark.parametrize("case", cases_of("Dropout"), ids=str)
def test_dropout_equals_its_body_to_the_bit(case: OpCase, dtype: DType) -> None:
    call = bound(case, dtype)
    fitting = [k for k in KERNELS["Dropout"] if k.unsupported(call.spec) is None]
    assert len(fitting) == (2 if dtype == DType.DOUBLE else 3)
    for kernel in fitting:
        assert_equal(run(kernel, call, call.inputs), call.want)


@pytest.mark.parametrize(
    "shape", [(1,), (3,), (1, 1), (257, 3), (2, 1, 70000), (5, 7, 1), (3, 1, 5, 7)], ids=str
)
def test_dropout_equals_its_body_at_odd_sizes(shape: tuple[int, ...]) -> None:
    """Sizes on both sides of a chunk of the generator, and seeds with their top bits set."""
    seed = np.array([2**32 - 1, 2**31 + 12345])
    case = _dropout(shape, seed, 2**33 + 7)
    call = bound(case)
    for kernel in KERNELS["Dropout"]:
        assert_equal(run(kernel, call, call.inputs), call.want)


def _dropout(shape: tuple[int, ...], seed: np.ndarray, offset: int) -> OpCase:
    from op_cases import Given, Real

    attrs = {"ratio": 0.3, "site": 2**20 + 5, "sample_dim": 0 if len(shape) > 1 else -1}
    return OpCase("Dropout", (Real(shape), Given(seed), Given(np.array(offset))), attrs, str(shape))


# ---- larger than one block


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_of_many_rows_may_lie_in_its_input(op: str) -> None:
    x = torch.randn(301, 1037)
    type = Type(DType.FLOAT, (301, 1037))
    spec = KernelSpec(op, {"axis": -1}, (type,), (type,))
    call = Bound(spec, [x], [])
    for kernel in KERNELS[op]:
        (want,) = run(kernel, call, [x.clone()])
        shared = x.clone()
        launch(kernel, call, [shared], [shared])
        assert torch.equal(shared, want)


def test_the_gradient_of_the_loss_is_computed_in_blocks_of_rows() -> None:
    """More rows than one block holds; the oracle is torch's autograd in fp64."""
    logits = torch.randn(700, 999, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 999, (700,))
    labels[::7] = -100
    weight = torch.rand(999, dtype=torch.float64) + 0.5
    loss = torch.nn.functional.cross_entropy(logits, labels, weight)
    (want,) = torch.autograd.grad(loss, logits)
    log_prob = torch.log_softmax(logits.detach(), 1)
    f64 = DType.DOUBLE
    spec = KernelSpec(
        "SoftmaxCrossEntropyLossGrad", {"reduction": "mean", "ignore_index": -100},
        (Type(f64, ()), Type(f64, (700, 999)), Type(DType.INT64, (700,)), Type(f64, (999,))),
        (Type(f64, (700, 999)),),
    )  # fmt: skip
    inputs: list[torch.Tensor | None] = [
        torch.ones((), dtype=torch.float64),
        log_prob,
        labels,
        weight,
    ]
    for kernel in KERNELS[spec.op]:
        (have,) = run(kernel, Bound(spec, inputs, []), inputs)
        np.testing.assert_allclose(have.numpy(), want.numpy(), rtol=1e-12, atol=1e-15)


def test_every_onward_op_has_sample_calls() -> None:
    assert {case.op for case in ONWARD_CASES} == set(OWN) - named("opaque")


@pytest.mark.parametrize(("shape", "rows"), [((3, 0), 2), ((0, 4), 0), ((0, 0), 0), ((2, 0, 3), 1)])
@pytest.mark.parametrize("op", ["GatherND", "ScatterND"])
def test_rows_without_elements_are_moved_about(op: str, shape: tuple[int, ...], rows: int) -> None:
    data, index = torch.ones(shape), torch.zeros(rows, 1, dtype=torch.int64)
    updates = torch.ones(rows, *shape[1:])
    given = [data, index] if op == "GatherND" else [data, index, updates]
    y = torch.full_like(updates if op == "GatherND" else data, 7.0)
    for kernel in KERNELS[op]:
        kernel.bind(KernelArguments({}, list(given), [y], []))()
        assert torch.equal(y, data[index[:, 0]] if op == "GatherND" else data)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_an_extreme_of_no_elements_where_nothing_asks_for_it(op: str, keep: int) -> None:
    """Masks of sequences without tokens; torch refuses the dim, and so it does where there is a
    result to give."""
    axes = torch.tensor([2])
    for kernel in KERNELS[op]:
        for x in (torch.ones(2, 0, 0), torch.ones(2, 0, 0, dtype=torch.int64)):
            y = x.new_empty((2, 0, 1) if keep else (2, 0))
            kernel.bind(KernelArguments({"keepdims": keep}, [x, axes], [y], []))()
        x, y = torch.ones(2, 3, 0), torch.ones((2, 3, 1) if keep else (2, 3))
        with pytest.raises(IndexError):
            kernel.bind(KernelArguments({"keepdims": keep}, [x, axes], [y], []))()
