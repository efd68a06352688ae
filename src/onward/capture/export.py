"""Drives `torch.export` and returns a forward Graph bound to the user's own parameters.

The whole call is exported (model, then the loss where one is given) as `forward(*leaves)`, with
all dims symbolic; sizes that are equal in the first batch and sit at the same place are one
symbol, and that equality is guarded (`CapturedModule.dims`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture.batch_guards.attention_forms import choose
from onward.capture.batch_guards.batch_writes import require_unchanged
from onward.capture.batch_guards.pinned import take
from onward.capture.buffer_updates import store_buffers
from onward.capture.captured_module import CapturedModule, layout
from onward.capture.dtypes import dtype_of
from onward.capture.evaluation import asks_more
from onward.capture.graph_inputs import batch_nodes, bind_inputs
from onward.capture.held_sizes import Held, SizeError, all_numbers, hold
from onward.capture.huggingface import forward_defaults, require_mask
from onward.capture.regions import RegionSearch
from onward.capture.side_effects import require_harmless
from onward.capture.trace.autocast_blocks import LOW_TYPES
from onward.capture.trace.data_branches import Unasked
from onward.capture.trace.export import ONE_AT_A_TIME, export
from onward.capture.trace.flat_call import TENSOR, FlatCall, LossFunction, named_tensors
from onward.capture.trace.gradient_edges import GradientEdges
from onward.capture.trace.refusals import refuse_layer_drop
from onward.capture.translate.autograd_reach import (
    passed,
    placeholders,
    reached,
    results_of_regions,
)
from onward.capture.translate.translator import Translator
from onward.config import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Value, type_of
from onward.graph.names import distinct, output_name
from onward.graph.types import DType
from onward.model_state import reading
from onward.model_state.eager_context import eager
from onward.model_state.effects import RandomState
from onward.model_state.refusals import refuse_model, refuse_unlisted


def capture(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: tuple[Any, ...] = (),
    loss_fn: LossFunction | None = None,
    want_loss: bool = True,
    gradients: bool | None = None,
    whole: bool = False,
    regions: bool = False,
    autocast: torch.dtype | None = None,
) -> CapturedModule:
    """The model's forward (in its present training mode) and loss, as a graph.

    Without `want_loss` the graph's outputs are just the model's; with `whole` the capture can put
    them together as the model returns them. gradients: whether they are asked for, as they are in
    training mode where left out. regions: parts that cannot be captured run in PyTorch, within the
    graph, instead of being refused (`CapturedModule.regions`). autocast: what `torch.autocast`
    casts to around the call, which is not made within it: the graph is fp32, and each node says in
    what its products are computed (`graph.precision_said`).

    Raises CaptureError with the complete list of what could not be captured.
    """

    gradients = model.training if gradients is None else gradients
    trains = gradients and (want_loss or whole)

    def tried(values: bool, parts: RegionSearch | None = None) -> CapturedModule:
        """With those sizes held that have to be. parts: what is to run in PyTorch."""
        apart = [] if parts is None else parts.modules
        refuse_model(model, loss_fn, trains, want_loss, apart)
        held: Held = {} if parts is None else parts.held

        def flat(spec: pytree.TreeSpec, fixed: list[Any]) -> FlatCall:
            return FlatCall(
                model, spec, fixed, loss_fn, want_loss, values, gradients, whole, parts, autocast
            )

        while True:
            with contextlib.nullcontext() if parts is None else parts.recorded():
                done = _capture(flat, model, args, kwargs, target, loss_fn, held)
            if isinstance(done, CapturedModule):
                return done
            held = done

    def found() -> CapturedModule:
        try:
            return tried(values=False)
        except CaptureError as error:
            with contextlib.suppress(Exception):  # the forward runs in eager mode too
                return tried(values=True)
            if regions:
                given = (args, kwargs, target)
                call = partial(_flat_call, model, given, loss_fn, want_loss, gradients, autocast)
                made = RegionSearch(model, gradients).captured(error, call, partial(tried, False))
                if made is not None:
                    return made
            raise error from error.__cause__

    draws = RandomState()
    try:
        with ONE_AT_A_TIME, eager(), reading(model, loss_fn) as reads:
            captured = found()
    except BaseException:
        draws.restore()
        raise
    if captured.regions:  # else a forward that draws has done so in its first run alone: this one
        draws.restore()
    captured.reads = reads
    if trains and want_loss:
        refuse_layer_drop(captured.regions)
    return captured


def _flat_call(
    model: torch.nn.Module,
    given: tuple[Any, ...],
    loss_fn: LossFunction | None,
    want_loss: bool,
    gradients: bool,
    autocast: torch.dtype | None,
) -> tuple[FlatCall, list[torch.Tensor]]:
    """The call to run in eager mode, and the batch's tensors."""
    leaves, spec = pytree.tree_flatten(given)
    fixed = [TENSOR if isinstance(v, torch.Tensor) else v for v in leaves]
    flat = FlatCall(model, spec, fixed, loss_fn, want_loss, gradients=gradients, autocast=autocast)
    flat.extra = forward_defaults(model, given[1]) if _takes(model, "use_cache") else {}
    return flat, [_alias(v, gradients) for v in leaves if isinstance(v, torch.Tensor)]


def _capture(
    make: Callable[[pytree.TreeSpec, list[Any]], FlatCall],
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: tuple[Any, ...],
    loss_fn: LossFunction | None,
    held: Held,
) -> CapturedModule | Held:
    """The same with these sizes held; or more sizes to hold, for another try. make: the call that
    is exported, of the arguments' tree and its leaves."""
    paths, spec = pytree.tree_flatten_with_path((args, kwargs, target))
    leaves = [leaf for _, leaf in paths]
    names: list[str] = []
    for path, leaf in paths:
        if isinstance(leaf, torch.Tensor):
            names.append(distinct(_leaf_name(path, model), names))
    fixed = [TENSOR if isinstance(v, torch.Tensor) else v for v in leaves]
    flat = make(spec, fixed)
    want_loss, values, trains = flat.want_loss, flat.values, flat.gradients
    # twice given = two
    tensors = [_alias(v, flat.whole) for v in leaves if isinstance(v, torch.Tensor)]
    _refuse_dtypes(model, dict(zip(names, tensors, strict=True)), flat.autocast is not None)
    require_mask(model, kwargs)
    flat.training = model.training  # its own flag alone: submodules keep theirs
    flat.extra = forward_defaults(model, kwargs) if _takes(model, "use_cache") else {}
    if values:
        flat.ask(*[t.clone() for t in tensors])
        if not flat.noted.read:
            raise CaptureError("the forward reads no number into Python")
    try:
        program = _exported(flat, tensors, names, held)
    except CaptureError:
        numbers = all_numbers(held)
        if numbers is None:
            raise
        return numbers
    pinned = take(program, flat.noted.asked, tensors, flat.model)
    shown = choose(program, tensors)
    graph = Graph("forward")
    translator = Translator(graph, program, flat.regions, flat.autocast is not None)
    result = CapturedModule(graph, {}, {}, {}, autocast=flat.autocast)
    batch = batch_nodes(program)
    try:
        buffers = bind_inputs(result, translator, program, flat, tensors, names)
        _translate(result, translator, flat, want_loss)
        tree = flat.noted.tree
        if flat.whole:
            _cast_results(graph, flat, translator)
        store_buffers(result, translator, buffers, named_tensors(flat), trains)
    except SizeError as error:
        more = hold(error, batch, tensors, held)
        if more is None:
            raise
        return more
    result._presumed = [*shown, *require_unchanged(program, translator.batch, tensors, names)]
    result._pinned = pinned
    if flat.noted.lies:
        result._layouts = list(map(layout, tensors))
    if flat.extra:
        result.notes.append("use_cache=False: a key/value cache cannot be part of a training graph")
        if "position_ids" in names:
            result.notes.append(
                "position_ids keep no packed documents apart, as in eager PyTorch while the "
                "model's use_cache is on; fix: model.config.use_cache = False"
            )
    for name in tree.caches if tree is not None else ():
        result.notes.append(f"{name} is None: a key/value cache cannot be part of a training graph")
    for name in flat.noted.chosen:
        result.notes.append(f"{name} is no output: how many rows a boolean mask chooses, data say")
    if flat.noted.read:
        result.notes.append(
            f"captured anew for other numbers where the forward reads {flat.noted.read} of the "
            "batch's into Python, or chooses rows by a mask"
        )
    if held:
        result.notes.append(_held_note(held, names))
    if want_loss:
        nodes = reached(translator.output_nodes()[0])
        result.reached = _named(nodes, translator) & set(result.parameters)
        if trains:
            lifted = program.graph_signature.inputs_to_lifted_tensor_constants
            read = [program.constants[lifted[n.name]] for n in nodes if n.name in lifted]
            refuse_unlisted(read, model, loss_fn)
    if flat.whole:
        result.tree = tree
        ends = dict(zip(flat.noted.names, translator.output_nodes(), strict=True))
        edges = GradientEdges()
        passes = {n: passed(node, edges) for n, node in ends.items()} if trains else {}
        sources = {name: placeholders(nodes) for name, nodes in passes.items()}
        result.parts_reached = {name: results_of_regions(nodes) for name, nodes in passes.items()}
        of_batch = {n: result.leaves[i] for i, n in enumerate(batch)}  # which may be cast first
        result.reaches = {
            name: _named(nodes, translator) | {of_batch[n] for n in nodes if n in of_batch}
            for name, nodes in sources.items()
        }
    if flat.regions is not None:
        result.regions = flat.regions.in_graph(graph)
    result.asks = asks_more(result, flat, program, translator.sites, args, kwargs)
    result.guard(getattr(program, "_guards_code", None) or [])
    with ONE_AT_A_TIME:
        require_harmless(
            flat.effects,
            lambda batch: flat.run(*batch),
            tensors,
            lambda: result.smaller(tensors),
            model,
            loss_fn,
        )
    result.effects = flat.effects
    if flat.effects.written and not flat.effects.left:
        written = ", ".join(flat.effects.written)
        result.notes.append(f"a step does not set {written}, as the model's forward does")
    if flat.effects.left:
        result.constants += flat.effects.tensors  # where they are written, eager code reads that
    return result


def _named(nodes: Iterable[Any], translator: Translator) -> set[str]:
    """What these placeholders are called in the graph."""
    values = [translator.env[n] for n in nodes]
    return {v.name or "" for v in values if isinstance(v, Value)}  # a complex one is a pair


def _exported(flat: FlatCall, tensors: list[torch.Tensor], names: list[str], held: Held) -> Any:
    """The exported program; a forward that asks tensors runs once before, for the answers."""
    with contextlib.suppress(Unasked):
        return export(flat, tensors, names, held)
    flat.ask(
        *[t.clone() for t in tensors]
    )  # outside, so that Unasked is no cause of what the second try raises
    return export(flat, tensors, names, held)


def _translate(
    result: CapturedModule, translator: Translator, flat: FlatCall, want_loss: bool
) -> None:
    """Fills the graph, and says what its outputs are."""
    outputs = [output_name(n) for n in flat.noted.names]
    if want_loss:
        outputs[0] = "loss"
    translator.run(dict(zip(outputs, translator.output_nodes(), strict=True)))
    first = 1 if want_loss else 0  # a result may be called as the loss is
    results = dict(zip(flat.noted.names[first:], outputs[first:], strict=True))
    loss = outputs[0] if want_loss else None
    graph = result.graph
    graph.signature = graph.signature.but(loss=loss, results=results)


def _cast_results(graph: Graph, flat: FlatCall, translator: Translator) -> None:
    """Casts the results to the types that they have in the trace, under autocast those of eager."""
    builder = Builder(graph)
    for name, node in zip(flat.noted.names, translator.output_nodes(), strict=True):
        low, output = LOW_TYPES.get(node.meta["val"].dtype), graph.signature.results[name]
        value = graph.outputs[output]
        if low is not None and type_of(value).dtype == DType.FLOAT:
            graph.outputs[output] = builder.one("Cast", [value], {"to": low})


def _held_note(held: Held, names: list[str]) -> str:
    """Which sizes may vary less than others."""
    dims = [
        f"{names[leaf]} dim {dim}" + (f" (multiples of {factor})" if factor else "")
        for (leaf, dim), (factor, _) in sorted(held.items())
    ]
    return f"captured anew for other sizes of: {', '.join(dims)}"


def _alias(x: torch.Tensor, keeps_flag: bool) -> torch.Tensor:
    found = x.detach().clone() if x.is_inference() else x.detach()
    return found.requires_grad_(x.requires_grad and keeps_flag)


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


def _refuse_dtypes(model: torch.nn.Module, batch: dict[str, torch.Tensor], autocast: bool) -> None:
    """Raises CaptureError for a parameter or a tensor of the batch of a type that no graph has.
    autocast: whether the call is made under it, which takes 16-bit tensors as it takes f32."""
    for name, tensor in batch.items():
        dtype_of(tensor.dtype, name, autocast)
    for name, parameter in model.named_parameters():
        dtype_of(parameter.dtype, name)
        if parameter.dtype == torch.float64:
            raise CaptureError(
                f"{name} is of {parameter.dtype}, in which Onward does not train; fix: "
                "model.float()"
            )


__all__ = ["capture"]
