"""Optimizers of ranks whose model is parameters alone, for tests of what a rank holds of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onward.distribute import Mesh
from onward.train.torch_optimizer import TorchOptimizer


def bare_optimizer(shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, zero: int) -> TorchOptimizer:
    """AdamW of one rank for parameters of zeros, before cuts along tp or stages are chosen."""
    model = torch.nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    optimizer = torch.optim.AdamW(model.parameters())
    return TorchOptimizer(model, optimizer, mesh=mesh, zero=zero)
