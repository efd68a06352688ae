"""Run by test_extend.py over a copy of the sources with additions: prints what they do, as JSON."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import torch
from torch import nn

import onward
from onward import extend
from onward.differentiate import vjp
from onward.graph.evaluate import evaluate
from onward.graph.graph import Role

ROWS = 40


class Net(nn.Module):
    """f32[N,16] -> f32[N,7]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.outer = nn.Linear(24, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.asinh(self.inner(x)).neg().neg())


class Scaled(nn.Module):
    """A model with an operator of torch.library, which Onward serves once `registered_later` adds
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 24)
        self.outer = nn.Linear(24, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.ops.additions.unit_row(self.inner(x)))


@torch.library.custom_op("additions::unit_row", mutates_args=())
def unit_row(x: torch.Tensor) -> torch.Tensor:
    """Divide each row by its length."""
    return x / x.norm(dim=-1, keepdim=True)


@unit_row.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x / x.norm(dim=-1, keepdim=True), x, dy)[0]


unit_row.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def batches(steps: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches in which three quarters of the labels are ignored."""
    torch.manual_seed(1)
    labels = torch.where(torch.arange(ROWS) % 4 == 0, torch.arange(ROWS) % 7, -100)
    return [(torch.randn(ROWS, 16), labels) for _ in range(steps)]


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def step_by_step(trainer: onward.Trainer) -> list[float]:
    return [float(trainer.train_step(x, y).loss) for x, y in batches()]


def distance(a: nn.Module, b: nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


def kernels(trainer: onward.Trainer) -> list[str]:
    return [launch.kernel.name for launch in trainer.plan.launches]


def compared(model: nn.Module) -> dict[str, Any]:
    """Results of a model trained by Onward beside eager PyTorch."""
    plain = copy.deepcopy(model)
    want = eager(plain, torch.optim.Adadelta(plain.parameters(), lr=0.5, weight_decay=0.01))
    optimizer = onward.optim.Adadelta(lr=0.5, weight_decay=0.01)
    trainer = onward.Trainer(model, optimizer, nn.functional.cross_entropy)
    losses, report = step_by_step(trainer), trainer.report()
    return {
        "eager": want,
        "losses": losses,
        "weights": distance(model, plain),
        "kernels": kernels(trainer),
        "passes": {p["name"]: p["edits"] for p in report["passes"] if p["edits"]},
        "rows": report["rows"]["arithmetic_done"],
        "trainer": trainer,
    }


def gradient_of_clip() -> float:
    """The largest difference of the added gradient rule from torch's gradient, relative to it."""
    graph = extend.Graph()
    value = graph.input("x", extend.parse_type("f64[3,5]"), Role.BATCH)
    b = extend.Builder(graph)
    weights = np.array([1.0, -2.0, 0.5])
    within = b.Clip(value, np.array(-0.5), np.array(0.75))
    total = b.reduce_sum(b.Mul(within, weights[:, None]), [0, 1], keepdims=False)
    graph.outputs = {"y": total}
    x = np.random.default_rng(0).standard_normal((3, 5))
    step = vjp(graph, ["y"], ["x"])
    (name,) = step.signature.gradients.values()
    have = evaluate(step, {"x": x, "cotangent.y": np.array(1.0)})[name]
    tensor = torch.from_numpy(x).requires_grad_()
    (tensor.clamp(-0.5, 0.75).sum(1) @ torch.from_numpy(weights)).backward()
    assert tensor.grad is not None
    return float((torch.from_numpy(have) - tensor.grad).abs().max() / tensor.grad.abs().max())


def registered_later() -> dict[str, Any]:
    """Results with an op that is registered with a row rule and translation, and later gets a
    gradient rule and a kernel."""

    def body(b: Any, inputs: Any, attrs: Any) -> list[Any]:
        (x,) = inputs
        dims = [extend.type_of(x).rank - 1]
        return [b.Div(x, b.Sqrt(b.reduce_sum(b.Mul(x, x), dims, keepdims=True)))]

    record = extend.Op(
        "UnitRow", lambda call: call.type(), body, "Each row over its length.",
        axes=extend.axis_attribute(-1),
    )  # fmt: skip
    extend.op(record, rows=extend.ALONG_ROWS)
    extend.translation("additions.unit_row.default", lambda call, x: call.b.UnitRow(x))
    torch.manual_seed(0)
    found = compared(Scaled())
    trainer = found.pop("trainer")
    before = kernels(trainer)

    def bind(args: Any) -> Any:
        x, y = args.x(), args.y
        return lambda: torch.div(x, x.norm(dim=-1, keepdim=True), out=y)

    def rule(b: Any, dys: Any, ys: Any, xs: Any, attrs: Any) -> list[Any]:
        (dy,), (y,), (x,) = dys, ys, xs
        dims = [extend.type_of(x).rank - 1]
        length = b.Sqrt(b.reduce_sum(b.Mul(x, x), dims, keepdims=True))
        along = b.Mul(y, b.reduce_sum(b.Mul(dy, y), dims, keepdims=True))
        return [b.Div(b.Sub(dy, along), length)]

    extend.gradient("UnitRow", rule)
    extend.kernel("UnitRow", extend.Kernel("added.unit_row", bind))
    step_by_step(trainer)
    found["kept"] = kernels(trainer) == before
    again = compared(Scaled())
    found["then"] = again["kernels"].count("added.unit_row")
    found["apart"] = max(abs(a - b) for a, b in zip(again["losses"], again["eager"], strict=True))
    return found


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = compared(Net())
    del found["trainer"]
    return {
        "from": onward.__file__,
        "trained": found,
        "norm": gradient_of_clip(),
        "later": registered_later(),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
