"""The table of torch's forms against the operators that have a gradient, in both directions, and
the calls that onnx's node tests leave out: results and gradients as torch's, in fp64."""

from __future__ import annotations

import pytest
from nodes.autograd import call_by_torch
from nodes.engine import EQUAL
from nodes.more_cases import Call, every
from nodes.page import gradient, names
from nodes.table import table
from nodes.torch_forms import AT_KINKS, FORMS, WITHOUT_TORCH

SHARE = 4  # one in so many is tried, of those without a kink; `make node-tests` tries all
CALLS = [call for i, call in enumerate(every()) if call.kink or i % SHARE == 0]
FLOWS = [name for name in names() if not gradient(name).startswith(("none", "-"))]


@pytest.mark.parametrize("op", FLOWS)
def test_an_op_with_a_gradient_has_a_form_in_torch_or_a_reason(op: str) -> None:
    assert (op in FORMS) != (op in WITHOUT_TORCH), "fix: a row in torch_<family>.py, or a reason"


@pytest.mark.parametrize("op", sorted(FORMS))
def test_a_form_is_compared(op: str) -> None:
    """A row that nothing is held against would prove nothing."""
    tested = any(row[0] == op and row[3] == EQUAL for row in table().values())
    assert tested or any(call.op == op for call in every())


def test_a_reason_is_needed() -> None:
    """An op without a form has a gradient, or node tests that are read."""
    for op in WITHOUT_TORCH:
        assert op in FLOWS or any(row[0] == op and row[1] == EQUAL for row in table().values())


def test_each_convention_has_a_call_that_holds_it() -> None:
    assert set(AT_KINKS) == {call.op for call in every() if call.kink}


@pytest.mark.sample(1)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_call_has_the_results_and_gradients_of_torch(call: Call) -> None:
    assert call_by_torch(call) == EQUAL
