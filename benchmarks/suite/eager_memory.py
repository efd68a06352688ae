"""The memory of eager PyTorch's step on a GPU, without one: torch's tracker under fake tensors.

Fake tensors are on the CPU, since a CPU build of PyTorch has no fake CUDA tensors. `AsOnCuda` makes
the operators keep what CUDA's keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from onward.explanation.as_on_cuda import AsOnCuda
from suite.batches import Batch
from suite.cases import Case
from suite.engines import LEARNING_RATE
from suite.workloads import make_batches, make_model


@dataclass(frozen=True)
class EagerMemory:
    """held: bytes of the model and the batch. peak: of a step after the first, in all."""

    held: int
    peak: int

    @property
    def step(self) -> int:
        """The bytes of a step above the model and the batch."""
        return self.peak - self.held


def eager_memory(case: Case) -> EagerMemory:
    """The memory of steps of a case in eager PyTorch."""
    batch = make_batches(case, 1)[0]
    return step_memory(lambda: make_model(case), batch, bf16=case.precision == "bf16")


def step_memory(
    build: Callable[[], torch.nn.Module], batch: Batch, bf16: bool = False
) -> EagerMemory:
    """The memory of steps on such a batch with fused AdamW. build: makes the model, whose call
    gives the loss or a mapping with one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        fake = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in batch.items()}
    held = [*{id(t): t for t in (*model.parameters(), *model.buffers())}.values(), *fake.values()]
    tracker = MemTracker()
    tracker.track_external(model, optimizer, *fake.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mode, tracker, AsOnCuda():
            for _ in range(2):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    output = model(**fake)
                loss = output if isinstance(output, torch.Tensor) else output["loss"]
                loss.backward()
                optimizer.step()
                del output, loss
                tracker.reset_mod_stats()
            peaks = tracker.get_tracker_snapshot("peak")
    peak = max(int(kinds["Total"]) for kinds in peaks.values())
    return EagerMemory(sum(t.nbytes for t in held), peak)
