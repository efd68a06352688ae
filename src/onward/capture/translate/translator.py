"""Translator: walks an exported program, and makes ONNX nodes of ATen calls by the table `aten`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from onward.capture.aten import TABLE, AtenCall, stop_gradient
from onward.capture.aten.complex_numbers import COMPLEX, Complex, constant, is_complex
from onward.capture.aten.complex_numbers import translated as over_pairs
from onward.capture.aten.pool import NUMBERED
from onward.capture.aten.reasons import reason
from onward.capture.aten.region import gives_sparse, is_operator, operator_apart
from onward.capture.dtypes import dtype_of
from onward.capture.held_sizes import SizeError, alike
from onward.capture.regions import RegionSearch
from onward.capture.trace import aliasing as memory_shared
from onward.capture.trace.autocast_blocks import LOW_TYPES, block_of
from onward.capture.translate import functionalize
from onward.capture.translate.batch_program import constants
from onward.capture.translate.decompose import expansion, functional, inputs_of, takes_parts
from onward.capture.translate.forced_sizes import forced
from onward.capture.translate.identities import made_by, unchanged
from onward.errors import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import Dim, DType, Size, Type, divide, floor_divide, product, symbol

_SILENT = (  # assertions that an export adds; the capture's guards check the same
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
)


# fp16's lowest number hides an attention score; in f32, in which graphs are made, that takes f32's
_HIDES = {torch.finfo(torch.float16).min: torch.finfo(torch.float32).min}

_SYMBOLIC = {
    operator.add: lambda a, b: a + b,
    operator.sub: lambda a, b: a - b,
    operator.mul: lambda a, b: a * b,
}


# what a translation raises for a call that it does not take
_FAILS = (CaptureError, ValueError, AssertionError, TypeError, LookupError, ArithmeticError)


class Translator:
    """Translates one exported program into a graph.

    env: FX node -> the graph's value, size or list of these. symbols: sympy symbol -> size. order:
    node -> its place in the walk. sites: how many nodes have drawn random numbers so far."""

    def __init__(
        self,
        graph: Graph,
        program: Any,
        regions: RegionSearch | None = None,
        autocast: bool = False,
    ) -> None:
        """regions: collects the regions in PyTorch; None where an op without a translation is
        refused. autocast: whether the call is made under it; blocks within the forward are found in
        the program."""
        self.graph = graph
        low = {kind.name for kind in LOW_TYPES.values()}
        self.autocast = autocast or any(
            block_of(node) in low for node, _ in _walk(program.graph_module)
        )
        self.program = program
        self.regions = regions
        self.apart: dict[Any, str] = {}  # node of an operator that runs in PyTorch -> reason
        self.env: dict[Any, Any] = {}
        self.symbols: dict[sympy.Symbol, Size] = {}
        self._env: Any = None  # torch's ShapeEnv
        self._asked = 0  # how many guards it had after the export
        self._places: dict[tuple[int, int], Size] = {}
        self.batch_size: Size | None = None
        self.sites = 0
        self.no_grad = False
        self.order: dict[Any, int] = {}
        # placeholder of a buffer -> (); within a region -> (the argument for it, the region)
        self.buffers: dict[Any, tuple[Any, ...]] = {}
        # any other placeholder of a region -> (the argument for it, the region)
        self.given: dict[Any, tuple[Any, Any]] = {}
        self.batch: dict[Any, list[Any]] = {}  # placeholder of a leaf -> nodes that write into it
        self.parts: dict[Any, Any] = {}  # node without a translation -> its expansion
        self.folded: dict[Any, torch.Tensor] = {}  # node without one, of constants -> its result
        self.lacking: dict[str, str] = {}  # op that cannot be expanded -> the part that prevents it
        self.builder = Builder(graph)

    # ---- sizes

    def name_sizes(self, node: Any, tensor: torch.Tensor) -> None:
        """Names the symbols of one leaf: `B` for dim 0, `T` for dim 1, ... Sizes of the same dim
        that are equal in the first batch get one name."""
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                continue
            factor, expr = size.node.expr.as_coeff_Mul()
            if not isinstance(expr, sympy.Symbol) or expr in self.symbols:
                continue
            place = (dim, tensor.shape[dim] // int(factor))
            if place not in self._places:
                stem = "BT"[dim] if dim < 2 else f"D{dim}"
                stem = stem if factor == 1 else f"{stem}by{factor}_"
                taken = {str(s) for s in self._places.values()}
                name = stem if stem not in taken else next(
                    f"{stem}{i}" for i in range(1, 1000) if f"{stem}{i}" not in taken
                )  # fmt: skip
                self._places[place] = symbol(name)
            self.symbols[expr] = self._places[place]

    def settle_sizes(self, nodes: Sequence[Any]) -> None:
        """Replaces symbols by numbers where the trace forces them (forced_sizes.py). nodes: the
        placeholders of the batch's leaves. Raises SizeError for a size that an op needs as a
        number."""
        sizes = [size for node in nodes for size in node.meta["val"].shape]
        env = next((size.node.shape_env for size in sizes if not isinstance(size, int)), None)
        self._env = env
        if env is None:
            return
        self._asked = len(env.guards)
        names = {s: sympy.Symbol(str(size)) for s, size in self.symbols.items()}
        first = {sympy.Symbol(str(size)): n for (_, n), size in self._places.items()}
        equations = [
            sympy.Eq(*(env.replace(side).xreplace(names) for side in guard.expr.args))
            for guard in env.guards
            if isinstance(guard.expr, sympy.Eq)
        ]
        found = forced(equations, first)
        self.symbols |= {s: found[name] for s, name in names.items() if name in found}
        self._require_numbers()

    def _require_numbers(self) -> None:
        """Raises SizeError for a size that an op needs as a number."""
        for node, _ in _walk(self.program.graph_module):
            needed = NUMBERED.get(_op_name(node.target)) if node.op == "call_function" else None
            if needed is not None:
                x = node.args[0].meta["val"]
                for dim in needed(x, *node.args[1:]):
                    if not isinstance(self.size_of(x.shape[dim]), int):
                        raise SizeError(x.shape[dim].node.expr, as_number=True)

    def _require_open(self) -> None:
        """Raises SizeError for symbols that tracing an expansion has put guards on: the guards of
        the exported program do not include those, so the sizes have to be numbers."""
        if self._env is None:
            return
        asked = {s for guard in self._env.guards[self._asked :] for s in guard.expr.free_symbols}
        asked |= {s for s in self.symbols if not self._env.replace(s).free_symbols}
        asked = {s for s in asked if not isinstance(self.symbols.get(s, 0), int)}
        if asked:
            raise SizeError(sympy.Add(*asked), as_number=True)

    def size_of(self, size: Any) -> Size:
        """Returns the Size of a SymInt or int. Raises SizeError where it is no polynomial."""
        return int(size) if isinstance(size, int) else self._poly(size.node.expr)

    def _poly(self, expr: Any) -> Size:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, sympy.Symbol):
            return self.symbols.setdefault(expr, symbol(str(expr)))
        polynomial = isinstance(expr, (sympy.Add, sympy.Mul, sympy.Pow))
        divided = type(expr).__name__ in ("FloorDiv", "CleanDiv")
        parts = [self._poly(a) for a in expr.args] if polynomial or divided else []
        if isinstance(expr, sympy.Add):
            total: Size = 0
            for part in parts:
                total = total + part
            return total
        if isinstance(expr, sympy.Mul):
            return product(parts)
        if isinstance(expr, sympy.Pow) and isinstance(parts[1], int) and parts[1] >= 0:
            return product([parts[0]] * parts[1])
        if divided:
            quotient = (
                floor_divide(parts[0], parts[1])
                if isinstance(parts[1], int)
                else divide(parts[0], parts[1])
            )
            if quotient is not None:
                return quotient
        free: Any = expr.free_symbols
        numbers: dict[Any, Any] = {s: self.symbols.get(s) for s in free}
        if all(isinstance(n, int) for n in numbers.values()):
            number: Any = expr.xreplace({s: sympy.Integer(n) for s, n in numbers.items()})
            if number.is_Integer:
                return int(number)
        raise SizeError(expr)

    def traced(self, size: Size) -> int | None:
        """Returns a size's number in the traced batch; None for a data-dependent size."""
        if isinstance(size, int):
            return size
        numbers = {str(name): n for (_, n), name in self._places.items()}
        return size.number(numbers) if size.symbols <= numbers.keys() else None

    def as_numbers(self, sizes: Sequence[Size]) -> list[int]:
        """Returns sizes as numbers, for an op that needs them. Raises SizeError for symbolic ones,
        so that the next try holds them."""
        found = {s for size in sizes if isinstance(size, Dim) for s in size.symbols}
        if not found:
            return [size for size in sizes if isinstance(size, int)]
        named = [s for s, size in self.symbols.items() if isinstance(size, Dim)
                 and size.symbols & found]  # fmt: skip
        raise SizeError(sympy.Add(*named), as_number=True)

    def size_of_argument(self, arg: Any) -> Size:
        """Returns the size that an op's argument stands for: an int, or the FX node of a SymInt."""
        return self.env[arg] if isinstance(arg, torch.fx.Node) else arg

    def dtype_of(self, dtype: torch.dtype, what: str) -> DType:
        """Returns the graph's element type for a torch dtype. what: names the tensor in a message.
        Raises CaptureError for a dtype that no graph has."""
        return dtype_of(dtype, what, self.autocast)

    def type_of_fx(self, node: Any) -> Type:
        """Returns the type that a node's tensor has in the graph. Raises CaptureError."""
        val = node.meta["val"]
        return Type(self.dtype_of(val.dtype, node.name), tuple(self.size_of(s) for s in val.shape))

    def find_batch_size(self) -> None:
        """Sets the batch size, which is dim 0 of the first leaf that has dims."""
        for value in self.graph.inputs_with(Role.BATCH):
            if type_of(value).rank:
                self.batch_size = type_of(value).shape[0]
                return

    # ---- the walk

    def output_nodes(self) -> list[Any]:
        """Returns the nodes that the program returns, in order."""
        return list(_outputs_of(self.program.graph))

    def run(self, outputs: dict[str, Any]) -> None:
        """Translates every node. outputs: name of a graph output -> node. Raises CaptureError
        listing every op without a translation, or at the first op whose translation fails."""
        module = self.program.graph_module
        missing: dict[str, list[str]] = {}
        for node, inner in _walk(module):
            self.order[node] = len(self.order)
            name = _untranslated(node, inner)
            if name is not None and not self._expand(node) and not self._fold(node):
                if self._can_be_apart(node):
                    self.apart[node] = f"no translation{_because(name, self.lacking)}"
                    continue
                missing.setdefault(name, []).append(module_path(node))
        if missing:
            lines = [
                f"  {op} at {', '.join(sorted(set(paths)))}{_because(op, self.lacking)}"
                for op, paths in sorted(missing.items())
            ]
            error = CaptureError(
                f"the model cannot be captured: {len(missing)} op(s) have no translation:\n"
                + "\n".join(lines)
            )
            error.places = tuple(sorted({p for paths in missing.values() for p in paths}))
            raise error
        self._require_open()
        self._run(module)
        for name, node in outputs.items():
            self.graph.outputs[name] = self.env[node]

    def _can_be_apart(self, node: Any) -> bool:
        """Returns whether an operator may run in PyTorch, as a region."""
        if self.regions is None or not is_operator(node):
            return False
        return not (self.regions.gradients and gives_sparse(node, self.program))

    def _run(self, module: Any) -> None:
        for node in module.graph.nodes:
            if node.op == "get_attr":
                held = getattr(module, node.target)
                known = isinstance(held, torch.Tensor) and module in self.parts.values()
                self.env[node] = constant(self.graph, held) if known else held
            elif node.op == "call_function":
                self._call(node)

    def _expand(self, node: Any) -> bool:
        """Expands an op without a translation into `parts`. Returns whether all ops in the
        expansion can be translated."""
        if node.op != "call_function" or reason(_op_name(node.target)):
            return False
        target = functional(node.target) if memory_shared.mutates(node.target) else node.target
        module = None if target is None else expansion(node, target)
        if module is None:
            return False
        stack = node.meta.get("nn_module_stack")
        for inner in module.graph.nodes:
            inner.meta |= {"nn_module_stack": stack, "custom": node.meta.get("custom")}
            self.order[inner] = len(self.order)
            lacking = _untranslated(inner, module)
            if lacking is not None and not self._expand(inner):
                name = _op_name(node.target)
                self.lacking.setdefault(name, self.lacking.get(lacking, lacking))
                return False
        self.parts[node] = module
        return True

    def _fold(self, node: Any) -> bool:
        """Computes an op without a translation into `folded`. Returns whether it depends on
        constants alone."""
        made = constants(self.program, node) if node.op == "call_function" else None
        if isinstance(made, torch.Tensor) and not made.is_complex():
            self.folded[node] = made
        return node in self.folded

    def _call(self, node: Any) -> None:
        if node in self.folded:
            self.env[node] = constant(self.graph, self.folded[node])
            return
        name = _translated_name(node.target)
        if name.partition(".")[0] in _SILENT:
            return
        if node.target is operator.getitem:
            made, number = self._resolve(node.args[0]), node.args[1]
            if number >= len(made):
                if not node.users:
                    return
                name, path = _op_name(node.args[0].target), module_path(node)
                raise CaptureError(f"{name} at {path}: its output {number} has no translation")
            self.env[node] = made[number]
            return
        if memory_shared.is_region(node):
            self._region(node)
            return
        val = node.meta.get("val")
        if isinstance(val, (torch.SymInt, int)) and not isinstance(val, bool):
            self.env[node] = self.size_of(val)
            return
        if isinstance(val, torch.SymBool):
            return
        if isinstance(val, torch.SymFloat):  # for example the square root of a size
            raise SizeError(val.node.expr, as_number=True)
        self.builder = Builder(self.graph, module=module_path(node), precision=block_of(node))
        written = memory_shared.writes(node.target)
        if written:
            self._require_own(node, node.args[0])
        elif memory_shared.reshapes(node.target) and made_by(node.args[0]).op != "call_function":
            raise CaptureError(
                f"{_op_name(node.target)} at {module_path(node)} changes the shape of an "
                "input of the forward in place; fix: use the op that returns a new tensor"
            )
        try:
            call = AtenCall(self, node, self.builder)
            for made in val if isinstance(val, (list, tuple)) else [val]:
                for size in made.shape if isinstance(made, torch.Tensor) else ():
                    self.size_of(size)  # raises SizeError before a translation fails on it
            if node in self.apart:
                self.env[node] = operator_apart(call, self.apart[node])
            elif node in self.parts:
                self.env[node] = self._run_parts(node)
            else:
                args = [self._resolve(a) for a in node.args]
                if self.autocast:
                    args = [_HIDES.get(a, a) if isinstance(a, float) else a for a in args]
                kwargs = {k: self._resolve(v) for k, v in node.kwargs.items()}
                if is_complex(node):
                    self.env[node] = over_pairs(name, TABLE.get(name), call, args, kwargs)
                else:
                    self.env[node] = _translated(TABLE[name], call, args, kwargs)
            self._require_type(self.env[node], val)
            if written:
                functionalize.settle(node.args[0], self.env[node], call, self._take)
        except SizeError:
            raise
        except _FAILS as error:
            sizes = alike(node) if "not broadcast" in str(error) else None
            if sizes is not None:
                raise SizeError(sizes, as_number=True) from error
            text = reason("item.default") if "has no source" in str(error) else error
            if not written and self._can_be_apart(node):
                self.env[node] = operator_apart(AtenCall(self, node, self.builder), str(text))
                return
            refused = CaptureError(f"{name} at {module_path(node)}: {text}")
            refused.places = (module_path(node),)
            raise refused from error

    def _require_type(self, made: Any, val: Any) -> None:
        """Raises CaptureError where a translation's result has another dtype or shape than torch's,
        as happens for dtypes or sizes that it does not support."""
        pairs = zip(made, val, strict=False) if isinstance(made, (list, tuple)) else [(made, val)]
        for value, tensor in pairs:
            if not isinstance(value, Value) or not isinstance(tensor, torch.Tensor):
                continue
            have, want = type_of(value), self.dtype_of(tensor.dtype, "its result")
            sizes = [
                (self.traced(a), _hint(b)) for a, b in zip(have.shape, tensor.shape, strict=False)
            ]
            other = any(None not in pair and pair[0] != pair[1] for pair in sizes)
            if have.dtype != want or have.rank != tensor.dim() or other:
                raise CaptureError(
                    f"no translation gives {tensor.dtype} {list(tensor.shape)} for these "
                    "input dtypes; fix: convert the inputs first, such as with .float()"
                )

    def store(self, call: AtenCall, written: Any, value: Value) -> None:
        """Records a new value for `written`, an argument that the op writes beside its results.
        Raises CaptureError where other memory would have to change."""
        self._require_own(call.node, written)
        functionalize.settle(written, stop_gradient(call.b, value), call, self._take)

    def _take(self, view: Any) -> None:
        """Computes a view again, after its memory has been written."""
        if memory_shared.writes(view.target):
            self.env[view] = self.env[view.args[0]]
        else:
            self._call(view)

    def _require_own(self, node: Any, written: Any) -> None:
        if functionalize.may_write(node, written, self.order, self.buffers, self.given, self.batch):
            owner = functionalize.path_to_owner(written)[-1]
            if owner in self.batch:
                self.batch[owner].append(node)
        else:
            raise CaptureError(
                f"{_op_name(node.target)} at {module_path(node)} writes in place into memory "
                "that another tensor shares; fix: use the op that returns a new tensor"
            )

    def _run_parts(self, node: Any) -> Any:
        module = self.parts[node]
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.env.update(zip(places, self._resolve(inputs_of(node)), strict=True))
        self._run(module)
        return self._resolve(_outputs_of(module.graph))

    def _region(self, node: Any) -> None:
        """Inlines a gradient-mode region (`no_grad`).

        Gradients stop at the results of a `no_grad` region, also at a view of an argument, but pass
        through a result that is an argument itself. Raises CaptureError for enable_grad within it.
        """
        enabled, region, *args = node.args
        stopped = not enabled
        if enabled and self.no_grad:
            raise CaptureError(
                "torch.enable_grad within torch.no_grad at "
                f"{module_path(node)} has no translation; fix: remove one of "
                "the two"
            )
        module = self._resolve(region)
        inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
        self.env.update(zip(inputs, self._resolve(args), strict=True))
        held = {n: a for n, a in zip(inputs, args, strict=True) if a in self.buffers}
        self.buffers |= {n: (a, node) for n, a in held.items()}
        self.given |= {n: (a, node) for n, a in zip(inputs, args, strict=True) if n not in held}
        outer, self.no_grad = self.no_grad, self.no_grad or stopped
        self._run(module)
        self.no_grad = outer
        for inner, buffer in held.items():
            if self.env[inner] is not self.env[buffer]:
                value = self.env[inner]
                self.env[buffer] = self._stop(value) if stopped else value
        made = _outputs_of(module.graph)
        results = self._resolve(made)
        if stopped:
            given = [isinstance(n, torch.fx.Node) and unchanged(n) in inputs for n in made]
            results = [v if g else self._stop(v) for v, g in zip(results, given, strict=True)]
        self.env[node] = results

    def _stop(self, value: Any) -> Any:
        if isinstance(value, Complex):
            return Complex(self._stop(value.re), self._stop(value.im))
        floating = isinstance(value, Value) and type_of(value).is_floating
        return stop_gradient(self.builder, value) if floating else value

    def _resolve(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self._resolve(a) for a in arg]
        return arg


def _walk(module: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each node with its graph module; those of a region's body in the place of the node
    that names it."""
    for node in module.graph.nodes:
        yield node, module
        if node.op == "get_attr" and isinstance(getattr(module, node.target), torch.fx.GraphModule):
            yield from _walk(getattr(module, node.target))


def _outputs_of(graph: Any) -> Sequence[Any]:
    return next(n for n in graph.nodes if n.op == "output").args[0]


def _untranslated(node: Any, module: Any) -> str | None:
    """Returns the name of an op without a translation; None for any other node."""
    if node.op in ("placeholder", "output"):
        return None
    if node.op == "get_attr" and isinstance(getattr(module, node.target), torch.fx.GraphModule):
        return None
    if node.op != "call_function":
        return f"{node.op} {node.target}"
    name = _translated_name(node.target)
    known = (
        node.target is operator.getitem
        or node.target in _SYMBOLIC
        or (name in TABLE and not takes_parts(node))
        or (name in COMPLEX and is_complex(node))
        or memory_shared.is_region(node)
        or name.partition(".")[0] in _SILENT
        or isinstance(node.meta.get("val"), (torch.SymInt, int, torch.SymBool, torch.SymFloat))
    )
    return None if known else name


def _because(op: str, lacking: Mapping[str, str]) -> str:
    part = lacking.get(op)
    why = reason(op if part is None else part)
    made = f" (by {part})" if part else ""
    return f"{made}: {why}" if why else made


def _translated(translation: Any, call: AtenCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a translation; as in torch, an op along a dim takes a 0-dim tensor as f[1]."""
    try:
        return translation(call, *args, **kwargs)
    except ZeroDivisionError:  # a dim modulo the number of dims
        b = call.b
        flat = [b.unsqueeze(x, [0]) if _without_dims(x) else x for x in args]
        made = translation(call, *flat, **kwargs)
        many = isinstance(made, (list, tuple))
        results = [b.reshape(y, ()) for y in (made if many else [made])]
        return results if many else results[0]


def _without_dims(x: Any) -> bool:
    return isinstance(x, Value) and type_of(x).rank == 0


def _hint(size: Any) -> int | None:
    """Returns a size's number in the traced batch; None for a data-dependent one."""
    hint = size if isinstance(size, int) else size.node.hint
    return None if hint is None else int(hint)


def _op_name(target: Any) -> str:
    """Returns an op's name, without the namespace `aten`: `view.default`."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
        return name.removeprefix("aten.")
    return getattr(target, "__name__", str(target))


def _translated_name(target: Any) -> str:
    """Returns the name under which the table has an op: `masked_fill.Scalar` for
    `masked_fill_.Scalar`.

    An in-place op is translated as if it returned a new tensor, since in an export later nodes read
    its result and not its argument.
    """
    name = _op_name(target)
    if name in TABLE or not memory_shared.mutates(target):
        return name
    plain = functional(target)
    return name if plain is None or (new := _op_name(plain)) not in TABLE else new


def module_path(node: Any) -> str:
    """Returns the path of the submodule that a node came from, such as `transformer.h.0.attn`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    for prefix in ("L['self'].model", "L['self']", "model"):
        path = path.removeprefix(prefix)
    return path.lstrip(".") or "(top)"
