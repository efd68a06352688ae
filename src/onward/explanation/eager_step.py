"""What eager PyTorch launches for a step on a GPU, found by running it under fake tensors.

The copy of the model that runs has no numbers, so that neither the GPU nor memory for the step is
needed, and the user's model and generators stay as they are.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from onward.capture.trace.flat_call import name_outputs
from onward.errors import one_line
from onward.explanation.as_on_cuda import ATTENTION_FLOPS, AsOnCuda
from onward.explanation.gpu_seconds import LaunchWork
from onward.model_state.eager_context import eager
from onward.model_state.effects import RandomState
from onward.prepare.batch import Batch

_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm")}
_FLOPS = {**flop_registry, **ATTENTION_FLOPS}
_CASTS = ("aten._to_copy",)  # most are autocast's, which adds them without Python
_VIEWS = ("aten._unsafe_view", "aten.detach")  # do not call themselves views
_arguments = attrgetter("_schema.arguments")  # of an operator


@dataclass
class EagerWork:
    """The work of a step in eager PyTorch. launches: of each operator but views. operators: number
    of those that are neither views nor casts. light: number of views and casts."""

    launches: list[LaunchWork] = field(default_factory=list)
    operators: int = 0
    light: int = 0


def eager_work(
    model: torch.nn.Module,
    loss_fn: Callable[..., Any] | None,
    batch: Batch,
    autocast: torch.dtype | None,
    backward: bool,
    bf16: bool = True,
) -> EagerWork | str:
    """Returns the work of forward and backward, or the reason why it is unknown. backward: False
    for the forward without gradients. bf16: whether the GPU multiplies bf16 as such. The loss is
    loss_fn's, or the output `loss`, or the sum of all outputs."""
    random, unpadded = RandomState(), _hides_nothing(batch)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    log = _Log(bf16)
    try:
        with warnings.catch_warnings(), _unlogged(), torch.random.fork_rng(devices=[]), eager():
            warnings.simplefilter("ignore")
            with FakeCopyMode(mode):
                model, loss_fn = copy.deepcopy((model, loss_fn))
            args, kwargs, target = pytree.tree_map_only(torch.Tensor, mode.from_tensor, batch.given)
            device = next((t.device.type for t in batch.tensors), "cpu")
            grad = torch.enable_grad() if backward else torch.no_grad()
            with mode, AsOnCuda(unpadded), _masks_as_in_a_run(), log, grad:
                with _autocast(device, autocast):
                    outputs = model(*args, **kwargs)
                    loss = _loss(outputs, loss_fn, target) if backward else None
                if loss is not None:
                    loss.backward()
    except Exception as error:  # any: a model may do what fake tensors cannot
        return one_line(f"{type(error).__name__}: {error}", 160)
    finally:
        random.restore()
    return log.found


def _hides_nothing(batch: Batch) -> bool:
    """Whether the attention masks among a batch's tensors, if there are any, hide no key."""
    masks = [v for k, v in batch.kwargs.items() if "mask" in k and isinstance(v, torch.Tensor)]
    return all(bool(mask.all()) for mask in masks)


@contextmanager
def _unlogged() -> Iterator[None]:
    """PyTorch logs a traceback of its own where an operator refuses fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _masks_as_in_a_run() -> Iterator[None]:
    """Transformers drops a mask that hides nothing, but keeps a fake one; within, it drops it, as
    it does in a run."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if before is None:
        yield
        return
    module.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        module.is_fake_tensor = before


def _autocast(device: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device, dtype)


def _loss(
    outputs: Any, loss_fn: Callable[..., Any] | None, target: tuple[Any, ...]
) -> torch.Tensor | None:
    """The scalar that backward starts from; None if no output requires a gradient."""
    if loss_fn is not None:
        return loss_fn(outputs, *target)
    named = name_outputs(outputs)
    if "loss" in named:
        return named["loss"]
    sums = [y.sum() for y in named.values() if y.requires_grad]
    return torch.stack(sums).sum() if sums else None


class _Log(TorchDispatchMode):
    """Writes down the work of each operator that is called within."""

    def __init__(self, bf16: bool) -> None:
        super().__init__()
        self.found = EagerWork()
        self._low = (torch.float16, torch.bfloat16) if bf16 else (torch.float16,)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        out = func(*args, **given)
        if func.namespace == "prim" or func.namespace == "profiler":
            return out
        name = str(func.overloadpacket)
        if func.is_view or name in _VIEWS:
            self.found.light += 1
            return out
        if name in _CASTS:
            self.found.light += 1
        else:
            self.found.operators += 1
        self.found.launches.append(_work(func, args, given, out, self._low))
        return out


def _work(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    low: tuple[torch.dtype, ...],
) -> LaunchWork:
    taken = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    nbytes = sum(t.numel() * t.itemsize for t in (*taken, *made))
    packet = func.overloadpacket
    if packet not in _FLOPS:
        return LaunchWork(nbytes=nbytes)
    attention = "attention" in func.name()
    flops = _flops(packet, args, kwargs, out)
    if attention and _is_causal(func, args, kwargs):
        flops /= 2
    matrices = [t for t in (*taken, *made) if t.dim() > 1] if packet in _PRODUCTS else []
    rows = tuple(max(t.stride()[-2:]) for t in matrices)
    return LaunchWork(flops, nbytes, any(t.dtype in low for t in taken), attention, rows)


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    if packet in ATTENTION_FLOPS:
        shapes = pytree.tree_map_only(torch.Tensor, lambda t: t.shape, args)
        return float(ATTENTION_FLOPS[packet](*shapes))
    return float(_FLOPS[packet](*args, **kwargs, out_val=out))


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in _arguments(func)]
    return bool((dict(zip(names, args, strict=False)) | kwargs).get("is_causal"))


__all__ = ["EagerWork", "eager_work"]
