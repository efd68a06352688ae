"""Times a step's launches in one run on copies; nothing of the user's is written."""

from __future__ import annotations

from typing import Any

import torch

from onward.execute import Executable, Memory
from onward.execute.executable import KernelTime
from onward.explanation.subject import Remade

_SETTING = 0.1  # learning rate, betas and the like, which do not affect times


def launch_times(remade: Remade) -> list[KernelTime]:
    """The seconds of every launch of the plan, in order; halves run one after the other.

    Needs as much memory as the step, and copies of the weights.
    """
    prepared = remade.prepared
    plan, signature = remade.executable.plan, remade.executable.plan.signature
    captured = remade.subject.captured
    copies = {n: t.detach().clone() for n, t in captured.owned.items() if n in plan.inputs}
    inputs: dict[str, Any] = dict(prepared.inputs)
    inputs |= dict.fromkeys(signature.cotangents.values(), 1.0)
    inputs |= dict.fromkeys(signature.hyperparameters.values(), _SETTING)
    inputs |= dict.fromkeys(signature.clocks.values(), 1)
    if signature.loss_scale is not None:
        inputs[signature.loss_scale] = 1.0
    if signature.seed is not None:
        inputs[signature.seed] = torch.zeros(2, dtype=torch.int64)
    if signature.sample_offset is not None:
        inputs[signature.sample_offset] = 0
    parts = getattr(captured, "regions", ())  # parts that run in PyTorch
    memory = Memory(remade.memory.device)
    executable = Executable(plan, memory, copies, *([parts] if parts else []))
    with torch.random.fork_rng(devices=[]):
        return executable.profile(inputs, prepared.dims)
