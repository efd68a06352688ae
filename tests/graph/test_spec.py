"""What a graph may hold at each stage: the stages of tiny models, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny import Compiled, bert, compiled, gpt2, mlp, trained
from tiny import batch as batch_of

import onward
from onward.graph.build import Builder
from onward.graph.graph import ONWARD, Graph, Node, Role, Value, type_of
from onward.graph.ops import OPS, Op
from onward.graph.spec import RULES, SCALARS, Stage, conform
from onward.graph.types import DType, parse_type
from onward.rewrite import Policy, specialize


@cache
def made(low: bool) -> Compiled:
    policy = Policy(DType.BFLOAT16) if low else None
    return compiled(gpt2(layers=1), batch_of(padding="right"), policy=policy)


@cache
def graphs() -> dict[Stage, Graph]:
    """A sound graph of each stage, of one model."""
    plain, low = made(False), made(True)
    forward, wrt = plain.forward, trained(plain)
    packed = plain.packed(["loss"])
    assert packed is not None
    step = step_of_a_trainer()
    return {
        Stage.CAPTURED: plain.captured.graph,
        Stage.FORWARD: forward,
        Stage.PRECISION: low.forward,
        Stage.PORTABLE: plain.compiler.portable(plain.captured),
        Stage.PACKED: packed,
        Stage.GRADIENTS: plain.differentiated(wrt),
        Stage.HALVES: plain.compiler.halves(forward, ["loss"], wrt),
        Stage.STEP: step,
        Stage.SPECIALIZED: specialize(step, dict.fromkeys(step.symbols, 6)),
    }


def step_of_a_trainer() -> Graph:
    """The step graph of a Trainer that accumulates and scales its loss."""
    options = {"mixed_precision": "fp16", "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    trainer = onward.Trainer(mlp(0.1), onward.optim.AdamW(), torch.nn.functional.cross_entropy,
                             options=options)  # fmt: skip
    trainer.train_step(torch.randn(6, 8), torch.arange(6) % 5)
    return trainer._steps.train[0].graphs.step


def appended(graph: Graph, op: str, domain: str = "", type: str = "f32[2]") -> Node:
    node = Node(domain, op, [], num_outputs=1)
    node.outputs[0].meta["type"] = parse_type(type)
    graph.ir.append(node)
    return node


def with_input(role: Role, type: str = "f32[2]") -> Callable[[Graph], object]:
    def plant(graph: Graph) -> None:
        graph.input("planted", parse_type(type), role)

    return plant


def of_signature(**entries: Any) -> Callable[[Graph], object]:
    def plant(graph: Graph) -> None:
        graph.signature = graph.signature.but(**entries)

    return plant


def with_another_role(graph: Graph) -> None:
    value = graph.input("planted", parse_type("i64[2]"), Role.BATCH)
    graph.signature = graph.signature.but(seed=value.name)


def with_a_wide_loss(graph: Graph) -> None:
    b = Builder(graph)
    name = graph.signature.loss
    assert name is not None
    graph.outputs[name] = b.unsqueeze(graph.outputs[name], [0])


def with_an_unpaired_next_value(graph: Graph) -> None:
    source = graph.inputs_with(Role.PARAM)[0].name or ""
    name = graph.output("planted", graph.outputs[graph.signature.loss or ""])
    graph.signature = graph.signature.but(written={source: name})


def with_an_op_without_body(graph: Graph) -> None:
    appended(graph, "Bare", ONWARD)


def with_two_low_types(graph: Graph) -> None:
    appended(graph, "Relu", type="bf16[2]")
    appended(graph, "Relu", type="f16[2]")


def with_a_waiting_result(graph: Graph) -> None:
    [waits] = graph.inputs_with(Role.COTANGENT)[:1]
    name = graph.output("planted", Builder(graph).Neg(waits))
    graph.signature = graph.signature.but(results={"planted": name})


def with_a_gradient_of_another_type(graph: Graph) -> None:
    signature = graph.signature
    name = next(iter(signature.gradients.values()), signature.loss)
    assert name is not None
    if name not in signature.gradients.values():  # of a step: nothing is left there yet
        [first] = graph.inputs_with(Role.PARAM)[:1]
        graph.signature = signature.but(left_gradients={first.name: name})
    graph.outputs[name] = Builder(graph).unsqueeze(graph.outputs[name], [0])


def without_updates(graph: Graph) -> None:
    graph.signature = replace(graph.signature, updated={})


def without_counts(graph: Graph) -> None:
    graph.counts = set()
    graph.signature = replace(graph.signature, rows={})


def with_a_start_alone(graph: Graph) -> None:
    x = next(v for v in graph.inputs if type_of(v).is_floating)
    b = Builder(graph)
    b.node("AllReduceStart", [x], {
        "axis": "tp", "size": 2, "sequence": 1, "record": "planted", "reduction": "sum",
    })  # fmt: skip


def with_a_symbol(graph: Graph) -> None:
    appended(graph, "Relu", type="f32[B]")


PLANTED: dict[str, Callable[[Graph], object]] = {
    "names": of_signature(results={"planted": "nowhere"}),
    "entry roles": with_another_role,
    "scalars": with_a_wide_loss,
    "pairs": with_an_unpaired_next_value,
    "bodies": with_an_op_without_body,
    "no gradients": lambda graph: appended(graph, "SoftmaxGrad", ONWARD),
    "no updates": lambda graph: appended(graph, "AdamUpdate", ONWARD),
    "no stops": lambda graph: appended(graph, "StopGradient", ONWARD),
    "no gradients of the model's own": lambda graph: (
        appended(graph, "WithGradient", ONWARD) and None
    ),
    "full precision": lambda graph: appended(graph, "Relu", type="bf16[2]"),
    "one low type": with_two_low_types,
    "owned in full precision": with_input(Role.BATCH, "bf16[2]"),
    "counts": without_counts,
    "split halves": of_signature(split_halves=False),
    "results do not wait": with_a_waiting_result,
    "gradient types": with_a_gradient_of_another_type,
    "no collectives": with_a_start_alone,
    "halves of collectives": with_a_start_alone,
    "updates": without_updates,
    "sizes": with_a_symbol,
}
# roles and entries are planted where the first table of a stage refuses them
ROLE_OR_ENTRY: dict[str, Callable[[Stage], Callable[[Graph], object] | None]] = {
    "roles": lambda stage: None if stage is Stage.SPECIALIZED else with_input(Role.SIZE),
    "entries": lambda stage: (
        of_signature(split_halves=True) if stage not in (Stage.HALVES, Stage.SPECIALIZED) else None
    ),
}


@pytest.mark.parametrize("stage", Stage, ids=lambda s: s.value)
def test_sound_graphs_conform(stage: Stage) -> None:
    conform(graphs()[stage], stage)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_is_broken_by_a_planted_fault(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "Bare", Op("Bare", lambda call: call.type(0)))
    seen = 0
    for stage in rule.stages:
        plant = PLANTED.get(rule.name) or ROLE_OR_ENTRY[rule.name](stage)
        if plant is None:
            continue
        graph = graphs()[stage].clone()
        if rule.name == "scalars" and graph.signature.loss is None:
            continue
        assert not list(rule.breaks(graph, stage))
        plant(graph)
        assert list(rule.breaks(graph, stage)), stage
        with pytest.raises(AssertionError, match=f"after {stage.value}, "):
            conform(graph, stage)
        seen += 1
    assert seen


def test_every_rule_has_a_planted_fault() -> None:
    names = [rule.name for rule in RULES]
    assert sorted(names) == sorted([*PLANTED, *ROLE_OR_ENTRY])


def test_scalars_of_a_step_are_all_there() -> None:
    graph = graphs()[Stage.STEP]
    values: dict[str, Value] = {**graph.outputs, **{v.name or "": v for v in graph.inputs}}
    entries = {e: getattr(graph.signature, e) for e in SCALARS}
    held = [e for e, name in entries.items() if isinstance(name, str)]  # others are dicts of names
    assert {"loss", "loss_scale", "growth_tracker", "grad_norm", "finite"} <= set(held)
    assert all(type_of(values[getattr(graph.signature, e)]) for e in held)


def test_the_stages_of_other_models_conform(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Trainer and a loop of one's own, with each pass and stage checked; two types below f32 in a
    step's arithmetic and in its state."""
    monkeypatch.setenv("ONWARD_CHECK", "1")
    data: dict[str, Any] = batch_of(padding="left", ignored=True)
    options: dict[str, Any] = {
        "memory_budget": 0.5,
        "mixed_precision": "fp16",
        "optimizer_state": "bf16",
    }
    trainer = onward.Trainer(bert(layers=1), onward.optim.AdamW(), options=options)
    trainer.train_step(**data)
    trainer.eval_step(**data)
    onward.accelerate(bert(layers=1), strict=True)(**data).loss.backward()
