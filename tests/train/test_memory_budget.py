"""`TrainerOptions(memory_budget=...)`: the same bits in less memory, or one clear error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from own_optimizers import Momentary
from tiny import batch, bert, gpt2

import onward
from onward.execute import Executable
from onward.graph.graph import where
from onward.memory_amounts import memory_amount, mib
from onward.plan import MemoryRegion, Plan
from onward.plan.recompute import layer

pytestmark = pytest.mark.usefixtures("captures_kept")

# Long sequences and few parameters: what is kept for backward is nearly all of the step's memory.
KINDS: dict[str, Any] = {
    "gpt2": lambda: gpt2(layers=4, width=16, n_positions=48),
    "bert": lambda: bert(layers=4, width=16, max_position_embeddings=48),
}
MORE: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.5},
    "accumulated": {"gradient_accumulation_steps": 2},
}
BATCHES = [batch(4, 48, "right", seed=seed) for seed in (1, 2, 3)]


def trainer_of(kind: str, budget: int | float | str | None, **more: Any) -> onward.Trainer:
    model = KINDS[kind]()
    # on every row: the same layers on a third of them leave less to compute again
    more = {"disable": ("row_demand",), **more}
    options = onward.TrainerOptions(seed=5, memory_budget=budget, **more)
    return onward.Trainer(model, onward.optim.AdamW(lr=1e-2), options=options)


def steps(trainer: onward.Trainer) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], Plan]:
    """Losses of three updates, everything they left behind, and the last plan."""
    losses = []
    for data in BATCHES:
        for _ in range(trainer.options.gradient_accumulation_steps):
            losses.append(trainer.train_step(data).loss)
    state = trainer.state_dict()
    return losses, {**state["model"], **state["optimizer"]}, trainer.plan


def layers_kept(plan: Plan) -> dict[str, int]:
    """Bytes kept for backward, by the layer whose launch wrote them first."""
    kept: dict[str, int] = {}
    residual = {b.index: b.nbytes for b in plan.buffers if b.region is MemoryRegion.RESIDUAL}
    for launch in plan.launches:
        for y in launch.outputs:
            if y.buffer in residual:
                name = re.sub(r"^(.*?\.\d+)\..*$", r"\1", launch.module)
                kept[name] = kept.get(name, 0) + residual.pop(y.buffer)
    return kept


@pytest.fixture(scope="module")
def unconstrained() -> dict[tuple[str, str], Any]:
    """The run in which no activation is made again, once for each kind of step."""
    return {}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("how", "budget"),
    [("plain", 0.8), ("plain", 0.6), ("plain", 0.5), ("clipped", 0.6), ("accumulated", 0.6)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_within_the_budget(
    kind: str, how: str, budget: float, unconstrained: dict[tuple[str, str], Any]
) -> None:
    if (kind, how) not in unconstrained:
        off = ("row_demand", "activation_again")
        unconstrained[kind, how] = steps(trainer_of(kind, None, disable=off, **MORE[how]))
    losses, state, free = unconstrained[kind, how]
    trainer = trainer_of(kind, int(budget * free.peak), **MORE[how])
    small_losses, small_state, plan = steps(trainer)
    assert plan.peak <= budget * free.peak
    assert all(torch.equal(a, b) for a, b in zip(losses, small_losses, strict=True))
    assert state.keys() == small_state.keys()
    assert [n for n in state if not torch.equal(state[n], small_state[n])] == []
    again = [x for x in plan.launches if ".again" in x.text]
    assert again and all(x.backward for x in again)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_makes_its_own_step(kind: str) -> None:
    """The gradients that are left for it are in the budget, and the bits are the same."""
    found: list[Any] = []
    for off in ("row_demand,activation_again", "row_demand"):
        model, budget = KINDS[kind](), int(0.6 * found[0][2].peak) if found else None
        options: dict[str, Any] = {"seed": 5, "memory_budget": budget, "disable": off}
        optimizer = Momentary(model.parameters(), lr=1e-2)
        trainer = onward.Trainer(model, optimizer, options=options)
        losses = [trainer.train_step(data).loss for data in BATCHES]
        assert trainer.report()["own_step"]
        found.append((losses, trainer.state_dict()["model"], trainer.plan))
    (losses, weights, free), (small_losses, small_weights, plan) = found
    assert all(torch.equal(a, b) for a, b in zip(losses, small_losses, strict=True))
    assert [n for n in weights if not torch.equal(weights[n], small_weights[n])] == []
    assert plan.peak <= 0.6 * free.peak
    left = {b.name for b in plan.buffers if b.name.startswith("gradient.param.")}
    assert len(left) == len({id(p) for p in model.parameters()})


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_held_are_those_predicted_and_within_the_budget(kind: str) -> None:
    trainer = trainer_of(kind, 0.6)
    trainer.train_step(BATCHES[0])
    executable = trainer._last_run().prepared.executable
    assert isinstance(executable, Executable)
    assert executable.nbytes() == trainer.plan.sizes


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_in_bytes_is_met_to_the_byte(kind: str) -> None:
    free = trainer_of(kind, None)
    free.train_step(BATCHES[0])
    exactly = trainer_of(kind, free.plan.peak)
    exactly.train_step(BATCHES[0])
    assert exactly.plan.launches == free.plan.launches, "it fits as it is"
    less = trainer_of(kind, free.plan.peak - 1)
    less.train_step(BATCHES[0])
    assert less.plan.peak < free.plan.peak
    [report] = [r for r in less.report()["passes"] if r["name"] == "recompute"]
    assert report["edits"] >= 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tight_budget_keeps_what_crosses_from_layer_to_layer(kind: str) -> None:
    free = trainer_of(kind, None)
    free.train_step(BATCHES[0])
    with pytest.raises(onward.OnwardError) as error:
        trainer_of(kind, "10kB").train_step(BATCHES[0])
    smallest = int(re.findall(r"memory_budget=(\d+) or more", str(error.value))[0])
    tight = trainer_of(kind, smallest)
    tight.train_step(BATCHES[0])
    before, after = layers_kept(free.plan), layers_kept(tight.plan)
    inner = [name for name in before if re.search(r"\.\d+$", name)]
    assert len(inner) == 4
    # the last layer is next to the loss, its residuals are read before others can be freed
    for name in inner[:-1]:
        assert after.get(name, 0) < 0.3 * before[name]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_impossible_budget_says_what_is_missing_and_changes_nothing(kind: str) -> None:
    trainer = trainer_of(kind, 100_000)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    state = trainer.state_dict()
    with pytest.raises(onward.OnwardError, match="smaller batch") as error:
        trainer.train_step(BATCHES[0])
    missing, smallest = (
        int(re.findall(pattern, str(error.value))[0])
        for pattern in (r"(\d+) bytes too small", r"memory_budget=(\d+) or more")
    )
    assert smallest - missing == 100_000
    after = trainer.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert (trainer.updates, trainer.micro_steps) == (0, 0)
    assert torch.equal(state["seed"], trainer.state_dict()["seed"])
    assert torch.equal(state["generator"], trainer.state_dict()["generator"])
    assert trainer.memory.arena_bytes(MemoryRegion.SCRATCH) == 0, "nothing was allocated"
    with pytest.raises(onward.OnwardError, match="too small"):
        trainer.train_step(BATCHES[0])
    enough = trainer_of(kind, smallest)
    enough.train_step(BATCHES[0])
    assert enough.plan.peak <= smallest


def test_a_smaller_batch_goes_on_after_the_error() -> None:
    small = batch(1, 12)
    free = trainer_of("gpt2", None)
    losses = [free.train_step(small).loss for _ in range(2)]
    trainer = trainer_of("gpt2", free.plan.peak)
    with pytest.raises(onward.OnwardError, match="memory_budget"):
        trainer.train_step(batch(32, 48))
    assert all(torch.equal(trainer.train_step(small).loss, loss) for loss in losses)


def plan_within(trainer: onward.Trainer, budget: int | float | str | None) -> Plan:
    """The plan of the last step's graph within another budget; nothing runs."""
    step = trainer._steps.train[0]
    graph = step.graphs.step
    outputs = [*trainer.plan.outputs, *graph.signature.updated.values()]
    return step.graphs.compiler.plan(graph, outputs, trainer.plan.dims, budget)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fraction_is_one_of_what_can_be_spared(kind: str) -> None:
    """Between the least peak, as the error of too few bytes names it, and the peak without one."""
    free = trainer_of(kind, None)
    free.train_step(BATCHES[0])
    with pytest.raises(onward.OnwardError) as error:
        plan_within(free, 2)
    least = int(re.findall(r"memory_budget=(\d+) or more", str(error.value))[0])
    most = free.plan.peak
    assert least < 0.7 * most
    peaks = []
    for fraction in (1.0, 0.75, 0.5, 0.25, 1e-6):
        peaks.append(plan_within(free, fraction).peak)
        assert peaks[-1] <= least + fraction * (most - least)
    # a search for exactly that may end with fewer bytes lost between buffers
    assert peaks[0] == most and peaks[-1] <= least
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)


WIDE: dict[str, Any] = {  # much optimizer state, few values: most of the peak cannot be spared
    "head": {"layers": 1, "vocab_size": 4000},
    "sgd": {"layers": 2, "width": 64},
}


@pytest.mark.parametrize(("kind", "steps"), [("head", 1), ("sgd", 2)])
def test_a_fraction_is_never_refused(kind: str, steps: int) -> None:
    model = gpt2(**WIDE[kind])
    optimizer = onward.optim.SGD() if kind == "sgd" else onward.optim.AdamW()
    options = onward.TrainerOptions(memory_budget=1e-6, gradient_accumulation_steps=steps)
    trainer = onward.Trainer(model, optimizer, options=options)
    for _ in range(steps):
        assert trainer.train_step(batch(2, 8)).loss.isfinite()


AMOUNTS: dict[str, int] = {
    "1000000B": 10**6, "1000kB": 10**6, "1MB": 10**6, "1 mb": 10**6, "0.001GB": 10**6,
    ".000001 TB": 10**6, "1024KiB": 2**20, "1MiB": 2**20, "1.5 MiB": 3 * 2**19,
    "0.5GiB": 2**29, "2 GiB ": 2**31, "1TiB": 2**40,
}  # fmt: skip


@pytest.mark.parametrize("text", AMOUNTS)
def test_bytes_with_a_unit(text: str) -> None:
    assert memory_amount(text) == AMOUNTS[text]
    assert onward.TrainerOptions(memory_budget=text).memory_budget == text


def test_bytes_are_shown_as_they_may_be_written() -> None:
    assert mib(1234.5 * 2**20) == "1,234.5 MiB"
    for nbytes in (0.25 * 2**20, 2**20, 768 * 2**20):
        assert memory_amount(mib(nbytes, 2)) == nbytes


def test_a_budget_with_a_unit_is_met_and_refused_in_bytes() -> None:
    free = trainer_of("gpt2", None)
    free.train_step(BATCHES[0])
    assert plan_within(free, f"{(free.plan.peak - 1) / 1e6:f} MB").peak < free.plan.peak
    with pytest.raises(onward.OnwardError, match="memory_budget of 1024 bytes") as error:
        plan_within(free, "1KiB")
    persistent = free.plan.sizes[MemoryRegion.PERSISTENT]
    assert f"{persistent} of them optimizer state" in str(error.value)


def test_evaluation_has_no_share_to_keep_but_obeys_bytes() -> None:
    trainer = trainer_of("gpt2", 0.5)
    assert trainer.eval_step(BATCHES[0]).loss.isfinite()
    with pytest.raises(onward.OnwardError, match="memory_budget"):
        trainer_of("gpt2", 1000).eval_step(BATCHES[0])


def test_recompute_can_be_seen() -> None:
    trainer = trainer_of("gpt2", 0.6)
    trainer.train_step(BATCHES[0])
    assert ".again" in str(trainer.plan)
    assert trainer.report()["compile_seconds"]["recompute"] > 0


def test_layers_are_told_by_their_number() -> None:
    trainer = trainer_of("gpt2", None)
    trainer.train_step(BATCHES[0])
    graph = trainer._steps.train[0].graphs.step
    found = {layer(node) for node in graph if where(node)}
    assert found == {"", *(f"transformer.h.{i}" for i in range(4))}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_counted_rows_fits_its_budget_too(kind: str) -> None:
    free = steps(trainer_of(kind, None, disable=()))
    budget = int(0.7 * free[2].peak)
    tight = steps(trainer_of(kind, budget, disable=()))
    assert tight[2].open and tight[2].peak <= budget < free[2].peak
    for ours, theirs in zip(tight[0], free[0], strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(tight[1][k], v) for k, v in free[1].items())
