"""Checks of owned tensors, which a step reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch

from onward.errors import OnwardError
from onward.execute.memory import overlapping
from onward.graph.names import user_name
from onward.graph.types import Size
from onward.kernels import torch_dtype
from onward.plan import Plan

Marks = list[list[int]]
_address, _version = torch.Tensor.data_ptr, attrgetter("_version")


def marks(tensors: Sequence[torch.Tensor]) -> Marks:
    """The addresses and versions of tensors, to detect later that any was written or moved.
    Inference tensors have no version, only an address."""
    try:
        return [list(map(_address, tensors)), list(map(_version, tensors))]
    except RuntimeError:
        versions = [0 if t.is_inference() else t._version for t in tensors]
        return [list(map(_address, tensors)), versions]


def check_owned(
    plan: Plan,
    owned: Mapping[str, torch.Tensor],
    written: Sequence[torch.Tensor],
    device: torch.device,
) -> None:
    """Raises OnwardError for tensors that have changed shape or dtype since the plan was made, that
    were moved from its device to another one (not to the CPU), and for written ones that share
    memory with others. owned: by graph input. written: a subset of them."""
    ids = {id(t) for t in written}
    for name, tensor in owned.items():
        layout = plan.inputs.get(name)
        if layout is None:
            continue
        have = (tuple(tensor.shape), tensor.dtype)
        want = (layout.shape, torch_dtype(layout.dtype))
        if have != want:
            raise OnwardError(
                f"'{user_name(name)}' is {_kind(*have)} now, but was {_kind(*want)} when "
                "training began; fix: make a new optimizer and Trainer after changing a "
                "parameter's shape or dtype"
            )
        if tensor.device.type != "cpu" and tensor.device != device:
            raise OnwardError(
                f"'{user_name(name)}' is on {tensor.device} now, but was on {device} when training "
                f"began; fix: move the model back, or make a new optimizer and Trainer for "
                f"{tensor.device}"
            )
        if tensor.is_inference() and id(tensor) in ids:
            raise OnwardError(
                f"'{user_name(name)}' was created under torch.inference_mode and cannot be "
                "trained; fix: create the model outside of it"
            )
    pair = overlapping(owned, ids)
    if pair is not None:
        first, second = map(user_name, pair)
        other = "itself (an expanded tensor)" if first == second else f"'{second}'"
        raise OnwardError(
            f"'{first}' shares memory with {other}, and a step updates it in place; fix: give "
            "each its own memory (p.data = p.data.clone()), or tie the weights as one "
            "Parameter"
        )


def _kind(shape: tuple[Size, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
