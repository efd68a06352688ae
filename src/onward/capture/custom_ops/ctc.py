"""`onward::ctc_loss`: replaces torch.ctc_loss in a trace. An export cannot trace torch's own, which
allocates a table as large as the longest label."""

from __future__ import annotations

from typing import Any

import torch

from onward.capture.custom_ops.autocast import as_loss


@torch.library.custom_op("onward::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    reduction: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """Placeholder op: log_probs f[T,N,C], targets i64[N,S] or concatenated i64[*], lengths i64[N]
    -> the loss of each sample f[N] (reduction 0), their mean, each divided by its number of labels
    (1), or their sum (2)."""
    raise NotImplementedError("onward::ctc_loss exists during capture only")


@ctc_loss.register_fake
def _(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int,
    reduction: int, zero_infinity: bool,
) -> Any:  # fmt: skip
    return log_probs.new_empty((log_probs.shape[1],) if reduction == 0 else ())


def recorded(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Replaces `torch.ctc_loss`: one op `onward::ctc_loss`, with arguments in its form."""
    one = log_probs.dim() == 2  # a single sample, without the dim N
    if one:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.reshape(1, -1) if targets.dim() == 1 else targets
    lengths = [
        n.reshape(-1) if isinstance(n, torch.Tensor) else torch.tensor([n] if one else list(n))
        for n in (input_lengths, target_lengths)
    ]
    loss = as_loss(ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity))
    return loss.squeeze(0) if one and reduction == 0 else loss


__all__ = ["recorded"]
