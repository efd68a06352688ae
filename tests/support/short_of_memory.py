"""Run by test_shortages.py in a process of its own, whose address space is limited at times. Prints
what a step that does not fit says, and whether training goes on as if it had not been, as JSON.
"""

from __future__ import annotations

import copy
import gc
import json
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

import onward

ROOM = 24 << 20  # bytes that may be mapped beyond those mapped now
WIDTH = 256


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points f32[size,WIDTH] and classes i64[size]."""
    generator = torch.Generator().manual_seed(size)
    return (
        torch.randn(size, WIDTH, generator=generator),
        torch.randint(0, 10, (size,), generator=generator),
    )


def limited(room: int | None) -> None:
    """Limits the address space to `room` bytes more than are mapped; None: no limit."""
    most = resource.RLIM_INFINITY
    if room is not None:
        gc.collect()  # a trainer of before, freed later, would make room for the step
        mapped = int(Path("/proc/self/statm").read_text().split()[0])
        most = mapped * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def trainer_of(net: nn.Module, **options: Any) -> onward.Trainer:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    return onward.Trainer(net, optimizer, nn.functional.cross_entropy, options=options)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def in_a_trainer() -> dict[str, Any]:
    trainer, twin = trainer_of(model()), trainer_of(model())
    for one in (trainer, twin):
        for size in (8, 9):
            one.train_step(*batch(size))
    large = batch(16384)
    before = copy.deepcopy(trainer.state_dict())
    said, memory_error = "", False
    limited(ROOM)
    try:
        trainer.train_step(*large)
    except onward.OutOfMemoryError as error:
        said, memory_error = str(error), isinstance(error, MemoryError)
    limited(None)
    unchanged = same(before, trainer.state_dict())
    for one in (trainer, twin):
        one.train_step(*batch(12))
    full = trainer_of(model())
    full.train_step(*large)
    return {
        "said": said,
        "is a MemoryError": memory_error,
        "unchanged": unchanged,
        "goes on": same(trainer.state_dict()["model"], twin.state_dict()["model"]),
        "peak": full.plan.peak,
    }


def in_a_loop() -> dict[str, Any]:
    net = onward.accelerate(model())
    eager = model()
    x, y = batch(8)
    nn.functional.cross_entropy(net(x), y).backward()
    net.zero_grad()
    large, _ = batch(16384)
    said = ""
    limited(ROOM)
    try:
        net(large)
    except MemoryError as error:
        said = str(error)
    limited(None)
    for one in (net, eager):
        nn.functional.cross_entropy(one(x), y).backward()
    pairs = zip(net.parameters(), eager.parameters(), strict=True)
    worst = max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]
    return {"said": said, "worst": worst}


def in_parts() -> dict[str, Any]:
    """A batch that does not fit, split; beside the same step with all memory."""
    nets = model(), model()
    trainers = [
        onward.Trainer(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            nn.functional.cross_entropy,
            options={"auto_micro_batch": splits},
        )
        for net, splits in zip(nets, (True, False), strict=True)
    ]
    for trainer in trainers:
        trainer.train_step(*batch(8))
    large = batch(16384)
    limited(2 * ROOM)  # eight parts take 22 MB
    try:
        found = trainers[0].train_step(*large)
    finally:
        limited(None)
    wanted = trainers[1].train_step(*large)
    peaks = [trainer.plan.peak for trainer in trainers]
    for trainer in trainers:  # short batches are whole again
        trainer.train_step(*batch(12))
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return {
        "loss": [float(found.loss), float(wanted.loss)],
        "peaks": peaks,
        "worst": max(float((p - q).detach().abs().max()) for p, q in pairs),
        "accumulates": bool(trainers[0].plan.signature.accumulators),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {"trainer": in_a_trainer(), "loop": in_a_loop(), "parts": in_parts()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
