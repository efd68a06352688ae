"""AsOnCuda: eager PyTorch's operators on fake tensors of a CPU, as they are on a CUDA device.

A CPU build of PyTorch has no fake CUDA tensors. Source of the operators that CUDA's autocast runs
in fp32: https://docs.pytorch.org/docs/stable/amp.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

Shape: TypeAlias = tuple[int, ...]

# Operators that CUDA's autocast runs in fp32, by their names as functions and methods.
FP32 = frozenset((
    "__rpow__", "__pow__", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
    "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist",
    "erfinv", "exp", "expm1", "group_norm", "huber_loss", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "logsumexp", "mse_loss", "nll_loss", "norm",
    "normalize", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss",
    "softmax", "softmin", "softplus", "sum", "tan",
))  # fmt: skip


class AsOnCuda(TorchFunctionMode):
    """A mode in which CPU operators save for their backward what CUDA's save: dropout a mask of a
    byte per element, attention no scores; under autocast, CUDA's list of operators in fp32 holds.
    answer: the result of each `bool(tensor)`, since fake tensors have no values."""

    def __init__(self, answer: bool = True) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is dropout:
            return self._dropout(*args, **given)
        if func is scaled_dot_product_attention:
            args, given = args[:4], {**given, "dropout_p": 0.0}
        elif name == "__bool__":
            return self._answer
        elif name in FP32 and torch.is_autocast_enabled("cpu"):
            args, given = tree_map_only(torch.Tensor, _widened, (args, given))
        return func(*args, **given)

    def _dropout(
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(dy: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(dy, q, k, v)


_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# FLOPs by operator, of the shapes of its tensors. Torch's counter knows CUDA's calls only.
ATTENTION_FLOPS = {
    getattr(torch.ops.aten, _ON_CPU): _attention,
    getattr(torch.ops.aten, f"{_ON_CPU}_backward"): _attention_backward,
}

__all__ = ["ATTENTION_FLOPS", "AsOnCuda"]
