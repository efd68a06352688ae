"""torch.nn.BatchNorm with momentum=None, whose running statistics are the mean over all batches.

Eager PyTorch reads the number of batches into Python, which a graph would hold as a constant; here
it stays a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onward.model_state.patches import patched


@contextmanager
def averaged_over_batches() -> Iterator[None]:
    """A context in which a batch norm without momentum counts its batches in a tensor."""
    norm = torch.nn.modules.batchnorm._BatchNorm
    plain = norm.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        counted = self.training and self.track_running_stats
        if self.momentum is not None or not counted or self.num_batches_tracked is None:
            return plain(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        share = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        dims, now = [0, *range(2, x.dim())], x.detach()
        for running, batch in (
            (self.running_mean, now.mean(dims)),
            (self.running_var, now.var(dims, unbiased=True)),
        ):
            running.copy_(running * (1.0 - share) + batch * share)
        return torch.nn.functional.batch_norm(
            x, None, None, self.weight, self.bias, True, 0.0, self.eps
        )

    with patched([(norm, "forward", forward)]):
        yield


__all__ = ["averaged_over_batches"]
