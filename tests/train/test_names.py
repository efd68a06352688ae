"""The user's names and ours never meet, whatever characters a path or keyword has."""

from __future__ import annotations

import copy
from typing import Any

import onnxruntime as ort
import pytest
import torch
from loops import OPTIMIZERS, Pair
from torch import nn

import onward

OURS = [
    "cotangent.loss", "seed", "sample_offset", "lr.0", "step.0", "step.1", "rows.R0", "grad_norm",
    "loss", "finite", "exp_avg.param.w", "exp_avg.w", "exp_avg_sq.w", "momentum_buffer.w",
    "accumulator.w", "accumulator.param.w", "next.param.w", "grad.param.w", "accumulated.w",
    "param.w", "buffer.b", "batch.x", "output.y", "w", "b", "const_1", "size_1", "mul_1", "add_2",
    "beta1.0", "weight_decay.0", "", "a b", "ä/ö:%", "x\n", "input_0", "target", "labels#2", "#2",
]  # fmt: skip


class Taking(nn.Module):
    """Multiplies by what it is given under any keyword."""

    b: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("b", torch.randn(3))

    def forward(self, **given: torch.Tensor) -> torch.Tensor:
        total = self.w * self.b
        for i, x in enumerate(given.values()):
            total = total * x + (i + 1) * x * self.w
        return total.pow(2).mean()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["plain", "clipped"])
def test_a_batch_may_use_every_name(options: dict[str, Any]) -> None:
    pair = Pair(Taking(), OPTIMIZERS["momentum"])
    for _ in range(2):
        pair.step(**{name: 1 + 0.1 * torch.randn(3) for name in OURS})
    if options:
        trainer = onward.Trainer(
            Taking(), onward.optim.AdamW(), options=onward.TrainerOptions(**options)
        )
        norm = trainer.train_step(grad_norm=torch.ones(3)).grad_norm
        assert norm is not None and norm.dim() == 0


class Scaled(nn.Module):
    """A parameter with the name of a forward argument."""

    x: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("x", torch.randn(3))

    def forward(self, x: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * self.scale * self.x + scale - y).pow(2).mean()


def test_a_parameter_may_have_an_arguments_name() -> None:
    pair = Pair(Scaled())
    for _ in range(3):
        pair.step(torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3))


class Named(nn.Module):
    """Parameters under the names that a step gives its state."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        for slot in ("exp_avg", "exp_avg_sq", "momentum_buffer", "accumulator", "next", "param"):
            inner = nn.Module()
            inner.w = nn.Parameter(torch.randn(3))
            inner.param = nn.Module()
            inner.param.w = nn.Parameter(torch.randn(3))
            self.add_module(slot, inner)
        for name in ("sample_offset", "seed", "grad norm", "ä/ö"):
            self.register_parameter(name, nn.Parameter(torch.randn(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x
        for p in self.parameters():
            total = total * 0.5 + p * x
        return total.pow(2).mean()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_may_have_the_names_of_state(make: Any) -> None:
    pair = Pair(Named(), make)
    for _ in range(3):
        pair.step(torch.randn(2, 3))


def test_state_of_such_parameters_is_saved_apart() -> None:
    pair = Pair(Named(), OPTIMIZERS["adamw"])
    x = torch.randn(2, 3)
    pair.step(x)
    state = pair.trainer.state_dict()
    pair.trainer.train_step(x)
    want = {n: p.detach().clone() for n, p in pair.model.named_parameters()}
    pair.trainer.load_state_dict(state)
    pair.trainer.train_step(x)
    for name, p in pair.model.named_parameters():
        assert torch.equal(p, want[name]), name


class Returning(nn.Module):
    """Outputs under names of ours, and names that are equal as text."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> dict[Any, torch.Tensor]:
        y = x * self.w
        names = [n for n in OURS if n and n != "loss"]
        return {"loss": y.mean()} | {n: y * (i + 2.0) for i, n in enumerate(names)}


def test_outputs_may_use_every_name() -> None:
    options = onward.TrainerOptions(max_grad_norm=1.0)
    model, x = Returning(), torch.randn(2, 3)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0), options=options)
    names = [n for n in OURS if n and n != "loss"]
    step = trainer.train_step(x=x, fetch=names)
    for i, name in enumerate(names):
        torch.testing.assert_close(step.outputs[name], x * (i + 2.0), msg=name)
    assert step.grad_norm is not None and step.grad_norm.dim() == 0
    loss = trainer.eval_step(x=x, fetch=["loss"])
    assert torch.equal(loss.outputs["loss"], loss.loss)


def test_an_exported_file_has_the_users_names(tmp_path: Any) -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.randn(3))
            self.mul_1 = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x * self.x * self.mul_1, "y": x * 2.0}

    model = Doubling()
    trainer = onward.Trainer(model, onward.optim.SGD(), lambda out, y: (out["x"] - y).pow(2).mean())
    x = torch.randn(2, 3)
    trainer.eval_step(x, x)
    path = trainer.export_onnx(tmp_path / "m.onnx", batch={"x": x, "labels": x})
    session = ort.InferenceSession(str(path))
    assert [i.name for i in session.get_inputs()] == ["x"]
    outputs = [o.name for o in session.get_outputs()]
    assert len(set(outputs)) == 2 and "y" in outputs
    got = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got[0]), model(x)["x"].detach())


def test_a_loss_module_may_have_the_models_names() -> None:
    """The model has a `loss_fn` of its own, with the same parts."""

    class Weighted(nn.Module):
        weight: torch.Tensor

        def __init__(self, number: float) -> None:
            super().__init__()
            self.register_buffer("weight", torch.full((3,), number))

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return x * self.weight if y is None else ((x - y).pow(2) * self.weight).mean()

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))
            self.loss_fn, self.model = Weighted(2.0), Weighted(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(self.loss_fn(x)) * self.w

    pair = Pair(Whole(), loss_fn=Weighted(5.0))
    for _ in range(2):
        pair.step(torch.randn(2, 3), torch.randn(2, 3))


OURS = ("loss", "grad_norm", "finite", "seed", "lr.0", "step.0", "next.param.w", "grad.param.w")


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_results_may_have_the_names_of_a_steps_outputs(make: Any, steps: int) -> None:
    """A result named `loss` beside a loss_fn too: what is minimised is what the loss_fn returns."""

    class Results(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = x * self.w
            return {"y": y, **{name: y.sum() * (i - 2.5) for i, name in enumerate(OURS)}}

    def loss_fn(results: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return (results["y"] - target).pow(2).mean()

    model = Results()
    twin = copy.deepcopy(model)
    options = {"max_grad_norm": 0.1, "gradient_accumulation_steps": steps}
    trainer = onward.Trainer(model, make(model.parameters()), loss_fn, options=options)
    optimizer = make(twin.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(steps):
            x, target = torch.randn(2, 3), torch.randn(2, 3)
            want = twin(x)
            loss = loss_fn(want, target)
            (loss / steps).backward()
            found = trainer.train_step(x, target, fetch=OURS)
            torch.testing.assert_close(found.loss, loss.detach())
            for name in OURS:
                torch.testing.assert_close(found.outputs[name], want[name].detach())
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
        torch.testing.assert_close(found.grad_norm, norm)
    torch.testing.assert_close(model.w, twin.w)
    found = trainer.eval_step(x, target, fetch=("loss",))
    torch.testing.assert_close(found.loss, loss_fn(twin(x), target).detach())
    torch.testing.assert_close(found.outputs["loss"], twin(x)["loss"].detach())
