"""The walk over an exported program: ATen calls become ONNX nodes through `aten.py`'s table."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch

from onward.capture import composites as composites  # registers its rows in the table
from onward.capture.aten import TABLE, Call
from onward.config import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, type_of
from onward.graph.types import DType, Size, Type, divide, product, symbol

DTYPES: dict[torch.dtype, DType] = {
    torch.float32: DType.FLOAT,
    torch.float64: DType.DOUBLE,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.uint8: DType.UINT8,
    torch.bool: DType.BOOL,
}

_SILENT = (  # assertions that export writes; the guards hold the same facts
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
)

_SYMBOLIC = {
    operator.add: lambda a, b: a + b,
    operator.sub: lambda a, b: a - b,
    operator.mul: lambda a, b: a * b,
}


def to_type(tensor: torch.Tensor) -> Type:
    """The type of a concrete tensor."""
    return Type(DTYPES[tensor.dtype], tuple(tensor.shape))


class Translator:
    """Holds the walk's state: what each FX node became, and the names of sizes."""

    def __init__(self, graph: Graph, program: Any) -> None:
        self.graph = graph
        self.program = program
        self.env: dict[Any, Any] = {}
        self.symbols: dict[sympy.Symbol, Size] = {}
        self._places: dict[tuple[int, int], Size] = {}
        self.batch_size: Size | None = None
        self.sites = 0
        self.builder = Builder(graph)

    # ---- sizes

    def name_sizes(self, node: Any, tensor: torch.Tensor) -> None:
        """Names the symbols of one batch leaf: `B` for dim 0, `T` for dim 1, equal sizes alike."""
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                continue
            expr = size.node.expr
            if not isinstance(expr, sympy.Symbol) or expr in self.symbols:
                continue
            place = (dim, tensor.shape[dim])
            if place not in self._places:
                stem = "BT"[dim] if dim < 2 else f"D{dim}"
                taken = {str(s) for s in self._places.values()}
                name = stem if stem not in taken else next(
                    f"{stem}{i}" for i in range(1, 1000) if f"{stem}{i}" not in taken
                )  # fmt: skip
                self._places[place] = symbol(name)
            self.symbols[expr] = self._places[place]

    def size_of(self, size: Any) -> Size:
        """A SymInt or int -> a Size. Raises CaptureError where it is not a polynomial."""
        return int(size) if isinstance(size, int) else self._poly(size.node.expr)

    def _poly(self, expr: Any) -> Size:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Symbol):
            return self.symbols.setdefault(expr, symbol(str(expr)))
        parts = [self._poly(a) for a in expr.args]
        if isinstance(expr, sympy.Add):
            total: Size = 0
            for part in parts:
                total = total + part
            return total
        if isinstance(expr, sympy.Mul):
            return product(parts)
        if isinstance(expr, sympy.Pow) and isinstance(parts[1], int) and parts[1] >= 0:
            return product([parts[0]] * parts[1])
        if type(expr).__name__ in ("FloorDiv", "CleanDiv"):
            quotient = divide(parts[0], parts[1])
            if quotient is not None:
                return quotient
        raise CaptureError(
            f"a size of the model is {expr}, which is not a polynomial of the batch's"
        )

    def type_of_fx(self, node: Any) -> Type:
        val = node.meta["val"]
        if val.dtype not in DTYPES:
            raise CaptureError(f"{node.name} has dtype {val.dtype}, which is not supported")
        return Type(DTYPES[val.dtype], tuple(self.size_of(s) for s in val.shape))

    def find_batch_size(self) -> None:
        """The batch size is dim 0 of the first batch leaf."""
        for value in self.graph.inputs_with(Role.BATCH):
            if type_of(value).rank:
                self.batch_size = type_of(value).shape[0]
                return

    # ---- the walk

    def output_nodes(self) -> list[Any]:
        return list(next(n for n in self.program.graph.nodes if n.op == "output").args[0])

    def run(self, outputs: dict[str, Any]) -> None:
        """Translates every node; raises CaptureError listing every op without a translation."""
        missing: dict[str, list[str]] = {}
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                name = _functional(_op_name(node.target))
                known = (
                    node.target is operator.getitem
                    or node.target in _SYMBOLIC
                    or name in TABLE
                    or name.partition(".")[0] in _SILENT
                    or isinstance(node.meta.get("val"), (torch.SymInt, int, torch.SymBool))
                )
                if not known:
                    missing.setdefault(name, []).append(module_path(node))
            elif node.op not in ("placeholder", "output"):
                missing.setdefault(f"{node.op} {node.target}", []).append(module_path(node))
        if missing:
            lines = [
                f"  {op} at {', '.join(sorted(set(paths)))}"
                for op, paths in sorted(missing.items())
            ]
            raise CaptureError(
                f"the model cannot be captured: {len(missing)} op(s) have no translation:\n"
                + "\n".join(lines)
            )
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._call(node)
        for name, node in outputs.items():
            self.graph.outputs[name] = self.env[node]

    def _call(self, node: Any) -> None:
        name = _functional(_op_name(node.target))
        if name.partition(".")[0] in _SILENT:
            return
        if node.target is operator.getitem:
            self.env[node] = self._resolve(node.args[0])[node.args[1]]
            return
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            self.env[node] = self.size_of(val)
            return
        if isinstance(val, torch.SymBool):
            return
        self.builder = Builder(self.graph, module=module_path(node))
        if name != _op_name(node.target):
            _require_no_alias(node)
        try:
            call = Call(self, node, self.builder)
            args = [self._resolve(a) for a in node.args]
            kwargs = {k: self._resolve(v) for k, v in node.kwargs.items()}
            self.env[node] = TABLE[name](call, *args, **kwargs)
        except CaptureError:
            raise
        except (ValueError, AssertionError, TypeError, LookupError) as error:
            raise CaptureError(f"{name} at {module_path(node)}: {error}") from error

    def _resolve(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self._resolve(a) for a in arg]
        return arg


def _op_name(target: Any) -> str:
    """`aten.view.default` -> `view.default`; other namespaces keep theirs."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
        return name.removeprefix("aten.")
    return getattr(target, "__name__", str(target))


def _functional(name: str) -> str:
    """`masked_fill_.Scalar` -> `masked_fill.Scalar`; ops that write nothing keep their name.

    An export lets what follows read the result of the op that wrote, never the tensor before it.
    """
    stem, _, overload = name.partition(".")
    plain = f"{stem.removesuffix('_')}.{overload}"
    return plain if stem.endswith("_") and name not in TABLE and plain in TABLE else name


def _require_no_alias(node: Any) -> None:
    """Raises CaptureError where another tensor shares the memory that an in-place op writes."""
    owner = node.args[0]
    while owner.op == "call_function" and _writes(owner.target):
        owner = owner.args[0]
    shared = owner.op != "call_function" or _aliases(owner.target)
    if shared or any(_aliases(user.target) and not _writes(user.target) for user in owner.users):
        raise CaptureError(
            f"{_op_name(node.target)} at {module_path(node)} writes into memory that another "
            "tensor shares; fix: use the op that returns a new tensor"
        )


def _aliases(target: Any) -> bool:
    """Whether the op's results may be views of its inputs, or its inputs themselves."""
    if target is operator.getitem:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )


def module_path(node: Any) -> str:
    """Where in the user's module the node came from: `transformer.h.0.attn`, never a file."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    for prefix in ("L['self'].model", "L['self']", "model"):
        path = path.removeprefix(prefix)
    return path.lstrip(".") or "(top)"
