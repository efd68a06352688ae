"""Modes in which eager PyTorch runs the model for a comparison: without dropout, and in fp64."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_DROPOUTS = (
    F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout,
    F.feature_alpha_dropout,
)  # fmt: skip
# position of the argument dropout_p
_PLACES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
# functions of layers that draw between them; dropout is the third argument behind the weights
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


class NoDropout(TorchFunctionMode):
    """A mode in which eager PyTorch's dropout returns its input, in training mode too."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        place = _PLACES.get(func)
        if func in _RECURRENT:
            place = 3 + next(i for i, given in enumerate(args) if isinstance(given, list))
        if place is not None and len(args) > place:
            args = (*args[:place], 0.0, *args[place + 1 :])
        elif place is not None:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class InDouble(TorchFunctionMode):
    """A mode in which code that asks for fp32 gets fp64: norms computed "in fp32, whatever the
    precision", constants outside of buffers."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        if name == "__get__" or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)  # ops in place keep the dtype of what they write
        args = pytree.tree_map(_doubled, args)
        kwargs = {name: pytree.tree_map(_doubled, x) for name, x in kwargs.items()}
        return pytree.tree_map_only(torch.Tensor, _doubled, func(*args, **kwargs))


def _doubled(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.double() if x.dtype == torch.float32 else x
    return torch.float64 if x is torch.float32 else x
