"""The predicted seconds of a step on a GPU: those of its plan, and eager PyTorch's beside them."""

from __future__ import annotations

from dataclasses import replace

import torch

from onward.explanation.eager_step import EagerWork, eager_work
from onward.explanation.facts import REGION_OPS, GpuTime
from onward.explanation.gpu_seconds import LaunchWork, device_seconds, host_seconds
from onward.explanation.subject import Subject
from onward.graph.types import DType, value
from onward.kernels import Gpu, Kernel
from onward.plan import Plan, PlannedLaunch
from onward.plan.cost import work

_LOW = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
_PRODUCTS = ("Gemm", "MatMul")
# ops of attention: the input that has the coordinates of queries, where rows are packed
COORDINATES = {"Attention": 6, "FlashAttention": 6, "FlashAttentionGrad": 10}


def gpu_time(subject: Subject, plan: Plan, gpu: Gpu, state: int) -> GpuTime:
    """Predicts a subject's step on a GPU. plan: for that GPU. state: bytes of the optimizer's
    state."""
    bf16 = gpu.target.multiplies_bf16
    tf32 = bf16 and torch.backends.cuda.matmul.fp32_precision == "tf32"  # both came with Ampere
    if any(launch.op in REGION_OPS for launch in plan.launches):
        return GpuTime(reason="a part of the model runs in eager PyTorch")
    samples = max(1, subject.batch.batch_size)
    onward = device_seconds(plan_work(plan, samples, bf16), gpu.rates, tf32)
    found = _eager(subject, plan, bf16)
    if isinstance(found, str):
        return GpuTime(onward, eager_reason=found)
    launches = list(found.launches)
    if subject.loop == "trainer":
        launches.append(_update(subject, state))
    return GpuTime(
        onward,
        device_seconds(launches, gpu.rates, tf32),
        host_seconds(found.operators, found.light),
        found.operators + found.light,
    )


def plan_work(plan: Plan, samples: int, bf16: bool = True) -> list[LaunchWork]:
    """The work of a plan's launches. Adjacent updates of parameters by one multi-tensor kernel are
    one launch. samples, bf16: as for `planned_work`."""
    found: list[LaunchWork] = []
    last: Kernel | None = None
    for launch in plan.launches:
        one = planned_work(launch, samples, bf16)
        if launch.kernel.together and launch.kernel is last:
            found[-1] = replace(found[-1], nbytes=found[-1].nbytes + one.nbytes)
        else:
            found.append(one)
        last = launch.kernel
    return found


def planned_work(launch: PlannedLaunch, samples: int, bf16: bool = True) -> LaunchWork:
    """The work of a launch of a plan. samples: number of sequences, among which packed rows are
    taken to be shared evenly. bf16: whether the GPU multiplies bf16 as such."""
    inputs, attrs = launch.spec.inputs, launch.spec.attrs
    flops, nbytes = work(launch)
    divisor = 1
    at = COORDINATES.get(launch.spec.op)
    if at is not None:
        divisor *= 2 if attrs.get("is_causal") else 1
        packed = len(inputs) > at and inputs[at] is not None
        divisor *= samples if packed else 1
    found = {t.dtype for t in inputs if t is not None and t.is_low}
    low = bool(found) and (bf16 or DType.BFLOAT16 not in found)
    matrices = (*inputs, *launch.spec.outputs) if launch.spec.op in _PRODUCTS else ()
    rows = tuple(value(t.shape[-1]) for t in matrices if t is not None and t.rank > 1)
    return LaunchWork(flops / divisor, nbytes, low, at is not None, rows)


def _eager(subject: Subject, plan: Plan, bf16: bool) -> EagerWork | str:
    policy, autocast = subject.compiler.policy, subject.captured.autocast
    if policy is not None and policy.everywhere:
        autocast = _LOW[policy.low]
    backward = any(launch.backward for launch in plan.launches)
    return eager_work(subject.model, subject.loss_fn, subject.batch, autocast, backward, bf16)


def _update(subject: Subject, state: int) -> LaunchWork:
    """The fused update of all parameters: each and its state are read and written, its gradient is
    read."""
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.itemsize for p in trained)
    return LaunchWork(nbytes=3 * weights + 2 * state)


__all__ = ["COORDINATES", "gpu_time", "plan_work", "planned_work"]
