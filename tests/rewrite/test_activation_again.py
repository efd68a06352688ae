"""The pass that makes activations again for the backward half."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import compiled
from torch import nn
from torch.nn import functional as F

import onward
from onward.graph.graph import Graph, Node
from onward.graph.types import DType
from onward.plan.views import VIEWS
from onward.rewrite import Policy

ROWS, WIDTH, WIDE = 64, 16, 64
OPS = ("BiasActivation", "GatedActivation", "Gelu")


class MLP(nn.Module):
    def __init__(self, activation: Callable[..., torch.Tensor], bias: bool, gated: bool) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        self.up = nn.Linear(WIDTH, WIDE, bias=bias)
        self.gate = nn.Linear(WIDTH, WIDE, bias=bias)
        self.down = nn.Linear(WIDE, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.activation(self.gate(x))
        return x + self.down(h * self.up(x) if self.gated else h)


class Stack(nn.Module):
    def __init__(self, kind: str, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MLP(*KINDS[kind]) for _ in range(layers))
        for layer in self.layers:
            if not layer.gated:
                del layer.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


# for each kind: the activation, whether it has a bias, whether it is gated
KINDS: dict[str, tuple[Callable[..., torch.Tensor], bool, bool]] = {
    "gelu": (F.gelu, True, False), "gelu without bias": (F.gelu, False, False),
    "tanh": (tanh_gelu, True, False), "tanh without bias": (tanh_gelu, False, False),
    "silu": (F.silu, True, False), "swiglu": (F.silu, False, True),
    "swiglu with bias": (F.silu, True, True), "geglu": (tanh_gelu, False, True),
    "reglu": (F.relu, False, True), "relu": (F.relu, True, False),
}  # fmt: skip


def step_of(model: nn.Module, low: bool = False) -> Graph:
    policy = Policy(DType.BFLOAT16) if low else None
    made = compiled(model, {"x": torch.randn(ROWS, WIDTH)}, policy=policy)
    return made.differentiated(list(made.captured.parameters))


def read_late(node: Node) -> bool:
    """Whether the backward half reads the node's result, or a view of it."""
    return any(
        read_late(n) if n.op_type in VIEWS and not n.meta.get("backward") else
        bool(n.meta.get("backward"))
        for n in node.outputs[0].consumers()
    )  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_activation_lives_through_both_halves(kind: str, low: bool) -> None:
    step = step_of(Stack(kind), low)
    forward = [n for n in step if n.op_type in OPS and not n.meta.get("backward")]
    again = [n for n in step if n.op_type in OPS and n.meta.get("backward")]
    assert len(forward) == 3
    if kind == "relu":  # its slope is read from the result
        assert not again and all(map(read_late, forward))
    else:
        assert len(again) == 3 and not any(map(read_late, forward))


def test_what_is_handed_out_is_kept() -> None:
    """An activation is kept where it is an output, and where nothing else in backward reads its
    operand."""

    class Shown(Stack):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            h = F.gelu(self.get_submodule("layers.0.gate")(x))
            return {"loss": self.get_submodule("layers.0.down")(h).square().mean(), "h": h}

    assert not any(n.meta.get("again") for n in step_of(Shown("gelu", 1)))

    class Frozen(Stack):
        """A model whose product before the activation needs no gradient, so its slope is not
        needed."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.gelu(x.repeat(1, WIDE // WIDTH))
            return self.get_submodule("layers.0.down")(h).square().mean()

    assert not any(n.meta.get("again") for n in step_of(Frozen("gelu", 1)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_not_a_bit_changes_and_the_peak_falls(kind: str, precision: str) -> None:
    batches = [torch.randn(ROWS, WIDTH, generator=torch.manual_seed(i)) for i in range(3)]
    found, peaks = [], []
    for off in ((), ("activation_again",)):
        options = onward.TrainerOptions(mixed_precision=precision, disable=off)
        trainer = onward.Trainer(Stack(kind), onward.optim.AdamW(lr=1e-2), options=options)
        losses = [trainer.train_step(x=x).loss for x in batches]
        found.append([*losses, *(p.detach() for p in trainer.model.parameters())])
        peaks.append(trainer.report()["predicted_peak_bytes"])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    kept = ROWS * WIDE * (2 if precision == "bf16" else 4)
    assert kind == "relu" or peaks[1] - peaks[0] >= 1.5 * kept, peaks
