"""CompiledPiece: a graph made by torch.compile, prepared for Onward's capture.

torch.compile traces pieces of a forward. The inputs of a piece are parameters, buffers, numbers as
tensors, and sizes beside the tensors that have them. Its outputs are everything that later code may
read, including views and sizes.
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
    """A graph of torch.compile, and the roles of its inputs and outputs, by position.

    eager: the graph as received. graph: the same with numbers and sizes in the form that capture
    needs, and without checkpoints, which a memory budget replaces; its outputs are those listed in
    `inside`. outside: computes the other outputs from the same inputs. held: positions of tensors
    that the model holds -> their paths. parameters: those of `held` that are parameters. floats:
    positions of numbers that are passed as tensors. sizes: positions of sizes, which the graph
    reads from its tensors. where: the user's line at which it begins. refusal: why it cannot run as
    a graph; None where it can. computes_nothing: it only returns sizes and views of its inputs.
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
        """Completes the results of `graph` with the outputs of `outside`, in order."""
        others = iter(self.outside(*inputs))
        found = dict(zip(self.inside, results, strict=True))
        return tuple([found[i] if i in found else next(others) for i in range(self.results)])


def _is_held(node: fx.Node, example: Any) -> bool:
    """Whether a value is a tensor that a module holds and that requires no gradient."""
    if not isinstance(example, torch.Tensor) or example.requires_grad:
        return False
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def _path(node: fx.Node) -> str:
    """The path of a parameter or buffer in the model, from torch.compile's expression for it:
    `L['self']._modules['head']._parameters['weight']` becomes `head.weight`."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    name = name() if callable(name) else name
    found = ["".join(pair) for pair in re.findall(r"\['(\w+)'\]|\.(\w+)", str(name))]
    return ".".join(part for part in found[1:] if part not in _INNER) or node.name


def _where(graph: fx.GraphModule) -> str:
    """The user's line at which the graph begins."""
    for node in graph.graph.nodes:
        lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.stack_trace or "")
        if node.op != "placeholder" and lines:
            file, line, function = lines[0]
            return f"{function}, {file}:{line}"
    return "a graph of torch.compile"


class Outside:
    """Outputs made from inputs alone: sizes, and views that share an input's memory. A graph of
    Onward's would return copies of them.

    They are computed after the graph has run, from the inputs as they are then.
    """

    def __init__(self, graph: fx.Graph) -> None:
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._memory = {_storage(node) for node in inputs} - {None}
        self._elsewhere = _in_another_grad_mode(graph)
        self._graph = fx.Graph()
        self._copies = {node: self._graph.placeholder(node.name) for node in inputs}
        self._outputs: list[fx.Node] = []

    def take(self, output: Any) -> bool:
        """Takes an output if it is one of these; returns whether it did."""
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
        if _in_place(node):  # returns the tensor that it writes to
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
        """Whether a node's result does not depend on the content of its tensors."""
        if node.op == "call_function":
            free = getattr(node.target, "__module__", "") == "_operator"
        else:
            free = node.op == "call_method" and node.target in (*VIEWS, *SIZES)
        if not free or not _is_tensor(node):
            return free
        return _storage(node) in self._memory and node not in self._elsewhere


def _in_another_grad_mode(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose grad mode differs from that around the graph. A view made without gradients
    passes none on."""
    before: bool | None = None  # unknown until the first switch, which goes to the opposite mode
    now: bool | None = None
    inference = False
    found = set()
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            now = bool(node.args[0])
            before = not now if before is None else before
        elif node.op == "call_function" and "inference_mode" in str(node.target):
            inference = True  # its end is not looked for
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
    """The reason why outputs must come from eager PyTorch: they share memory with an input or each
    other, and later code may write there, while a graph of Onward's returns copies. None where
    there is none."""
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
    """Whether a node reads a number from a tensor; its users then get the number itself."""
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
    """The inputs that are sizes of other inputs; they are replaced by sizes read from those. As an
    input of its own a size would be a constant of the capture."""
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
