"""Refuses models that a graph would silently get wrong, each with its place and a fix.

Hooks do not run inside a graph. Forward hooks of torch.nn (weight norm, pruning), Transformers and
PEFT only compute the module's inputs and outputs, so that an export traces them. Any other hook may
have side effects, say on a list or a logger, which an export would lose.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.jit import ScriptModule
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _device, _python_dispatch

from onward.errors import CaptureError
from onward.model_state import Walk, module_of

# packages whose forward hooks are pure: they may be traced
_TRACED = ("torch.nn.", "torch.ao.", "transformers.", "peft.")

FORWARD_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
BACKWARD_HOOKS = {"_backward_hooks": "backward hook", "_backward_pre_hooks": "backward pre-hook"}
TENSOR_HOOKS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}
_GLOBAL = {"_global_" + attribute.lstrip("_"): kind for attribute, kind in FORWARD_HOOKS.items()}
_GLOBAL |= {"_global_" + attribute.lstrip("_"): kind for attribute, kind in BACKWARD_HOOKS.items()}

AUTOCAST_DEVICES = ("cpu", "cuda")
_CORE: Any = torch._C
_packing = _CORE._autograd._top_saved_tensors_default_hooks  # innermost (pack, unpack), or None
NO_HOOKS = "hooks do not run inside a graph; fix: remove the hook"
_TRACERS = ("torch.export.", "torch.fx.", "torch._export.", "torch._subclasses.")
_FETCH = f"{NO_HOOKS}, or use fetch= for an output of the model"


def refuse_model(
    model: torch.nn.Module,
    loss_fn: Any = None,
    trains: bool = True,
    tensor_hooks: bool = True,
    apart: Sequence[torch.nn.Module] = (),
) -> None:
    """Raises CaptureError listing everything in the model that its graph could not honour.

    trains: whether gradients are asked for; backward hooks matter only then. tensor_hooks: whether
    hooks on parameters matter too; where autograd itself accumulates gradients, it calls them.
    apart: modules that run in PyTorch, with their hooks.
    """
    aside = {id(m) for part in apart for m in part.modules()}
    roots = {"": model}
    if isinstance(loss_fn, torch.nn.Module):
        roots["loss_fn."] = loss_fn
    reasons = [*_autocast(), *_surroundings()]
    places: list[str] = []
    for prefix, root in roots.items():
        found = [*_wrapped(root, prefix, aside), *_module_hooks(root, prefix, trains, aside)]
        reasons += [reason for _, reason in found]
        places += [place for place, _ in found]
        reasons += _tensors(root, prefix, trains and tensor_hooks)
        reasons += _of_inference_mode(root, prefix) if trains else ()
    if reasons:
        error = CaptureError("the model cannot be captured: " + "; ".join(reasons))
        if len(places) == len(reasons):  # running these modules in PyTorch would mend them all
            error.places = tuple(dict.fromkeys(places))
        raise error


def refuse_surroundings(autocast: bool = True) -> None:
    """Raises CaptureError where a mode, a global hook or (if `autocast` is set) autocast is active,
    which would act in eager mode but not in a graph."""
    reasons = [*(_autocast() if autocast else ()), *_surroundings()]
    if reasons:
        raise CaptureError("; ".join(reasons))


def _autocast() -> Iterator[str]:
    if any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES)):
        yield (
            "torch.autocast is on; fix: call outside of the autocast block, and use "
            "mixed_precision= instead"
        )


def _surroundings() -> Iterator[str]:
    stacks = (
        getattr(torch.overrides, "_get_current_function_mode_stack", list),
        getattr(_python_dispatch, "_get_current_dispatch_mode_stack", list),
    )
    for mode in itertools.chain.from_iterable(stack() for stack in stacks):
        if type(mode) is _device.DeviceContext:
            continue  # torch.set_default_device
        if type(mode).__module__.startswith(_TRACERS):
            yield (
                f"torch's tracing mode {type(mode).__name__} is active: this is a call within a "
                "trace, or an exception from another thread has interrupted one; fix: call outside "
                "of the trace, or start a new process"
            )
            continue
        yield (
            f"the mode {type(mode).__name__} is active, whose code a graph would not run; "
            "fix: call outside of its block"
        )
    packing = _packing(True)
    if packing and not keeps_numbers(packing[0]):
        yield (
            "torch.autograd.graph.saved_tensors_hooks are active, which a graph does not "
            "call; fix: call outside of the block"
        )
    for attribute, kind in _GLOBAL.items():
        yield from _hooks(getattr(modules, attribute, {}), f"global {kind}", "every module", _FETCH)


def keeps_numbers(pack: Any) -> bool:
    """Returns whether a pack hook belongs to save_on_cpu or checkpoint, which unpack a tensor with
    the same numbers."""
    held = ("torch.autograd.graph", "torch.utils.checkpoint")
    return pack is _same_numbers or getattr(pack, "__module__", "") in held


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _same_numbers(x: torch.Tensor) -> torch.Tensor:
    """Returns x detached: x itself would make a cycle where an operator saves its own result."""
    return x.detach()


def apart_from_hooks() -> Any:
    """Returns a context in which an enclosing `torch.utils.checkpoint` does not count the tensors
    that a capture saves."""
    if not _packing(True):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same_numbers, _as_it_is)


def _wrapped(root: torch.nn.Module, prefix: str, aside: set[int]) -> Iterator[tuple[str, str]]:
    """Yields (path, reason) of modules that are TorchScript or DistributedDataParallel."""
    for path, module in root.named_modules(prefix=prefix.rstrip(".")):
        where = path or "the model"
        if id(module) in aside:
            continue
        if isinstance(module, ScriptModule):
            yield path, f"{where} is TorchScript; fix: pass the original torch.nn.Module"
            return  # so are its submodules
        if isinstance(module, DistributedDataParallel):
            yield (
                path,
                f"{where} is wrapped in DistributedDataParallel, which no graph runs; fix: pass "
                "its .module, and mesh={'dp_replicate': N} to a Trainer on N ranks",
            )


def _module_hooks(
    root: torch.nn.Module, prefix: str, trains: bool, aside: set[int]
) -> Iterator[tuple[str, str]]:
    named = dict(root.named_modules(prefix=prefix.rstrip(".")))
    for path, module in named.items():
        if id(module) in aside:
            continue
        where = path or type(module).__name__
        for attribute, kind in FORWARD_HOOKS.items():
            hooks = getattr(module, attribute, {})
            for reason in _hooks(hooks, kind, where, _FETCH):
                yield _owner(hooks, named, path), reason
        for attribute, kind in BACKWARD_HOOKS.items() if trains else ():
            hooks = getattr(module, attribute, {})
            for reason in _hooks(hooks, kind, where, NO_HOOKS, ()):
                yield _owner(hooks, named, path), reason


def _owner(hooks: Mapping[int, Any], named: Mapping[str, torch.nn.Module], path: str) -> str:
    """Returns the path of the module that a module's hooks may set values on: an enclosing module
    that one of the hooks is a method of, or else the module itself."""
    owners = {id(getattr(hook, "__self__", None)) for hook in hooks.values()}
    above = path
    while "." in above:
        above = above.rpartition(".")[0]
        if above in named and id(named[above]) in owners:
            return above
    return path


def _hooks(
    hooks: Mapping[int, Any] | None,
    kind: str,
    where: str,
    fix: str,
    traced: Iterable[str] = _TRACED,
) -> Iterator[str]:
    for hook in (hooks or {}).values():
        if not is_traced(hook, traced):
            yield f"{where} has the {kind} {_origin(hook).__qualname__}; {fix}"


def is_traced(hook: Any, packages: Iterable[str] = _TRACED) -> bool:
    """Returns whether a forward hook comes from one of these packages, whose hooks are pure."""
    return f"{module_of(_origin(hook))}.".startswith(tuple(packages))


@contextmanager
def without_hooks(model: torch.nn.Module) -> Iterator[None]:
    """A context in which the model's modules have no hooks but those that may be traced."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
            hooks = vars(module).get(name)
            if hooks and not all(map(is_traced, hooks.values())):
                held.append((vars(module), name, hooks))
    try:
        for attributes, name, hooks in held:
            traced = [(key, hook) for key, hook in hooks.items() if is_traced(hook)]
            attributes[name] = OrderedDict(traced)
        yield
    finally:
        for attributes, name, hooks in held:
            attributes[name] = hooks


def _origin(hook: Any) -> Any:
    hook = getattr(hook, "func", hook)  # the function in a functools.partial
    return hook if hasattr(hook, "__qualname__") else type(hook)


def own_class(tensor: torch.Tensor) -> str | None:
    """Returns a phrase that refuses a subclass of torch.Tensor, None for torch's own classes. A
    subclass may redefine torch's functions, and in a trace its tensors have another class."""
    cls = type(tensor)
    mro = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    plain = all(module_of(c).startswith("torch.nn.") for c in mro)
    said = f"of {cls.__qualname__}, a subclass of torch.Tensor, which a graph cannot hold"
    return None if plain else said


def _tensors(root: torch.nn.Module, prefix: str, trains: bool) -> Iterator[str]:
    storages: dict[int, list[_Range]] = {}
    parameters, buffers = root.named_parameters(), root.named_buffers()  # tied ones are listed once
    for name, tensor in itertools.chain(parameters, buffers):
        name, trained = prefix + name, isinstance(tensor, torch.nn.Parameter)
        if torch.nn.parameter.is_lazy(tensor):
            yield f"{name} is a lazy parameter without a shape; fix: call the model once first"
            continue
        strange = own_class(tensor)
        if strange:
            yield f"{name} is {strange}; fix: use a plain torch.Tensor"
            continue
        if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr():
            held = storages.setdefault(tensor.untyped_storage().data_ptr(), [])
            held.append(_Range(*_bytes_of(tensor), name, trained))
        for attribute, kind in TENSOR_HOOKS.items() if trains else ():
            yield from _hooks(getattr(tensor, attribute, None), kind, name, NO_HOOKS, ())
    for held in storages.values():
        for first, second in _overlapping(held):
            yield (
                f"{second} and {first} overlap in memory (different views of one storage); "
                "fix: clone() one of them"
            )


def _of_inference_mode(root: torch.nn.Module, prefix: str) -> Iterator[str]:
    found = [name for name, p in root.named_parameters() if p.requires_grad and p.is_inference()]
    if found:
        more = f" and {len(found) - 1} other parameters" if found[1:] else ""
        yield (
            f"{prefix}{found[0]}{more} created under torch.inference_mode cannot be trained; "
            "fix: create the model outside of it"
        )


class _Range(NamedTuple):
    """The range [start, end) of a tensor's bytes in its storage, gaps between elements included."""

    start: int
    end: int
    name: str
    trained: bool


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _overlapping(held: list[_Range]) -> Iterator[tuple[str, str]]:
    """Yields pairs of names of tensors whose byte ranges overlap, at least one of them a parameter.
    Parameters side by side in one flat buffer (as DeepSpeed's) do not overlap."""
    order = {r.name: i for i, r in enumerate(held)}
    open_: list[_Range] = []
    for at in sorted(held):
        open_ = [r for r in open_ if r.end > at.start]
        for other in open_:
            if at.end > at.start and (at.trained or other.trained):
                first, second = sorted((at.name, other.name), key=order.__getitem__)
                yield first, second
        open_.append(at)


def refuse_unlisted(
    constants: Iterable[torch.Tensor], model: torch.nn.Module, loss_fn: Any
) -> None:
    """Raises CaptureError where autograd would give a gradient to a tensor that the forward reads
    (one of `constants`) and that is in neither the model's nor the loss's `parameters()`."""
    read = {t.untyped_storage().data_ptr() for t in constants}
    for path, tensor in Walk(model, loss_fn).named_tensors() if read else ():
        if tensor.requires_grad and tensor.untyped_storage().data_ptr() in read:
            raise CaptureError(
                f"the forward reads the parameter {path}, which requires grad but is not in "
                "model.parameters(); fix: register it (a module attribute, ModuleList or "
                "ParameterList), or requires_grad_(False)"
            )


def refuse_constant(tensor: torch.Tensor, owned: Mapping[str, torch.Tensor]) -> None:
    """Raises CaptureError for a constant tensor that requires grad or shares a parameter's memory.

    owned: the model's parameters and buffers by path. A constant may share a buffer's memory: it is
    captured anew when the buffer changes.
    """
    fix = "fix: read it through its module, so that the graph holds it as a parameter"
    if tensor.requires_grad:
        raise CaptureError(
            f"the forward reads a tensor of shape {tuple(tensor.shape)} that requires grad "
            f"but is not in model.parameters(); {fix}"
        )
    pointer = tensor.untyped_storage().data_ptr()
    for name, other in owned.items() if pointer else ():
        trained = isinstance(other, torch.nn.Parameter)
        if trained and other.untyped_storage().data_ptr() == pointer:
            raise CaptureError(
                f"the forward reads the memory of {name} through another tensor (a list, a "
                f"closure, a view); {fix}"
            )


__all__ = [
    "AUTOCAST_DEVICES",
    "BACKWARD_HOOKS",
    "FORWARD_HOOKS",
    "NO_HOOKS",
    "TENSOR_HOOKS",
    "apart_from_hooks",
    "is_traced",
    "keeps_numbers",
    "own_class",
    "refuse_constant",
    "refuse_model",
    "refuse_surroundings",
    "refuse_unlisted",
    "without_hooks",
]
