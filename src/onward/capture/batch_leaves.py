"""The arguments of a call, flattened: the tensors with their names, and the values baked in."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture.request import CaptureRequest
from onward.capture.trace.flat_call import TENSOR
from onward.graph.names import distinct


@dataclass(frozen=True)
class BatchLeaves:
    """The flattened `(args, kwargs, target)` of a call.

    spec: the tree. fixed: its leaves, with TENSOR in place of each tensor. tensors: the call's
    tensors, detached from autograd, in the caller's dtypes; one that is passed twice occurs twice.
    names: a unique name for each tensor.
    """

    spec: pytree.TreeSpec
    fixed: list[Any]
    names: list[str]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, request: CaptureRequest, keeps_flags: bool) -> BatchLeaves:
        """Flattens a request. keeps_flags: whether the detached tensors keep `requires_grad`."""
        tree = (request.args, request.kwargs, request.target)
        paths, spec = pytree.tree_flatten_with_path(tree)
        fixed, names, tensors = list[Any](), list[str](), list[torch.Tensor]()
        for path, leaf in paths:
            if isinstance(leaf, torch.Tensor):
                names.append(distinct(_leaf_name(path, request.model), names))
                tensors.append(_alias(leaf, keeps_flags))
            fixed.append(TENSOR if isinstance(leaf, torch.Tensor) else leaf)
        return cls(spec, fixed, names, tensors)


def _leaf_name(path: tuple[Any, ...], model: torch.nn.Module) -> str:
    """Returns a leaf's name: its keyword, or the parameter of `forward` at its position."""
    part, *rest = path
    keys = [str(getattr(k, "key", getattr(k, "idx", k))) for k in rest]
    if part.idx == 0 and keys and keys[0].isdigit():
        parameters = list(inspect.signature(model.forward).parameters)
        position = int(keys[0])
        keys[0] = parameters[position] if position < len(parameters) else f"input_{position}"
    elif part.idx == 2:
        keys = ["target", *(keys if keys != ["0"] else [])]
    return ".".join(keys)


def _alias(x: torch.Tensor, keeps_flag: bool) -> torch.Tensor:
    found = x.detach().clone() if x.is_inference() else x.detach()
    return found.requires_grad_(x.requires_grad and keeps_flag)


__all__ = ["BatchLeaves"]
