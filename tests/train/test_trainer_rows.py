"""The Trainer on counted rows: each batch by its own counts, few plans, every row's numbers."""

from __future__ import annotations

import copy
from typing import Any
from xml.etree import ElementTree

import pytest
import tiny
import torch
from tiny import Tensors, batch, bert, gpt2
from tiny_families import Towers

import onward
from onward.compile import Compiler
from onward.graph.graph import Graph
from onward.plan import Plan

pytestmark = pytest.mark.usefixtures("captures_kept")

VOCABULARY = tiny.VOCABULARY


def ragged(seed: int, size: int = 4, most: int = 24, labelled: float = 0.3) -> Tensors:
    """Sequences of random lengths, padded to the longest of them; some tokens labelled."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, most + 1, (size, 1), generator=generator)
    length = int(lengths.max())
    ids = torch.randint(0, VOCABULARY, (size, length), generator=generator)
    mask = torch.arange(length) < lengths
    chosen = (torch.rand(ids.shape, generator=generator) < labelled) & mask
    chosen[0, 1] = True
    return {
        "input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~chosen, -100)
    }  # fmt: skip


def trainer_of(model: torch.nn.Module, **options: Any) -> onward.Trainer:
    made = onward.TrainerOptions(seed=3, **options)
    return onward.Trainer(model, onward.optim.AdamW(lr=1e-3), options=made)


def both(model: torch.nn.Module, **options: Any) -> tuple[onward.Trainer, onward.Trainer]:
    """Two Trainers on equal models, with and without row demand."""
    twin = copy.deepcopy(model)
    return trainer_of(model, **options), trainer_of(twin, disable=("row_demand",), **options)


STREAM = [ragged(seed) for seed in range(8)]
SPECIAL = {
    "every row": batch(4, 24),
    "one sequence": ragged(3, size=1),
    "no label": {**ragged(5), "labels": torch.full_like(ragged(5)["labels"], -100)},
    "one label": ragged(6, labelled=0.0),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.5}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "clipped", "accumulated"],
)
def test_a_run_is_the_run_on_every_row(kind: str, options: dict[str, Any]) -> None:
    """Losses and parameters are those of a run on every row, with dropout on, as sizes, lengths and
    labels change."""
    model = gpt2() if kind == "gpt2" else bert()
    ours, theirs = both(model, **options)
    done = []
    for data in [*STREAM, SPECIAL["every row"], SPECIAL["one label"], *STREAM[::-1]]:
        a, b = ours.train_step(data), theirs.train_step(data)
        torch.testing.assert_close(a.loss, b.loss, rtol=2e-5, atol=0)
        assert (a.grad_norm is None) == (b.grad_norm is None)
        done.append(ours.report()["rows"]["arithmetic_done"])
    assert min(done) < 0.6
    pairs = zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True)
    for (name, p), q in pairs:
        torch.testing.assert_close(p, q, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_batches_between_others(name: str) -> None:
    ours, theirs = both(bert())
    for data in (STREAM[0], SPECIAL[name], STREAM[1]):
        a, b = ours.train_step(data).loss, theirs.train_step(data).loss
        torch.testing.assert_close(a, b, rtol=2e-5, atol=0, equal_nan=True)
    assert name != "no label" or ours.train_step(SPECIAL[name]).loss.isnan()


def test_towers() -> None:
    from tiny_families import pairs

    ours, theirs = both(tiny.ready(Towers()))
    for seed in range(5):
        data = pairs(seed)
        a, b = ours.train_step(data).loss, theirs.train_step(data).loss
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert ours.report()["rows"]["arithmetic_done"] < 0.95


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """A list of every plan that is made."""
    found: list[Plan] = []
    plain = Compiler.plan

    def noted(self: Compiler, graph: Graph, *args: Any, **more: Any) -> Plan:
        plan = plain(self, graph, *args, **more)
        if not self.journal.quiet:
            found.append(plan)
        return plan

    monkeypatch.setattr(Compiler, "plan", noted)
    return found


def test_a_hundred_batches_need_a_handful_of_plans(plans: list[Plan]) -> None:
    """No plan is made and no arena grows once the largest batch was seen."""
    trainer = trainer_of(bert(layers=1))
    batches = [ragged(seed) for seed in range(100)]
    largest = max(range(100), key=lambda i: batches[i]["attention_mask"].sum())
    seen = []
    for data in batches:
        trainer.train_step(data)
        seen.append((len(plans), trainer.memory.version))
    assert len({tuple(b["input_ids"].shape) for b in batches}) > 10
    assert seen[-1][0] <= 12, "a plan to count with, one to step with, each a few times"
    for data in [batches[largest], *batches]:
        before = (len(plans), trainer.memory.version)
        trainer.train_step(data)
        assert (len(plans), trainer.memory.version) == before


def test_a_plan_serves_what_is_smaller_and_nothing_else(plans: list[Plan]) -> None:
    trainer = trainer_of(bert(layers=1))
    trainer.train_step(STREAM[0])
    plan = trainer.plan
    assert plan.serves(plan.dims)
    for name, size in plan.dims.items():
        assert not plan.serves({**plan.dims, name: size + 1})
        assert not plan.serves({**plan.dims, name: 0})
        assert plan.serves({**plan.dims, name: size - 1})
    assert not plan.serves({})


def test_evaluation_skips_the_same_rows() -> None:
    ours, theirs = both(bert())
    for data in STREAM[:3]:
        a, b = ours.eval_step(data).loss, theirs.eval_step(data).loss
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    [step] = ours._steps.eval
    assert not step.padded, "no batch was computed on every row"


def test_fetched_outputs_are_whole() -> None:
    model = bert(dropout=0.0)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0))
    for data in STREAM[:3]:
        want = model(**data).logits.detach()
        found = trainer.train_step(data, fetch=["logits"]).outputs["logits"]
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_verify_compares_both_forms() -> None:
    trainer = trainer_of(bert())
    report = trainer.verify(STREAM[0])
    assert report.ok, str(report)
    assert "rows that are read" in str(report)


# ---- looking


def test_report_has_the_rows_of_the_last_step() -> None:
    trainer = trainer_of(bert())
    data = STREAM[0]
    trainer.train_step(data)
    rows = trainer.report()["rows"]
    labelled = data["labels"] != -100
    read = (data["attention_mask"] > 0) & labelled.any(1, keepdim=True)
    assert sorted(rows["counts"].values()) == sorted([int(labelled.sum()), int(read.sum())])
    assert 0 < rows["arithmetic_done"] < 0.9
    trainer.train_step(batch(4, 24))
    assert trainer.report()["rows"] == {"arithmetic_done": 1.0, "counts": {}}


def test_explain_says_which_rows_which_module_computes() -> None:
    trainer = trainer_of(bert())
    data = STREAM[0]
    found = trainer.explain(data)
    labelled = data["labels"] != -100
    last = "bert.encoder.layer.1.intermediate.dense"
    keys = "bert.encoder.layer.1.attention.self.key"
    by_module = {m: s for s in found.sets for m in s.modules}
    assert torch.equal(by_module[last].present, labelled)
    read = (data["attention_mask"] > 0) & labelled.any(1, keepdim=True)
    assert torch.equal(by_module[keys].present, read)
    assert found.packed and not found.whole and not found.kept
    assert 0.0 < found.share < 0.9
    text = str(found)
    assert f"{int(labelled.sum())} of {labelled.numel()} rows" in text
    assert f"{1 - found.share:.1%} of the arithmetic spared" in text
    lines = [line for line in text.splitlines() if line.startswith("  |")]
    drawn = [[c != " " for c in line[3:-1]] for line in lines]
    assert drawn == read.logical_or(labelled).tolist()


def test_explain_names_what_keeps_rows_and_what_it_costs() -> None:
    trainer = trainer_of(bert())
    data = STREAM[0]
    plain, kept = trainer.explain(data), trainer.explain(data, fetch=["logits"])
    [item] = kept.kept
    assert item.why == "output 'logits'"
    # `more` is the share of the arithmetic that is spared without that output
    assert kept.done * (1 - item.more) == pytest.approx(plain.done, rel=1e-6)
    assert "kept by output 'logits'; without it" in str(kept)


def test_the_picture_is_an_image(tmp_path: Any) -> None:
    trainer = trainer_of(bert())
    found = trainer.explain(STREAM[0])
    root = ElementTree.parse(found.save(tmp_path / "rows.svg")).getroot()
    dark = [r for r in root.iter() if r.get("fill") == "#1f6f78"]
    assert root.tag.endswith("svg") and len(dark) >= len(STREAM[0]["input_ids"])


def test_explain_changes_nothing() -> None:
    """An explanation before or within a run changes nothing that follows."""
    results = []
    for asks in (False, True):
        trainer = trainer_of(bert())
        if asks:
            trainer.explain(STREAM[0])
        losses = [trainer.train_step(STREAM[0]).loss]
        if asks:
            trainer.explain(STREAM[1], fetch=["logits"])
        losses.append(trainer.train_step(STREAM[1]).loss)
        results.append(torch.stack(losses))
    assert torch.equal(*results)
