"""Verification finds what is planted: a small wrong in one place of one stage, and says which.

Each fault replaces one entry of a table, one pass, or one decision of the planner, in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planting import (
    Patch,
    after,
    attribute,
    bypass,
    drop_addend,
    gradient,
    grown,
    kernel,
    narrow_broadcast,
    scaled,
    translation,
    without_first,
)
from torch import nn

import onward
import onward.compile
from onward.capture import CaptureRequest
from onward.capture.aten import TABLE
from onward.differentiate import reverse
from onward.graph.graph import type_of
from onward.plan import liveness
from onward.train.verify.engines import Engines

WIDTH = 8


class Small(nn.Module):
    """One layer that uses a bit of everything, and returns its loss. The head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.place = nn.Parameter(torch.zeros(WIDTH))
        self.norm, self.end = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place
        y = self.norm(x)
        q, k, v = (m(y).view(*y.shape[:2], 2, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.end(x)
        gates = torch.softmax(self.gate(y), -1) * self.scale
        x = x + self.down(F.gelu(self.up(y))) * gates.sum(-1, keepdim=True) - self.shift
        logits = F.linear(torch.tanh(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model() -> Small:
    torch.manual_seed(0)
    made = Small()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return made


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1)
    labels[0, 3:] = -100
    return {"ids": ids, "labels": labels}


# ---- the faults


@dataclass(frozen=True)
class Fault:
    """plant: changes Onward. stage: where bisection must find it; node: what it must say of it."""

    plant: Callable[[Patch], None]
    stage: str
    node: str = ""
    captured: bool = False  # whether the fault is one of capture


def _scale_of_two(was: Any) -> float:
    return 0.5 * 1.001


GRAPH = "every node agrees with onnxruntime: the graph itself computes something other"
FAULTS: dict[str, Fault] = {
    # capture
    "attention's scale": Fault(
        translation("scaled_dot_product_attention.default", scale=_scale_of_two),
        "capture",
        captured=True,
    ),
    "attention sees what follows": Fault(
        translation("scaled_dot_product_attention.default", causal=lambda _: False),
        "capture",
        captured=True,
    ),
    "gelu by tanh": Fault(
        translation("gelu.default", approximate=lambda _: "tanh"),
        "capture",
        captured=True,
    ),
    "a norm's epsilon": Fault(
        translation("layer_norm.default", eps=lambda _: 1e-6),
        "capture",
        captured=True,
    ),
    "smoothed labels": Fault(
        translation("cross_entropy_loss.default", label_smoothing=lambda _: 1e-4),
        "capture",
        captured=True,
    ),
    "softmax over another dim": Fault(
        translation("softmax.int", dim=lambda _: 1),
        "capture",
        captured=True,
    ),
    "transposed weight of a square layer": Fault(
        lambda patch: patch.setitem(
            TABLE, "linear.default",
            lambda c, x, w, bias=None, plain=TABLE["linear.default"]: plain(
                c, x, c.b.transpose(w, [1, 0]) if len(set(type_of(w).shape)) == 1 else w, bias
            ),
        ),
        "capture",
        captured=True,
    ),
    # rewrite
    "fused attention's scale": Fault(
        after("flash_attention", attribute("FlashAttention", "scale", lambda x: x * 1.0005)),
        "forward-flash_attention",
        GRAPH,
    ),
    "fused norm's epsilon": Fault(
        after("add_layer_norm", attribute("AddLayerNormalization", "epsilon", 1e-3)),
        "forward-add_layer_norm",
    ),
    "fused norm's epsilon, a little": Fault(  # the loss does not show it, gradients do
        after("add_layer_norm", attribute("AddLayerNormalization", "epsilon", 1.2e-5)),
        "differentiate",
    ),
    "fused activation": Fault(
        after("bias_activation", attribute("BiasActivation", "activation", "gelu_tanh")),
        "forward-bias_activation",
    ),
    "a residual swept away": Fault(
        after("dead_code_elimination", bypass("Add", 0, 3)), "forward-dead_code_elimination"
    ),
    "a residual's gradient swept away": Fault(
        after("gemm_add", drop_addend, "STEP"), "gradients-gemm_add"
    ),
    # differentiate
    "tanh's slope": Fault(gradient("Tanh", scaled(0, 1.001)), "differentiate"),
    "a norm's gain": Fault(gradient("LayerNormalization", scaled(1, 1.001)), "differentiate"),
    "a norm's shift lacks a row": Fault(
        gradient("LayerNormalization", without_first(2)), "differentiate"
    ),
    "softmax lacks its sum": Fault(
        gradient("Softmax", lambda b, dxs, dys, ys, *_: [b.Mul(dys[0], ys[0])]), "differentiate"
    ),
    "a difference's sign": Fault(
        gradient("Sub", lambda b, dxs, *_: [dxs[0], b.Neg(dxs[1])]), "differentiate"
    ),
    "a square weight's gradient transposed": Fault(
        gradient(
            "Gemm",
            lambda b, dxs, *_: [
                dxs[0],
                b.transpose(dxs[1], [1, 0]) if len(set(type_of(dxs[1]).shape)) == 1 else dxs[1],
                *dxs[2:],
            ],
        ),
        "differentiate",
    ),
    "a broadcast not summed": Fault(
        lambda patch: patch.setattr(reverse, "unbroadcast", narrow_broadcast), "differentiate"
    ),
    "the first token's row": Fault(
        gradient("Gather", without_first(0)), "differentiate"
    ),
    "attention's keys": Fault(gradient("FlashAttention", scaled(1, 1.001)), "differentiate", GRAPH),
    "activation's bias": Fault(gradient("BiasActivation", scaled(1, 0.999)), "differentiate"),
    "one summand of two": Fault(
        gradient("Add", lambda b, dxs, *_: [dxs[0], b.Mul(dxs[1], 0.999)]), "differentiate"
    ),
    # kernels
    "attention's kernel": Fault(
        kernel("FlashAttention", grown(0, 1.0005)), "forward-flash_attention", "FlashAttention("
    ),
    "activation's backward kernel": Fault(
        kernel("BiasActivationGrad", grown(0)), "differentiate", "BiasActivationGrad("
    ),
    "a norm's backward kernel": Fault(
        kernel("AddLayerNormalizationGrad", grown(1)), "differentiate", "AddLayerNormalizationGrad("
    ),
    "a sum's kernel": Fault(
        kernel("ReduceSum", lambda use: use.y.view(-1)[:1].mul_(1.001)), "capture", "ReduceSum("
    ),
    # plan
    "memory taken too early": Fault(  # an output is put over an input that others still read
        lambda patch: patch.setattr(liveness, "dies", lambda last, place: True),
        "capture",
        "first node: ",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared() -> tuple[Small, Any]:
    """The model, captured once for all faults behind the capture."""
    made = model()
    return made, onward.compile.capture(CaptureRequest(made, (), batch()))


def trainer(made: Small) -> onward.Trainer:
    """A Trainer without its packed form, which has the same planted fault."""
    return onward.Trainer(
        made, onward.optim.AdamW(), options=onward.TrainerOptions(disable=("row_demand",))
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_and_named(name: str, shared: Any, monkeypatch: Patch) -> None:
    fault, (made, captured) = FAULTS[name], shared
    if not fault.captured:
        monkeypatch.setattr(onward.compile, "capture", lambda *args, **_: captured)
    if not fault.node:  # onnxruntime runs what the graph says; it is asked for the node only
        monkeypatch.setattr(Engines, "has_onnxruntime", lambda _: False)
    fault.plant(monkeypatch)
    report = trainer(made).verify(batch(), bisect=True)
    assert not report.ok
    assert "DIFFERS" in str(report)
    [note] = [n for n in report.notes if n.startswith("bisect: ")]
    assert f"'{fault.stage}'; " in note
    assert fault.node in note


def test_nothing_planted_nothing_found(shared: tuple[Small, Any]) -> None:
    made, _ = shared
    report = trainer(made).verify(batch(), bisect=True)
    assert report.ok, str(report)
    assert "bisect: no stage differs from eager PyTorch" in report.notes
