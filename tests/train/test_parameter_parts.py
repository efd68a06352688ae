"""A Trainer with `zero=3`: weights that ranks hold parts of are never shown as if they were whole,
come back whole, and go into and come from any state."""

from __future__ import annotations

from pathlib import Path

import parts_program
import pytest
import torch
from torch import nn

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.shards import Shard, StageCut, shard_of
from onward.train.averaged_weights import AveragedWeights
from onward.train.parameter_parts import ParameterParts

NEEDS_WHOLE = (
    "state_dict", "part of the model", "save_pretrained", "a copy", "verify", "export_onnx",
    "export_training", "whole",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2 zero 3", "gpt2 tp"])
def test_weights_in_parts(case: str, tmp_path: Path) -> None:
    first, second = parts_program.run(tmp_path, case)
    for said in (first, second):
        for name in NEEDS_WHOLE:
            assert (
                "holds a part of them (zero=3, tp or pp); fix: call trainer.gather()" in said[name]
            )
        assert "single memory location" in said["in place"]
        assert "itself, of which each rank holds a part (zero=3, tp or pp)" in said["copies"]
        if "zero" in case:
            assert "optimizer that cuts parameters in another way" in said["blocks"]
        assert "the weights of transformer.h.0.attn.c_attn.weight were replaced" in said["replaced"]
        assert said["captures"] == (1 if "zero" in case else 2)  # one to choose the cuts
        assert said["resumed"] == "checkpoint-5"
    assert "rank 1 evaluates a batch, while rank 0 trains a micro-batch" in first["alone"]
    assert "rank 0 trains a micro-batch, while rank 1 evaluates a batch" in second["alone"]
    if "tp" in case:
        for said in (first, second):
            assert "rank 1 has another batch than rank 0, with which it shares" in said["batches"]


class TwoRanks(Mesh):
    """Two ranks in one process: the other one's rows are those that it has put here."""

    rows: dict[int, torch.Tensor]

    def gathered_row(self, part: torch.Tensor, shard: Shard, to_first: bool) -> torch.Tensor:
        return torch.cat([part, self.rows[shard.elements]])


def cut(model: torch.nn.Module, mesh: Mesh) -> ParameterParts:
    parts = ParameterParts(mesh)
    parts.cut(model, lambda p: shard_of(p.numel(), "dp_shard", 2, mesh.rank))
    return parts


def test_what_is_cut_and_what_stays_whole() -> None:
    """Small parameters, and those that share memory, stay whole; buffers do; tied ones are one."""
    mesh = TwoRanks(("dp_shard",), (2,), (0,))
    model = torch.nn.Module()
    flat, shared = torch.randn(2, 100, 50), torch.randn(80, 90)
    named = {
        "small": torch.randn(5), "wide": torch.randn(100, 60), "odd": torch.randn(4099),
        "turned": torch.randn(70, 90).t(), "one": flat[0], "two": flat[1],
        "first": shared, "second": shared, "low": torch.randn(90, 80, dtype=torch.bfloat16),
    }  # fmt: skip
    for name, x in named.items():
        model.register_parameter(name, nn.Parameter(x))
    model.register_parameter("tied", model.get_parameter("wide"))
    model.register_buffer("table", torch.randn(9000))
    parts = cut(model, mesh)
    for name, x in named.items():
        p = model.get_parameter(name)
        is_cut = name in ("wide", "odd", "turned", "low")
        assert (p.shape, p.dtype) == (x.shape, x.dtype)
        assert bool(p.isnan().all()) == is_cut == (not parts.is_whole(p))
        if is_cut:
            assert p.untyped_storage().nbytes() == p.element_size()
            assert torch.equal(parts.stored(p), x.reshape(-1)[: -(-x.numel() // 2)])
    assert model.tied is model.wide and not model.get_buffer("table").isnan().any()
    with pytest.raises(OnwardError, match="state_dict of a model needs whole weights"):
        model.state_dict()
    mesh = parts._mesh
    assert isinstance(mesh, TwoRanks)
    rest = {x.numel(): x.reshape(-1)[-(-x.numel() // 2) :] for x in named.values()}
    object.__setattr__(mesh, "rows", rest)
    parts.gather()
    for name, x in named.items():
        p = model.get_parameter(name)
        assert torch.equal(p, x) and p.stride() == x.stride(), name
    assert set(model.state_dict()) == {*named, "tied", "table"}


@pytest.mark.parametrize("way", ["in parts", "gathered", "cut within", "restored, cut within"])
def test_averages_of_parts(way: str) -> None:
    """A rank averages its part. The state is whole, and is cut again where it is restored; and the
    model has its own numbers back whatever happened while it had the averages."""
    mesh, model = TwoRanks(("dp_shard",), (2,), (0,)), nn.Linear(64, 80)
    first = {n: p.detach().clone().reshape(-1) for n, p in model.named_parameters()}
    size = first["weight"].numel() // 2
    parts = cut(model, mesh)
    averages = AveragedWeights(model, 0.75, parts)
    averages.update()
    with torch.no_grad():
        parts.stored(model.weight).add_(1.0)
        model.bias.add_(1.0)
    averages.update()
    assert averages._averages[model.weight].tensor.numel() == size
    others = first["weight"][size:] + 5.0  # the averages of the other rank
    object.__setattr__(mesh, "rows", {2 * size: others})
    want = torch.cat([first["weight"][:size] + 0.25, others])
    state = averages.part().save()
    torch.testing.assert_close(state["ema"]["weight"].reshape(-1), want)
    torch.testing.assert_close(state["ema"]["bias"], first["bias"] + 0.25)
    own = parts.stored(model.weight).clone()
    if way != "in parts":
        parts.gather()
        assert parts.cut_of(model.weight) is None
    if "restored" in way:
        averages.part().restore(state)
        assert averages._averages[model.weight].cut is None
    with averages.swapped_in():
        if "cut within" in way:
            parts.cut(model, lambda p: shard_of(p.numel(), "dp_shard", 2, 0))
        shown = parts.stored(model.weight).detach().reshape(-1)
        torch.testing.assert_close(shown, want[: shown.numel()])
        assert shown.numel() == (2 * size if way == "gathered" else size)
    assert torch.equal(parts.stored(model.weight).detach().reshape(-1)[:size], own)
    torch.testing.assert_close(model.bias.detach(), first["bias"] + 1.0)
    if way != "gathered":
        assert torch.allclose(averages._averages[model.weight].tensor, want[:size])

    parts.cut(model, lambda p: shard_of(p.numel(), "dp_shard", 2, 0))
    again = AveragedWeights(model, 0.75, parts)
    again.part().restore(state)
    again.update()
    torch.testing.assert_close(
        again._averages[model.weight].tensor, want[:size] * 0.75 + own * 0.25
    )


class SecondStage(Mesh):
    """The second of two ranks along pp in one process: what the first gives is put here."""

    given: dict[tuple[int, ...], torch.Tensor]

    def given_by(self, owner: int, whole: torch.Tensor, axis: str) -> torch.Tensor:
        return whole if owner == self.coordinate(axis) else self.given[tuple(whole.shape)]


def test_stages_have_whole_parameters_or_nothing() -> None:
    """A rank's own parameters keep their memory; others show NaN until all is gathered; loaded
    weights come into both."""
    mesh = SecondStage(("pp",), (2,), (1,))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5, bias=False))
    first, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    second = model.get_parameter("1.weight")
    stages: dict[torch.Tensor, tuple[int, ...]] = {first: (0,), bias: (0, 1), second: (1,)}
    whole = {tuple(p.shape): p.detach().clone() for p in model.parameters()}
    object.__setattr__(mesh, "given", whole)
    parts, places = ParameterParts(mesh), (bias.data_ptr(), second.data_ptr())
    parts.cut(model, lambda p: StageCut("pp", 2, 1, stages[p]))
    assert parts.is_cut and bool(first.isnan().all()) and not second.isnan().any()
    assert (bias.data_ptr(), second.data_ptr()) == places
    assert parts.stored(second) is second and parts.stored(first).numel() == 0
    named = dict(model.named_parameters())
    assert parts.stages(named) == {"0.weight": (0,), "0.bias": (0, 1), "1.weight": (1,)}
    assert not any(map(parts.is_whole, model.parameters()))
    with pytest.raises(OnwardError, match="state_dict of a model needs whole weights"):
        model.state_dict()
    for name, x in parts.state_of(model, to_first=False).items():
        assert torch.equal(x, whole[tuple(x.shape)]), name
    with parts.lent():
        assert not any(p.any() for p in model.parameters())
    close = parts.open(model)
    close()
    assert torch.equal(second, whole[5, 4]) and second.data_ptr() == places[1]
    parts.gather()
    assert not parts.is_cut and torch.equal(first, whole[4, 3])
    parts.cut(model, lambda p: StageCut("pp", 2, 1, stages[p]))
    parts.open(model)
    model.load_state_dict({n: x + 1 for n, x in parts.shown_state(model).items()})
    with torch.no_grad():
        second.copy_(whole[5, 4] + 1)
    parts.cut(model, lambda p: StageCut("pp", 2, 1, stages[p]))
    assert torch.equal(second, whole[5, 4] + 1) and second.data_ptr() == places[1]
    assert bool(first.isnan().all())
