"""Run by test_plugin.py in a process of its own: prints, as JSON, what a plugin's parts do there.

Nothing here imports the plugin: where it is installed, Onward finds it by its entry point.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

import torch
from torch import nn

import onward
from onward.recipes.doctor import facts

STEPS, ROWS = 6, 40


class Net(nn.Module):
    """f32[N,16] -> f32[N,7], by way of a squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.outer = nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x)).square())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches in which three quarters of the labels are ignored."""
    torch.manual_seed(1)
    labels = torch.where(torch.arange(ROWS) % 4 == 0, torch.arange(ROWS) % 7, -100)
    return [(torch.randn(ROWS, 16), labels) for _ in range(STEPS)]


def eager(model: nn.Module) -> list[float]:
    """Losses of the same steps in PyTorch alone, with Signum as the paper writes it."""
    momenta = {p: torch.zeros_like(p) for p in model.parameters()}
    losses = []
    for x, y in batches():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p, momentum in momenta.items():
                assert p.grad is not None
                g = p.grad
                momentum.copy_(0.9 * momentum + 0.1 * g)
                p -= 0.01 * (torch.sign(momentum) + 0.1 * p)
    return losses


def trained(model: nn.Module, optimizer: Any, **options: Any) -> tuple[onward.Trainer, list[float]]:
    made = onward.TrainerOptions(**options)
    trainer = onward.Trainer(model, optimizer, nn.functional.cross_entropy, options=made)
    return trainer, [float(trainer.train_step(x, y).loss) for x, y in batches()]


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    listed = [line.split(None, 1)[1] for line in facts() if line.startswith("plugins")]
    early = [name for name in sys.modules if name.startswith("onward_")]
    if not hasattr(onward.optim, "Signum"):
        return without(model)
    plain, written, off, torchs = (copy.deepcopy(model) for _ in range(4))
    want = eager(plain)
    trainer, losses = trained(written, onward.optim.Signum(lr=0.01, weight_decay=0.1))
    report = trainer.report()
    less, others = trained(
        off, onward.optim.Signum(lr=0.01, weight_decay=0.1), disable=("squared_relu",)
    )
    record = next(r for r in _optimizers().values() if r.name == "Signum")
    module, _, name = record.torch.rpartition(".")
    its_own = getattr(sys.modules[module], name)(torchs.parameters(), lr=0.01, weight_decay=0.1)
    for x, y in batches():
        torchs.zero_grad()
        nn.functional.cross_entropy(torchs(x), y).backward()
        its_own.step()
    return {
        "eager": want,
        "losses": losses,
        "weights": distance(written, plain),
        "moved": distance(model, plain),
        "kernels": [launch.kernel.name for launch in trainer.plan.launches],
        "passes": {p["name"]: p["edits"] for p in report["passes"]},
        "rows": report["rows"]["arithmetic_done"],
        "off": {
            "losses": others,
            "kernels": [launch.kernel.name for launch in less.plan.launches],
            "passes": [p["name"] for p in less.report()["passes"]],
        },
        "torch": distance(torchs, plain),
        "state": sorted({key for held in trainer.optimizer.state.values() for key in held}),
        "meets": meets(),
        "replaced": [replaced(its_own, its_own), replaced(its_own, type(its_own))],
        "early": early,
        "listed": listed,
    }


def _optimizers() -> dict[str, Any]:
    from onward import extend

    return extend.OPTIMIZERS


def meets() -> str:
    """The error that refuses a second op of the name that the plugin's op has."""
    from onward import extend

    def body(b: Any, inputs: Any, attrs: Any) -> Any: ...

    try:
        extend.op(extend.Op("SquaredRelu", lambda call: call.type(0), body))
    except extend.OnwardError as error:
        return str(error)
    return ""


def replaced(optimizer: torch.optim.Optimizer, where: Any) -> str:
    """The error that refuses an optimizer whose step has been replaced by another function."""
    model, before = Net(), vars(where).get("step")
    kind: Any = type(optimizer)
    optimizer = optimizer if where is optimizer else kind(model.parameters(), lr=0.01)
    where.step = lambda *_: None
    try:
        onward.Trainer(model, optimizer, nn.functional.cross_entropy, options={"strict": True})
    except onward.OnwardError as error:
        return str(error)
    finally:
        if before is None:
            del where.step
        else:
            where.step = before
    return ""


def without(model: nn.Module) -> dict[str, Any]:
    """What a run of the model shows in a process where no plugin is installed."""
    from onward import extend

    trainer, losses = trained(model, onward.optim.SGD(lr=0.01))
    return {
        "losses": losses,
        "kernels": [launch.kernel.name for launch in trainer.plan.launches],
        "passes": [p["name"] for p in trainer.report()["passes"]],
        "ops": sorted(extend.OPS),
        "optimizers": sorted(extend.OPTIMIZERS),
        "modules": [name for name in sys.modules if name.startswith("onward_")],
    }


if __name__ == "__main__":
    print(json.dumps(main()))
