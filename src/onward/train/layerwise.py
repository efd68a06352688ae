"""Layer-wise learning rate decay: lower layers of a pretrained model learn more slowly.

Source: ELECTRA, arXiv 2003.10555, section 3.1 (there a multiplier for each layer); BEiT, arXiv
2106.08254.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from onward.errors import OnwardError, refused

# how transformers names a stack of blocks: BERT's encoder.layer.0, GPT-2's h.0, T5's block.0,
# Llama's layers.0
BLOCKS = r"(?P<stack>(?:^|.*?\.)(?:layers?|h|blocks?))\.(?P<index>\d+)\."


def layerwise_decay(
    model: nn.Module, lr: float, decay: float, pattern: str = BLOCKS
) -> list[dict[str, Any]]:
    """Returns parameter groups for a torch optimizer, from the bottom to the top of the model.

    What follows the blocks (norms, poolers, heads) has the rate `lr`; the last block `lr decay`,
    the one below it `lr decay^2`, and so on. What precedes the first block in the model's order
    (embeddings) is below the lowest block. Each stack of an encoder and decoder is counted from its
    own top. A tied parameter is where it comes first.

    lr: of the top. decay: above 0, at most 1. pattern: a regular expression that the path of a
    block's parameter begins with, with the groups `stack` and `index`. Raises OnwardError where no
    parameter of the model fits it.
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay <= 1:
        raise refused("decay", decay, "a number above 0, at most 1")
    found = [(path, p, re.match(pattern, path)) for path, p in model.named_parameters()]
    depths: dict[str, int] = {}  # number of blocks, by stack
    for _, _, place in found:
        if place is not None:
            stack, index = place["stack"], int(place["index"])
            depths[stack] = max(depths.get(stack, 0), index + 1)
    if not depths:
        raise OnwardError(
            f"no parameter of {type(model).__name__} is in a block that fits {pattern!r}; fix: "
            "pattern= with the groups `stack` and `index`, for paths such as "
            f"{next((path for path, _, _ in found), 'layer.0.weight')}"
        )
    below, lowest = True, max(depths.values()) + 1
    groups: dict[int, list[torch.Tensor]] = {}  # by the number of steps below the top
    for _, p, place in found:
        if place is None:
            steps = lowest if below else 0
        else:
            below, steps = False, depths[place["stack"]] - int(place["index"])
        groups.setdefault(steps, []).append(p)
    return [{"params": groups[n], "lr": lr * decay**n} for n in sorted(groups, reverse=True)]


__all__ = ["layerwise_decay"]
