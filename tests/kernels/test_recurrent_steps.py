"""The steps of recurrent layers at sizes of models: what they compute, and what they allocate."""

from __future__ import annotations

import pytest
import torch
from kernel_calls import rubbish, spec_of
from op_cases import OpCase, r
from test_conv import outstanding

from onward.graph.ops.recurrent import GATES
from onward.graph.types import DType
from onward.kernels import KERNELS, KernelArguments
from onward.kernels.aten.recurrent import (
    RecurrentLayer,
    recurrence_backward_ref,
    recurrence_ref,
)

KINDS = ("lstm", "lstm projected", "gru", "tanh", "relu")


def case_of(op: str, kind: str, reverse: int, steps: int, samples: int, hidden: int) -> OpCase:
    name = kind.partition(" ")[0]
    inner = 3 * hidden // 4 if kind == "lstm projected" else hidden
    width, small = GATES[name] * hidden, 0.2
    layer = [r(steps, samples, width), r(width, inner, low=-small, high=small), r(width),
             r(samples, inner)]  # fmt: skip
    layer += [r(samples, hidden)] if name == "lstm" else []
    layer += [r(inner, hidden, low=-small, high=small)] if "projected" in kind else []
    if op == "RecurrenceGrad":
        y, cells = r(steps, samples, inner, low=-1, high=1), r(steps, samples, hidden)
        lstm = name == "lstm"
        layer = [y, cells if lstm else None, y, cells if lstm else None, *layer]
    return OpCase(op, tuple(layer), {"kind": name, "reverse": reverse}, f"{op} {kind} {reverse}")


def launched(case: OpCase, dtype: DType) -> tuple[list[torch.Tensor], int, int]:
    """The results; bytes that were in use at once, and bytes that the kernel said."""
    (kernel,), spec, feeds = KERNELS[case.op], spec_of(case, dtype), case.feeds(dtype)
    outputs, scratch = ([rubbish(t) for t in ts] for ts in (spec.outputs, kernel.scratch(spec)))
    inputs = [
        torch.tensor(feeds[f"x{i}"]) if f"x{i}" in feeds else None for i in range(len(case.inputs))
    ]
    with torch.no_grad():
        launch = kernel.bind(KernelArguments(spec.attrs, inputs, outputs, scratch))
        launch()
        used = outstanding(launch)
    return outputs, used, kernel.workspace(spec)


@pytest.mark.parametrize("dtype", [DType.FLOAT, DType.DOUBLE], ids=str)
@pytest.mark.parametrize("sizes", [(20, 8, 32), (1, 64, 16), (50, 1, 128), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["Recurrence", "RecurrenceGrad"])
def test_no_more_is_allocated_than_said(
    op: str, kind: str, sizes: tuple[int, int, int], dtype: DType
) -> None:
    for reverse in (0, 1):
        _, used, said = launched(case_of(op, kind, reverse, *sizes), dtype)
        assert used <= said


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_many_steps_are_autograds(kind: str, reverse: int) -> None:
    """In fp64, beside torch's own layer, whose product with the input is the unit matrix."""
    torch.manual_seed(0)
    name, steps, samples, hidden = kind.partition(" ")[0], 20, 3, 8
    inner = 6 if "projected" in kind else hidden
    width = GATES[name] * hidden
    gates = torch.randn(steps, samples, width, dtype=torch.float64, requires_grad=True)
    kinds = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
    more = {"proj_size": inner} if inner != hidden else {}
    more |= {} if name in kinds else {"nonlinearity": name}
    layer = kinds.get(name, torch.nn.RNN)(width, hidden, **more).double()
    weights = dict(layer.named_parameters())
    with torch.no_grad():
        weights["weight_ih_l0"].copy_(torch.eye(width))
        weights["bias_ih_l0"].zero_()
    states = [torch.randn(samples, n, dtype=torch.float64, requires_grad=True)
              for n in (inner, hidden)[: 2 if name == "lstm" else 1]]  # fmt: skip
    first = tuple(s[None] for s in states)
    x = gates.flip(0) if reverse else gates
    y = layer(x, first if name == "lstm" else first[0])[0]
    y = y.flip(0) if reverse else y
    layer_inputs = [gates, weights["weight_hh_l0"], weights["bias_hh_l0"], *states]
    layer_inputs += [weights["weight_hr_l0"]] if more.get("proj_size") else []
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, layer_inputs, dy)
    attrs = {"kind": name, "reverse": reverse}
    given = [x.detach() for x in layer_inputs]
    made = [torch.empty_like(y)]
    made += [torch.empty(steps, samples, hidden, dtype=torch.float64)] if name == "lstm" else []
    with torch.no_grad():
        for op, inputs, outputs in (
            ("Recurrence", given, made),
            ("RecurrenceGrad", [dy, None, *(made if name == "lstm" else [made[0], None]), *given],
             [torch.empty_like(x) for x in given]),
        ):  # fmt: skip
            case = case_of(op, kind, reverse, steps, samples, hidden)
            (kernel,), spec = KERNELS[op], spec_of(case, DType.DOUBLE)
            scratch = [rubbish(t) for t in kernel.scratch(spec)]
            kernel.bind(KernelArguments(attrs, list(inputs), outputs, scratch))()
    torch.testing.assert_close(made[0], y.detach(), rtol=1e-12, atol=1e-12)
    for have, expected in zip(outputs, want, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_compute_the_plain_loops(kind: str, reverse: int) -> None:
    """In fp64, also with a gradient of the cells; autograd is the oracle of the backward loop."""
    case = case_of("Recurrence", kind, reverse, 7, 3, 8)
    feeds = case.feeds(DType.DOUBLE)
    given = [torch.tensor(feeds[f"x{i}"], requires_grad=True) for i in range(len(feeds))]
    given += [torch.empty(0)] * (6 - len(given))
    layer = RecurrentLayer(
        str(case.attrs["kind"]), bool(reverse), *(x if x.numel() else None for x in given)  # type: ignore[arg-type]
    )  # fmt: skip
    y, cells = recurrence_ref(layer)
    made, _, _ = launched(case, DType.DOUBLE)
    torch.testing.assert_close(
        made, [y.detach()] if cells is None else [y.detach(), cells.detach()]
    )
    dy, dcells = torch.randn_like(y), None if cells is None else torch.randn_like(cells)
    loss = (y * dy).sum()
    if cells is not None and dcells is not None:
        loss = loss + (cells * dcells).sum()
    held = [x for x in given if x.numel()]
    want = torch.autograd.grad(loss, held)
    with torch.no_grad():
        found = recurrence_backward_ref(layer, dy, dcells, y, cells)
    gradients = [x for x in vars(found).values() if x is not None]
    torch.testing.assert_close(gradients, list(want), rtol=1e-10, atol=1e-12)
    back = case_of("RecurrenceGrad", kind, reverse, 7, 3, 8)
    (kernel,), spec = KERNELS["RecurrenceGrad"], spec_of(back, DType.DOUBLE)
    outputs, scratch = ([rubbish(t) for t in ts] for ts in (spec.outputs, kernel.scratch(spec)))
    inputs = [dy, dcells, y.detach(), None if cells is None else cells.detach()]
    inputs += [x.detach() for x in held]
    with torch.no_grad():
        kernel.bind(KernelArguments(back.attrs, inputs, outputs, scratch))()
    torch.testing.assert_close(outputs, gradients, rtol=1e-10, atol=1e-12)
