"""A graph of torch.compile's, made ready for Onward's capture.

What torch.compile traces is a piece of a forward. Its inputs are parameters, buffers, numbers in
tensors, sizes beside the tensors that have them; its outputs are all that the code after the piece
may read, views and sizes among them.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint

VIEWS = (
    "chunk", "detach", "expand", "expand_as", "flatten", "movedim", "narrow", "permute", "reshape",
    "select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze",
    "view", "view_as",
)  # fmt: skip
SIZES = ("dim", "numel", "size")
# Methods that give a tensor another shape in place.
SHAPING = frozenset(
    {
        "as_strided_", "detach_", "requires_grad_", "resize_", "resize_as_", "set_", "squeeze_",
        "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_",
    }
)  # fmt: skip
WRITING = frozenset(
    {
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
        operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
    }
)  # fmt: skip
_INNER = ("_modules", "_parameters", "_buffers")


@dataclasses.dataclass(frozen=True)
class CompiledPiece:
    """A graph and its inputs, in order.

    eager: the graph as it came. graph: the same with numbers and sizes as Onward's capture wants
    them, and without checkpoints, whose part a plan with a memory budget plays; its outputs are
    those of `inside`, by position. outside: gives the other outputs, of the same inputs. held:
    positions of what the model holds -> its path there. parameters: those of `held` that are
    parameters. floats: positions of numbers that torch.compile hands over as tensors. sizes:
    positions of sizes, which the graph reads from its tensors. where: the user's line that it
    begins with. refusal: why it cannot run as a graph of Onward's. computes_nothing: it gives sizes
    and views of its inputs, and nothing else.
    """

    eager: fx.GraphModule
    graph: fx.GraphModule
    outside: fx.GraphModule
    inside: tuple[int, ...]
    results: int
    count: int
    held: dict[int, str]
    parameters: frozenset[int]
    floats: frozenset[int]
    sizes: frozenset[int]
    where: str
    refusal: str | None
    computes_nothing: bool

    @classmethod
    def of(cls, graph: fx.GraphModule, examples: Sequence[Any]) -> CompiledPiece:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        held, parameters = {}, set()
        for i, (node, example) in enumerate(zip(inputs, examples, strict=True)):
            if isinstance(example, nn.Parameter):
                parameters.add(i)
            elif not _is_held(node, example):
                continue
            held[i] = _path(node)
        rewritten = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        results = list(rewritten.graph_copy(graph.graph, copies) or ())  # type: ignore[arg-type]
        given = next(iter(reversed(graph.graph.nodes))).args[0]
        assert isinstance(given, (tuple, list)), "torch.compile's graphs return a tuple"
        outside = Outside(graph.graph)
        inside = [i for i, output in enumerate(given) if not outside.take(output)]
        rewritten.output(tuple(results[i] for i in inside))
        nodes = [copies[node] for node in inputs]
        floats = {i for i, node in enumerate(nodes) if _float_from_tensor(node)}
        sizes = _sizes_from_tensors(rewritten, nodes, held)
        _inline_checkpoints(rewritten)
        return cls(
            eager=graph,
            graph=fx.GraphModule(graph, rewritten),
            outside=outside.module(),
            inside=tuple(inside),
            results=len(given),
            count=len(inputs),
            held=held,
            parameters=frozenset(parameters),
            floats=frozenset(floats),
            sizes=sizes,
            where=_where(graph),
            refusal=_shared_memory(graph, [given[i] for i in inside]),
            computes_nothing=not inside and not any(map(_in_place, graph.graph.nodes)),
        )

    def with_outside(self, results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """All outputs, after `graph` has given those inside."""
        others = iter(self.outside(*inputs))
        found = dict(zip(self.inside, results, strict=True))
        return tuple([found[i] if i in found else next(others) for i in range(self.results)])


def _is_held(node: fx.Node, example: Any) -> bool:
    """Whether a value is a tensor that a module holds, and gradients do not pass."""
    if not isinstance(example, torch.Tensor) or example.requires_grad:
        return False
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def _path(node: fx.Node) -> str:
    """The path in the model of a parameter or buffer, from the expression by which torch.compile
    finds it: `L['self']._modules['head']._parameters['weight']` is `head.weight`."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    name = name() if callable(name) else name
    found = ["".join(pair) for pair in re.findall(r"\['(\w+)'\]|\.(\w+)", str(name))]
    return ".".join(part for part in found[1:] if part not in _INNER) or node.name


def _where(graph: fx.GraphModule) -> str:
    """The line of the user's that the graph begins with."""
    for node in graph.graph.nodes:
        lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.stack_trace or "")
        if node.op != "placeholder" and lines:
            file, line, function = lines[0]
            return f"{function}, {file}:{line}"
    return "a graph of torch.compile"


class Outside:
    """Outputs that are made of the inputs alone: sizes, and views, which show an input's memory. A
    graph of Onward's would return copies of these.

    They are made when the graph has run, of what the inputs hold then.
    """

    def __init__(self, graph: fx.Graph) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._memory = {_storage(node) for node in inputs} - {None}
        self._elsewhere = _in_another_grad_mode(graph)
        self._graph = fx.Graph()
        self._copies = {node: self._graph.placeholder(node.name) for node in inputs}
        self._outputs: list[fx.Node] = []

    def take(self, output: Any) -> bool:
        """Takes an output, where it is one of these."""
        if not isinstance(output, fx.Node):
            return False
        if _is_tensor(output) and _storage(output) not in self._memory:
            return False
        found = self._made(output)
        if found is not None:
            self._outputs.append(found)
        return found is not None

    def module(self) -> fx.GraphModule:
        self._graph.output(tuple(self._outputs))
        self._graph.eliminate_dead_code()
        return fx.GraphModule({}, self._graph)

    def _made(self, node: fx.Node) -> fx.Node | None:
        known = self._copies.get(node)
        if known is not None:
            return known
        if _in_place(node):  # which gives back what it writes to
            first = node.args[0]
            return self._made(first) if isinstance(first, fx.Node) else None
        if not self._is_free(node):
            return None
        parts = {part: self._made(part) for part in node.all_input_nodes}
        made = {part: copy for part, copy in parts.items() if copy is not None}
        if len(made) < len(parts):
            return None
        self._copies[node] = self._graph.node_copy(node, made.__getitem__)
        return self._copies[node]

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a node computes nothing of what its tensors hold."""
        if node.op == "call_function":
            free = getattr(node.target, "__module__", "") == "_operator"
        else:
            free = node.op == "call_method" and node.target in (*VIEWS, *SIZES)
        if not free or not _is_tensor(node):
            return free
        return _storage(node) in self._memory and node not in self._elsewhere


def _in_another_grad_mode(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose grad mode differs from the mode around the graph. A view that is made without
    gradients passes none on."""
    before: bool | None = None  # which the first switch tells: it goes to the other
    now: bool | None = None
    inference = False
    found = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            now = bool(node.args[0])
            before = not now if before is None else before
        elif node.op == "call_function" and "inference_mode" in str(node.target):
            inference = True  # where it ends is not looked for
        elif (now is not None and now != before) or inference:
            found.add(node)
    return found


def _in_place(node: fx.Node) -> bool:
    if not _is_tensor(node):
        return False
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") and name not in SHAPING
    return node.op == "call_function" and node.target in WRITING


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _shared_memory(graph: fx.GraphModule, outputs: Sequence[Any]) -> str | None:
    """Why outputs of the graph have to be eager's: they show memory of an input or of each other,
    and what comes after the graph may write there. A graph of Onward's returns copies."""
    owner: dict[int | None, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            owner.setdefault(_storage(node), node)
    owner.pop(None, None)
    for node in dict.fromkeys(n for n in outputs if isinstance(n, fx.Node)):
        storage = _storage(node)
        other = owner.setdefault(storage, node)
        if storage is not None and other is not node:
            kind = "input" if other.op == "placeholder" else "output"
            return (
                f"its output {node.name} is a view of its {kind} {other.name}, and the code "
                "after it may write into both; fix: remove the graph break that follows, or "
                "clone() one of them"
            )
    return None


def _storage(node: fx.Node) -> int | None:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    return example.untyped_storage()._cdata


def _float_from_tensor(node: fx.Node) -> bool:
    """Whether a node is a number held in a tensor; its users then take the number."""
    if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False):
        return False
    users = list(node.users)
    if any(user.op != "call_method" or user.target != "item" for user in users):
        return False
    for user in users:
        user.replace_all_uses_with(node)
        user.graph.erase_node(user)
    return True


def _sizes_from_tensors(
    graph: fx.Graph, inputs: Sequence[fx.Node], held: Mapping[int, str]
) -> frozenset[int]:
    """The inputs that are sizes of other inputs, which are read there from now on. A size that is
    an input of its own would be a fixed number to a graph."""
    carriers: dict[Any, tuple[fx.Node, int]] = {}
    for i, node in enumerate(inputs):
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and i not in held:
            for dim, size in enumerate(example.shape):
                if isinstance(size, torch.SymInt):
                    carriers.setdefault(size.node.expr, (node, dim))
    found = set()
    for i, node in enumerate(inputs):
        example = node.meta.get("example_value")
        if not isinstance(example, torch.SymInt) or example.node.expr not in carriers:
            continue
        tensor, dim = carriers[example.node.expr]
        with graph.inserting_after(inputs[-1]):
            size = graph.call_method("size", (tensor, dim))
        node.replace_all_uses_with(size)
        found.add(i)
    return frozenset(found)


def _inline_checkpoints(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is tag_activation_checkpoint:
            body, *args = node.args
            _, kwargs = tag_activation_checkpoint.divide_kwargs(node.kwargs)
            assert isinstance(body, fx.Node) and body.op == "get_attr"
            with graph.inserting_before(node):
                call = graph.call_module(str(body.target), tuple(args), kwargs)
            node.replace_all_uses_with(call)
            graph.erase_node(node)


__all__ = ["CompiledPiece", "Outside"]
