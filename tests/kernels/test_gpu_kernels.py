"""Kernels on a CUDA device: the numbers of the op, and no wait for the device in a launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from after_forward import after_forward
from device_waits import waits_refused
from kernel_calls import Bound, assert_equal, bound, raise_input_error, rubbish, spec_of
from op_cases import CASES, ONWARD_CASES, OpCase, cases_of
from test_host_reads import BAD
from triton_checks import type_of

from onward.graph.types import DType, Type
from onward.kernels import KERNELS, Kernel, KernelArguments, KernelSpec, host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = host("cuda")
ON_GPU = [
    (case, kernel)
    for case in CASES + ONWARD_CASES
    for kernel in KERNELS.get(case.op, ())
    if kernel.where(CUDA) is None and kernel.unsupported(spec_of(case)) is None
]
EACH = pytest.mark.parametrize(("case", "kernel"), ON_GPU, ids=[f"{c}-{k.name}" for c, k in ON_GPU])
# Tolerances, since sums have other orders and functions come from another library.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Convolutions of fp32 are of fp32: cuDNN's default is TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def launched(case: OpCase, kernel: Kernel, dtype: DType) -> tuple[Bound, list[torch.Tensor]]:
    call = bound(after_forward(case), dtype)
    if kernel.unsupported(call.spec) is not None:
        assert kernel.name.startswith("triton."), "aten's take every dtype"
        pytest.skip("not for this dtype")
    inputs = [
        x if x is None or i in kernel.host else x.cuda() for i, x in enumerate(call.inputs)
    ]  # fmt: skip
    outputs = [rubbish(t).cuda() for t in call.spec.outputs]
    scratch = [rubbish(t).cuda() for t in kernel.scratch(call.spec)]
    flag = torch.zeros(2, dtype=torch.int64, device="cuda")
    args = KernelArguments(call.spec.attrs, inputs, outputs, scratch, flag)
    with torch.no_grad():
        launch = kernel.bind(args)
        with waits_refused():
            launch()
    raise_input_error(kernel, args)
    return call, [y.cpu() for y in outputs]


@EACH
def test_kernels_compute_what_the_op_means(case: OpCase, kernel: Kernel) -> None:
    call, outputs = launched(case, kernel, DType.FLOAT)
    assert_equal(outputs, call.want, **TOLERANCE)


@EACH
def test_kernels_compute_in_fp64_what_they_are_given(case: OpCase, kernel: Kernel) -> None:
    if case.op in ("Erf", "Gelu", "GeluGrad"):
        return  # the reference evaluator computes Erf in fp32, whatever its input
    call, outputs = launched(case, kernel, DType.DOUBLE)
    loose = {"rtol": 1e-7, "atol": 1e-9} if "Update" in case.op else {"rtol": 1e-12, "atol": 1e-12}
    assert_equal(outputs, call.want, **loose)


@pytest.mark.parametrize("case", cases_of("Dropout"), ids=str)
def test_dropout_equals_its_body_to_the_bit(case: OpCase) -> None:
    for kernel in KERNELS["Dropout"]:
        if kernel.where(CUDA) is None:
            call, outputs = launched(case, kernel, DType.FLOAT)
            assert_equal(outputs, call.want)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_flagged(name: str) -> None:
    """A bad index raises IndexError, and no device assertion ends the CUDA context."""
    op, arrays, shape, attrs, _ = BAD[name]
    for kernel in KERNELS[op]:
        if kernel.input_error is None or kernel.where(CUDA) is not None:
            continue
        inputs: list[torch.Tensor | None] = [torch.tensor(x, device="cuda") for x in arrays]
        flag = torch.zeros(2, dtype=torch.int64, device="cuda")
        y = torch.zeros(shape, device="cuda")
        types = [type_of(x) for x in (*inputs, y)]
        spec = KernelSpec(op, attrs, tuple(types[:-1]), tuple(t for t in types[-1:] if t))
        scratch = [rubbish(t).cuda() for t in kernel.scratch(spec)]
        args = KernelArguments(attrs, inputs, [y], scratch, flag)
        with torch.no_grad():
            launch = kernel.bind(args)
            with waits_refused():
                launch()
        with pytest.raises(IndexError, match="out of range"):
            raise_input_error(kernel, args)
        torch.cuda.synchronize()


@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "CrossEntropyLoss"])
@pytest.mark.parametrize("label", [-1, 7, 2**40])
def test_a_label_that_is_no_class_is_flagged(op: str, label: int) -> None:
    (kernel,) = (k for k in KERNELS[op] if k.input_error is not None)
    if kernel.where(CUDA) is not None:
        pytest.skip("Triton is not installed")
    attrs = {"label_smoothing": 0.1} if op == "CrossEntropyLoss" else {}
    z, labels = torch.randn(4, 7, device="cuda"), torch.tensor([0, label, -100, 6], device="cuda")
    outputs, partial = [z.new_empty(()), torch.empty_like(z)], z.new_empty(1, 2)
    flag = torch.zeros(2, dtype=torch.int64, device="cuda")
    args = KernelArguments(attrs, [z, labels], outputs, [partial], flag)
    launch = kernel.bind(args)
    with waits_refused():
        launch()
    with pytest.raises(IndexError, match=f"label {label} is out of range for 7 classes"):
        raise_input_error(kernel, args)
    torch.testing.assert_close(outputs[1], z.log_softmax(1))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "packed", "added", "bias"])
def test_a_query_that_is_no_number_gives_none(kind: str, dtype: torch.dtype) -> None:
    """A device's maximum passes over NaN: a row of it alone is not one that sees nothing."""
    kernels = [k for k in KERNELS["FlashAttention"] if k.where(CUDA) is None]
    if not kernels:
        pytest.skip("Triton is not installed")
    n, device = 100, torch.device("cuda")
    q, k, v = torch.randn(3, 1, 2, n, 32, device=device).to(dtype)
    q[:, :, 3:6] = torch.nan
    place = torch.arange(n, device=device)
    at = torch.stack([place // 25, place % 25], 1) if kind == "packed" else None
    added = torch.zeros(1, 2, n, n, device=device, dtype=dtype)
    mask, bias = added if kind == "added" else None, added if kind == "bias" else None
    if kind == "mask":
        mask = torch.ones(n, n, device=device, dtype=torch.bool)
        mask[5] = False  # sees nothing
    inputs = [q, k, v, mask, None, None, at, at, bias]
    outputs = [torch.empty_like(q), *(torch.empty(1, 2, n, device=device) for _ in range(2))]
    attrs = {"scale": 0.2, "is_causal": int(kind == "causal")}
    kinds = {torch.float32: DType.FLOAT, torch.bfloat16: DType.BFLOAT16, torch.bool: DType.BOOL,
             torch.int64: DType.INT64}  # fmt: skip
    types = [None if x is None else Type(kinds[x.dtype], tuple(x.shape)) for x in inputs]
    written = tuple(Type(kinds[y.dtype], tuple(y.shape)) for y in outputs)
    spec = KernelSpec("FlashAttention", attrs, tuple(types), written)
    assert kernels[0].unsupported(spec) is None
    scratch = [rubbish(t).cuda() for t in kernels[0].scratch(spec)]
    kernels[0].bind(KernelArguments(attrs, inputs, outputs, scratch))()
    odd = (place >= 3) & (place < (5 if kind == "mask" else 6))
    y = outputs[0].float().cpu()
    assert torch.equal(y.isnan(), odd.cpu()[:, None].expand(y.shape))
    assert kind != "mask" or not y[:, :, 5].any()
