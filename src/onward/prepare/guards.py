"""Guards: whether a captured graph still describes the model, its loss function and their state.

Checked, on the model, its loss function and everything they refer to:
  - parameters and buffers: identity, dtype, shape, strides, `requires_grad`, ties, hooks;
  - submodules: identity, order, names, training flags, classes, hooks;
  - plain attributes: numbers, strings, flags, enums, containers, config objects, functions,
    partials, tensors and arrays;
  - attributes of plain objects such as a config, `facts.DEPTH` levels deep, but only those that a
    capture has read;
  - code: a `forward` or another function replaced on an instance or a class, a function's own code,
    and for code outside of installed packages its defaults, closure and the globals it names, also
    where a library's decorator has wrapped it, and attributes of the user's own modules;
  - tensors that were baked in as constants, also where they were written in place through an alias;
  - the default dtype and the default device.

Not checked:
  - attributes of plain objects that no capture has read (model_state/reads.py);
  - the elements of a container of more than `facts.ELEMENTS`: only its length;
  - arrays larger than `facts.BYTES` bytes edited in place; baked tensors as large, written without
    autograd's version counter (`.data`, `.numpy()`);
  - objects after the first `walk.VALUES` that a walk meets, or nested deeper than `walk.NESTING`: a
    log line says where the walk stopped;
  - the content of objects of extension types, of torch and of the standard library: only identity;
  - names that code computes of modules (`globals()["x"]`, `sys.modules["x"]`);
  - globals read by installed packages, files, environment variables, the clock.

The check at each step compares object identities, in a few passes that stay within C. Only where
one differs are all facts read again and compared by value.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from operator import is_
from pathlib import Path
from typing import Any

import torch

from onward.capture import ONE_AT_A_TIME, Captured, refuse_surroundings
from onward.model_state import Sweep, Walk, facts
from onward.model_state.walk import Read

OFTEN = 5  # changes of one attribute before a warning says that recapturing is slow

log = logging.getLogger("onward")

_OPTIMIZER_HOOKS = {
    "_optimizer_step_pre_hooks": "step pre-hook",
    "_optimizer_step_post_hooks": "step post-hook",
}
_GLOBAL_HOOKS = {
    "_global_optimizer_pre_hooks": "global step pre-hook",
    "_global_optimizer_post_hooks": "global step post-hook",
}
_ABSENT = object()
_LIBRARIES = tuple(
    str(p) + os.sep for p in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


def code_around_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Describes the user's code that a call of `optimizer.step()` runs, and an update in a graph
    would not: hooks around it, which may read gradients, and a function in its place. None where
    there is none."""
    for step in (optimizer.step, type(optimizer).step):
        if not _is_its_own(step, type(optimizer)):
            return f"optimizer.step has been replaced by {_name_of(step)}"
    held = [(getattr(optimizer, name, {}), kind) for name, kind in _OPTIMIZER_HOOKS.items()]
    everywhere = sys.modules[torch.optim.Optimizer.__module__]
    held += [(getattr(everywhere, name, {}), kind) for name, kind in _GLOBAL_HOOKS.items()]
    for hooks, kind in held:
        for hook in hooks.values():
            return f"the optimizer has the {kind} {_name_of(hook)}"
    return None


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _is_its_own(step: Any, kind: type) -> bool:
    """Whether an optimizer's `step` is torch's, Onward's or its plugin class's own, wrapped at most
    by a learning rate scheduler's counter."""
    files = {c: getattr(sys.modules.get(c.__module__), "__file__", None) for c in kind.__mro__}
    written = {(file, f"{c.__qualname__}.step") for c, file in files.items()}
    while step is not None:
        code = getattr(getattr(step, "__func__", step), "__code__", None)
        if code is None:
            return False
        ours = code.co_filename.startswith(_LIBRARIES)
        if not ours and (code.co_filename, code.co_qualname) not in written:
            return False
        step = getattr(step, "__wrapped__", None)
    return True


class Guards:
    """The facts that the graphs of a model and its loss function depend on, as last read."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._flags: dict[str, bool] = {}
        self._roots: tuple[Any, ...] = ()
        self._sweep: Sweep | None = None
        # attribute names that captures read of plain objects (None: all), by path and by object id
        self._names: dict[str, frozenset[str] | None] | None = None  # None: all of each object
        self._plain: dict[int, tuple[Any, frozenset[str] | None]] = {}
        self._unread = True  # whether flags may differ from those of the last training step
        self._baked: list[torch.Tensor] = []
        self._marks: list[int] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._times: Counter[str] = Counter()
        # paths that parts running in PyTorch set in themselves
        self._set_apart: tuple[str, ...] = ()
        self._paths: list[str] = []  # what changed last

    def changed(
        self, model: torch.nn.Module, loss_fn: Any, training: bool, count: bool = True
    ) -> bool:
        """Whether earlier graphs no longer describe this model and loss function; the facts found
        now become the reference. Raises CaptureError where the surroundings, such as a trace, allow
        no graph.

        training: whether a training step is asked for. Training flags matter only there; a model in
        evaluation mode counts as all in training mode, since such a step puts it there. count:
        count a change towards the warning of slow recaptures at once; else the caller calls
        `count_changes`.
        """
        refuse_surroundings()
        same, kept = self._is_met(model, loss_fn), self._kept()
        if same and kept and not (training and self._unread):
            return False
        before = self._facts
        paths = [] if same else self._look(model, loss_fn)
        if not kept:
            paths.append("a tensor that the forward reads")
        self._unread = not training
        if training:
            paths += self._read_flags(model)
        if not paths:
            return False
        self._baked, self._marks, self._copies = [], [], []
        self._paths = paths if before else []
        if self._names is not None:  # facts that only the dropped graphs depended on
            self._names = None
            self._look(model, loss_fn)
        if count:
            self.count_changes()
        return True

    def fresh(self, model: torch.nn.Module, loss_fn: Any, training: bool) -> bool:
        """Whether nothing has changed since the last look, by object identities alone. training and
        errors: as in `changed`."""
        refuse_surroundings()
        return not (training and self._unread) and self._is_met(model, loss_fn) and self._kept()

    def _is_met(self, model: torch.nn.Module, loss_fn: Any) -> bool:
        roots = (model, loss_fn)
        return self._sweep is not None and all(map(is_, self._roots, roots)) and self._sweep.same()

    def count_changes(self) -> None:
        """Counts the last change as one that caused a capture."""
        self._count(self._paths)

    def saw(self, other: Guards, flags: bool = False) -> bool:
        """Whether the state that `other` has just read equals this one's, though its objects may
        differ; these guards then refer to the objects of `other`. flags: also require equal
        training flags."""
        if not other._roots or not self._kept():
            return False
        if flags and self._flags and self._flags != other._flags:
            return False
        model, loss_fn = other._roots
        seen = _walk(model, loss_fn, self._read_at)
        if self._without_apart(seen.facts) != self._facts:
            return False
        self._take(seen, model, loss_fn)
        self._unread = other._unread
        if flags:
            self._flags = other._flags
        return True

    def same(self, model: torch.nn.Module) -> bool:
        """Whether nothing but training flags has changed since the last look, by object identities
        alone."""
        return (
            self._sweep is not None
            and self._roots[0] is model
            and self._sweep.same()
            and self._kept()
        )

    def successor(self) -> Guards:
        """A copy of these guards that may diverge from them."""
        found = copy.copy(self)
        found._baked, found._marks, found._copies = [*self._baked], [*self._marks], [*self._copies]
        return found

    def restless(self, times: int) -> str | None:
        """The path that has changed most often, if at least `times` times over all successive
        states."""
        for path, count in self._times.most_common(1):
            return path if count >= times else None
        return None

    def _read_flags(self, model: torch.nn.Module) -> list[str]:
        """Reads the training flags; returns the paths of those that differ from the last training
        step's."""
        before = self._flags
        self._flags = {
            f"{name}.training": m.training or not model.training
            for name, m in model.named_modules(prefix="model")
        }
        return [n for n, flag in self._flags.items() if before and before.get(n) != flag]

    def settle(self, captured: Captured) -> bool:
        """Takes the state after a capture as the one that its graph holds for. Returns whether the
        forward has set anything else, which earlier graphs may read."""
        self._leave_apart(captured)
        paths = self._look(*self._roots)  # includes changes that a refused capture has left
        self._count(paths)
        self._narrow(captured)
        assert self._sweep is not None
        # a parameter of another model is baked as an alias that has a version counter of its own
        owners = {t.data_ptr(): t for t in self._sweep.tensors if t.numel()}
        baked: list[torch.Tensor] = list(captured.constants)
        found = [owners.get(t.data_ptr(), t) for t in baked]
        self._baked = list({id(t): t for t in (*self._baked, *found)}.values())
        self._marks = list(map(_version, self._baked))
        small = [t for t in self._baked if t.layout is torch.strided and t.nbytes <= facts.BYTES]
        copies = [(t, t.detach().clone()) for t in small]
        self._copies = [(t, copy) for t, copy in copies if torch.equal(t, copy)]  # NaN is not equal
        return bool(paths)

    def _narrow(self, captured: Captured) -> None:
        """Keeps, of plain objects, only the facts that this capture or an earlier one has read."""
        first, before = self._names is None, self._plain

        def read(x: Any, path: str) -> frozenset[str] | None:
            new = captured.reads.names(x)
            if first or id(x) not in before:  # no earlier graph has read this object
                return new
            old = before[id(x)][1]
            return None if new is None or old is None else old | new

        model, loss_fn = self._roots
        self._take(_walk(model, loss_fn, read), model, loss_fn)

    def _read_at(self, x: Any, path: str) -> frozenset[str] | None:
        return None if self._names is None else self._names.get(path)

    def _take(self, seen: Walk, model: torch.nn.Module, loss_fn: Any) -> None:
        """Makes the facts of a walk the reference."""
        self._facts = self._without_apart(seen.facts)
        self._roots, self._sweep = (model, loss_fn), Sweep(seen)
        self._names = {path: names for path, (_, names) in seen.plain.items()}
        self._plain = {id(x): (x, names) for x, names in seen.plain.values()}

    def _leave_apart(self, captured: Captured) -> None:
        """Drops facts that regions set in their own modules: only their own code reads them."""
        paths = {path for region in captured.regions for path in region.sets}
        self._set_apart = tuple({*self._set_apart, *paths})
        self._facts = self._without_apart(self._facts)

    def _without_apart(self, facts: dict[str, Any]) -> dict[str, Any]:
        if not self._set_apart:
            return facts
        within = tuple(f"{path}{mark}" for path in self._set_apart for mark in ".[")
        return {
            n: fact
            for n, fact in facts.items()
            if n not in self._set_apart and not n.startswith(within)
        }

    def _look(self, model: torch.nn.Module, loss_fn: Any) -> list[str]:
        """Reads all facts anew; returns the paths of those that changed."""
        before, names = self._facts, self._names
        self._take(_walk(model, loss_fn, self._read_at), model, loss_fn)
        after = self._facts
        if names is None:  # still all attributes of each object
            self._names = None
        if before == after:
            return []
        paths = {**after, **before}
        return [n for n in paths if before.get(n, _ABSENT) != after.get(n, _ABSENT)]

    def _kept(self) -> bool:
        """Whether the baked tensors still hold the same numbers."""
        return list(map(_version, self._baked)) == self._marks and all(
            torch.equal(tensor, copy) for tensor, copy in self._copies
        )

    def _count(self, paths: Sequence[str]) -> None:
        if not paths:
            return
        log.debug("the model is captured again, since these changed: %s", ", ".join(paths[:8]))
        self._times.update(paths)
        for path in paths:
            if self._times[path] == OFTEN:
                log.warning(
                    "%s has changed %d times, and each time the model was captured again, "
                    "which is slow; fix: pass it as a tensor of the batch, or register it as "
                    "a buffer",
                    path,
                    OFTEN,
                )


def _walk(model: torch.nn.Module, loss_fn: Any, read: Read) -> Walk:
    """Reads all facts while no other thread traces a model: a trace replaces attributes of classes
    that all models share."""
    with ONE_AT_A_TIME:
        return Walk(model, loss_fn, read)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
