"""A complex loss or result is refused in one line that says so; its real parts are trained on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onward
from onward import CaptureError
from onward.errors import EagerWarning


class Waves(nn.Module):
    """A model of one complex number, and what it returns."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.returned = nn.Linear(4, 3), returned

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layer(x)
        z = torch.complex(h.sum(), h.square().mean())
        return {
            "bare": z, "loss": {"loss": z}, "abs": {"loss": z.abs()}, "real": {"loss": z.real},
            "result": {"loss": z.abs(), "waves": z}, "logits": {"logits": h},
        }[self.returned]  # fmt: skip


def x() -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def trainer_of(model: nn.Module, *given: Any) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), *given)


LOSS = "the loss is complex; fix: return a real number, such as its .abs() or .real"
RESULT = "the output 'waves' is complex, and a graph returns real numbers; fix: return its .real"


@pytest.mark.parametrize("call", ["train_step", "eval_step"])
@pytest.mark.parametrize(("returned", "said"), [("bare", LOSS), ("loss", LOSS), ("result", RESULT)])
def test_it_is_refused_in_one_line(returned: str, said: str, call: str) -> None:
    model = Waves(returned)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CaptureError) as found:
        getattr(trainer_of(model), call)(x())
    assert said in str(found.value)
    assert "\n" not in str(found.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_complex_loss_function() -> None:
    def loss_fn(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        h = outputs["logits"] - target
        return torch.complex(h.sum(), h.mean())

    with pytest.raises(CaptureError) as found:
        trainer_of(Waves("logits"), loss_fn).train_step(x(), torch.randn(2, 3))
    assert LOSS in str(found.value)


@pytest.mark.parametrize("returned", ["abs", "real"])
def test_its_real_parts_train_as_in_pytorch(returned: str) -> None:
    model = Waves(returned)
    twin, trainer = copy.deepcopy(model), trainer_of(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        loss = trainer.train_step(x()).loss
        optimizer.zero_grad()
        want = twin(x())["loss"]
        want.backward()
        optimizer.step()
        torch.testing.assert_close(loss, want.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("returned", ["bare", "result"])
def test_an_accelerated_module_runs_in_eager_pytorch_and_says_why(returned: str) -> None:
    model = Waves(returned)
    twin = copy.deepcopy(model)
    onward.accelerate(model)
    with pytest.warns(EagerWarning, match="runs in eager PyTorch: .* is complex"):
        found = model(x())
    want = twin(x())
    for z, other in (
        [(found, want)] if returned == "bare" else zip(found.values(), want.values(), strict=True)
    ):
        torch.testing.assert_close(z, other)
    z, other = (found, want) if returned == "bare" else (found["waves"], want["waves"])
    z.abs().backward()
    other.abs().backward()
    torch.testing.assert_close(model.layer.weight.grad, twin.layer.weight.grad)
