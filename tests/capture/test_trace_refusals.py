"""What torch.export refuses is said in one line that can be read: where, what, and a way on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

import onward

LONGEST = 300
INNER = (  # words of torch.export's own
    "zuf", "u0", "unhinted", "Size-like", "fake tensor", "file an issue", "tensor subclasses",
    "torch.Size", "lifted_tensor", "def forward",
)  # fmt: skip


class Inner(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(4, 4), does
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.does(self, self.layer(x))


class Net(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Inner(does)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).square().mean()}


def drawn_number(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.rand(1).item()


def drawn_branch(m: Any, y: torch.Tensor) -> torch.Tensor:
    return 2.0 * y if torch.rand(1).item() < 0.5 else y


def read_number(m: Any, y: torch.Tensor) -> torch.Tensor:
    number: Any = y.mean().tolist()
    return y * number


def read_as_float(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(y.detach().abs().sum())


def read_as_size(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y[: int(y.abs().sum()) + 1]


def written_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.kept.data.copy_(y.detach().mean(0))
    return y + m.kept


def written_local(m: Any, y: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(4)
    t.data.copy_(y.detach().mean(0))
    return y + t


def through_numpy(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(y.detach().numpy().mean())


REFUSED: dict[Callable[[Any, torch.Tensor], torch.Tensor], str] = {
    drawn_number: "into Python",
    drawn_branch: "into Python",
    read_number: "into Python",
    read_as_float: "into Python",
    read_as_size: "into Python",
    written_data: r"\.data\.copy_",
    written_local: r"\.data\.copy_",
    through_numpy: "numpy",
}


def assert_readable(text: str) -> None:
    assert len(text) <= LONGEST, text
    assert "\n" not in text
    assert "fix: " in text, text
    assert not [w for w in INNER if w in text], text


@pytest.mark.parametrize("does", REFUSED, ids=lambda f: f.__name__)
def test_a_refusal_is_a_line(does: Any, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net(does)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onward.Trainer(model, optimizer, options={"strict": True})
    with pytest.raises(onward.CaptureError, match=REFUSED[does]) as refused:
        trainer.train_step(x=torch.ones(3, 4))
    assert_readable(str(refused.value))
    assert capfd.readouterr().err == "", "nothing of torch.export's is printed"


@pytest.mark.parametrize("does", REFUSED, ids=lambda f: f.__name__)
def test_an_accelerated_model_says_it_once_and_goes_on(does: Any) -> None:
    model = onward.accelerate(Net(does))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(3, 4))["loss"].backward()
    lines = [line for w in told for line in str(w.message).splitlines()]
    assert lines
    assert all(len(line) <= LONGEST for line in lines)
    assert not [w for w in INNER for line in lines if w in line], lines


def test_what_nobody_knows_is_said_with_its_place() -> None:
    model = Net(lambda m, y: (_ for _ in ()).throw(RuntimeError("strange " * 100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(onward.CaptureError, match="could not trace inner: strange") as refused:
        onward.Trainer(model, optimizer).train_step(x=torch.ones(3, 4))
    assert len(str(refused.value)) <= LONGEST


@pytest.mark.parametrize("option", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layer_drop_is_called_so(option: str) -> None:
    torch.manual_seed(0)
    drops: Any = {option: 0.5}
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=32, **drops,
    )).train()  # fmt: skip
    ids = torch.randint(3, 60, (3, 7))
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(onward.CaptureError, match=f"layer drop.*config.{option} = 0") as refused:
        trainer.train_step(input_ids=ids, labels=ids)
    assert len(str(refused.value)) <= LONGEST
