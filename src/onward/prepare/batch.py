"""A batch: the arguments of one call of the model, targets, and a cheap signature of shapes.

What a batch may be: a mapping (UserDict and BatchEncoding too), a dataclass, a tuple or a list, or
the arguments themselves. Numpy arrays and lists of numbers, nested or not, become tensors as
`torch.as_tensor` makes them: integers are int64, numpy's types stay (float64 is no float32). Other
Python numbers, strings and None, and tuples of them, are values of the program.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
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
    """`model(*args, **kwargs)`, then `loss_fn(outputs, *target)` where there is one.

    tensors: the tensor leaves in order; kind: structure, non-tensor values, dtypes and ranks;
    signature: kind and sizes, the key of a plan.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]
    tensors: list[torch.Tensor]
    kind: tuple[Any, ...]
    signature: tuple[Any, ...]

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """What is passed to the model, and the loss function's targets."""
        return self.args, self.kwargs, self.target

    @property
    def batch_size(self) -> int:
        """Dim 0 of the first tensor."""
        return next((t.shape[0] for t in self.tensors if t.dim()), 1)

    def named(self) -> dict[str, Any]:
        """Keyword inputs by name; positional ones as `input_0`, ...; targets as `labels`."""
        out = {f"input_{i}": a for i, a in enumerate(self.args)} | self.kwargs
        return out | ({"labels": self.target[0]} if self.target else {})


def bind_batch(args: tuple[Any, ...], kwargs: dict[str, Any], has_loss: bool) -> Batch:
    """The batch of a step's arguments. Raises OnwardError where it is empty, lacks the target a
    loss function needs, or holds what is neither a tensor nor a plain value."""
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
    """The batch of what the model, and the loss function after it, are given. Raises OnwardError
    where there is no tensor."""
    leaves, spec = pytree.tree_flatten((args, kwargs, target))
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    if not tensors:
        raise OnwardError("the batch has no tensors; fix: pass the model's inputs")
    kind = (spec, tuple(map(leaf_kind, leaves)))
    return Batch(args, kwargs, target, tensors, kind, (kind, tuple(t.shape for t in tensors)))


def leaf_kind(leaf: Any) -> tuple[Any, ...]:
    """What of a leaf a program depends on; 1, 1.0 and True are not the same, nor 0.0 and -0.0."""
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
    """The value with tensors for arrays and lists of numbers, and dicts for other mappings."""
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
    """Why no graph can be given it, and the way out."""
    if isinstance(value, torch.Tensor):
        return _strange(value)
    if isinstance(value, _VALUES):
        return None
    return (
        f"a {type(value).__name__}, neither a tensor nor a plain value; fix: convert it to "
        "tensors before the step"
    )


def _strange(tensor: torch.Tensor) -> str | None:
    """Why no step reads it, and the way out."""
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
    """Whether a list holds numbers alone, at any depth, and at least one."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_numbers, value))
    return isinstance(value, (bool, int, float, np.generic, np.ndarray))


def _list(value: list[Any], where: str) -> torch.Tensor:
    """Python numbers take torch's default types, numpy's keep their own."""
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
        array = array.copy()  # torch warns about the first, and cannot have the second
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OnwardError(
            f"the batch's {where} is a numpy array of {array.dtype}, which PyTorch does not "
            f"have ({error}); fix: convert it with .astype"
        ) from None
