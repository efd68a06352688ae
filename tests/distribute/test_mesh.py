"""A mesh: one rank is what there was before, more are refused, and decisions follow all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import onward
from onward.capture import CaptureRequest
from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.distribute import AXES, Mesh, distribute
from onward.errors import OnwardError
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph
from onward.graph.printer import graph_text
from onward.kernels import host

pytestmark = pytest.mark.usefixtures("captures_kept")

ALONE = Mesh(AXES, (1,) * len(AXES), (0,) * len(AXES))
PAIR = Mesh(("dp_replicate", "pp"), (1, 2), (0, 1))


def test_one_rank_is_the_default_and_the_identity() -> None:
    graph = Graph()
    assert Mesh().ranks == ALONE.ranks == 1 and PAIR.ranks == 2
    for mesh in (Mesh(), ALONE):
        assert distribute(graph, mesh) is graph
        assert mesh.agreed(True) is True and mesh.agreed(False) is False
    assert (str(Mesh()), str(PAIR)) == ("one rank", "dp_replicate 1 x pp 2")


def step(mesh: Mesh | None) -> Graph:
    compiler = Compiler(host(), mesh=mesh)
    call = compiler.capture(CaptureRequest(tiny.mlp(), (torch.ones(3, 8),), loss_fn=torch.sum))
    optimizer, names = OPTIMIZERS["SGD"], tuple(sorted(call.reached))
    attributes = optimizer.attributes(torch.optim.SGD([torch.ones(1)]).param_groups[0])
    recipe = Recipe((UpdateGroup(0, names, optimizer, attributes),))
    return compiler.step(compiler.forward(call), recipe)


def test_a_step_on_a_mesh_of_one_rank_is_the_step() -> None:
    assert graph_text(step(ALONE)) == graph_text(step(None))


def test_more_ranks_are_refused() -> None:
    with pytest.raises(OnwardError, match=r"stages of a pipeline are not chosen yet for .*pp 2"):
        step(PAIR)


@pytest.mark.parametrize(
    "given",
    [
        (("data",), (1,), (0,)),
        (("tp", "tp"), (1, 1), (0, 0)),
        (("tp",), (), ()),
        (("tp",), (2,), (2,)),
        (("tp",), (2,), (-1,)),
        (("tp",), (0,), (0,)),
    ],
)
def test_a_mesh_that_is_none(given: Any) -> None:
    with pytest.raises(OnwardError, match="fix"):
        Mesh(*given)


def trained() -> tuple[onward.Trainer, torch.nn.Module, onward.StepResult]:
    """One step of a model whose packed form leaves most rows out."""
    model = tiny.bert()
    data: Any = tiny.batch(4, 12, "right")
    data["labels"][:, 1:] = -100
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-2))
    return trainer, model, trainer.train_step(**data)


def test_what_the_ranks_agree_upon_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement among the ranks decides which form of a step runs, and whether it writes what
    outlives it."""
    trainer, model, result = trained()
    assert trainer.report()["rows"]["counts"] and not result.skipped
    answers: list[bool] = []

    def no(self: Mesh, value: bool) -> bool:
        answers.append(value)
        return False

    monkeypatch.setattr(Mesh, "agreed", no)
    before = {n: p.detach().clone() for n, p in tiny.bert().named_parameters()}
    trainer, model, result = trained()
    assert answers == [True, True], "this rank would run the packed form, and write"
    assert not trainer.report()["rows"].get("counts") and result.skipped
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
