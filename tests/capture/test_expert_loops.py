"""Loops over experts that a router chooses: eager's numbers, or a refusal in one line."""

from __future__ import annotations

from typing import Any

import expert_loops
import pytest
import tiny
import torch
import torch.nn.functional as F
from expert_loops import LOOPS, Experts, batch, hits, mask_of
from expert_loops_refused import REFUSED
from near_autocast import assert_near
from row_programs import wrong_numbers

from onward.errors import OnwardError
from onward.graph.types import DType
from onward.rewrite import Policy

TOGETHER = (
    "tables", "from_a_list", "every_expert", "if_any_rows", "unasked", "numbered_experts",
    "some_are_identities", "tables_of_all", "fewer_than_matrices",
)  # fmt: skip
TURN_BY_TURN = (
    "every_expert_in_place", "all_by_name", "all_unlike", "matrices_in_a_list",
    "by_a_table_of_numbers", "scaled_by_number", "in_turns", "several_of_all",
)  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", LOOPS)
def test_numbers_are_eagers(name: str) -> None:
    """One capture, whichever experts are hit; on all rows, and on those that are read."""
    model, data = Experts(LOOPS[name]), [batch(5, 0), batch(5, 1, 30.0), batch(8, 2)]
    for given, found in zip(data, tiny.gradients_of(model, data), strict=True):
        want, exact = (tiny.eager(model, given, t) for t in (torch.float32, torch.float64))
        wrong = tiny.differing_most(found, want, exact)
        assert not wrong, wrong
    assert not (wrong := wrong_numbers(model, data)), "\n".join(wrong)


@pytest.mark.parametrize("name", ["from_a_list", "unasked"])
def test_mixed_precision_is_as_near_as_autocast(name: str) -> None:
    # so many tokens that each expert has some: else it has no gradient in eager PyTorch
    model, data = Experts(LOOPS[name]), [batch(16 + 2 * (i % 2), i) for i in range(24)]
    assert_near(model, data, tiny.gradients_of(model, data, policy=Policy(DType.BFLOAT16)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_turn_without_rows_may_change_is_refused(name: str) -> None:
    with pytest.raises(OnwardError) as found:
        tiny.compiled(Experts(REFUSED[name]), batch(5, 0))
    assert "\n" not in str(found.value)
    assert "fix: " in str(found.value)


def test_experts_may_have_dropout() -> None:
    def dropped(p: Experts, x: torch.Tensor, chosen: torch.Tensor, scale: torch.Tensor) -> Any:
        y, mask = torch.zeros_like(x), mask_of(chosen)
        for e in hits(mask):
            _, token = torch.where(mask[e[0]])
            y.index_add_(0, token, F.dropout(x[token], 0.5, p.training))
        return y

    made = tiny.compiled(Experts(dropped), batch(5, 0))
    assert len(tiny.dropout_nodes(made.captured.graph)) == 1


def test_an_expert_that_is_none_is_not_a_number() -> None:
    """Eager has an error of an index."""
    model = Experts(lambda p, x, chosen, scale: LOOPS["one_more"](p, x, chosen + 1, scale))
    data = batch(5, 0)
    with pytest.raises(IndexError):
        model(**data)
    (found,) = tiny.gradients_of(model, [data])
    assert found["loss"].isnan()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", TOGETHER)
def test_experts_share_one_product_by_group(name: str) -> None:
    made = tiny.compiled(Experts(LOOPS[name]), batch(5, 0))
    assert [n.op_type for n in made.captured.graph].count("GroupedMatMul") == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TURN_BY_TURN)
def test_loops_over_all_experts_may_go_turn_by_turn(name: str) -> None:
    made = tiny.compiled(Experts(LOOPS[name]), batch(5, 0))
    assert not [n for n in made.captured.graph if n.op_type == "GroupedMatMul"]
    assert "range" not in vars(expert_loops), "what a trace replaces is put back"
    assert "enumerate" not in vars(expert_loops)
