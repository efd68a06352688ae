"""A state of any nesting as JSON and tensors, and back, equal to the bit.

A pickle would run code when it is read; JSON lacks tuples, NaN, bytes and dicts whose keys are no
strings. What it lacks is written as a dict of one key that begins with `$`; tensors are taken out
and named by their place in the state.

    {"lr": 1e-3, "betas": (0.9, 0.999), "generator": tensor}
    {"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}, "generator": {"$tensor": "generator"}}
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from onward.errors import CheckpointError

_DEEPEST = 100  # levels: less than Python's recursion allows


def encoded(state: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encodes a state as what `json.dumps` takes; adds its tensors to `tensors`, by their places.

    where: the name of the state, with which places begin. Raises CheckpointError, which names the
    place, for a value that is neither a number, a string, a tensor, an array, nor made of them.
    """
    return _Encoder(tensors).encode(state, where, 0)


def decoded(value: Any, where: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decodes what `encoded` made, with the same name of the state. Raises CheckpointError for what
    it would not have made: encoded again, a state has to be the same text."""
    try:
        found = _decode(value, tensors)
        again = json.dumps(encoded(found, where, {}), allow_nan=False)
        same = again == json.dumps(value, allow_nan=False)
    except CheckpointError:
        raise
    except Exception as error:  # any, since a value of any type may stand anywhere
        raise CheckpointError(f"the {where} is malformed: {error!r}") from error
    if not same:
        raise CheckpointError(f"the {where} is malformed: no save writes it like this")
    return found


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def encode(self, value: Any, place: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise CheckpointError(f"{place} is nested more than {_DEEPEST} levels deep")
        inner = depth + 1
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._taken(value.detach(), place)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            shown = torch.from_numpy(np.ascontiguousarray(value))
            return {"$array": self._taken(shown.reshape(value.shape), place)}
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return {"$number": [value.dtype.name, self.encode(value.item(), place, inner)]}
        if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
            items = [self.encode(v, f"{place}.{i}", inner) for i, v in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if isinstance(value, set | frozenset):
            return {"$set": [self.encode(v, place, inner) for v in sorted(value, key=repr)]}
        if isinstance(value, dict) and type(value) in (dict, OrderedDict, Counter):
            return self._dict(value, place, inner)
        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype | torch.device):
            return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
        raise CheckpointError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, and a checkpoint "
            "holds numbers, strings, tensors and containers of these; fix: leave it out of "
            "state_dict()"
        )

    def _dict(self, value: Mapping[Any, Any], place: str, depth: int) -> Any:
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        if plain and type(value) is not Counter:
            return {k: self.encode(v, f"{place}.{k}", depth) for k, v in value.items()}
        pairs = [
            [self.encode(k, place, depth), self.encode(v, f"{place}.{k}", depth)]
            for k, v in value.items()
        ]
        return {"$counter" if type(value) is Counter else "$dict": pairs}

    def _taken(self, tensor: torch.Tensor, place: str) -> str:
        name, number = place, 1
        while name in self._tensors:  # keys of a dict may look alike: 1 and "1"
            number += 1
            name = f"{place}#{number}"
        self._tensors[name] = tensor
        return name


_Decoder = Callable[[Any, Mapping[str, torch.Tensor]], Any]
_DECODERS: dict[str, _Decoder] = {
    "$float": lambda v, t: _float(v),
    "$tensor": lambda v, t: t[v],
    "$array": lambda v, t: t[v].numpy(),
    "$number": lambda v, t: np.dtype(_number_type(v[0])).type(_decode(v[1], t)),
    "$tuple": lambda v, t: tuple(_decode(x, t) for x in v),
    "$set": lambda v, t: {_decode(x, t) for x in v},
    "$dict": lambda v, t: {_decode(k, t): _decode(x, t) for k, x in v},
    "$counter": lambda v, t: Counter({_decode(k, t): _decode(x, t) for k, x in v}),
    "$bytes": lambda v, t: base64.b64decode(v, validate=True),
    "$dtype": lambda v, t: _dtype(v),
    "$device": lambda v, t: torch.device(v),
}


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(x, tensors) for x in value]
    if not isinstance(value, dict):
        return value
    key = next(iter(value), "")
    if not key.startswith("$"):
        return {k: _decode(v, tensors) for k, v in value.items()}
    if len(value) != 1 or key not in _DECODERS:
        raise CheckpointError(f"the state is malformed: {key} stands for nothing")
    return _DECODERS[key](value[key], tensors)


def _float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r} is no float")
    return float(text)


def _number_type(name: str) -> str:
    if np.dtype(name).kind not in "biuf":
        raise ValueError(f"{name!r} is no type of numbers")
    return name


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return found


__all__ = ["decoded", "encoded"]
