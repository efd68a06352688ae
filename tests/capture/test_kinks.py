"""Operators of PyTorch's table at whole numbers, halves and ties, where slopes change: loss and
gradient are eager's. Random numbers never fall there; zeros of a first layer do."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import op_db
import pytest
import torch
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, UnaryUfuncInfo

PLACES = [-20.0, -6, -3, -2.5, -2, -1.5, -1, -0.5, -1e-8, 0, 1e-8, 0.5, 1, 1.5, 2, 2.5, 3, 6, 20]
PAIRS = [-3.0, -2, -1, -0.5, 0, 0.5, 1, 2, 3]
ACTIVATIONS = (
    "celu", "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
    "logsigmoid", "mish", "relu", "relu6", "selu", "silu", "softplus", "softshrink", "softsign",
    "tanhshrink",
)  # fmt: skip
WRITTEN = json.loads(op_db.TABLE.read_text())["operators"]
CAPTURED = {
    name: op
    for op in op_db.operators()
    if WRITTEN[name := op_db.called(op)] == "equal" and torch.float32 in op.supported_dtypes("cpu")
}
OF_ONE = {
    name: op
    for name, op in CAPTURED.items()
    if (isinstance(op, UnaryUfuncInfo) or op.name.removeprefix("nn.functional.") in ACTIVATIONS)
}
OF_TWO = {name: op for name, op in CAPTURED.items() if isinstance(op, BinaryUfuncInfo)}


def finite(op: Any, *numbers: float, **more: Any) -> bool:
    """Whether eager's result and slopes are numbers there."""
    given = [torch.tensor(float(n), requires_grad=True) for n in numbers]
    try:
        y = op.op(*given, **more)
        slopes = torch.autograd.grad(y, given, allow_unused=True) if y.requires_grad else ()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return all(t is None or bool(t.isfinite()) for t in (y, *slopes))


def assert_eagers(op: Any, *tensors: torch.Tensor, **more: Any) -> None:
    sample = SimpleNamespace(input=tensors[0], args=tensors[1:], kwargs=more)
    found = op_db.outcome(op, sample)
    assert found.partition(":")[0] in ("equal", "refused", "eager"), found


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", OF_ONE)
def test_of_one_number(name: str) -> None:
    op = OF_ONE[name]
    more = next((s.kwargs for s in op_db.samples(op, torch.float32)), {})
    places = [x for x in PLACES if finite(op, x, **more)]
    if places:
        assert_eagers(op, torch.tensor(places), **more)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", OF_TWO)
def test_of_two_numbers(name: str) -> None:
    op = OF_TWO[name]
    pairs = [(x, y) for x in PAIRS for y in PAIRS if finite(op, x, y)]
    if pairs:
        assert_eagers(op, *[torch.tensor(side) for side in zip(*pairs, strict=True)])


def test_the_tables_have_the_operators_with_kinks() -> None:
    assert {"nn.functional.hardswish", "nn.functional.relu6", "sinc", "abs"} <= set(OF_ONE)
    assert {"maximum", "fmax", "xlogy", "atan2"} <= set(OF_TWO)
