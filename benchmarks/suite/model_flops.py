"""FLOPs of a training step of a model, as PyTorch's counter counts them, without running it."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from suite.cases import Case
from suite.eager_memory import AsOnCuda
from suite.workloads import make_batches, make_model

Shape: TypeAlias = tuple[int, ...]


def _attention(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _attention_backward(dy: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(dy, q, k, v)


_ATEN = torch.ops.aten
# the counter knows CUDA's calls alone
FORMULAS = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def step_flops(case: Case) -> int:
    """FLOPs of the products of forward and backward on every row, padding included, two for each
    multiplication with its addition; what a causal mask hides counts."""
    real = make_batches(case, 1)[0]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = make_model(case)
        batch = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in real.items()}
        with AsOnCuda(), FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            output = model(**batch)
            (output if isinstance(output, torch.Tensor) else output["loss"]).backward()
    return int(counter.get_total_flops())
