"""`torch.compile(model, backend="onward")`: the graphs that torch.compile makes, as Onward's.

torch.compile hands over one FX graph for each piece of a forward between graph breaks; parameters
and buffers are arguments of it. Each graph becomes a module of its own that is accelerated: what
the model holds is bound to it, so that sizes of weights are fixed and gradients known, and all else
stays an argument. One graph may serve several modules of a class: each has a module of its own.

`onward.accelerate` is the better way in. It sees the whole forward and its outputs by name, so that
it computes no output that nobody reads, and no row that no output needs.

The name is found by torch's entry point group `torch_dynamo_backends`. A checkout that is not
installed calls `register()`, or gives the function: `torch.compile(model, backend=onward_backend)`.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from onward.config import CaptureError, EagerWarning, ModuleOptions, OnwardError, check_names
from onward.module import accelerate, eager

NAME = "onward"
KEPT = 128  # modules that one graph serves, as the layers of a model
OFTEN = 3  # times that a buffer is replaced by another until it counts as an argument
_GRAPH = "_graph_of_torch_compile"  # beside the paths of the user's model
_INNER = ("_modules", "_parameters", "_buffers")


def onward_backend(
    graph: fx.GraphModule, examples: Sequence[Any], **settings: Any
) -> Callable[..., Any]:
    """What torch.compile calls for each graph; returns what runs in its place.

    settings: `options`, the fields of `onward.ModuleOptions`. A setting that cannot be meant raises
    OnwardError when the compiled function is called: what is raised here torch.compile would wrap.
    """
    try:
        options = _options(**settings)
    except OnwardError as error:
        refusal = error  # Python drops the name `error` after the block

        def refused(*_: Any) -> Any:
            raise OnwardError(str(refusal))

        return refused
    return CompiledGraph(_Piece.of(graph, examples), options)


def register() -> None:
    """Makes the name "onward" known to torch.compile where no installed entry point does."""
    from torch._dynamo.backends import registry

    if NAME in registry.list_backends(exclude_tags=()):
        return
    registry.register_backend(compiler_fn=onward_backend, name=NAME)


def _options(
    options: Mapping[str, Any] | None = None, mode: str | None = None, **others: Any
) -> ModuleOptions:
    strange = [f"mode={mode!r}"] if mode is not None else []
    strange += [f"{name}={value!r}" for name, value in others.items()]
    if strange:
        raise OnwardError(
            f"torch.compile({', '.join(strange)}) is for its own backend; fix: leave it out, and "
            'give options={"strict": True} and the like'
        )
    given = dict(options or {})
    known = [field.name for field in dataclasses.fields(ModuleOptions)]
    check_names("torch.compile's options", "option", [str(name) for name in given], known)
    found = ModuleOptions(**given)
    if found.outputs == "loss":
        raise OnwardError(
            "outputs='loss' has no meaning in torch.compile, whose graphs have no names for their "
            "outputs; fix: onward.accelerate(model, outputs='loss')"
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A graph and its inputs, in order.

    eager: the graph as it came. graph: the same with numbers and sizes as Onward's capture wants
    them, and without checkpoints, whose part a plan with a memory budget plays. held: positions of
    what the model holds -> its path there. parameters: those of `held` that are parameters.
    floats: positions of numbers that torch.compile hands over as tensors. sizes: positions of
    sizes, which the graph reads from its tensors. where: the user's line that it begins with.
    refusal: why it cannot run as a graph of Onward's.
    """

    eager: fx.GraphModule
    graph: fx.GraphModule
    count: int
    held: dict[int, str]
    parameters: frozenset[int]
    floats: frozenset[int]
    sizes: frozenset[int]
    where: str
    refusal: str | None

    @classmethod
    def of(cls, graph: fx.GraphModule, examples: Sequence[Any]) -> _Piece:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        held, parameters = {}, set()
        for i, (node, example) in enumerate(zip(inputs, examples, strict=True)):
            if isinstance(example, nn.Parameter):
                parameters.add(i)
            elif not _is_held(node, example):
                continue
            held[i] = _path(node)
        where, refusal = _where(graph), _shared_memory(graph)
        rewritten = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        rewritten.output(rewritten.graph_copy(graph.graph, copies))
        nodes = [copies[node] for node in inputs]
        floats = {i for i, node in enumerate(nodes) if _float_from_tensor(node)}
        sizes = _sizes_from_tensors(rewritten, nodes, held)
        known = frozenset(parameters), frozenset(floats), sizes
        _inline_checkpoints(rewritten)
        whole = fx.GraphModule(graph, rewritten)
        return cls(graph, whole, len(inputs), held, *known, where, refusal)


def _is_held(node: fx.Node, example: Any) -> bool:
    """Whether it is a tensor that a module holds, and gradients do not pass."""
    if not isinstance(example, torch.Tensor) or example.requires_grad:
        return False
    return "_dynamo_static_input_type" in node.meta.get("tensor_dict", {})


def _path(node: fx.Node) -> str:
    """Its path in the model, of the expression by which torch.compile finds it:
    `L['self']._modules['head']._parameters['weight']` is `head.weight`."""
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
    return "a graph of torch.compile's"


def _shared_memory(graph: fx.GraphModule) -> str | None:
    """Why outputs of the graph have to be eager's: they show memory of an input or of each other,
    and what comes after the graph may write there. A graph of Onward's returns copies."""
    nodes = list(graph.graph.nodes)
    owner = {}
    for node in nodes:
        if node.op == "placeholder":
            owner.setdefault(_storage(node), node)
    owner.pop(None, None)
    outputs = dict.fromkeys(n for n in nodes[-1].all_input_nodes if n.op != "placeholder")
    for node in outputs:
        storage = _storage(node)
        other = owner.setdefault(storage, node)
        if storage is not None and other is not node:
            kind = "input" if other.op == "placeholder" else "output"
            return (
                f"its output {node.name} is a view of its {kind} {other.name}, and here the code "
                "after it may write to both; fix: remove the graph break that follows, or clone one"
            )
    return None


def _storage(node: fx.Node) -> int | None:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    return example.untyped_storage()._cdata


def _float_from_tensor(node: fx.Node) -> bool:
    """Whether it is a number in a tensor's clothes; its users then take the number."""
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


class _Part(nn.Module):
    """Holds some of the tensors of a `_Bound`, under the path that they have in the model."""


class _Bound(_Part):
    """A graph with what one module holds; takes the other inputs, in order."""

    def __init__(self, piece: _Piece, held: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.add_module(_GRAPH, piece.graph)
        self.count = piece.count
        self.unread = piece.sizes
        self.places: dict[int, tuple[str, str]] = {}
        for i, tensor in held.items():
            self.places[i] = self._hold(piece.held[i], f"held_{i}", tensor)

    def _hold(self, path: str, other: str, tensor: torch.Tensor) -> tuple[str, str]:
        """Registers the tensor under the path that it has in the model, or where that is taken,
        under another name; returns the path of its module and its name there."""
        *modules, name = path.split(".")
        module: nn.Module = self
        for part in modules:
            if part not in module._modules:
                if hasattr(module, part):
                    return self._hold(other, other, tensor)
                module.add_module(part, _Part())
            module = module.get_submodule(part)
        if hasattr(module, name):
            return self._hold(other, other, tensor)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
        return ".".join(modules), name

    def forward(self, *given: Any) -> Any:
        rest = iter(given)
        inputs = []
        for i in range(self.count):
            if i in self.places:
                path, name = self.places[i]
                inputs.append(getattr(self.get_submodule(path), name))
            else:
                inputs.append(None if i in self.unread else next(rest))
        return getattr(self, _GRAPH)(*inputs)


class CompiledGraph:
    """What torch.compile calls with all inputs of a graph.

    The modules that it has bound are found by the tensors that they hold. One is dropped when the
    model's module, which held them first, is gone.
    """

    def __init__(self, piece: _Piece, options: ModuleOptions) -> None:
        self._piece, self._options = piece, options
        self._held = tuple(piece.held)
        self._bound: OrderedDict[tuple[int, ...], _Bound] = OrderedDict()
        self._replaced: Counter[int] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        try:
            if self._piece.refusal is not None:
                raise CaptureError(self._piece.refusal)
            with self._lock:
                bound = self._find(inputs)
            return bound(*self._rest(inputs, bound))
        except CaptureError as error:
            if self._options.strict:
                raise
            self._tell(str(error))
        with eager():
            return self._piece.eager.forward(*inputs)

    def _rest(self, inputs: Sequence[Any], bound: _Bound) -> Iterator[Any]:
        piece = self._piece
        for i, given in enumerate(inputs):
            if i not in bound.places and i not in piece.sizes:
                yield given.item() if i in piece.floats else given

    def _find(self, inputs: Sequence[Any]) -> _Bound:
        """The module that holds these tensors, which is made where there is none."""
        key = tuple([id(inputs[i]) for i in self._held])
        bound = self._bound.get(key)
        if bound is None:
            key = self._without_replaced(inputs, key)
            bound = self._bound[key] = self._bind(inputs, key)
            while len(self._bound) > KEPT:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        return bound

    def _without_replaced(self, inputs: Sequence[Any], key: tuple[int, ...]) -> tuple[int, ...]:
        """The key, from now on without buffers of which each call brings another: they are
        arguments."""
        parameters = self._piece.parameters
        for known in list(reversed(self._bound)):  # a finalizer may take one away
            pairs = list(zip(self._held, known, key, strict=True))
            if all(a == b for i, a, b in pairs if i in parameters):
                self._replaced.update(i for i, a, b in pairs if a != b)
                break
        often = {i for i, times in self._replaced.items() if times >= OFTEN}
        if not often & set(self._held):
            return key
        self._held = tuple(i for i in self._held if i not in often)
        self._bound.clear()
        return tuple([id(inputs[i]) for i in self._held])

    def _bind(self, inputs: Sequence[Any], key: tuple[int, ...]) -> _Bound:
        held = {i: inputs[i] for i in self._held}
        bound = _Bound(self._piece, held)
        options = dataclasses.replace(self._options, strict=True)  # told here, by the graph's line
        accelerate(bound, **vars(options))
        # a parameter of the model lives as long as its module does, not as long as this one
        first = next((t for t in held.values() if isinstance(t, nn.Parameter)), None)
        owner = None if first is None else _owner(first)
        if owner is not None:
            weakref.finalize(owner, _drop, weakref.ref(self), key).atexit = False
        return bound

    def _tell(self, reason: str) -> None:
        if reason in self._told:
            return
        self._told.add(reason)
        warnings.warn(
            f"what torch.compile made of {self._piece.where} runs in eager PyTorch: {reason}",
            EagerWarning,
            stacklevel=3,
        )


def _drop(graph: weakref.ref[CompiledGraph], key: tuple[int, ...]) -> None:
    held = graph()
    if held is not None:
        held._bound.pop(key, None)


def _owner(parameter: nn.Parameter) -> nn.Module | None:
    """A module of the user's that holds the parameter. torch.compile tells of none."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module) and not isinstance(found, _Part):
            held = vars(found).get("_parameters") or {}
            if any(p is parameter for p in held.values()):
                return found
    return None


__all__ = ["CompiledGraph", "onward_backend", "register"]
