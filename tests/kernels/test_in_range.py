"""Numbers of rows and classes, looked at before they are used: the first one out of range is named,
with the limit, and the others pass as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onward.execute import Executable, Memory
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import parse_type
from onward.plan import make_plan

IDS: dict[str, Any] = {"what": "index", "wraps": 1}
ROWS: dict[str, Any] = {"what": "index", "wraps": 0}
LABELS: dict[str, Any] = {"what": "label", "ignored": -100}


def looked_at(numbers: list[int], attrs: dict[str, Any], dtype: str) -> torch.Tensor:
    """What a run of InRange with the limit 5 returns."""
    graph = Graph()
    kind = parse_type(f"{dtype}[{len(numbers)}]")
    x = graph.input("x", kind, Role.BATCH)
    limit = graph.input("limit", parse_type(f"{dtype}[]"), Role.BATCH)
    graph.outputs = {"y": Builder(graph).InRange(x, limit, **attrs)}
    executable = Executable(make_plan(graph, {}), Memory(torch.device("cpu")), {})
    of = torch.int64 if dtype == "i64" else torch.int32
    executable.run({"x": torch.tensor(numbers, dtype=of), "limit": torch.tensor(5, dtype=of)})
    return executable.output("y")


@pytest.mark.parametrize("dtype", ["i64", "i32"])
@pytest.mark.parametrize(
    ("numbers", "attrs", "bad"),
    [
        ([0, 4, 2], IDS, None), ([-5, -1, 4], IDS, None), ([0, 5, 9], IDS, 5), ([-6, 9], IDS, -6),
        ([4, 0], ROWS, None), ([0, -1], ROWS, -1), ([-100, 4], LABELS, None), ([], LABELS, None),
        ([4, -1, 7], LABELS, -1), ([0, 5], LABELS, 5), ([-100, -101], LABELS, -101),
    ],
)  # fmt: skip
def test_numbers_out_of_range(
    numbers: list[int], attrs: dict[str, Any], bad: int | None, dtype: str
) -> None:
    if bad is None:
        assert looked_at(numbers, attrs, dtype).tolist() == numbers
        return
    limit = "5 classes" if attrs is LABELS else "a table .* of 5 rows"
    with pytest.raises(IndexError, match=f"the {attrs['what']} {bad} is out of range for {limit}"):
        looked_at(numbers, attrs, dtype)
