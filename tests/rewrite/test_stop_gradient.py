"""A stopped gradient stays stopped: before and behind every op, in every precision, by every pass;
and what is noted beside a node changes no number."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import compiled, eager, execute, plain, trained
from torch import nn
from torch.nn import functional as F

import onward
from onward.differentiate import vjp
from onward.graph.archive import ArchiveError, from_bytes, to_bytes
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.graph import MARKS, NOTES, Graph, Role, type_of
from onward.graph.types import DType, parse_type
from onward.options import LossScale, TrainerOptions
from onward.rewrite import FORWARD, Policy, in_precision, run
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination
from onward.rewrite.noop import noop

SOURCES = Path(onward.__file__).parent
WIDTH = 8


class Parts(nn.Module):
    """What ops read beside a hidden tensor x f[2,6,8]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.group = nn.LayerNorm(WIDTH), nn.GroupNorm(2, 6)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.patches = nn.Conv2d(1, 4, 2, stride=2)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (t.view(2, 6, 2, 4).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 8)

    def written_out(self, x: Any) -> Any:
        weights = (self.up(x) @ x.transpose(1, 2) * 0.3).softmax(-1)
        return weights @ self.gate(x)

    def turned(self, x: Any) -> Any:
        angles = torch.arange(48.0).view(6, 8) * 0.1
        half = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * angles.cos() + half * angles.sin()


# an op, as f(parts, x) of a hidden tensor f[2,6,8]; every pass of the lists has some that it treats
OPS: dict[str, Callable[[Parts, Any], Any]] = {
    "nothing": lambda p, x: x,
    "sum": lambda p, x: x + p.scale,
    "product": lambda p, x: x * p.up(x),
    "linear": lambda p, x: p.up(x),
    "matmul": lambda p, x: x @ x.transpose(1, 2),
    "gelu": lambda p, x: F.gelu(x),
    "bias and activation": lambda p, x: F.gelu(p.up(x)),
    "gate": lambda p, x: F.silu(p.gate(x)) * p.up(x),
    "layer norm": lambda p, x: p.norm(x),
    "sum and norm": lambda p, x: p.norm(x + p.up(x)),
    "rms norm": lambda p, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * p.scale,
    "group norm": lambda p, x: p.group(x),
    "softmax": lambda p, x: x.softmax(-1) * p.scale,
    "attention": lambda p, x: p.attention(p.up(x), p.gate(x), x),
    "attention's keys": lambda p, x: p.attention(p.up(x), p.gate(x).detach(), x),
    "attention's values": lambda p, x: p.attention(p.up(x), p.gate(x), x.detach()),
    "attention written out": lambda p, x: p.written_out(x),
    "rotary": lambda p, x: p.turned(p.up(x)),
    "transpose": lambda p, x: x.transpose(1, 2),
    "reshape": lambda p, x: x.reshape(12, 8),
    "two reshapes": lambda p, x: p.up(x).reshape(12, 8).reshape(2, 6, 4, 2),
    "two transposes": lambda p, x: p.up(x).transpose(1, 2).transpose(0, 1),
    "heads and back": lambda p, x: (
        p.up(x).view(2, 6, 2, 4).transpose(1, 2).transpose(1, 2).flatten(2)
    ),
    "unsqueeze": lambda p, x: x.unsqueeze(1),
    "expand": lambda p, x: x[:, :1].expand(2, 6, 8),
    "slice": lambda p, x: x[:, 1:, 2:6],
    "split": lambda p, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "packed projection": lambda p, x: F.linear(x, torch.cat((p.up.weight, p.gate.weight)))[..., 4:],
    "stack": lambda p, x: torch.stack((x, p.up(x))),
    "gather": lambda p, x: x[:, torch.tensor([0, 3, 3])],
    "where": lambda p, x: torch.where(x > 0, x, p.up(x)),
    "mean": lambda p, x: x.mean(1),
    "patches": lambda p, x: p.patches(x.reshape(2, 1, 6, 8)),
    "conv": lambda p, x: p.conv(x),
    "max": lambda p, x: x.amax(-1),
}


class Stopped(nn.Module):
    """h = norm(body(x)); a term of f(h), and hundredfold those where the gradient is stopped before
    f, behind it, between two of it, and of a part that `no_grad` computes."""

    def __init__(self, f: Callable[[Parts, Any], Any]) -> None:
        super().__init__()
        self.body, self.first = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.parts, self.aux, self.f = Parts(), nn.Parameter(torch.tensor(1.5)), f

    def forward(self, x: Any) -> Any:
        h = self.first(self.body(x))
        y = self.f(self.parts, h)
        before, behind = self.f(self.parts, h.detach()), self.f(self.parts, h).detach()
        with torch.no_grad():
            without = self.f(self.parts, h * 2)
        terms = [before.float().pow(2), (behind * self.aux).pow(2), (without - self.aux).pow(2)]
        terms += [y.detach().transpose(0, -1).reshape(-1) * self.aux, (y.detach() * y) * 0.01]
        return y.float().mean() + 100 * sum(t.float().mean() for t in terms)


LOW = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def made(f: Callable[[Parts, Any], Any]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Stopped(f), {"x": torch.randn(2, 6, WIDTH)}


def gradients(model: nn.Module, x: torch.Tensor, low: torch.dtype | None) -> dict[str, Any]:
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        loss = model(x=x)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: dict[str, Any], theirs: dict[str, Any], exact: dict[str, Any]) -> None:
    """What a lost stop changes is the hundredfold: no rounding of a low type comes near it."""
    assert ours.keys() == theirs.keys()
    least = 1e-5 * max(float(e.norm()) for e in exact.values())
    for name, g in theirs.items():
        truth = exact[name].double()
        off, room = (ours[name].double() - truth).norm(), 2 * (g.double() - truth).norm()
        assert off <= room + 0.05 * truth.norm() + least, (name, off, truth.norm())


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_an_accelerated_model_are_eagers(op: str, precision: str) -> None:
    model, data = made(OPS[op])
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    found = gradients(ours, data["x"], LOW[precision])
    theirs = gradients(copy.deepcopy(model), data["x"], LOW[precision])
    assert_near(found, theirs, gradients(model.double(), data["x"].double(), None))


@pytest.mark.parametrize("op", ["layer norm", "group norm", "sum and norm", "rms norm"])
def test_what_is_zero_in_fp16_is_below_its_numbers_where_eager_rounds(op: str) -> None:
    """A norm behind a norm lets next to nothing through: the gradient of the first Linear's output,
    which autocast keeps in fp16. What eager has there instead is its own rounding."""
    model, data = made(OPS[op])
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    found = gradients(ours, data["x"], torch.float16)
    arrived: dict[torch.dtype, torch.Tensor] = {}

    def note(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(lambda g: arrived.update({out.dtype: g}))

    model.get_submodule("body").register_forward_hook(note)
    theirs = gradients(copy.deepcopy(model), data["x"], torch.float16)
    exact = gradients(model.double(), data["x"].double(), None)
    assert set(arrived) == {torch.float16, torch.float64}  # eager rounds to fp16 at this very place
    least = torch.finfo(torch.float16).smallest_normal * 2**-10  # subnormal
    vanishes = bool((arrived[torch.float64].abs() < least / 2).all())
    assert vanishes == (op in ("layer norm", "group norm"))
    for name in ("body.weight", "body.bias"):
        assert bool((found[name] == 0).all()) == vanishes, name
    for name, truth in exact.items():  # and everywhere at most twice eager's distance
        off, room = (g[name].double() - truth for g in (found, theirs))
        assert off.norm() <= 2 * room.norm() + 1e-7 * truth.norm(), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("op", ["nothing", "sum", "product", "attention's keys", "transpose"])
def test_a_trainers_step_is_eagers(op: str, precision: str) -> None:
    model, data = made(OPS[op])
    model = model.train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    twin = copy.deepcopy(model)
    options = TrainerOptions(mixed_precision="no" if precision == "fp32" else precision)
    if precision == "fp16":
        options = TrainerOptions(mixed_precision="fp16", loss_scale=LossScale(init_scale=64.0))
    trainer = onward.Trainer(model, onward.optim.SGD(lr=1e-3), options=options)
    trainer.train_step(data["x"])
    moved = {n: (before[n] - p.detach()) / 1e-3 for n, p in model.named_parameters()}
    theirs = gradients(copy.deepcopy(twin), data["x"], LOW[precision])
    exact = gradients(twin.double(), data["x"].double(), None)
    for name, g in exact.items():
        room = 2 * (theirs[name].double() - g).norm() + 0.05 * g.norm() + 0.05
        assert (moved[name].double() - g).norm() <= room, name


# ---- passes, copies and files


def kept_by(name: str, graph: Graph) -> Graph:
    """The graph after one of the ways that a graph goes."""
    match name:
        case "clone":
            return graph.clone({})
        case "archive":
            return from_bytes(to_bytes(graph))
        case _:
            return run(graph, [p for p in FORWARD if p.name == name], verify=True)[0]


@pytest.mark.sample(4)
@pytest.mark.parametrize("op", OPS)
def test_each_pass_keeps_the_gradients(op: str) -> None:
    """Each pass alone, and a copy and a file, of the graph as it was captured."""
    model, data = made(OPS[op])
    held = compiled(model, data)
    graph = held.captured.graph
    assert sum(n.op_type == "StopGradient" for n in graph) >= 3
    exact = eager(model, data, torch.float64)
    for name in ("clone", "archive", *(p.name for p in FORWARD)):
        after = kept_by(name, graph)
        gradient = held.differentiated(trained(held), after)
        assert all(n.op_type != "StopGradient" for n in gradient)  # it has said what it had to
        names = [n for n in gradient.outputs if n == "loss" or n.startswith("grad.")]
        ours = plain(execute(held, gradient, data, names))
        for key, g in exact.items():
            room = 1e-4 * g.norm() + 1e-5
            assert (ours[key].double() - g).norm() <= room, (name, key)


@pytest.mark.parametrize("low", [DType.BFLOAT16, DType.FLOAT16])
def test_casts_keep_the_gradients(low: DType) -> None:
    """Each pass of the list behind the policy's, one after the other: what parameters reach the
    loss, by what the graph says of each."""
    model, data = made(OPS["product"])
    held = compiled(model, data, policy=Policy(low))
    passes = in_precision(Policy(low))
    graph = run(held.captured.graph, FORWARD)[0]
    stops = sum(n.op_type == "StopGradient" for n in graph)
    for count in range(len(passes) + 1):
        after = run(graph, passes[:count], verify=True)[0]
        assert sum(n.op_type == "StopGradient" for n in after) >= stops  # one for each type
        assert all(
            type_of(n.inputs[0]) == type_of(n.outputs[0])
            for n in after
            if n.op_type == "StopGradient"
        )
        assert from_bytes(to_bytes(after)).names_made == after.names_made


def test_a_graph_without_gradients_holds_none_when_it_is_planned() -> None:
    model, data = made(OPS["linear"])
    held = compiled(model, data, policy=Policy(DType.BFLOAT16))
    plan = held.plan(held.forward, ["loss"], held.captured.dims(list(data.values())) or {})
    assert any(n.op_type == "StopGradient" for n in held.forward)
    assert "StopGradient" not in str(plan) and "Identity" not in str(plan)


def small(role: Role = Role.PARAM) -> tuple[Graph, Builder, Any]:
    graph = Graph("small")
    return graph, Builder(graph), graph.input("x", parse_type("f32[4]"), role)


@pytest.mark.parametrize(
    "between",
    [(), ("Reshape",), ("Identity", "Neg"), ("Reshape", "Transpose", "Transpose"),
     ("Reshape", "Reshape"), ("Neg", "Reshape", "Reshape", "Reshape")],
)  # fmt: skip
def test_a_stop_is_taken_out_only_where_no_gradient_arrives(between: tuple[str, ...]) -> None:
    graph, b, x = small()
    whole = graph.input("n", parse_type("i64[4]"), Role.BATCH)
    drawn = b.Cast(whole, to=DType.FLOAT)
    for i, op in enumerate(between):
        shape = (2, 2) if i % 2 == 0 else (4, 1)
        x, drawn = (
            b.reshape(v, shape) if op == "Reshape" else b.one(op, [v], {}) for v in (x, drawn)
        )
    graph.outputs = {"a": b.StopGradient(x), "b": b.StopGradient(drawn)}
    noop(graph)
    assert [n.op_type for n in graph].count("StopGradient") == 1
    assert graph.outputs["a"].producer().op_type == "StopGradient"  # type: ignore[union-attr]


def test_equal_stops_are_one_and_no_other_node_is() -> None:
    graph, b, x = small()
    graph.outputs = {"a": b.StopGradient(x), "b": b.StopGradient(x), "c": b.Identity(x)}
    assert common_subexpression_elimination(graph) == 1
    assert [n.op_type for n in graph] == ["StopGradient", "Identity"]


def test_differentiation_lets_nothing_pass_and_leaves_no_trace() -> None:
    graph, b, x = small()
    graph.output("y", b.ReduceSum(b.Mul(b.StopGradient(x), x), b.ints([0]), keepdims=0))
    made = vjp(graph, ["y"], ["x"])
    check(made)
    assert all(n.op_type != "StopGradient" for n in made)


# ---- what is noted beside a node


def test_what_the_sources_note_is_in_the_table() -> None:
    """Every key of a `meta` that the graph's stages write or read."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        if path.relative_to(SOURCES).parts[0] not in ("capture", "integrations"):
            found |= keys(ast.parse(path.read_text()))
    assert found == MARKS.keys() | NOTES.keys()
    ours = keys(ast.parse((SOURCES / "rewrite" / "fuse_attention.py").read_text()))
    assert ours == {"unfused"}
    assert all(MARKS.values()) and all(NOTES.values())


def keys(tree: ast.AST) -> set[str]:
    """What a `.meta` is asked for: `x.meta["a"]`, `x.meta.get("b")`, `x.meta.update(c=...)`."""
    found: set[Any] = set()
    for node in ast.walk(tree):
        held = getattr(node, "value", None)
        if isinstance(node, ast.Subscript) and getattr(held, "attr", "") == "meta":
            found |= {c.value for c in [node.slice] if isinstance(c, ast.Constant)}
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and getattr(call.value, "attr", "") == "meta":
            assert isinstance(node, ast.Call)
            found |= {k.arg for k in node.keywords if k.arg}
            found |= {c.value for c in node.args[:1] if isinstance(c, ast.Constant)}
    return found


def test_another_note_is_neither_kept_nor_passed() -> None:
    graph, b, x = small()
    graph.output("y", b.Neg(x))
    next(iter(graph)).meta["stop_gradient"] = True
    with pytest.raises(AssertionError, match="stop_gradient is noted beside"):
        check(graph)
    with pytest.raises(ArchiveError, match="stop_gradient of Neg"):
        to_bytes(graph)


@pytest.mark.parametrize("precision", LOW)
def test_no_number_changes_where_every_mark_is_lost(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both halves of a step that run apart, and in a whole step."""

    def numbers() -> list[torch.Tensor]:
        model = tiny.gpt2(dropout=0.0)
        data = tiny.batch()
        halves = onward.accelerate(copy.deepcopy(model), strict=True)
        low = LOW[precision]
        with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
            loss = halves(**data).loss
        with torch.no_grad():
            for name, p in halves.named_parameters():
                if "bias" in name:
                    p.add_(0.5)  # as eager's backward, ours reads the bias that was added
        loss.backward()
        options = TrainerOptions(mixed_precision="no" if low is None else precision)
        trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-2), options=options)
        trainer.train_step(data)
        gradients = [p.grad for p in halves.parameters() if p.grad is not None]
        return [*gradients, *(p.detach() for p in model.parameters())]

    torch.manual_seed(0)
    want = numbers()
    clone = Graph.clone

    def bare(self: Graph, dims: Any = None) -> Graph:
        made = clone(self, dims)
        for node in made:
            node.meta.clear()
        return made

    monkeypatch.setattr(Graph, "clone", bare)
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "0")
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(numbers(), want, strict=True))
