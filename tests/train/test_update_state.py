"""UpdateState: what updates read and write, without an optimizer or module; what only asks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tiny import batch, gpt2

import onward
import onward.train
from onward import OnwardError
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.signature import Signature, Slot
from onward.train.state_form import StateForms
from onward.train.update_state import Joining, UpdateState

RECORD = OPTIMIZERS["AdamW"]


def state_of(*parameters: torch.Tensor) -> UpdateState:
    forms = StateForms("fp32", RECORD, lambda parameter: False)
    return UpdateState(RECORD, forms, {p: f"w{i}" for i, p in enumerate(parameters)})


def test_state_goes_by_graph_input_without_an_optimizer() -> None:
    """State is kept by graph input, as a session with plain tensors for weights would hold it."""
    w, v = torch.ones(3, 2), torch.ones(4)
    state = state_of(w, v)
    graph = Joining({"param.w": w, "param.v": v}, [w, v], [w, v])
    clocks = state.clocks(graph)
    assert clocks.of[w] == clocks.of[v], "they have always moved together"
    state.join(graph)
    signature = Signature(
        clocks={clocks.of[w]: "count"},
        slots={Slot("param.w", "exp_avg"): "state.m", Slot("param.v", "exp_avg_sq"): "state.s"},
        accumulators={"param.w": "sum.w", "param.v": "sum.v"},
    )
    state.enter(signature, first=True)
    owned = state.owned(signature)
    assert {name: tuple(t.shape) for name, t in owned.items()} == {
        "state.m": (3, 2), "state.s": (4,), "sum.w": (3, 2), "sum.v": (4,),
    }  # fmt: skip
    owned["sum.w"].fill_(2.0)
    state.sum(signature)
    assert state.window == {"w0", "w1"} and torch.equal(state.summed()[w], owned["sum.w"])
    assert state.inputs(signature) == {"count": 1}
    assert state.advance(signature), "nothing was counted before"
    assert not state.advance(signature) and state.inputs(signature) == {"count": 3}
    assert state.counts == {w: 2, v: 2} and state.done == 2 and not state.window


def test_a_graph_that_parts_a_clock_makes_a_version_and_asking_makes_none() -> None:
    w, v = torch.ones(2), torch.ones(2)
    state = state_of(w, v)
    inputs = {"param.w": w, "param.v": v}
    state.join(Joining(inputs, [w, v], [w, v]))
    for _ in range(2):
        state.join(Joining(inputs, [w, v], [w, v]))
    assert state.version == 0
    fewer = Joining(inputs, [w, v], [w])
    assert v not in state.clocks(fewer).of
    assert state.version == 0 and v in state.clocks(Joining(inputs, [w, v], [w, v])).of
    state.join(fewer)
    assert state.version == 1, "the graph before moved both by one count"


def test_a_step_without_anything_to_move_is_refused() -> None:
    with pytest.raises(OnwardError, match="the loss depends on no parameter"):
        state_of(torch.ones(2)).enter(Signature(), first=True)


def test_explaining_other_batch_sizes_leaves_the_updates_as_they_are() -> None:
    """The explanation of one sample captures the model again, and asks which updates there are."""
    trainer = onward.Trainer(gpt2(layers=1), onward.optim.AdamW())
    trainer.train_step(batch(4, 12))
    step, version = trainer._steps.train[0], trainer._updates.version
    known = dict(trainer._updates._parameters)
    assert onward.explain(trainer, batch_sizes=(1,)).sizes[0].nbytes
    assert trainer._updates.version == version
    assert known.keys() == trainer._updates._parameters.keys()
    trainer.train_step(batch(4, 12))
    assert trainer._steps.train == [step]


def test_its_modules_need_no_optimizer_and_no_module_of_torch() -> None:
    folder = Path(onward.train.__file__).parent
    names = {
        "update_state", "gradient_sums", "optimizer_state", "state_form", "state_shards", "clocks",
        "cut_tensors",
    }  # fmt: skip
    for name in names:
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        written = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {"torch.nn", "torch.optim", "torch.nn.Module"} & written
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("torch."), "torch alone"
                room, _, inner = node.module.partition("onward.train.")
                assert room or inner in names, f"{name}.py imports {node.module}"
