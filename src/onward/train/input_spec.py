"""`model_desc`: what a batch must look like, checked where it is given.

    {"inputs": [("input_ids", ["batch", "tokens"], "i64"), ("labels", ["batch", "tokens"])]}

A shape lists integers (fixed) and names (symbolic; equal names mean equal sizes). The dtype is
optional, in the notation of types (`i64`, `f32`) or a torch dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onward.config import OnwardError
from onward.graph.types import parse_dtype
from onward.kernels import torch_dtype


def check_batch(description: Mapping[str, Any] | None, batch: Mapping[str, Any]) -> None:
    """Raises OnwardError naming the first input that does not fit."""
    if description is None:
        return
    sizes: dict[str, tuple[int, str]] = {}
    entries: Sequence[Any] = description.get("inputs", ())
    known = [str(e[0]) for e in entries]
    for name in batch:
        if name not in known:
            raise OnwardError(
                f"batch has '{name}', which model_desc does not list ({', '.join(known)})"
            )
    for name, shape, *rest in entries:
        tensor = batch.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise OnwardError(
                f"model_desc lists '{name}', which the batch lacks; fix: pass it as a tensor"
            )
        have = tuple(tensor.shape)
        if len(have) != len(shape):
            raise OnwardError(f"'{name}' has shape {list(have)}, model_desc says {list(shape)}")
        for size, want in zip(have, shape, strict=True):
            if isinstance(want, int) and size != want:
                raise OnwardError(f"'{name}' has shape {list(have)}, model_desc says {list(shape)}")
            if isinstance(want, str):
                first, where = sizes.setdefault(want, (size, name))
                if first != size:
                    raise OnwardError(
                        f"'{name}' has {want}={size}, but '{where}' has {want}={first}"
                    )
        if rest and rest[0] is not None:
            dtype = (
                rest[0] if isinstance(rest[0], torch.dtype) else torch_dtype(parse_dtype(rest[0]))
            )
            if tensor.dtype != dtype:
                raise OnwardError(f"'{name}' is {tensor.dtype}, model_desc says {dtype}")
