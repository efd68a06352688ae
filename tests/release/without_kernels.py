"""A program that trains where there are no native kernels, on a machine that seems to be a Mac.

There is no /proc, no /sys and no affinity of processors, and `sys.platform` says darwin from when
eager PyTorch has trained, before Onward is imported. It prints what `onward doctor` says, and as
its last line the losses of a Trainer's steps and of eager PyTorch's.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


def without_linux() -> None:
    """Takes away what Linux alone has."""
    stat = os.stat

    def is_linux(path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(("/proc/", "/sys/"))

    def absent(path: object) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def stat_elsewhere(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if is_linux(path):
            raise absent(path)
        return stat(path, *arguments, **options)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and is_linux(arguments[0]):
            raise absent(arguments[0])

    sys.addaudithook(watch)
    os.stat = stat_elsewhere
    del os.sched_getaffinity
    sys.platform = "darwin"


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
    eager: list[float] = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        optimizer.step()
        eager.append(float(loss.detach()))
    without_linux()

    import onward
    from onward.recipes.doctor import facts

    print(*facts(), sep="\n")
    rule = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = onward.Trainer(model, rule, loss_fn=F.cross_entropy)
    print(json.dumps([[float(trainer.train_step(x, y).loss) for _ in eager], eager]))


if __name__ == "__main__":
    main()
