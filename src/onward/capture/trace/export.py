"""Runs `torch.export` on a flat call, with the patches that it needs."""

from __future__ import annotations

import importlib
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from typing import Any

import torch
import torch.fx.config as fx
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from onward.capture.custom_ops import ctc as ctc_op
from onward.capture.custom_ops.recurrent import recurrent_layers_kept_whole
from onward.capture.held_sizes import Held, dynamic_shapes
from onward.capture.huggingface import attention_kept_whole, log_probs_kept_whole
from onward.capture.mode_reads import noting_mode
from onward.capture.regions.blame import causes
from onward.capture.trace.autocast_blocks import autocast_noted
from onward.capture.trace.cheaper import cheaper
from onward.capture.trace.data_branches import Unasked
from onward.capture.trace.flat_call import FlatCall
from onward.capture.trace.gradient_code import refusing_gradient_code
from onward.capture.trace.refusals import refusal
from onward.capture.trace.replaced import run_once
from onward.capture.trace.torch_nn.running_mean import averaged_over_batches
from onward.capture.trace.torch_nn.transformer_encoder import padded_with_zeros
from onward.errors import CaptureError
from onward.forks import Lock
from onward.model_state.patches import Patch, patched

ONE_AT_A_TIME = Lock()  # held by a capture, since it patches what all threads share
_tracing: list[int] = []  # ids of the thread that is tracing
_LOGS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def traced_elsewhere() -> bool:
    """Returns whether another thread is tracing a model; torch's own flag is on in all threads."""
    now = _tracing[-1:]
    return bool(now) and now[0] != threading.get_ident()


def untraced() -> None:
    """Waits until no other thread is tracing, which replaces its model's parameters."""
    if traced_elsewhere():
        with ONE_AT_A_TIME:
            pass


def export(
    flat: FlatCall, tensors: list[torch.Tensor], names: list[str], held: Held
) -> ExportedProgram:
    """Returns the call as an exported program, sizes above 1 symbolic. names: the names of the
    tensors. held: dims whose sizes are numbers, or multiples of a symbol.

    Raises CaptureError with the reason where it cannot be traced.
    """
    try:
        return _exported(flat, tensors, names, held)
    except Unasked:
        raise
    except CaptureError:
        if flat.alone or not flat.noted.over_all:
            raise
    flat.alone = True  # loops over all experts may be traced turn by turn
    return _exported(flat, tensors, names, held)


def _exported(
    flat: FlatCall, tensors: list[torch.Tensor], names: list[str], held: Held
) -> ExportedProgram:
    # sizes 0 and 1 are left out, since every export specializes them
    shapes = {"leaves": dynamic_shapes(tensors, held)}
    try:
        # with `use_cache` on, a model does not look for packed documents, in eager mode either
        with (
            ONE_AT_A_TIME,
            _unlogged(),
            _capturing(flat, "position_ids" in names and not flat.extra),
            nullcontext() if flat.regions is None else flat.regions.tracing(),
            noting_mode(flat.model) if flat.gradients else nullcontext() as flat.noted.mode,
        ):
            _tracing.append(threading.get_ident())
            try:
                made = torch.export.export(
                    flat, tuple(tensors), dynamic_shapes=shapes, strict=False
                )
            finally:
                _tracing.pop()
            _note_readers(made.graph_module)
            return made
    except CaptureError:
        raise
    except Exception as error:
        cause = next((e for e in reversed(causes(error)) if isinstance(e, CaptureError)), None)
        if cause is not None:
            raise cause from None
        raise refusal(error, flat.model) from error


def _note_readers(module: torch.nn.Module) -> None:
    """Adds nodes to the `users` of their inputs, which an export with gradient-mode regions leaves
    incomplete."""
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            for node in inner.graph.nodes:
                for read in node.all_input_nodes:
                    read.users.setdefault(node, None)


@contextmanager
def _unlogged() -> Iterator[None]:
    """A context in which an export in this thread does not log or print errors: the caller has a
    message of its own for a model that is refused or runs in eager mode."""
    here, logs = threading.get_ident(), [logging.getLogger(name) for name in _LOGS]

    def others(record: logging.LogRecord) -> bool:
        return record.thread != here

    for log in logs:
        log.addFilter(others)
    try:
        # imported here: it brings in Dynamo, which a capture from the cache has no use for
        made = importlib.import_module("torch.export._trace")
        with patched([(vars(made), "print", _nothing)]):  # it prints the unfinished graph
            yield
    finally:
        for log in logs:
            log.removeFilter(others)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def _capturing(flat: FlatCall, own_positions: bool) -> Iterator[None]:
    """A context with all patches that an export needs; they do not act in other threads."""
    transformer = torch.nn.modules.transformer

    def causal_as_said(mask: Any, is_causal: Any = None, size: Any = None) -> bool:
        """Returns what the caller says: the original inspects data, which an export lacks."""
        return bool(is_causal)

    places: list[Patch] = [
        (torch, "ctc_loss", ctc_op.recorded),
        (transformer, "_detect_is_causal_mask", causal_as_said),
        (torch.nn.Module, "to", _moved),
    ]
    places += [*run_once(), *_tracing_alone(), *cheaper()]
    if hasattr(fx, "do_not_emit_stack_traces"):  # a capture does not read stack traces
        places.append((fx, "do_not_emit_stack_traces", True))
    with (
        patched(places),
        torch.set_grad_enabled(flat.gradients),  # if on, `no_grad` and detach are recorded
        attention_kept_whole(flat.model, own_positions),
        refusing_gradient_code(flat.gradients),
        padded_with_zeros(flat.gradients),
        recurrent_layers_kept_whole(),
        log_probs_kept_whole(),
        averaged_over_batches(),
        autocast_noted(flat.device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _tracing_alone() -> list[Patch]:
    """Returns patches that let other threads' modules run as usual: an export intercepts the calls
    and attributes of modules in all threads."""
    here, plain = threading.get_ident(), _ModuleStackTracer
    call, get = plain.call_module, plain.getattr

    def call_module(tracer: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return forward(*args, **kwargs)
        return call(tracer, module, forward, args, kwargs)

    def getattr_(tracer: Any, name: str, value: Any, cache: Any) -> Any:
        return get(tracer, name, value, cache) if threading.get_ident() == here else value

    # not functions, since `patched` would let those act in this thread alone
    return [(plain, "call_module", partialmethod(call_module)),
            (plain, "getattr", partialmethod(getattr_))]  # fmt: skip


_to: Any = torch.nn.Module.to
_parse_to: Any = getattr(torch._C, "_nn")._parse_to  # noqa: B009


def _moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to` for a trace: does nothing if every tensor is as requested. The original assigns
    every parameter even then, which a trace does not allow."""
    device, dtype, _, lying = _parse_to(*args, **kwargs)
    tensors = [*module.parameters(), *module.buffers()]
    as_asked = lying is None and all(
        device in (None, t.device)
        and (dtype in (None, t.dtype) or not (t.is_floating_point() or t.is_complex()))
        for t in tensors
    )
    return module if as_asked else _to(module, *args, **kwargs)


__all__ = [
    "ONE_AT_A_TIME",
    "export",
    "traced_elsewhere",
    "untraced",
]
