"""`onward::attention`: a whole attention as one op of an exported program."""

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
    """Placeholder op: q f[B,H,Q,K], k f[B,H,S,K], v f[B,H,S,E] -> f[B,H,Q,E].

    The mask is given by `mask` (bool: true may attend; float: added to the scores), or in compact
    form by `padding` b[B,1,1,S], `bias` (added, may be trained) and `is_causal`. If both are given,
    they differ only for queries that see no key, for which `mask` is right:
    `attention_forms.choose` keeps one of the two, or refuses the dense one if `compact_only`.
    ratio: the dropout probability.
    """
    raise NotImplementedError("onward::attention exists during capture only")


@attention.register_fake
def _(
    q: Any, k: Any, v: Any, mask: Any, padding: Any, bias: Any, is_causal: bool, scale: float,
    ratio: float, compact_only: bool,
) -> Any:  # fmt: skip
    for added in (mask, padding, bias):
        if added is not None:  # makes the export record that its dims equal those of the scores
            added.expand(*q.shape[:-1], k.shape[-2])
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


__all__ = ["attention"]
