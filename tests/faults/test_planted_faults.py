"""Verification finds what is planted: a small wrong in one place of one stage, and says which.

Each fault replaces one entry of a table, one pass, or one decision of the planner, in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward
import onward.compile
import onward.rewrite
from onward.capture import CaptureRequest
from onward.capture.aten import TABLE
from onward.differentiate import reverse
from onward.differentiate.rule_table import RULES
from onward.graph.graph import Graph, attributes, make_attributes, type_of
from onward.kernels import KERNELS
from onward.plan import liveness
from onward.train.verify.engines import Engines

Patch = pytest.MonkeyPatch
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


# ---- ways to plant


def translation(name: str, **changed: Any) -> Callable[[Patch], None]:
    """A capture fault: an ATen op is translated with other arguments than the model gives."""

    def plant(patch: Patch) -> None:
        plain = TABLE[name]

        def wrong(c: Any, *args: Any, **kwargs: Any) -> Any:
            named = plain.__code__.co_varnames[1 : plain.__code__.co_argcount]
            given = dict(zip(named, args, strict=False)) | kwargs
            for key, change in changed.items():
                given[key] = change(given.get(key))
            return plain(c, **given)

        patch.setitem(TABLE, name, wrong)

    return plant


def after(name: str, edit: Callable[[Graph], None], where: str = "FORWARD") -> Callable[..., None]:
    """A rewrite fault: a pass leaves the graph with this edit."""

    def plant(patch: Patch) -> None:
        def wrong(item: Any) -> Any:
            def apply(graph: Graph, *context: Any) -> int:
                edits = item.apply(graph, *context)
                edit(graph)
                return edits

            apply.__name__ = name
            return replace(item, apply=apply)

        passes = getattr(onward.rewrite, where)
        assert name in {p.name for p in passes}
        patch.setattr(
            onward.rewrite, where, tuple(wrong(p) if p.name == name else p for p in passes)
        )

    return plant


def attribute(op_type: str, name: str, value: Any) -> Callable[[Graph], None]:
    def edit(graph: Graph) -> None:
        for node in graph:
            if node.op_type == op_type:
                was = attributes(node).get(name)
                now = value(was) if callable(value) else value
                node.attributes[name] = make_attributes({name: now})[0]

    return edit


def bypass(op_type: str, keep: int, rank: int) -> Callable[[Graph], None]:
    """A rewrite fault: the first op of this type whose result has this rank returns one of its
    inputs."""

    def edit(graph: Graph) -> None:
        for node in list(graph):
            x = node.inputs[keep] if len(node.inputs) > keep else None
            same = x is not None and type_of(x) == type_of(node.outputs[0])
            if node.op_type == op_type and same and type_of(node.outputs[0]).rank == rank:
                graph.replace(node.outputs[0], x)  # type: ignore[arg-type]
                graph.remove([node])
                return

    return edit


def drop_addend(graph: Graph) -> None:
    """A rewrite fault: the first Gemm that adds a matrix loses that addend."""
    for node in graph:
        c = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        if c is not None and type_of(c).rank == 2:
            node.replace_input_with(2, None)
            return


def gradient(op_type: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """A gradient fault: a rule returns `change(builder, its gradients, its arguments)`."""

    def plant(patch: Patch) -> None:
        plain = RULES[op_type]

        def wrong(b: Any, dys: Any, ys: Any, xs: Any, attrs: Any) -> Any:
            return change(b, list(plain(b, dys, ys, xs, attrs)), dys, ys, xs, attrs)

        patch.setitem(RULES, op_type, wrong)

    return plant


def scaled(i: int, factor: float) -> Callable[..., Any]:
    def change(b: Any, dxs: list[Any], *_: Any) -> list[Any]:
        dxs[i] = b.Mul(dxs[i], factor)
        return dxs

    return change


def without_first(i: int) -> Callable[..., Any]:
    """A fault that replaces the first row of gradient `i` by zeros."""

    def change(b: Any, dxs: list[Any], *_: Any) -> list[Any]:
        size = type_of(dxs[i]).shape[0]
        rest = b.slice(dxs[i], 0, 1, size)
        dxs[i] = b.Concat(b.Mul(b.slice(dxs[i], 0, 0, 1), 0.0), rest, axis=0)
        return dxs

    return change


def kernel(op_type: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """A kernel fault: `change(use)` runs after the launch."""

    def plant(patch: Patch) -> None:
        def wrong(plain: Any) -> Any:
            def bind(use: Any) -> Any:
                launch = plain.bind(use)

                def run() -> None:
                    launch()
                    change(use)

                return run

            return replace(plain, bind=bind)

        patch.setitem(KERNELS, op_type, tuple(wrong(k) for k in KERNELS[op_type]))

    return plant


def grown(output: int, factor: float = 1.001) -> Callable[[Any], Any]:
    return lambda use: use.outputs[output].mul_(factor)


def narrow_broadcast(b: Any, dx: Any, shape: Any) -> Any:
    """A gradient fault: a broadcast is undone by taking its first part instead of the sum."""
    have = type_of(dx).shape
    if have == shape:
        return dx
    for _ in range(len(have) - len(shape)):
        dx = b.squeeze(b.slice(dx, 0, 0, 1), [0])
    for i, size in enumerate(shape):
        dx = dx if size == type_of(dx).shape[i] else b.slice(dx, i, 0, 1)
    return dx


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
