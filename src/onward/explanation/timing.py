"""Seconds of a step's launches, of one run on copies: nothing of the user's is written."""

from __future__ import annotations

from typing import Any

import torch

from onward.execute import Executable, Memory
from onward.execute.executable import KernelTime
from onward.explanation.subject import Remade

_SETTING = 0.1  # of learning rate, betas and the like, which no launch's time depends on


def launch_times(remade: Remade) -> list[KernelTime]:
    """The seconds of every launch of the plan, in order. Both halves of a plan run one after the
    other.

    Takes as much memory as the step, and copies of the weights.
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
    parts = getattr(captured, "regions", ())  # that run in PyTorch
    memory = Memory(remade.memory.device)
    executable = Executable(plan, memory, copies, *([parts] if parts else []))
    with torch.random.fork_rng(devices=[]):
        return executable.profile(inputs, prepared.dims)
