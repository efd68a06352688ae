"""PyTorch's form of each operator of ONNX: the second oracle of results and gradients.

`FORMS` has one function for one op, `(attributes, *inputs) -> output or outputs`, entered by `row`.
An input that a node leaves out is None. A function raises `NoForm` for what torch does not have;
`WITHOUT_TORCH` says why an op has no function at all. `torch_forms.py` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import onnx
import torch

from onward.graph.importer.decomposition import plain

T: TypeAlias = "torch.Tensor"
Form: TypeAlias = "Callable[..., Any]"
FORMS: dict[str, Form] = {}

WITHOUT_TORCH: dict[str, str] = {
    "FlexAttention": "of a preview domain: its function body is read, whose ops have rows",
    **dict.fromkeys(
        ("If", "Loop", "Scan"),
        "it runs a graph of its own, whose ops have rows; torch's control flow is Python's",
    ),
}

# Conventions for gradients that are not unique: at ties, at kinks.
AT_KINKS: dict[str, str] = {}


class NoForm(ValueError):
    """Raised where torch has the op, but not in this form."""


class Attributes:
    """The attributes of a node, with the defaults of its schema; None for one that it has not."""

    def __init__(self, node: onnx.NodeProto, opset: int) -> None:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        self.version, self.outputs = schema.since_version, len(node.output)
        known = {n: a.default_value for n, a in schema.attributes.items() if a.default_value.type}
        known |= {a.name: a for a in node.attribute}
        self._known = {n: plain(onnx.helper.get_attribute_value(a)) for n, a in known.items()}

    def __getattr__(self, name: str) -> Any:
        return self._known.get(name)


def row(*ops: str, kinks: str = "") -> Callable[[Form], Form]:
    def decorate(function: Form) -> Form:
        for op in ops:
            assert op not in FORMS, op
            FORMS[op] = function
            if kinks:
                AT_KINKS[op] = kinks
        return function

    return decorate


def ints(x: T | None) -> list[int]:
    """The integers of an input; none where it is left out."""
    return [] if x is None else [int(n) for n in x.reshape(-1)]
