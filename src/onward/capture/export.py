"""Drives `torch.export` and returns a forward Graph bound to the user's own parameters.

The whole call is exported (model, then the loss where one is given) as `forward(*leaves)`, with
all dims symbolic; sizes that are equal in the first batch and sit at the same place are one
symbol, and that equality is guarded (`Captured.accepts`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onward.capture.attention_forms import Shown, choose
from onward.capture.autograd_reach import reached
from onward.capture.bind_inputs import bind_inputs
from onward.capture.dtypes import dtype_of
from onward.capture.flat_call import TENSOR, FlatCall, LossFunction
from onward.capture.fuse_composites import fuse_composites
from onward.capture.huggingface import forward_defaults, require_mask
from onward.capture.refusals import refuse_model, refuse_unlisted
from onward.capture.rehearsal import require_harmless
from onward.capture.trace import ONE_AT_A_TIME, export
from onward.capture.translate import Translator
from onward.config import CaptureError
from onward.graph.graph import Graph
from onward.graph.names import distinct, output_name
from onward.graph.types import Size


@dataclass
class Captured:
    """A forward graph and what ties it to the user's world.

    graph: outputs are `loss` and the model's other outputs as `output.<name>`.
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
    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by graph input name."""
        return {**self.parameters, **self.buffers}

    def arrays(self) -> dict[str, np.ndarray]:
        """The same as numpy arrays; on the CPU they share the tensors' memory."""
        return {name: t.detach().cpu().numpy() for name, t in self.tensors.items()}

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


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: tuple[Any, ...] = (),
    loss_fn: LossFunction | None = None,
    want_loss: bool = True,
) -> Captured:
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
    fixed = [TENSOR if isinstance(v, torch.Tensor) else v for v in leaves]
    tensors = [_detached(v) for v in leaves if isinstance(v, torch.Tensor)]  # twice given = two
    _refuse_dtypes(model, dict(zip(names, tensors, strict=True)))
    require_mask(model, kwargs)
    flat = FlatCall(model, spec, fixed, loss_fn, want_loss)
    flat.training = model.training  # its own flag alone: submodules keep theirs
    flat.extra = forward_defaults(model, kwargs) if _takes(model, "use_cache") else {}
    program = export(flat, tensors, names)
    shown = choose(program, tensors)
    graph = Graph("forward")
    translator = Translator(graph, program)
    result = Captured(graph, {}, {}, {})
    bind_inputs(result, translator, program, flat, tensors, names)
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
    if want_loss:
        nodes = reached(translator.output_nodes()[0])
        result.reached = {translator.env[n].name for n in nodes} & set(result.parameters)
        if model.training:
            lifted = program.graph_signature.inputs_to_lifted_tensor_constants
            read = [program.constants[lifted[n.name]] for n in nodes if n.name in lifted]
            refuse_unlisted(read, model, loss_fn)
    fuse_composites(graph)
    _guard(result, program)
    with ONE_AT_A_TIME:
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


def _guard(result: Captured, program: Any) -> None:
    for text in getattr(program, "_guards_code", None) or []:
        result._guards.append(compile(text, "<shape guard>", "eval"))


__all__ = ["Captured", "capture"]
