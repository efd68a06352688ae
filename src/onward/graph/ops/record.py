"""Op: the record of one `onward` op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir

from onward.graph.infer import Call
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value
Body: TypeAlias = "Callable[[Builder, list[Value | None], dict[str, Any]], list[Value]]"


@dataclass(frozen=True)
class Op:
    """Everything that is true of an op on every machine.

    `infer` gives the output types, `body` the op in standard ops (its types are those of the
    values it is given, an absent optional input is None). `cases` are sample inputs for the
    enumerating tests: attributes and input types such as `"f32[2,3,8]"`.
    """

    name: str
    infer: Callable[[Call], list[Type]]
    body: Body
    doc: str
    cases: tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...]
