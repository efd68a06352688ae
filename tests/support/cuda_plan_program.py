"""Run by test_cuda_plans.py in a process of its own: trains tiny models by the plans of a CUDA
device, with Triton's interpreter in the place of the device, and prints what differs from eager.

Triton reads TRITON_INTERPRET when it is first imported, so that the variable is set before.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["ONWARD_CACHE"] = ""  # kept graphs are those of other targets

import tiny
import torch
from tiny_families import CASES, allowed

import onward
from onward import compile as stages
from onward.kernels import Target

CUDA = Target("cuda", triton=True, multiplies_bf16=True, capability=(9, 0))
STEPS = 2


def for_cuda(cuda: bool) -> None:
    """Makes compilers plan for a CUDA device, whatever target they are given; or no longer."""
    stages.Compiler.__init__ = _for_cuda if cuda else _as_given


_as_given = stages.Compiler.__init__


def _for_cuda(self: Any, target: Target, *args: Any, **options: Any) -> None:
    _as_given(self, CUDA, *args, **options)


def loss_of(model: torch.nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    found: Any = model(**data)
    return found if isinstance(found, torch.Tensor) else found["loss"]


def eager_steps(
    model: torch.nn.Module, data: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Losses of steps of SGD in PyTorch, and the weights after them."""
    twin = copy.deepcopy(model).to(dtype)
    cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in data.items()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05)
    found: dict[str, torch.Tensor] = {}
    for i in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(twin, cast)
        loss.backward()
        optimizer.step()
        found[f"loss {i}"] = loss.detach()
    return {**found, **{n: p.detach() for n, p in twin.named_parameters()}}


def triton_kernels(trainer: onward.Trainer) -> dict[str, int]:
    """How often the step launches each Triton kernel."""
    names = [launch.kernel.name for launch in trainer.plan.launches]
    return dict(Counter(name for name in names if name.startswith("triton.")))


def family(name: str) -> dict[str, Any]:
    """Trains a family's model by Onward and by eager PyTorch."""
    model, data = CASES[name][0](), CASES[name][1]()
    exact, plain = (eager_steps(model, data, t) for t in (torch.float64, torch.float32))
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    ours = {f"loss {i}": trainer.train_step(data).loss for i in range(STEPS)}
    ours |= {n: p.detach() for n, p in model.named_parameters()}
    wrong = [
        key
        for key, truth in exact.items()
        if not float((ours[key].double() - truth).norm()) <= 2 * allowed(plain[key], truth, exact)
    ]
    return {"wrong": wrong, "kernels": triton_kernels(trainer)}


def low_family(name: str) -> dict[str, Any]:
    """Trains a family's model in fp16 by the plans of a CUDA device, by Onward and under PyTorch's
    autocast. An update may be as far from fp64's as autocast's is, twice over.

    beside_f32: launches of attention that multiply fp16 and add numbers of f32 to the scores.
    """
    model, data = CASES[name][0](), CASES[name][1]()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    exact = eager_steps(model, data, torch.float64)
    with torch.autocast("cpu", torch.float16):
        cast = eager_steps(model, data, torch.float32)
    options = {"mixed_precision": "fp16", "loss_scale": onward.LossScale(init_scale=1024.0)}
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), options=options)
    ours = {f"loss {i}": trainer.train_step(data).loss for i in range(STEPS)}
    ours |= {n: p.detach() for n, p in model.named_parameters()}
    wrong: list[str] = []
    for key, truth in exact.items():
        far, theirs = ((x[key].double() - truth).norm() for x in (ours, cast))
        moved = (truth - before[key].double()).norm() if key in before else truth.abs()
        if not float(far) <= 2 * float(theirs) + 1e-3 * float(moved):
            wrong.append(f"{key}: {float(far):.1e}, autocast {float(theirs):.1e}")
    beside = 0
    for launch in trainer.plan.launches:
        if launch.op == "FlashAttention":
            floating = [t for t in launch.spec.inputs if t is not None and t.is_floating]
            beside += floating[0].is_low and not floating[-1].is_low
    return {"wrong": wrong, "kernels": triton_kernels(trainer), "beside_f32": beside}


def _trained(cuda: bool, options: dict[str, Any], windows: int) -> tuple[Any, dict[str, int]]:
    for_cuda(cuda)
    model = tiny.gpt2(0.3)
    data = tiny.batch(4, 12, "right")
    trainer = onward.Trainer(
        model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3), options=options
    )
    losses = [
        float(trainer.train_step(part).loss)
        for _ in range(3)
        for part in (tiny.halves(data) if windows == 2 else [data])
    ]
    return (losses, [p.detach() for p in model.parameters()]), triton_kernels(trainer)


def same_dropout(precision: str, windows: int) -> dict[str, Any]:
    """Trains GPT-2 with dropout by the plans of a CUDA device and by those of this processor, with
    one seed: their masks are the same, so that losses and weights agree to rounding."""
    options = {"seed": 3, "gradient_accumulation_steps": windows, "mixed_precision": precision}
    (losses, weights), _ = _trained(False, options, windows)
    (made, found), kernels = _trained(True, options, windows)
    for_cuda(True)
    rtol = 1e-4 if precision == "no" else 5e-3
    pairs = [*zip(made, losses, strict=True)]
    wrong = [f"loss {i}" for i, (a, b) in enumerate(pairs) if not abs(a - b) <= rtol * abs(b)]
    for i, (p, q) in enumerate(zip(found, weights, strict=True)):
        if not float((p - q).norm()) <= 20 * rtol * float(q.norm()) + 1e-4:
            wrong.append(f"weight {i}")
    return {"wrong": wrong, "kernels": kernels}


def main(names: Iterable[str]) -> None:
    """Prints a line of JSON for each name: a family, `fp16 FAMILY`, or `dropout PRECISION
    WINDOWS`."""
    for_cuda(True)
    for name in names:
        if name.startswith("dropout "):
            _, precision, windows = name.split()
            print(json.dumps(same_dropout(precision, int(windows))))
        elif name.startswith("fp16 "):
            print(json.dumps(low_family(name.removeprefix("fp16 "))))
        else:
            print(json.dumps(family(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
