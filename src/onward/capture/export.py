"""Captures a call: runs the stages, and tries again with sizes held or parts left in PyTorch.

The whole call (the model, then the loss where one is given) is exported as `forward(*leaves)`, with
sizes above 1 symbolic. Two tensors whose sizes along the same dim are equal in the first batch
share a symbol there, and the equality is guarded (`CapturedModule.dims`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import torch

from onward.capture.batch_leaves import BatchLeaves
from onward.capture.captured_module import CapturedModule
from onward.capture.graph_module import GraphModule
from onward.capture.held_sizes import Held
from onward.capture.huggingface import forward_defaults
from onward.capture.regions import RegionSearch
from onward.capture.request import CaptureRequest
from onward.capture.stages import STAGES
from onward.capture.trace.export import ONE_AT_A_TIME
from onward.capture.trace.flat_call import FlatCall
from onward.capture.trace.refusals import refuse_layer_drop
from onward.capture.traced import SizesToHold, Traced
from onward.errors import CaptureError
from onward.model_state import reading
from onward.model_state.eager_context import eager
from onward.model_state.effects import RandomState
from onward.model_state.refusals import refuse_model
from onward.signals import signals_wait


def capture(request: CaptureRequest) -> CapturedModule:
    """Captures the model's forward (in its present training mode) and the loss as a graph.

    Signals wait until its end, or until they come a second time. Raises CaptureError with
    everything that is known to prevent it.
    """
    if isinstance(request.model, GraphModule):
        return request.model.captured(request)
    # a try may switch the model's mode for a while
    request = replace(request, gradients=request.differentiated)
    draws = RandomState()
    try:
        ONE_AT_A_TIME.require_whole("capturing a model")
        # torch.export keeps modes of the whole process, which an interrupt within it leaves on
        with (
            ONE_AT_A_TIME, signals_wait(insistent=True), eager(),
            reading(request.model, request.loss_fn) as reads,
        ):  # fmt: skip
            captured = _first_that_works(request)
    except BaseException:
        draws.restore()
        raise
    # with regions, undo what the search's runs have drawn; without, a forward that draws in every
    # run is refused, and one that draws in its first run alone has had that run now
    if captured.regions:
        draws.restore()
    captured.reads = reads
    if request.trains and request.want_loss:
        refuse_layer_drop(captured.regions)
    return captured


def _first_that_works(request: CaptureRequest) -> CapturedModule:
    """Tries a capture for all batches; else one for batches with the same numbers where the forward
    reads them into Python; else, where the request allows it, one with regions in PyTorch. Raises
    the CaptureError of the first try where all fail."""
    try:
        return _with_sizes_held(request)
    except CaptureError as error:
        with contextlib.suppress(Exception):  # the forward runs in eager mode too
            return _with_sizes_held(request, values=True)
        if request.regions:
            search = RegionSearch(request.model, request.differentiated)
            again = partial(_with_sizes_held, request, False)
            made = search.captured(error, partial(_eager_call, request), again)
            if made is not None:
                return made
        raise error from error.__cause__


def _with_sizes_held(
    request: CaptureRequest, values: bool = False, parts: RegionSearch | None = None
) -> CapturedModule:
    """Captures again with more sizes held until the graph can be made. values: whether to bake in
    the numbers that the forward reads into Python. parts: the submodules that run in PyTorch.
    Raises CaptureError."""
    apart = [] if parts is None else parts.modules
    refuse_model(request.model, request.loss_fn, request.trains, request.want_loss, apart)
    found = _through_stages(request, {} if parts is None else parts.held, values, parts)
    while not isinstance(found, CapturedModule):  # each time more sizes, or more of them numbers
        found = _through_stages(request, found, values, parts)
    return found


def _through_stages(
    request: CaptureRequest, held: Held, values: bool, parts: RegionSearch | None
) -> CapturedModule | Held:
    """Runs the stages once with these sizes held. Returns the capture, or the sizes that the next
    try has to hold. Raises CaptureError."""
    with contextlib.nullcontext() if parts is None else parts.recorded():
        traced = Traced.of(request, held, values, parts)
        try:
            for stage in STAGES:
                stage(traced)
        except SizesToHold as more:
            return more.held
        return traced.result


def _eager_call(request: CaptureRequest) -> tuple[FlatCall, list[torch.Tensor]]:
    """Returns the call to run in eager mode, and the batch's tensors to run it on."""
    leaves = BatchLeaves.of(request, keeps_flags=request.differentiated)
    flat = FlatCall(replace(request, whole=False), leaves.spec, leaves.fixed)
    flat.extra = forward_defaults(request.model, request.kwargs)
    return flat, leaves.tensors


__all__ = ["capture"]
