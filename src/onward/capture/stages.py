"""The stages of one try at a capture: functions that each fill in some fields of a `Traced`.

`STAGES` lists them in order, each with the reason for its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map

from onward.capture.aten.complex_numbers import Complex
from onward.capture.batch_guards.attention_forms import choose
from onward.capture.batch_guards.batch_writes import require_unchanged
from onward.capture.batch_guards.pinned import take
from onward.capture.buffer_updates import store_buffers
from onward.capture.captured_module import layout
from onward.capture.dtypes import dtype_of
from onward.capture.evaluation import asks_more
from onward.capture.graph_inputs import batch_nodes, bind_inputs
from onward.capture.held_sizes import Held, SizeError, all_numbers, hold
from onward.capture.huggingface import require_mask
from onward.capture.regions.search import first_line
from onward.capture.side_effects import Rehearsal
from onward.capture.trace.autocast_blocks import LOW_TYPES
from onward.capture.trace.data_branches import Unasked
from onward.capture.trace.export import ONE_AT_A_TIME, export
from onward.capture.trace.flat_call import named_tensors
from onward.capture.trace.gradient_edges import GradientEdges
from onward.capture.trace.sharing import Sharing
from onward.capture.traced import SizesToHold, Traced
from onward.capture.translate.autograd_reach import (
    passed,
    placeholders,
    reached,
    results_of_regions,
)
from onward.capture.translate.shared_results import shared_results
from onward.capture.translate.translator import Translator
from onward.errors import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.names import output_name
from onward.graph.types import DType
from onward.model_state.refusals import refuse_unlisted

Stage = Callable[[Traced], None]


def refuse_dtypes(traced: Traced) -> None:
    """Raises CaptureError for a parameter or a tensor of the batch whose dtype no graph has, for a
    parameter in fp64, and for a mask that eager attention would add as ones and zeros. Under
    autocast the batch may have 16-bit floats."""
    model, leaves = traced.request.model, traced.leaves
    autocast = traced.request.autocast is not None
    for name, tensor in zip(leaves.names, leaves.tensors, strict=True):
        dtype_of(tensor.dtype, name, autocast)
    for name, parameter in model.named_parameters():
        dtype_of(parameter.dtype, name)
        if parameter.dtype == torch.float64:
            raise CaptureError(
                f"{name} is of {parameter.dtype}, which Onward cannot train; fix: model.float()"
            )
    require_mask(model, traced.request.kwargs)


def refuse_devices(traced: Traced) -> None:
    """Raises CaptureError for parameters on several devices: a step has the memory of one."""
    found: dict[torch.device, str] = {}
    for name, parameter in traced.request.model.named_parameters():
        found.setdefault(parameter.device, name)
    if len(found) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise CaptureError(
            f"the parameters are on several devices ({places}), and a step has the memory of one; "
            "fix: model.to(device), without device_map"
        )


def read_numbers(traced: Traced) -> None:
    """Runs the call once in eager mode for the numbers that the forward reads into Python, if this
    try is to bake them in. Raises CaptureError where it reads none."""
    if traced.flat.values:
        _ask(traced)
        if not traced.flat.noted.read:
            raise CaptureError("the forward reads no number into Python")


def export_call(traced: Traced) -> None:
    """Exports the call as `traced.program`. Raises SizesToHold, with all held sizes as numbers,
    where the trace fails with some held as multiples; else CaptureError."""
    try:
        traced.program = _exported(traced)
    except CaptureError:
        numbers = all_numbers(traced.held)
        if numbers is None:
            raise
        raise SizesToHold(numbers) from None
    traced.batch = batch_nodes(traced.program)
    traced.tree = traced.flat.noted.tree


def compare_layouts(traced: Traced) -> None:
    """Raises CaptureError where a tensor's memory layout decides what the forward computes, and is
    another in the trace than in eager PyTorch: fake tensors have other strides for `w[index]`, for
    example, where the index is transposed. Sets `traced.layouts_matter`."""
    noted = traced.flat.noted
    traced.layouts_matter = bool(noted.layouts) or bool(noted.sharing.matter())
    if not traced.layouts_matter:
        return
    try:
        asked, sharing = traced.flat.layouts(*map(_alike, traced.leaves.tensors))
    except Exception as error:
        raise CaptureError(f"the forward fails in eager PyTorch: {first_line(error)}") from error
    eager = _answers(asked, sharing)
    told = [
        (method, tree_map(_hint, answer))
        for method, answer in _answers(noted.layouts, noted.sharing)
    ]
    if told != eager:
        methods = ", ".join(sorted({f"{method}()" for method, _ in (*told, *eager)}))
        raise CaptureError(
            f"the forward depends on a tensor's memory layout ({methods}), which PyTorch's trace "
            "has otherwise than eager mode; fix: neither branch on a layout nor write in place "
            "through a reshaped tensor"
        )


def take_presumptions(traced: Traced) -> None:
    """Removes questions about the batch's numbers from the program's outputs and pins their
    answers, and chooses the form of each attention mask. Raises CaptureError."""
    program, tensors, flat = traced.program, traced.leaves.tensors, traced.flat
    traced.result._pinned = take(program, flat.noted.asked, tensors, flat.model)
    traced.shown = choose(program, tensors, traced.request.presumes)


def fill_graph(traced: Traced) -> None:
    """Makes the graph of the program: inputs, nodes, outputs, buffers' next values. Raises
    SizesToHold for a size that is no polynomial unless more sizes are held; else CaptureError."""
    result, flat, leaves = traced.result, traced.flat, traced.leaves
    autocast = traced.request.autocast is not None
    traced.translator = Translator(result.graph, traced.program, flat.regions, autocast)
    try:
        buffers = bind_inputs(result, traced.translator, traced.program, flat, leaves)
        result.constants += flat.noted.outer  # so that guards notice a later write into them
        _translate(traced)
        named = named_tensors(flat)
        store_buffers(result, traced.translator, buffers, named, flat.gradients)
    except SizeError as error:
        more = hold(error, traced.batch, leaves.tensors, traced.held)
        if more is None:
            raise
        raise SizesToHold(more) from None


def cast_results(traced: Traced) -> None:
    """Casts the results of a whole call from f32 to their dtypes in the trace, which under autocast
    are those of eager mode."""
    if not traced.request.whole:
        return
    graph, nodes = traced.result.graph, traced.translator.output_nodes()
    builder = Builder(graph)
    for name, node in zip(traced.flat.noted.names, nodes, strict=True):
        low, output = LOW_TYPES.get(node.meta["val"].dtype), graph.signature.results[name]
        value = graph.outputs[output]
        if low is not None and type_of(value).dtype == DType.FLOAT:
            graph.outputs[output] = builder.one("Cast", [value], {"to": low})


def note_presumptions(traced: Traced) -> None:
    """Records the presumptions to check on later batches besides their sizes. Raises CaptureError
    where the forward changes numbers of the batch."""
    tensors, written = traced.leaves.tensors, traced.translator.batch
    unchanged = require_unchanged(traced.program, written, tensors, traced.leaves.names)
    traced.result._presumed = [*traced.shown, *unchanged]
    if traced.layouts_matter:
        traced.result._layouts = list(map(layout, tensors))


def reach_of_loss(traced: Traced) -> None:
    """Records the parameters that autograd reaches from the loss. Raises CaptureError where it
    reaches one that is in neither the model's nor the loss function's `parameters()`."""
    if not traced.request.want_loss:
        return
    translator, result, program = traced.translator, traced.result, traced.program
    model = traced.request.model
    nodes = reached(translator.output_nodes()[0])
    result.reached = _named(nodes, translator) & set(result.parameters)
    if traced.flat.gradients:
        lifted = program.graph_signature.inputs_to_lifted_tensor_constants
        read = [program.constants[lifted[n.name]] for n in nodes if n.name in lifted]
        read = [x for x in read if isinstance(x, torch.Tensor)]
        refuse_unlisted(read, model, traced.request.loss_fn)


def reach_of_results(traced: Traced) -> None:
    """Records, for each result of a whole call, the parameters, leaves of the batch and outputs of
    PyTorch regions that autograd reaches from it."""
    if not traced.request.whole:
        return
    translator, result = traced.translator, traced.result
    result.tree = traced.tree
    ends = _ends(traced)
    edges = GradientEdges()
    trains = traced.flat.gradients
    passes = {n: passed(node, edges) for n, node in ends.items()} if trains else {}
    sources = {name: placeholders(nodes) for name, nodes in passes.items()}
    result.parts_reached = {name: results_of_regions(nodes) for name, nodes in passes.items()}
    # not by `env`, where a 16-bit leaf is the cast of its input
    of_batch = {n: result.leaves[i] for i, n in enumerate(traced.batch)}
    result.reaches = {
        name: _named(nodes, translator) | {of_batch[n] for n in nodes if n in of_batch}
        for name, nodes in sources.items()
    }


def _ends(traced: Traced) -> dict[str, torch.fx.Node]:
    """Returns the results of a whole call, with the nodes of the exported program."""
    return dict(zip(traced.flat.noted.names, traced.translator.output_nodes(), strict=True))


def share_results(traced: Traced) -> None:
    """Has the outputs of a whole call share memory as in eager PyTorch: results that are views are
    taken out of the graph, and made from the tensors that they are views of. Raises CaptureError
    for views that cannot be made so."""
    if not traced.request.whole:
        return
    result, ends = traced.result, _ends(traced)
    views = shared_results(ends, traced.program)
    if not views:
        return
    assert result.tree is not None, "a whole call"
    result.tree.views = views
    signature = result.graph.signature
    kept = {name: out for name, out in signature.results.items() if name not in views}
    for name in views:
        del result.graph.outputs[signature.results[name]]
        result.reaches.pop(name, None)
        result.parts_reached.pop(name, None)
    result.graph.signature = replace(signature, results=kept)


def note_regions(traced: Traced) -> None:
    """Records the regions that run in PyTorch. Raises CaptureError where the program lost one."""
    if traced.flat.regions is not None:
        traced.result.regions = traced.flat.regions.in_graph(traced.result.graph)


def judge_evaluation(traced: Traced) -> None:
    """Records why evaluation may differ from this call in more than dropout."""
    traced.result.asks = asks_more(
        traced.result, traced.flat, traced.program, traced.translator.sites, traced.request
    )


def guard_sizes(traced: Traced) -> None:
    """Records the export's conditions on the batch's sizes as guards."""
    traced.result.guard(getattr(traced.program, "_guards_code", None) or [])


def rehearse(traced: Traced) -> None:
    """Runs the forward again in eager mode if it sets values or draws random numbers. Raises
    CaptureError where a graph, which does the same in each step, would differ from it."""
    request, flat, result, tensors = (
        traced.request, traced.flat, traced.result, traced.leaves.tensors,
    )  # fmt: skip
    if flat.effects.written or flat.effects.drawn:
        with ONE_AT_A_TIME:
            Rehearsal(
                run=lambda batch: flat.run(*batch),
                batch=tensors,
                smaller=lambda: result.smaller(tensors),
                model=request.model,
                loss_fn=request.loss_fn,
            ).judge(flat.effects)
    result.effects = flat.effects
    if flat.effects.left:
        result.constants += flat.effects.tensors  # so that guards notice a later write into them


def say_notes(traced: Traced) -> None:
    """Adds a line to the notes for each thing that was presumed or left out."""
    noted, effects, notes = traced.flat.noted, traced.flat.effects, traced.result.notes
    caches = traced.tree.caches if traced.tree is not None else ()
    if traced.flat.extra:
        notes.append("use_cache=False: a key/value cache cannot be part of a training graph")
        if "position_ids" in traced.leaves.names:
            notes.append(
                "position_ids do not separate packed documents in attention while use_cache "
                "is on, as in eager PyTorch; fix: model.config.use_cache = False"
            )
    for name in caches:
        notes.append(f"{name} is None: a key/value cache cannot be part of a training graph")
    for name in noted.chosen:
        notes.append(
            f"{name} is left out of the outputs: how many rows its boolean "
            "mask chooses depends on the data"
        )
    if noted.read:
        notes.append(
            "the model is captured again for other values where the forward reads "
            f"{noted.read} numbers of the batch into Python (.item()) or chooses rows by "
            "a boolean mask"
        )
    if traced.held:
        notes.append(_held_note(traced.held, traced.leaves.names))
    if effects.written and not effects.left:
        written = ", ".join(effects.written)
        notes.append(f"a compiled step does not set {written}, which the model's forward sets")


STAGES: tuple[Stage, ...] = (
    refuse_devices,
    refuse_dtypes,  # before the trace fails on them with a message that does not name the tensor
    read_numbers,  # before the trace, which has no numbers and is given these
    export_call,
    take_presumptions,  # before the translation, which would see the questions as outputs
    fill_graph,
    cast_results,  # after the translation, in which 16-bit tensors are f32
    compare_layouts,  # after the translation, which has a better message for a write it refuses
    note_presumptions,  # after the translation, which finds the writes into the batch
    reach_of_loss,  # in the program: graph passes drop what is multiplied by 0, autograd does not
    reach_of_results,
    share_results,  # after the translation, which has a better message for a write it refuses
    note_regions,  # of the finished graph
    judge_evaluation,  # of the finished graph
    guard_sizes,
    rehearse,  # after the sizes are known: it runs a smaller batch
    say_notes,
)


def _answers(asked: list[tuple[str, Any]], sharing: Sharing) -> list[tuple[str, Any]]:
    """Returns a run's answers about memory layouts, and on shared memory where that matters."""
    calls = sharing.answers()
    return [*asked, *(calls[i] for i in sharing.matter())]


def _alike(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the tensor's memory layout: storage, offset and strides."""
    held = torch.empty(0, dtype=x.dtype, device=x.device)
    return held.set_(x.untyped_storage().clone(), x.storage_offset(), x.size(), x.stride())


def _hint(answer: object) -> object:
    """Returns a symbolic size or condition of the trace as its value for this batch."""
    return answer.node.hint if isinstance(answer, torch.SymInt | torch.SymBool) else answer


def _ask(traced: Traced) -> None:
    traced.flat.ask(*[t.clone() for t in traced.leaves.tensors])


def _exported(traced: Traced) -> ExportedProgram:
    """Returns the exported program. A forward that branches on tensors runs once in eager mode
    first, for the answers."""
    flat, leaves = traced.flat, traced.leaves
    with contextlib.suppress(Unasked):
        return export(flat, leaves.tensors, leaves.names, traced.held)
    _ask(traced)  # outside, so that Unasked is no cause of what the second try raises
    return export(flat, leaves.tensors, leaves.names, traced.held)


def _translate(traced: Traced) -> None:
    """Adds the program's nodes to the graph, and names its outputs in the signature. Raises
    CaptureError for an output that is complex."""
    translator, want_loss = traced.translator, traced.request.want_loss
    names = traced.flat.noted.names
    outputs = [output_name(n) for n in names]
    if want_loss:
        outputs[0] = "loss"
    translator.run(dict(zip(outputs, translator.output_nodes(), strict=True)))
    graph = traced.result.graph
    for name, output in zip(names, outputs, strict=True):
        if isinstance(graph.outputs[output], Complex):
            raise CaptureError(
                f"the output {name!r} is complex, and a graph returns real numbers; fix: return "
                "its .real and .imag (torch.view_as_real)"
            )
    first = 1 if want_loss else 0  # by position: a result may also be named "loss"
    results = dict(zip(names[first:], outputs[first:], strict=True))
    loss = outputs[0] if want_loss else None
    losses = {name: results[given] for name, given in traced.flat.noted.losses.items()}
    graph.signature = graph.signature.but(loss=loss, results=results, losses=losses)


def _named(nodes: Collection[torch.fx.Node], translator: Translator) -> set[str]:
    """Returns the names of the graph inputs of these placeholders."""
    values = [translator.env[n] for n in nodes]
    return {v.name or "" for v in values if isinstance(v, Value)}  # a complex one is a pair


def _held_note(held: Held, names: list[str]) -> str:
    """Returns the note on held sizes, which are not free to vary."""
    dims = [
        f"{names[leaf]} dim {dim}" + (f" (multiples of {factor})" if factor else "")
        for (leaf, dim), (factor, _) in sorted(held.items())
    ]
    return f"the model is captured again for other sizes of: {', '.join(dims)}"


__all__ = ["STAGES", "Stage"]
