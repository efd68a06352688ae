"""A launch reads no tensor on the host: on a device it would wait there for all that is queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from kernel_calls import bound, rubbish
from op_cases import OpCase
from test_kernels import EACH_CALL
from torch.utils._python_dispatch import TorchDispatchMode

from onward.kernels import ATEN, KERNELS, TRITON, Kernel, KernelArguments

METHODS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "cpu")
# Operators whose result, or its size, is known on the host alone.
OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
# On the CPU nothing is queued; what runs elsewhere is tested on the meta device below.
ON_CPU = {"aten.all_finite", "aten.mm_by_group", "aten.linear_cross_entropy_scale"}


class Watched(TorchDispatchMode):
    """Calls `read` with each tensor that an operator reads on the host."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in OPERATORS:
            self.read(func.overloadpacket.__name__, args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(allowed: list[torch.Tensor | None]) -> Iterator[list[str]]:
    """The names of what reads tensors other than these on the host within it."""
    places = {x.data_ptr() for x in allowed if x is not None}
    found: list[str] = []

    def read(name: str, x: torch.Tensor) -> None:
        if x.data_ptr() not in places:
            found.append(name)

    def recorded(name: str) -> Any:
        plain = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **more: Any) -> Any:
            read(name, self)
            return plain(self, *args, **more)

        return method

    with pytest.MonkeyPatch.context() as patch, Watched(read):
        for name in METHODS:
            patch.setattr(torch.Tensor, name, recorded(name))
        yield found


@pytest.mark.parametrize("name", ["__bool__", "__int__", "__float__", "item", "tolist", "numpy"])
def test_a_read_is_found(name: str) -> None:
    x, other = torch.tensor(1), torch.tensor(2)
    with host_reads([other]) as found:
        getattr(other, name)()
        assert not found
        getattr(x, name)()
        assert name in found
    with host_reads([]) as found:
        torch.nonzero(torch.ones(3))
    assert found == ["nonzero"]


@pytest.mark.sample(1)
@EACH_CALL
def test_launches_read_nothing_on_the_host(case: OpCase, kernel: Kernel) -> None:
    if kernel.name in ON_CPU:
        return
    call = bound(case)
    outputs = [rubbish(t) for t in call.spec.outputs]
    scratch = [rubbish(t) for t in kernel.scratch(call.spec)]
    with torch.no_grad():
        args = KernelArguments(call.spec.attrs, call.inputs, outputs, scratch)
        launch = kernel.bind(args)
        given = [call.inputs[i] for i in kernel.host if i < len(call.inputs)]
        with host_reads(given) as found:
            launch()
    assert found == []


def test_whether_numbers_are_finite_is_not_asked_by_the_host_of_a_device() -> None:
    (kernel,) = ATEN["AllFinite"]
    (x, norm), y = (torch.ones(3, device="meta"), torch.ones((), device="meta")), torch.ones(())
    kernel.bind(KernelArguments({}, [norm, x], [y.to("meta", torch.bool)], []))()
    with pytest.raises(RuntimeError, match="meta"):
        bool(norm)


@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1}])
def test_what_a_loss_weighs_is_not_asked_by_the_host_of_a_device(more: dict[str, float]) -> None:
    (kernel,) = ATEN["LinearCrossEntropyScale"]
    given = [torch.ones(shape, device="meta") for shape in ((6, 4), (9, 4), (9,))]
    inputs = [torch.ones((), device="meta"), torch.ones(6, device="meta", dtype=torch.int64)]
    outputs = [torch.empty_like(g) for g in given]
    attrs = {"ignore_index": -100, "rows": 1, **more}
    kernel.bind(KernelArguments(attrs, [*inputs, *given], outputs, []))()


# ---- bad input: flagged, and nothing foreign is read or written

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)
BAD: dict[str, tuple[str, list[Any], tuple[int, ...], dict[str, Any], str]] = {
    "a row": ("Gather", [TABLE, [1, 4]], (2, 3), {}, "index 4 is out of range"),
    "a row before": ("Embedding", [TABLE, [1, -1]], (2, 3), {}, "index -1 is out of range"),
    "a place": ("GatherND", [TABLE, [[0, 0], [2**40, 0]]], (2,), {}, r"for dims of \[4, 3\]"),
    "a place before": ("GatherND", [TABLE, [[0, -4], [0, 2]]], (2,), {}, r"for dims of \[4, 3\]"),
    "rows added": (
        "ScatterND", [TABLE, [[1], [-5]], TABLE[:2]], (4, 3), {"reduction": "add"},
        "index -5 is out of range",
    ),
    "a number": ("InRange", [[-4, 4], 4], (2,), {"what": "index", "wraps": 1}, "index 4 is out"),
    "a label": (
        "InRange", [[-2, -100], 4], (2,), {"what": "label", "ignored": -100}, "label -2 is out"
    ),
    "places set": ("ScatterND", [TABLE, [[4, 0]], TABLE[0, :1]], (4, 3), {}, r"dims of \[4, 3\]"),
}  # fmt: skip

OF_ATEN = ("a place", "a place before", "places set", "a number", "a label")  # of BAD


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_flagged_and_the_launch_goes_on(name: str) -> None:
    op, inputs, shape, attrs, words = BAD[name]
    tensors: list[torch.Tensor | None] = [torch.tensor(np.array(x)) for x in inputs]
    ran = 0
    for kernel in KERNELS[op]:
        if kernel.input_error is None or kernel in TRITON.get(op, ()):
            continue  # test_triton_interpreted.py
        if kernel.name == "native.add_rows" and attrs.get("reduction") != "add":
            continue
        if kernel.name.startswith("aten.") and name not in OF_ATEN:
            continue  # on the CPU torch's operator refuses a row itself
        args = KernelArguments(attrs, tensors, [torch.zeros(shape)], [])
        with torch.no_grad():
            launch = kernel.bind(args)
            with host_reads([]) as found:
                launch()
        assert found == []
        error = kernel.input_error(args, args.flag.tolist())
        with pytest.raises(IndexError, match=words):
            assert error is not None
            raise error
        ran += 1
    assert ran == 1


def test_every_kernel_that_finds_bad_input_is_tried_with_some() -> None:
    tried = {op for op, *_ in BAD.values()}
    finding = {op for op, kernels in KERNELS.items() if any(k.input_error for k in kernels)}
    heads = {"LinearCrossEntropy", "LinearCrossEntropyGrad", "LinearCrossEntropyStep"}
    losses = {"SoftmaxCrossEntropyLoss", "CrossEntropyLoss"}  # of Triton alone
    assert finding == tried | heads | losses, "test_head.py, support/triton_checks.py"
