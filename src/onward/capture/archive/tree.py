"""The tree of a call's outputs as JSON, with classes by name; only loaded classes are found."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture.output_tree import (
    BatchLeaf,
    Computed,
    Container,
    Held,
    OutputTree,
    Part,
    SizeLeaf,
    Value,
)
from onward.graph.archive import ArchiveError

_LEAVES: dict[str, type[Any]] = {
    "computed": Computed, "number": SizeLeaf, "given": BatchLeaf, "held": Held, "value": Value,
}  # fmt: skip
_NAMES = {kind: name for name, kind in _LEAVES.items()}
_PLAIN = (bool, int, float, str, type(None))
_BUILT_IN = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}


def written_tree(tree: OutputTree) -> list[object]:
    """Returns a tree of outputs as JSON. Raises ArchiveError for one that cannot be rebuilt from
    the names of its classes."""
    if tree.views:
        raise ArchiveError("the outputs share memory")
    found: list[object] = [_written(tree.root), tree.names]
    _require_same(read_tree(found).root, tree.root)
    return found


def read_tree(said: list[Any]) -> OutputTree:
    """Returns the tree that `written_tree` has written. Raises ArchiveError for a class that is not
    loaded or has changed."""
    root, names = said
    return OutputTree.of(_read(root), names)


def _written(part: Part) -> list[object]:
    if not isinstance(part, Container):
        (value,) = vars(part).values()
        if not isinstance(value, _PLAIN):
            raise ArchiveError(f"the outputs hold a {type(value).__qualname__}")
        return [_NAMES[type(part)], value]
    kind = part.kind
    if _BUILT_IN.get(kind.__name__) is kind:
        form = kind.__name__
    elif _is_model_output(kind):
        form = "fields"
    elif dataclasses.is_dataclass(kind):
        form = "dataclass"
    else:
        raise ArchiveError(f"the outputs are a {kind.__qualname__}")
    parts = [_written(p) for p in part.parts]
    return ["container", form, kind.__module__, kind.__qualname__, list(part.keys), parts]


def _read(said: list[Any]) -> Part:
    name, *rest = said
    if name != "container":
        return _LEAVES[name](*rest)
    form, module, qualname, keys, parts = rest
    made = tuple(map(_read, parts))
    kind = _BUILT_IN[form] if form in _BUILT_IN else _loaded(module, qualname)
    if form == "dataclass":
        return Container(kind, _dataclass_maker(kind, len(made)), made, tuple(keys))
    leaves = [torch.empty(0) for _ in made]
    if form in ("dict", "OrderedDict", "fields"):
        if len(keys) != len(made) or (form == "fields" and not _is_model_output(kind)):
            raise ArchiveError(f"{qualname} has other fields")
        like = kind(dict(zip(keys, leaves, strict=True))) if form in _BUILT_IN else kind(
            **dict(zip(keys, leaves, strict=True))
        )  # fmt: skip
    elif form in ("tuple", "list"):
        like = kind(leaves)
    else:  # no class of the file's choice is called
        raise ArchiveError(f"{form} is no form of outputs")
    found, spec = pytree.tree_flatten(like)
    if list(map(id, found)) != list(map(id, leaves)):
        raise ArchiveError(f"{qualname} flattens into other parts")
    return Container(kind, lambda new: pytree.tree_unflatten(new, spec), made, tuple(keys))


def _dataclass_maker(kind: type, count: int) -> Callable[[list[object]], object]:
    if not dataclasses.is_dataclass(kind):
        raise ArchiveError(f"{kind!r} is no dataclass")
    fields = [f.name for f in dataclasses.fields(kind)]
    if len(fields) != count:
        raise ArchiveError(f"{kind!r} has other fields")

    def make(made: list[object]) -> object:
        fresh: object = object.__new__(kind)
        for name, value in zip(fields, made, strict=True):
            object.__setattr__(fresh, name, value)
        return fresh

    return make


def _loaded(module: str, qualname: str) -> type:
    """Returns a loaded class by module and qualified name, or raises ArchiveError."""
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        found = vars(found).get(name) if found is not None else None
    if not isinstance(found, type):
        raise ArchiveError(f"{module}.{qualname} is not loaded")
    return found


def _is_model_output(kind: type) -> bool:
    generic = sys.modules.get("transformers.utils.generic")
    return generic is not None and issubclass(kind, generic.ModelOutput)


def _require_same(one: Part, other: Part) -> None:
    """Raises ArchiveError where the tree that is read is not the one that was written."""
    if not (isinstance(one, Container) and isinstance(other, Container)):
        same = one == other
    else:
        same = (one.kind, one.keys) == (other.kind, other.keys)
        same = same and len(one.parts) == len(other.parts)
        for a, b in zip(one.parts, other.parts, strict=same):
            _require_same(a, b)
    if not same:
        raise ArchiveError("the outputs are rebuilt differently")


__all__ = ["read_tree", "written_tree"]
