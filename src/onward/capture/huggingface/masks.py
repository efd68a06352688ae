"""Transformers' mask functions: dense masks whose makings are remembered.

Transformers builds a dense `b[B,1,T,T]` mask from ~30 nodes. While a capture runs, its mask
functions still return that mask, and remember what it was made of: (padding, causal). Whoever reads
the mask himself finds what eager PyTorch gives him.
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
    """A dense mask and what it was made of. padding: b[B,1,1,S].

    optional: torch's sdpa is given no mask at all where the batch hides no token.
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
    """What transformers' mask function makes of the same, `b[B,1,Q,K]` or floats, in fewer nodes:
    tracing its own takes as long as one to two layers."""
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
        """counted: the ranges that the forward makes, where the version's mask functions are given
        `cache_position`."""
        self._made: dict[int, DenseMask] = {}
        self._counted = counted

    def remembering(self, original: Function, added: bool) -> Function:
        """The mask function `original`, whose masks are remembered. added: they are floats."""
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
                return None  # as in eager; a trace would be given a dense mask
            if positions is not None:
                from_zero = self._counted is not None and self._counted.from_zero(positions)
                if not from_zero and not added and kwargs.get("allow_is_causal_skip", True):
                    raise CaptureError(offsets_hidden)
                known &= from_zero
            # whether a batch hides anything is data, so a mask is always made
            if not known or (padding is not None and padding.shape[-1] != kwargs["kv_length"]):
                never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
                return broadcast(original, added, {**kwargs, **never})
            keys = None if padding is None else padding.to(torch.bool)[:, None, None, :]
            dense = _dense(keys, causal, added, **{**kwargs, "q_length": length})
            self._made[id(dense)] = DenseMask(dense, dense._version, keys, causal, bool(optional))
            return dense

        return make

    def find(self, mask: torch.Tensor | None) -> DenseMask | None:
        """What a mask was made of, where it is one of ours and as we made it."""
        made = self._made.get(id(mask))
        return made if made is not None and made.dense._version == made.version else None


def require_kind(mask: torch.Tensor) -> None:
    if mask.dim() != 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise CaptureError(
            f"an attention mask of shape {tuple(mask.shape)} and {mask.dtype}; fix: give one of "
            "shape (batch, tokens), or (batch, 1, tokens, tokens) of bool (true may attend) or of "
            "the scores' float dtype (added to them)"
        )


__all__ = ["Masks", "require_kind"]
