"""`onward::attention`: the op that stands for a whole attention in an exported program."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("onward::attention", mutates_args=())
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    ratio: float,
    compact_only: bool,
) -> torch.Tensor:
    """Placeholder op that an export records whole: q f[B,H,Q,K], k f[B,H,S,K], v f[B,H,S,E].

    The mask is said by `mask` (bool: true may attend; float: added to the scores), or in compact
    form: padding b[B,1,1,S], a bias that is added and may be trained, causality. Where both are
    said they mean the same but for rows of queries that see no key at all; there `mask` is right,
    and `attention_forms.choose` takes one of the two, or refuses where `compact_only`.
    """
    raise NotImplementedError("onward::attention exists during capture only")


@attention.register_fake
def _(
    q: Any, k: Any, v: Any, mask: Any, padding: Any, bias: Any, is_causal: bool, scale: float,
    ratio: float, compact_only: bool,
) -> Any:  # fmt: skip
    for added in (mask, padding, bias):
        if added is not None:  # its dims and those of the scores are then known to be equal
            added.expand(*q.shape[:-1], k.shape[-2])
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


__all__ = ["attention"]
