"""A sample of `op_db.py`: what becomes of PyTorch's own operators is what the table says."""

from __future__ import annotations

import json

import op_db
import pytest

WRITTEN = json.loads(op_db.TABLE.read_text())
OPERATORS = {op_db.called(op): op for op in op_db.operators()}


def test_the_table_has_every_operator() -> None:
    assert set(WRITTEN["operators"]) == set(OPERATORS)


def test_no_operator_is_wrong() -> None:
    kinds = {text.partition(":")[0] for text in WRITTEN["operators"].values()}
    assert kinds <= {"equal", "refused", "eager"}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_eagers_equal_or_refused_as_the_table_says(name: str) -> None:
    found = op_db.status(op_db.outcomes(OPERATORS[name]))
    if WRITTEN["torch"] == op_db.torch.__version__.partition("+")[0]:
        assert found == WRITTEN["operators"][name]
    assert found.partition(":")[0] in ("equal", "refused", "eager")
