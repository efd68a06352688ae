"""Replaces transformers' mask functions by ones that record the padding and causality of a mask.

Transformers builds a dense b[B,1,T,T] mask from about 30 nodes. During a capture its mask functions
return an equal mask, and remember what it was built from: (padding, causal). Code that reads the
mask itself gets the same numbers as in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from onward.capture.huggingface.cache_position import Counted, broadcast, offsets_hidden
from onward.errors import CaptureError

Function = Callable[..., Any]


@dataclass(frozen=True)
class DenseMask:
    """A dense mask and what it was built from.

    dense: b[B,1,Q,K], or floats to add to the scores. version: its `_version`, to notice writes.
    padding: b[B,1,1,S]; None without padding. causal: whether a query sees only keys up to its own
    position. optional: whether eager mode passes no mask to sdpa if the batch hides no token.
    """

    dense: torch.Tensor
    version: int
    padding: torch.Tensor | None
    causal: bool
    optional: bool


def _dense(
    keys: torch.Tensor | None,
    causal: bool,
    added: bool,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """Returns what transformers' mask function would, b[B,1,Q,K] or floats if `added`, in fewer
    nodes: tracing transformers' own takes as long as one or two layers. keys: b[B,1,1,K]."""
    if causal:
        q, k = (torch.arange(n, device=device) for n in (q_length, kv_length))
        mask = k <= q[:, None]
        mask = mask if keys is None else mask & keys
    else:
        mask = torch.ones((), dtype=torch.bool, device=device) if keys is None else keys
    mask = mask.expand(batch_size, 1, q_length, kv_length)
    if not added:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)


class Masks:
    """The masks of one capture."""

    def __init__(self, counted: Counted | None = None) -> None:
        """counted: the forward's `arange` results, if mask functions take `cache_position`."""
        self._made: dict[int, DenseMask] = {}
        self._counted = counted

    def remembering(self, original: Function, added: bool) -> Function:
        """Returns a replacement for the mask function `original` that remembers its masks. added:
        whether they are floats, to be added to the scores."""
        from transformers import masking_utils

        bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)

        def make(**kwargs: Any) -> torch.Tensor | None:
            function, padding = kwargs["mask_function"], kwargs.get("attention_mask")
            positions, length = kwargs.get("cache_position"), kwargs.get("q_length")
            if length is None and positions is not None:
                length = positions.shape[0]
            if padding is not None and padding.dim() != 2:
                require_kind(padding)
            causal = function is masking_utils.causal_mask_function
            offset = kwargs.get("q_offset", 0) != 0 or kwargs.get("kv_offset", 0) != 0
            known = (causal or function is bidirectional) and not offset
            if causal:
                optional = not added and kwargs.get("allow_is_causal_skip", True)
            else:
                optional = kwargs.get("allow_is_bidirectional_skip", False)
            if known and optional and padding is None:
                return None  # as in eager mode; in a trace `original` would return a dense mask
            if positions is not None:
                from_zero = self._counted is not None and self._counted.from_zero(positions)
                if not from_zero and not added and kwargs.get("allow_is_causal_skip", True):
                    raise CaptureError(offsets_hidden)
                known &= from_zero
            # whether a batch hides a token depends on its data, so a mask is always made
            if not known or (padding is not None and padding.shape[-1] != kwargs["kv_length"]):
                never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
                return broadcast(original, added, {**kwargs, **never})
            keys = None if padding is None else padding.to(torch.bool)[:, None, None, :]
            dense = _dense(keys, causal, added, **{**kwargs, "q_length": length})
            self._made[id(dense)] = DenseMask(dense, dense._version, keys, causal, bool(optional))
            return dense

        return make

    def find(self, mask: torch.Tensor | None) -> DenseMask | None:
        """Returns the record of a mask; None for another tensor, or one written into since."""
        made = self._made.get(id(mask))
        return made if made is not None and made.dense._version == made.version else None


def require_kind(mask: torch.Tensor) -> None:
    """Raises CaptureError unless a mask is 4-dim and of bools or floats."""
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise CaptureError(
            f"an attention mask of {mask.dtype} has shape {tuple(mask.shape)}; fix: give one of "
            "shape (batch, tokens), or (batch, 1, tokens, tokens) of bool (true may attend) or of "
            "the scores' float dtype (added to them)"
        )


__all__ = ["Masks", "require_kind"]
