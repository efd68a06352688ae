"""The arguments of a call as leaves: names, tensors, and what is baked in."""

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

    spec: the tree. fixed: its leaves, with TENSOR in place of each tensor. names: one for each
    tensor, no two alike. tensors: those of the call, detached from autograd, in the caller's
    dtypes; a tensor that is given twice is two.
    """

    spec: pytree.TreeSpec
    fixed: list[Any]
    names: list[str]
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, request: CaptureRequest, keeps_flags: bool) -> BatchLeaves:
        """keeps_flags: whether tensors that require gradients still do."""
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
    """A batch leaf's name: its keyword, or the forward parameter at its position."""
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
