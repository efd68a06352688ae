"""The rule for `ctc_loss` with masked labels, whose number in each sample is an argument."""

from __future__ import annotations

from typing import Any

import torch

from onward.capture.masked_rows.rows import MaskedRows, refusal, rule


@rule("ctc_loss")
def _ctc_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes `ctc_loss` of masked labels: moves those that count to the front, in order, and
    those of each sample into a row of its own. The loss reads no labels after a sample's own."""
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    labels, rest = given["targets"], args[len(names) :]
    others = (x for name, x in given.items() if name != "targets")
    if not isinstance(labels, MaskedRows) or any(isinstance(x, MaskedRows) for x in others):
        raise refusal("ctc_loss")
    if labels.dim() != 1:
        raise refusal("labels in several dims")
    count = labels.full.shape[0]
    place = torch.where(labels.member, labels.member.long().cumsum(0) - 1, count)
    room = labels.full.new_zeros(count + 1)
    flat = room.scatter(0, place, labels.full)[:count]
    lengths = torch.as_tensor(given["target_lengths"]).long()
    starts = (lengths.cumsum(0) - lengths).unsqueeze(1)
    given["targets"] = flat[(starts + torch.arange(count)).clamp(max=count - 1)]
    first = [given.pop(name) for name in names]
    return func(*first, *rest, **given)
