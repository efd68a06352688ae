"""FLOPs of a training step of a model, as PyTorch's counter counts them, without running it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from onward.explanation.as_on_cuda import ATTENTION_FLOPS, AsOnCuda
from suite.cases import Case
from suite.workloads import make_batches, make_model


def step_flops(case: Case) -> int:
    """FLOPs of the products of forward and backward on every row, padding included, two for each
    multiplication with its addition; what a causal mask hides counts."""
    real = make_batches(case, 1)[0]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = make_model(case)
        batch = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in real.items()}
        with AsOnCuda(), FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
            output = model(**batch)
            (output if isinstance(output, torch.Tensor) else output["loss"]).backward()
    return int(counter.get_total_flops())
