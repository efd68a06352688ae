"""onnx's own backend node tests: each a model of one op, its inputs, and the results it gives."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases

FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class NodeCase:
    """One case. feeds, wants: by the names of the model's inputs and outputs."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Any]
    wants: dict[str, Any]
    rtol: float
    atol: float

    @property
    def ops(self) -> list[str]:
        return [node.op_type for node in self.model.graph.node]


@cache
def cases() -> dict[str, NodeCase]:
    """By name. Making them draws numbers by a generator that onnx seeds for each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(_read(collect_testcases(None)))
    return {case.name: case for case in found}


def op_of(name: str) -> str:
    """The op that a case is about; of a function body written out, the op that it defines."""
    base = re.split("_expanded", name)[0]
    return cases()[base if base in cases() else name].model.graph.node[0].op_type


def _read(found: list[Any]) -> Iterator[NodeCase]:
    for case in found:
        model = case.model
        inputs, outputs = case.data_sets[0]
        feeds = dict(zip((i.name for i in model.graph.input), map(_value, inputs), strict=False))
        wants = dict(zip((o.name for o in model.graph.output), map(_value, outputs), strict=False))
        yield NodeCase(case.name, model, feeds, wants, case.rtol, case.atol)


def _value(x: Any) -> Any:
    if isinstance(x, onnx.TensorProto):
        return onnx.numpy_helper.to_array(x)
    return np.asarray(x) if isinstance(x, np.generic | int | float | bool) else x


def is_floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.name in FLOATS
