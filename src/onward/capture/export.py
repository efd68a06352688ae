"""Drives `torch.export` and returns a forward Graph bound to the user's own parameters.

The whole call is exported (model, then the loss where one is given) as `forward(*leaves)`, with
all dims symbolic; sizes that are equal in the first batch and sit at the same place are one
symbol, and that equality is guarded (`CapturedModule.dims`).
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from onward.capture.as_eager import answering_as_eager
from onward.capture.attention_forms import Shown, choose
from onward.capture.effects import Effects, require_harmless, undoing
from onward.capture.held import traces_names
from onward.capture.huggingface import attention_kept_whole, forward_defaults, require_mask
from onward.capture.nested import padded_with_zeros
from onward.capture.raise_ import raise_composites
from onward.capture.reach import reached
from onward.capture.refusals import (
    refuse_constant,
    refuse_model,
    refuse_unlisted,
    refusing_gradient_code,
)
from onward.capture.translate import Translator, dtype_of, to_type
from onward.config import CaptureError
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.names import BATCH, BUFFER, PARAM, distinct, output_name
from onward.graph.types import Size

LossFunction = Callable[..., torch.Tensor]
_ONE_AT_A_TIME = threading.RLock()  # a capture patches what all threads share


@dataclass
class CapturedModule:
    """A forward graph and what ties it to the user's module (`protocol.Captured`).

    parameters, buffers: graph input name -> the user's tensor (tied ones appear once).
    leaves: batch leaf index -> graph input name; leaves that are not tensors are baked in.
    constants: the user's tensors that are baked in, since no module registers them.
    reached: parameters that autograd would give a gradient, if only of zeros.
    """

    graph: Graph
    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    leaves: dict[int, str]
    notes: list[str] = field(default_factory=list)
    constants: list[torch.Tensor] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    _guards: list[CodeType] = field(default_factory=list)
    _sizes: list[tuple[int, int, Size]] = field(default_factory=list)
    _shown: list[Shown] = field(default_factory=list)
    _layouts: list[Any] | None = None  # of a batch, where the forward asks

    @property
    def owned(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by graph input name."""
        return {**self.parameters, **self.buffers}

    def arrays(self) -> dict[str, np.ndarray]:
        """The same as numpy arrays; on the CPU they share the tensors' memory."""
        return {name: t.detach().cpu().numpy() for name, t in self.owned.items()}

    def suits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether what the capture presumed of a batch besides its sizes holds: of its numbers, and
        how they lie in memory."""
        if self._layouts not in (None, list(map(_layout, tensors))):
            return False
        return all(shown.holds(tensors) for shown in self._shown)

    def dims(self, tensors: list[torch.Tensor]) -> dict[str, int] | None:
        """Symbol -> size for a batch's tensors (in leaf order); None where they do not fit."""
        dims: dict[str, int] = {}
        for leaf, dim, size in self._sizes:
            have = tensors[leaf].shape[dim]
            if isinstance(size, int):
                if have != size:
                    return None
            elif have < 2 or dims.setdefault(str(size), have) != have:
                return None  # sizes 0 and 1 behave differently (broadcasting): own capture
        scope = {"L": {"leaves": tensors}}
        if not all(eval(guard, scope) for guard in self._guards):
            return None
        return dims if self.suits(tensors) else None  # asked last: it may lean on the sizes

    def smaller(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The first part of a batch: of each size that may vary, one less."""
        dims = {symbol: max(n - 1, 1) for symbol, n in (self.dims(tensors) or {}).items()}
        cut = list(tensors)
        for leaf, dim, size in self._sizes:
            if not isinstance(size, int) and size.symbols <= dims.keys():
                cut[leaf] = cut[leaf].narrow(dim, 0, size.number(dims))
        return cut


class _Noted:
    """What the wrapper notes in a run: an export restores a module's own attributes.

    names: of its outputs. lies: whether the forward asks how tensors lie in memory.
    """

    names: tuple[str, ...] | list[str] = ()
    lies = False

    def layout(self) -> None:
        self.lies = True


class _Flat(torch.nn.Module):
    """`forward(*leaves)`: rebuilds the call, runs model and loss, returns loss and outputs."""

    def __init__(
        self,
        model: torch.nn.Module,
        spec: pytree.TreeSpec,
        fixed: list[Any],
        loss_fn: LossFunction | None,
        want_loss: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.spec, self.fixed, self.loss_fn = spec, fixed, loss_fn
        self.want_loss = want_loss
        self.noted = _Noted()
        self.effects = Effects()
        self.extra: dict[str, Any] = {}
        self.attributes = {name: vars(tensor) for name, tensor in _tensors(self) if vars(tensor)}

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for name, tensor in _tensors(self):  # those of the trace, which have the names alone
            _give(tensor, self.attributes.get(name, {}), name)
        trained = [t for _, t in _tensors(self)] if self.model.training else []
        with (
            undoing(self.effects, self.model, self.loss_fn) as seen,
            answering_as_eager(seen, trained, self.noted.layout),
        ):
            return self.run(*leaves)

    def run(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(leaves)
        full = [next(rest) if f is _TENSOR else f for f in self.fixed]
        args, kwargs, target = pytree.tree_unflatten(full, self.spec)
        outputs = self.model(*args, **kwargs, **self.extra)
        named = name_outputs(outputs)
        if not self.want_loss:
            self.noted.names = list(named)
            return tuple(named.values())
        if self.loss_fn is not None:
            loss = self.loss_fn(outputs, *target)
        elif "loss" in named:
            loss = named.pop("loss")
        elif len(named) == 1:
            loss = named.pop(next(iter(named)))  # a model that returns its loss alone
        else:
            raise CaptureError(
                f"the model returns {', '.join(named) or 'nothing'} but no loss; fix: pass labels, "
                "or a loss_fn"
            )
        if loss.dim() != 0:
            raise CaptureError(
                f"the loss has shape {tuple(loss.shape)}; fix: reduce it to a scalar"
            )
        self.noted.names = ["loss", *named]
        return (loss, *named.values())


_TENSOR = object()


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _give(tensor: torch.Tensor, attributes: dict[str, Any], name: str) -> None:
    """Sets what the user has set on the tensor that this one stands for."""
    for key in attributes.keys() & traces_names():
        raise CaptureError(
            f"{_path(name)} has the attribute {key}, a name that tensors within torch.export use "
            "themselves; fix: another name"
        )
    vars(tensor).update(attributes)


def name_outputs(outputs: Any) -> dict[str, torch.Tensor]:
    """A model's outputs by name: its own keys, else `output` or `output_0`, `output_1`, ..."""
    if isinstance(outputs, torch.Tensor):
        return {"output": outputs}
    if hasattr(outputs, "items"):
        pairs = list(outputs.items())
    else:
        pairs = [(f"output_{i}", v) for i, v in enumerate(outputs)]
    named: dict[str, torch.Tensor] = {}
    for name, value in pairs:
        leaves = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
        if isinstance(value, torch.Tensor):
            named[distinct(str(name), named)] = value
        else:
            for i, leaf in enumerate(leaves):
                named[distinct(f"{name}_{i}", named)] = leaf
    return named


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: tuple[Any, ...] = (),
    loss_fn: LossFunction | None = None,
    want_loss: bool = True,
) -> CapturedModule:
    """The model's forward (in its present training mode) and loss, as a graph.

    Without `want_loss` the graph's outputs are just the model's.

    Raises CaptureError with the complete list of what could not be captured.
    """
    refuse_model(model, loss_fn, want_loss and model.training)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs, target))
    leaves = [leaf for _, leaf in paths]
    names: list[str] = []
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor):
            names.append(distinct(_leaf_name(path, model), names))
    fixed = [_TENSOR if isinstance(v, torch.Tensor) else v for v in leaves]
    tensors = [_detached(v) for v in leaves if isinstance(v, torch.Tensor)]  # twice given = two
    _refuse_dtypes(model, dict(zip(names, tensors, strict=True)))
    require_mask(model, kwargs)
    flat = _Flat(model, spec, fixed, loss_fn, want_loss)
    flat.training = model.training  # its own flag alone: submodules keep theirs
    flat.extra = forward_defaults(model, kwargs) if _takes(model, "use_cache") else {}
    program = _export(flat, tensors, names)
    shown = choose(program, tensors)
    graph = Graph("forward")
    translator = Translator(graph, program)
    result = _bind_inputs(translator, program, flat, tensors, names)
    result._shown = shown
    if flat.noted.lies:
        result._layouts = list(map(_layout, tensors))
    if flat.extra:
        result.notes.append("use_cache=False: a key/value cache cannot be part of a training graph")
        if "position_ids" in names:
            result.notes.append(
                "position_ids keep no packed documents apart, as in eager PyTorch while the "
                "model's use_cache is on; fix: model.config.use_cache = False"
            )
    outputs = [output_name(n) for n in flat.noted.names]
    if want_loss:
        outputs[0] = "loss"
    translator.run(dict(zip(outputs, translator.output_nodes(), strict=True)))
    results = dict(zip(flat.noted.names, outputs, strict=True))
    if want_loss:
        graph.signature = graph.signature.but(loss=results.pop(flat.noted.names[0]))
    graph.signature = graph.signature.but(results=results)
    if want_loss:
        nodes = reached(translator.output_nodes()[0])
        result.reached = {translator.env[n].name for n in nodes} & set(result.parameters)
        if model.training:
            lifted = program.graph_signature.inputs_to_lifted_tensor_constants
            read = [program.constants[lifted[n.name]] for n in nodes if n.name in lifted]
            refuse_unlisted(read, model, loss_fn)
    raise_composites(graph)
    _guard(result, program)
    with _ONE_AT_A_TIME:
        require_harmless(
            flat.effects,
            lambda batch: flat.run(*batch),
            tensors,
            lambda: result.smaller(tensors),
            model,
            loss_fn,
        )
    if flat.effects.written and not flat.effects.left:
        written = ", ".join(flat.effects.written)
        result.notes.append(f"a step does not set {written}, as the model's forward does")
    if flat.effects.left:
        result.constants += flat.effects.tensors  # where they are written, eager code reads that
    return result


def _layout(x: torch.Tensor) -> Any:
    """How a tensor lies in memory, as far as a forward may ask."""
    return x.is_contiguous() or x.stride(), x.storage_offset()


def _detached(x: torch.Tensor) -> torch.Tensor:
    return x.clone() if x.is_inference() else x.detach()


def _leaf_name(path: Any, model: torch.nn.Module) -> str:
    """A batch leaf's name: its keyword, or the forward parameter at its position."""
    part, *rest = path
    keys = [str(getattr(k, "key", getattr(k, "idx", k))) for k in rest]
    if part.idx == 0 and keys and keys[0].isdigit():
        parameters = list(inspect.signature(model.forward).parameters)
        position = int(keys[0])
        keys[0] = parameters[position] if position < len(parameters) else f"input_{position}"
    elif part.idx == 2:
        keys = ["target", *(keys if keys != ["0"] else [])]
    return ".".join(keys)


def _takes(model: torch.nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _refuse_dtypes(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    for name, tensor in (*model.named_parameters(), *batch.items()):
        dtype_of(tensor.dtype, name)
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float64:
            raise CaptureError(
                f"{name} is of {parameter.dtype}, in which Onward does not train; fix: "
                "model.float()"
            )


@contextmanager
def _capturing(model: torch.nn.Module, own_positions: bool) -> Iterator[None]:
    """The patches an export needs, undone afterwards."""
    transformer = torch.nn.modules.transformer
    detect = transformer._detect_is_causal_mask
    here = threading.get_ident()  # other threads go on as if nothing were patched

    def causal_as_said(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
        """The original inspects data, which an export has not."""
        if threading.get_ident() != here:
            return detect(mask, is_causal, size)
        return bool(is_causal)

    transformer._detect_is_causal_mask = causal_as_said
    try:
        with (
            torch.set_grad_enabled(model.training),  # on, what stops gradients leaves a trace
            attention_kept_whole(model, own_positions),
            refusing_gradient_code(model.training),
            padded_with_zeros(model.training),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformer._detect_is_causal_mask = detect


def _export(flat: _Flat, tensors: list[torch.Tensor], names: list[str]) -> Any:
    auto = torch.export.Dim.AUTO
    # sizes 0 and 1 are specialised by every export: say so
    shapes = {
        "leaves": tuple({d: auto for d, n in enumerate(t.shape) if n > 1} or None for t in tensors)
    }
    try:
        # as in eager: with its cache on, a model takes no notice of packed documents
        with _ONE_AT_A_TIME, _capturing(flat.model, "position_ids" in names and not flat.extra):
            return torch.export.export(flat, tuple(tensors), dynamic_shapes=shapes, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        cause = next((e for e in _chain(error) if isinstance(e, CaptureError)), None)
        if cause is not None:
            raise cause from None
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CaptureError(f"torch.export could not trace the model: {first}") from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _bind_inputs(
    translator: Translator,
    program: Any,
    flat: _Flat,
    tensors: list[torch.Tensor],
    names: list[str],
) -> CapturedModule:
    """Makes the graph's inputs: parameters by identity, buffers, then the batch."""
    graph = translator.graph
    result = CapturedModule(graph, {}, {}, {})
    by_id: dict[int, Value] = {}
    live = dict(_tensors(flat))
    first = {id(t): n for n, t in reversed(live.items())}  # of tied ones, the name torch lists
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    batch = [
        placeholders[s.arg.name]
        for s in program.graph_signature.input_specs
        if s.kind is InputKind.USER_INPUT
    ]
    for node, tensor in zip(batch, tensors, strict=True):
        translator.name_sizes(node, tensor)
    translator.settle_sizes(batch)
    users = 0
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            value = graph.input(BATCH + names[users], translator.type_of_fx(node), Role.BATCH)
            for dim, size in enumerate(type_of(value).shape):
                result._sizes.append((users, dim, size))
            result.leaves[users] = value.name or ""
            users += 1
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = live.get(spec.target)
            if tensor is None:
                tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
            assert tensor is not None, f"{spec.target} is not in the model"
            if id(tensor) in by_id:
                value = by_id[id(tensor)]
            else:
                trained = isinstance(tensor, torch.nn.Parameter)
                name = (PARAM if trained else BUFFER) + _path(first.get(id(tensor), spec.target))
                value = graph.input(name, to_type(tensor), Role.PARAM if trained else Role.BUFFER)
                by_id[id(tensor)] = value
                if isinstance(tensor, torch.nn.Parameter):
                    result.parameters[name] = tensor
                else:
                    result.buffers[name] = tensor
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            tensor = program.constants[spec.target]
            refuse_constant(tensor, {_path(n): t for n, t in live.items()})
            result.constants.append(tensor)
            value = graph.constant(tensor.detach().numpy().copy())
        else:
            raise CaptureError(
                f"the forward reads {spec.target}, which is no tensor that a graph can hold (a "
                "torch.Generator, for one); fix: draw outside, and make it an input of the batch"
            )
        translator.env[node] = value
    translator.find_batch_size()
    return result


def _path(target: str | None) -> str:
    """The model's own path of what the wrapper holds; the loss function's stands apart.

    An empty first part is no module's name, so that no path of the model begins so.
    """
    assert target is not None
    return target.removeprefix("model.") if target.startswith("model.") else f".{target}"


def _guard(result: CapturedModule, program: Any) -> None:
    for text in getattr(program, "_guards_code", None) or []:
        result._guards.append(compile(text, "<shape guard>", "eval"))


__all__ = ["CapturedModule", "capture", "name_outputs"]
