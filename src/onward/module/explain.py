"""explain: describes a model's training step, in the user's own loop or in a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from onward.capture import unwrapped
from onward.compile import Compiler
from onward.errors import CaptureError, OnwardError
from onward.explanation import (
    ExplanationRequest,
    StepExplanation,
    Subject,
    asked_for,
    explained,
    refused,
)
from onward.module.accelerate import CACHE, Accelerated, accelerated
from onward.module.arguments import bind_call
from onward.module.around import Mode, autocast_off, surroundings, uses_cache
from onward.module.graphs import HalvesRequest
from onward.module.prepared_call import PreparedCall
from onward.options import ModuleOptions
from onward.prepare.batch import Batch
from onward.prepare.graphs import Graphs
from onward.prepare.planned_amount import planned_amount
from onward.prepare.prepared_batch import OutputRequest
from onward.prepare.session import Session
from onward.train import Trainer
from onward.train.optim import record_of
from onward.train.state_form import tensors_of


def explain(
    model: Any,
    batch: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: int | str | None = None,
    batch_sizes: Sequence[int] = (),
    optimizer: torch.optim.Optimizer | None = None,
    profile: bool = False,
    gpu: str | None = None,
) -> StepExplanation:
    """Explains the training step of a model or of an `onward.Trainer`. Changes nothing.

    model: an accelerated module, an `onward.Module`, a plain module (which stays plain), or a
    Trainer. batch: a mapping gives keyword arguments, a tuple or list positional ones, anything
    else the only one; `kwargs` are added. Without a batch, the step that ran last is explained.
    memory: bytes, or text such as "2GB"; the explanation then says how large a batch fits.
    batch_sizes: those to predict the memory of. optimizer: of the user's own loop, so that its
    state is counted. profile: times the launches of one more run, on copies. gpu: plans the step
    for a GPU that need not be here, such as "H100" (`onward.kernels.GPUS`). Raises OnwardError for
    any other model or GPU, and where no batch is given and nothing has run.
    """
    more = asked_for(memory, batch_sizes, profile, gpu)
    given = _given(batch, kwargs)
    if isinstance(model, Trainer):
        return model.explain_call(given, asked=more)
    held = _held(model)
    if optimizer is not None and not hasattr(optimizer, "state"):  # others wrap such a one
        raise OnwardError(
            f"optimizer is a {type(optimizer).__name__}, and a loop of your own steps one of "
            "torch.optim; fix: give that one, or explain a Trainer"
        )
    state = None if optimizer is None else state_bytes(optimizer)
    if given is None:
        return _explain_last(held, state, more)
    return _explain_call(held, *given, state, more)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, as it is or as it will be after the first step. Raises
    OnwardError for an unknown optimizer that has not stepped."""
    tensors = [
        t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    ]
    if tensors:
        return sum(t.numel() * t.itemsize for t in tensors)
    try:
        record = record_of(optimizer)
    except OnwardError:
        raise OnwardError(
            f"{type(optimizer).__name__} has no state yet, since it has not stepped; fix: "
            "explain after the first optimizer.step(), or leave out optimizer="
        ) from None
    trained = ((p, g) for g in optimizer.param_groups for p in g["params"] if p.requires_grad)
    return sum(
        tensor.numel() * tensor.itemsize
        for p, group in trained
        for slot, tensor in tensors_of(record, "", p).items()
        if record.kept(group, slot)
    )


def _given(
    batch: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The positional and keyword arguments of a call; None where none are given."""
    named = dict(kwargs or {})
    if batch is None:
        return ((), named) if named else None
    if isinstance(batch, Mapping):
        return (), {**batch, **named}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), named
    return (batch,), named


def _held(model: Any) -> Accelerated:
    """The Accelerated that runs the model's calls, or a new one for a plain module. Raises
    OnwardError for anything but a module."""
    if not isinstance(model, torch.nn.Module):
        raise OnwardError(
            "explain takes a torch.nn.Module or an onward.Trainer, not a "
            f"{type(model).__name__}; fix: pass the model"
        )
    held = accelerated(model)
    return Accelerated(unwrapped(model), ModuleOptions()) if held is None else held


def _explain_last(
    held: Accelerated, state: int | None, asked: ExplanationRequest
) -> StepExplanation:
    with held.locked(), autocast_off():
        call = held.last_call()
        last = call.last
        assert last is not None, "a last call has run"
        subject = _subject(held, call, last.batch, last.results, last.ends, state)
        return explained(replace(subject, ran=last.prepared), asked)


def _explain_call(
    held: Accelerated,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: int | None,
    asked: ExplanationRequest,
) -> StepExplanation:
    model = held.model
    reason = surroundings()
    if reason is None and uses_cache(model, kwargs, held.takes_cache, held.cache_setting):
        reason = CACHE
    if reason is not None:
        return refused(model, "module", reason)
    try:
        batch = bind_call(args, kwargs)
        call = held.find(batch)
    except CaptureError as error:
        return refused(model, "module", error)
    if isinstance(call, str):
        return refused(model, "module", call)
    with held.locked(), autocast_off():
        return explained(_next(held, call, batch, state), asked)


def _next(held: Accelerated, call: PreparedCall, batch: Batch, state: int | None) -> Subject:
    """Describes the call as the user's loop will make it."""
    results = call.usual(held.options.outputs)
    ends: tuple[str, ...] = ()
    if torch.is_grad_enabled():
        names = [n for n in results if n in call.differentiable]
        ends = tuple(n for n in call.ends if n in names) or tuple(names)
    return _subject(held, call, batch, tuple(results), ends, state)


def _subject(
    held: Accelerated,
    call: PreparedCall,
    batch: Batch,
    results: tuple[str, ...],
    ends: tuple[str, ...],
    state: int | None,
) -> Subject:
    model, compiler, captured = held.model, call.compiler, call.captured
    request = HalvesRequest(results) if ends else OutputRequest(results)

    def graphs(other: Compiler) -> Graphs:
        base = Graphs(other, captured)
        return call.halves(base, ends) if ends else base

    def again(args: tuple[Any, ...], kwargs: dict[str, Any], target: tuple[Any, ...]) -> Subject:
        """Describes the call of a batch that needs another capture; leaves the model's own calls
        alone."""
        quiet, other = compiler.quiet(), bind_call(args, kwargs)
        session = Session(held.memory, memory_budget=planned_amount(held.options, model))
        made = held.capture(quiet, model, other, Mode(bool(ends), captured.autocast))
        found = PreparedCall(other, quiet, made, session)
        return _subject(held, found, other, results, ends, state)

    return Subject(
        model=model,
        loop="module",
        batch=batch,
        captured=captured,
        compiler=compiler,
        memory_budget=planned_amount(held.options, model),
        graphs=graphs,
        request=request,
        halves=bool(ends),
        still=call.without_gradient(ends),
        again=again,
        optimizer=state,
    )


__all__ = ["explain", "state_bytes"]
