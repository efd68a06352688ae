"""Input spec: what a batch must look like (`model_desc`), checked when it is given and on each
batch.

    {"inputs": [("input_ids", ["batch", "tokens"], "i64"), ("labels", ["batch", "tokens"])]}

A shape lists integers (fixed) and names (symbolic; equal names mean equal sizes). The dtype is
optional, in the notation of types (`i64`, `f32`) or a torch dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onward.errors import OnwardError, check_names
from onward.graph.types import parse_dtype
from onward.kernels import torch_dtype

_KEYS = ("inputs", "outputs")


def check_input_spec(spec: Any) -> None:
    """Raises OnwardError for an invalid input spec. None is valid: any batch fits it."""
    if spec is None:
        return
    fix = 'fix: {"inputs": [(name, shape), (name, shape, dtype), ...]}'
    if not isinstance(spec, Mapping) or "inputs" not in spec:
        raise OnwardError(f"model_desc is not a dict with 'inputs'; {fix}")
    check_names("model_desc", "key", [str(k) for k in spec], _KEYS)
    entries = spec["inputs"]
    if not isinstance(entries, list | tuple):
        raise OnwardError(f"model_desc['inputs'] is a {type(entries).__name__}; {fix}")
    for entry in entries:
        name, shape = entry[:2] if _is_entry(entry) else (None, None)
        sizes = shape if isinstance(shape, list | tuple) else [None]
        strange = [n for n in sizes if isinstance(n, bool) or not isinstance(n, int | str)]
        if not isinstance(name, str) or strange:
            raise OnwardError(
                f"model_desc lists the invalid entry {entry!r}; {fix}; a shape holds ints and names"
            )


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and len(entry) in (2, 3)


def check_batch(spec: Mapping[str, Any] | None, batch: Mapping[str, Any]) -> None:
    """Raises OnwardError naming the first input that does not fit the spec."""
    if spec is None:
        return
    sizes: dict[str, tuple[int, str]] = {}
    entries: Sequence[Any] = spec.get("inputs", ())
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
