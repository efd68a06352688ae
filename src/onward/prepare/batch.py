"""Batch: the arguments of one call of the model, targets, and a cheap signature of shapes.

A batch may be given as a mapping (including UserDict and BatchEncoding), a dataclass, a tuple, a
list, or the arguments themselves. Numpy arrays and lists of numbers, nested or not, become tensors
as `torch.as_tensor` makes them: Python integers become int64, numpy dtypes are kept (float64 stays
float64). Other Python numbers, strings and None, and tuples of them, are constants of the graph.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from onward.errors import OnwardError
from onward.model_state.refusals import own_class

_TARGETS = ("labels", "target", "targets")
_VALUES = (
    bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device,
    torch.layout, torch.memory_format, slice, type(...),
)  # fmt: skip


@dataclass
class Batch:
    """The arguments of `model(*args, **kwargs)` and, if there is a loss function, of
    `loss_fn(outputs, *target)`.

    tensors: the tensor leaves in order. kind: the structure, non-tensor values, dtypes and ranks.
    signature: the kind and the sizes, the key of a plan.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]
    tensors: list[torch.Tensor]
    kind: tuple[Any, ...]
    signature: tuple[Any, ...]

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """The model's positional and keyword arguments, and the loss function's targets."""
        return self.args, self.kwargs, self.target

    @property
    def batch_size(self) -> int:
        """The size of dim 0 of the first tensor that has dims."""
        return next((t.shape[0] for t in self.tensors if t.dim()), 1)

    def with_rows(self, rows: int, of: Collection[int]) -> Batch:
        """A batch of so many rows, which are those of this one, repeated. of: the tensors that have
        rows, by place."""
        leaves, spec = pytree.tree_flatten(self.given)
        places = iter(range(len(self.tensors)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and next(places) in of:
                leaves[i] = leaf[torch.arange(rows, device=leaf.device) % leaf.shape[0]]
        return batch_of(*pytree.tree_unflatten(leaves, spec))

    def on(self, device: torch.device) -> Batch:
        """The batch on a device, where all its tensors are in the host's memory; else the batch as
        it is, of which the caller has placed the tensors."""
        if device.type == "cpu" or any(t.device.type != "cpu" for t in self.tensors):
            return self
        moved = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), self.given)
        return batch_of(*moved)

    def named(self) -> dict[str, Any]:
        """The inputs by name: keyword arguments by theirs, positional ones as `input_0`, ...; the
        first target as `labels`."""
        out = {f"input_{i}": a for i, a in enumerate(self.args)} | self.kwargs
        return out | ({"labels": self.target[0]} if self.target else {})


def bind_batch(args: tuple[Any, ...], kwargs: dict[str, Any], has_loss: bool) -> Batch:
    """Makes a Batch of a step's arguments. Raises OnwardError where there are no tensors, where a
    loss function lacks its target, and for a value that is neither a tensor nor a plain value."""
    if len(args) == 1 and not kwargs:
        [given] = args
        if isinstance(given, Mapping):
            args, kwargs = (), dict(given)
        elif isinstance(given, (tuple, list)):
            args = tuple(given)
        elif dataclasses.is_dataclass(given) and not isinstance(given, type):
            args, kwargs = (), {f.name: getattr(given, f.name) for f in dataclasses.fields(given)}
    args = tuple(_converted(v, f"input {i}") for i, v in enumerate(args))
    kwargs = {_key(k): _converted(v, f"'{k}'") for k, v in kwargs.items()}
    target: tuple[Any, ...] = ()
    if has_loss:
        key = next((k for k in _TARGETS if k in kwargs), None)
        if key is not None:
            target = (kwargs.pop(key),)
        elif len(args) >= 2:
            args, target = args[:-1], (args[-1],)
        else:
            raise OnwardError(
                "loss_fn is given but the batch has no target; fix: train_step(input, "
                "target), or labels= in the batch"
            )
    return batch_of(args, kwargs, target)


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any], target: tuple[Any, ...]) -> Batch:
    """Makes a Batch of the model's arguments and the loss function's targets. Raises OnwardError
    where there is no tensor."""
    leaves, spec = pytree.tree_flatten((args, kwargs, target))
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    if not tensors:
        raise OnwardError("the batch has no tensors; fix: pass the model's inputs")
    kind = (spec, tuple(map(leaf_kind, leaves)))
    return Batch(args, kwargs, target, tensors, kind, (kind, tuple(t.shape for t in tensors)))


def leaf_kind(leaf: Any) -> tuple[Any, ...]:
    """The part of a leaf that a graph depends on: dtype and rank of a tensor, type and value of
    anything else. 1, 1.0 and True differ; so do 0.0 and -0.0."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.dim()
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex, slice)) else leaf


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise OnwardError(
            f"the batch has the key {key!r}, which cannot name an argument; fix: use strings "
            "as keys"
        )
    return key


def _converted(value: Any, where: str) -> Any:
    """Converts arrays and lists of numbers to tensors, and mappings to dicts, at any depth. Raises
    OnwardError for other values that a graph cannot take."""
    if type(value) is torch.Tensor and not _strange(value):
        return value
    if isinstance(value, np.ndarray):
        return _array(value, where)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list) and _numbers(value):
        return _list(value, where)
    if isinstance(value, Mapping) and type(value) not in pytree.SUPPORTED_NODES:
        value = dict(value)
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
    if len(leaves) == 1 and leaves[0] is value:
        return _leaf(value, where)
    return pytree.tree_unflatten([_converted(v, where) for v in leaves], spec)


def _leaf(value: Any, where: str) -> Any:
    reason = refuse_leaf(value)
    if reason is not None:
        raise OnwardError(f"the batch's {where} is {reason}")
    return value


def refuse_leaf(value: Any) -> str | None:
    """The reason why a graph cannot take this value, with a fix; None where it can."""
    if isinstance(value, torch.Tensor):
        return _strange(value)
    if isinstance(value, _VALUES):
        return None
    return (
        f"a {type(value).__name__}, neither a tensor nor a plain value; fix: convert it to "
        "tensors before the step"
    )


def _strange(tensor: torch.Tensor) -> str | None:
    """The reason why a step cannot read this tensor, with a fix; None where it can."""
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}, which is not supported; fix: to_dense()"
    if tensor.is_nested:
        return (
            "a nested tensor, which is not supported; fix: to_padded_tensor(0), with an "
            "attention mask"
        )
    if tensor.is_meta:
        return (
            "on the meta device, where tensors have no data; fix: create it on the model's device"
        )
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    strange = None if plain else own_class(tensor)
    if strange:
        return f"{strange}; fix: x.as_subclass(torch.Tensor)"
    for name in vars(tensor):
        if not name.startswith("_dynamo_"):  # `mark_dynamic` leaves some
            return (
                f"a tensor with the attribute {name}, which a graph does not keep; fix: pass "
                "it as a separate input of the batch"
            )
    return None


def _numbers(value: Any) -> bool:
    """Whether a list holds only numbers, at any depth, and at least one."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_numbers, value))
    return isinstance(value, (bool, int, float, np.generic, np.ndarray))


def _list(value: list[Any], where: str) -> torch.Tensor:
    """Converts a list to a tensor: Python numbers take torch's default dtypes, numpy's keep theirs.
    Raises OnwardError for rows of unequal length."""
    try:
        if _has_numpy(value):
            return _array(np.array(value), where)
        return torch.as_tensor(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, OnwardError):
            raise
        raise OnwardError(
            f"the batch's {where} is a list that cannot become a tensor ({error}); fix: pad "
            "its rows to equal lengths"
        ) from None


def _has_numpy(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_numpy, value))
    return isinstance(value, (np.generic, np.ndarray))


def _array(array: np.ndarray, where: str) -> torch.Tensor:
    if not array.flags.writeable or any(s < 0 for s in array.strides):
        array = array.copy()  # torch warns about read-only arrays and refuses negative strides
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OnwardError(
            f"the batch's {where} is a numpy array of {array.dtype}, which PyTorch does not "
            f"have ({error}); fix: convert it with .astype"
        ) from None
