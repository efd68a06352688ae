"""Type rules against what onnx's reference evaluator returns."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from op_cases import CASES, OpCase

from onward.graph.file import to_proto
from onward.graph.graph import content_of, type_of
from onward.graph.ops import STANDARD
from onward.graph.types import of_array


@pytest.mark.parametrize("case", CASES, ids=str)
def test_inferred_types_are_those_of_the_results(case: OpCase) -> None:
    graph = case.graph()
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(to_proto(graph)).run(None, case.feeds())
    for value, array in zip(graph.outputs.values(), results, strict=True):
        assert of_array(np.asarray(array)) == type_of(value)
        known = content_of(value)
        if known is not None:
            assert np.asarray(array).reshape(-1).tolist() == list(known)


def test_every_type_rule_has_a_case() -> None:
    assert {case.op for case in CASES} == set(STANDARD)
