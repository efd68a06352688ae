"""OutputTree: the structure of a forward's outputs, to rebuild them from a graph's results.

A leaf is a tensor that the graph computes, a tensor of the batch or the module that the forward
returns as it is, or a plain value.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture.huggingface import CACHE, is_cache
from onward.capture.masked_rows import is_tensor
from onward.errors import CaptureError
from onward.graph.names import distinct
from onward.model_state.facts import ATOMS


@dataclass(frozen=True)
class Computed:
    """A tensor that the graph computes, by its name for the user."""

    name: str


@dataclass(frozen=True)
class BatchLeaf:
    """A tensor of the batch that the forward returns, by its index among the batch's tensors."""

    index: int


@dataclass(frozen=True)
class Held:
    """A parameter or buffer that the forward returns, by its path."""

    path: str


@dataclass(frozen=True)
class SizeLeaf:
    """A size, which the graph computes as an i64[] of this name."""

    name: str


@dataclass(frozen=True)
class Value:
    """A plain value, such as a number, a string or None."""

    value: Any


@dataclass(frozen=True)
class Container:
    """A container of parts. kind: its class. make: builds one from the rebuilt parts. keys: a
    mapping's keys that are strings."""

    kind: type
    make: Callable[[list[Any]], Any]
    parts: tuple[Part, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """A result that shares memory with a tensor: a view of `base`. make: makes it from that tensor
    and the batch's tensors."""

    base: Computed | BatchLeaf | Held
    make: Callable[..., torch.Tensor]


Part = Computed | SizeLeaf | BatchLeaf | Held | Value | Container


class OutputTree:
    """The structure of a call's outputs.

    outputs: what one run returned. leaves: the batch's tensors in that run. owned: path -> tensor
    of the module. left_out: whether key/value caches may be left out, and listed in `caches`.
    root: the whole tree. names: the names of the computed tensors. views: those that the graph does
    not compute, since they are views of other tensors.
    Raises CaptureError for outputs that no graph can return.
    """

    def __init__(
        self,
        outputs: Any,
        leaves: Sequence[torch.Tensor] = (),
        owned: Mapping[str, torch.Tensor] = types.MappingProxyType({}),
        left_out: bool = False,
    ) -> None:
        self._given = {id(x): i for i, x in enumerate(leaves)}
        self._owned = {id(x): path for path, x in owned.items()}
        self._seen: dict[int, str] = {}
        self._computed: dict[str, torch.Tensor] = {}
        self._left_out, self.caches = left_out, list[str]()
        self.views: dict[str, View] = {}
        self.root = self._part(outputs, ())

    @classmethod
    def of(cls, root: Part, names: Sequence[str]) -> OutputTree:
        """Returns a tree from its root and the names of its computed tensors."""
        found = cls(())
        found.root, found._computed = root, dict.fromkeys(names)  # type: ignore[assignment]
        return found

    @property
    def names(self) -> list[str]:
        return list(self._computed)

    def taken(self) -> list[torch.Tensor]:
        """Returns the computed tensors of the run in the order of `names`, and lets go of them, so
        that it works once."""
        found = list(self._computed.values())
        self._computed = dict.fromkeys(self._computed)  # type: ignore[assignment]
        self._given, self._owned, self._seen = {}, {}, {}
        return found

    def build(
        self,
        computed: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        held: Callable[[str], torch.Tensor],
    ) -> Any:
        """Returns the outputs of a call. computed: name -> computed tensor, or None for one that is
        left out. given: the batch's tensors. held: path -> the module's tensor."""
        if self.views:
            made: dict[str, Any] = {}
            for name, view in self.views.items():
                base = _built(view.base, computed, given, held)
                made[name] = None if base is None else view.make(base, *given)
            computed = {**computed, **made}
        return _built(self.root, computed, given, held)

    def computed_at_once(self) -> set[str]:
        """Returns the results that no output can wait for: views, and those that they are of."""
        bases = {v.base.name for v in self.views.values() if isinstance(v.base, Computed)}
        return {*self.views, *bases}

    def _part(self, x: Any, path: tuple[str, ...]) -> Part:
        if is_tensor(x):
            return self._tensor(x, path)
        if type(x) in ATOMS:
            return Value(x)
        if path and is_cache(x):
            where = ".".join(path)
            if not self._left_out:
                raise CaptureError(
                    f"{CACHE}: the forward returns a {type(x).__name__} at {where}; fix: give the "
                    "inner model use_cache=False, or set its config.use_cache = False"
                )
            self.caches.append(where)
            return Value(None)
        if isinstance(x, torch.SymInt):
            number = torch.full((), x, dtype=torch.int64)  # type: ignore[arg-type]
            part = self._tensor(number, path)
            assert isinstance(part, Computed), "a tensor made here"
            return SizeLeaf(part.name)
        # by id: pytree keeps `is_leaf` until a garbage collection, and would keep the outputs too
        itself = id(x)
        children, spec = pytree.tree_flatten(x, is_leaf=lambda y: id(y) != itself)
        if len(children) == 1 and children[0] is x:
            return self._plain_object(x, path)
        names = [str(i) for i in range(len(children))]
        keys: tuple[str, ...] = ()
        if isinstance(x, Mapping) and list(map(id, x.values())) == list(map(id, children)):
            names = list(map(str, x))
            keys = tuple(k for k in x if isinstance(k, str))
        parts = tuple(self._part(c, (*path, n)) for c, n in zip(children, names, strict=True))
        return Container(type(x), lambda made: pytree.tree_unflatten(made, spec), parts, keys)

    def _plain_object(self, x: Any, path: tuple[str, ...]) -> Part:
        fields = [f.name for f in dataclasses.fields(x)] if dataclasses.is_dataclass(x) else []
        if not fields or isinstance(x, type) or set(vars(x)) - set(fields):
            where = ".".join(path)
            raise CaptureError(
                f"the forward returns {'at ' + where + ' ' if where else ''}a "
                f"{type(x).__name__}, which is neither a tensor nor a container registered "
                "with torch.utils._pytree; fix: return a dict, a tuple or a dataclass"
            )
        kind: Any = type(x)
        parts = tuple(self._part(getattr(x, name), (*path, name)) for name in fields)

        def make(made: list[Any]) -> Any:
            fresh = object.__new__(kind)
            for name, value in zip(fields, made, strict=True):
                object.__setattr__(fresh, name, value)
            return fresh

        return Container(kind, make, parts)

    def _tensor(self, x: torch.Tensor, path: tuple[str, ...]) -> Part:
        if id(x) in self._given:
            return BatchLeaf(self._given[id(x)])
        if id(x) in self._owned:
            return Held(self._owned[id(x)])
        name = self._seen.get(id(x))
        if name is None:
            unnamed = not path or path[0].isdigit()
            whole = "_".join(["output", *path] if unnamed else path)
            name = self._seen[id(x)] = distinct(whole, self._computed)
            self._computed[name] = x
        return Computed(name)


def _built(
    part: Part,
    computed: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    held: Callable[[str], torch.Tensor],
) -> Any:
    # not nested in `build`: its closure would hold itself, and so keep the outputs alive
    match part:
        case Computed(name):
            return computed[name]
        case SizeLeaf(name):
            return int(computed[name])
        case BatchLeaf(index):
            return given[index]
        case Held(path):
            return held(path)
        case Value(value):
            return value
        case Container():
            return part.make([_built(inner, computed, given, held) for inner in part.parts])


__all__ = [
    "BatchLeaf", "Computed", "Container", "Held", "OutputTree", "Part", "SizeLeaf", "Value", "View",
]  # fmt: skip
