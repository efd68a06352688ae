"""What an explanation says is what happens: passes, launches, and every byte of the plan, beside
the step that really runs and the memory that it really holds."""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import pytest
import tiny
import torch
from tiny import batch, mlp
from torch import nn

import onward
from onward.errors import CaptureError, OnwardError
from onward.explanation import StepExplanation
from onward.explanation.build import reasons
from onward.explanation.facts import ARENA, KINDS, OF_REGIONS
from onward.graph.printer import count_ops
from onward.journal import Journal
from onward.module import accelerated
from onward.module.accelerate import _MEMORIES
from onward.plan import MemoryRegion, Plan

LOOPS = ("trainer", "module")
gpt2, bert = partial(tiny.gpt2, layers=1), partial(tiny.bert, layers=1)


class Shaped(nn.Module):
    """A model with a strided weight, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.tied = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner.weight = nn.Parameter(torch.randn(8, 16)[:, ::2])
        self.tied.weight = self.inner.weight
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.tied(torch.tanh(self.inner(x))) * self.scale).square().mean()


@dataclass
class Running:
    """A model in one of the loops. who: what is explained."""

    loop: str
    model: Any
    who: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, loop: str, model: Any, optimizer: Any = None, **options: Any) -> Running:
        made = (optimizer or torch.optim.AdamW)(model.parameters())
        if loop == "trainer":
            return cls(loop, model, onward.Trainer(model, made, options=options), made)
        _MEMORIES.clear()  # so that no other model's arenas are this one's
        return cls(loop, model, onward.accelerate(model, **options), made)

    def step(self, given: Any) -> None:
        if self.loop == "trainer":
            self.who.train_step(given)
            return
        out = self.model(**given)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()

    def explain(self, given: Any = None, **more: Any) -> StepExplanation:
        if self.loop == "module":
            more = {"optimizer": self.optimizer, **more}
        return onward.explain(self.who, given, **more)

    @property
    def plan(self) -> Plan:
        held = accelerated(self.model)
        return self.who.plan if held is None else held.plan

    @property
    def report(self) -> dict[str, Any]:
        held = accelerated(self.model)
        return self.who.report() if held is None else held.report()

    def held(self) -> dict[str, int]:
        """Bytes held in memory for the last step, by kind: persistent, the arena or the block of a
        call, and beside a block what its rows were counted in."""
        held = accelerated(self.model)
        if held is None:
            executable = self.who.snapshot().last_run.prepared.executable
        else:
            [call] = [c for s in held._states for cs in s.calls.values() for c in cs]
            assert not isinstance(call, str) and call.last is not None
            executable = call.last.prepared.executable._last
        found = executable.nbytes()
        beside = 0 if held is None else held.memory.arena_bytes(MemoryRegion.SCRATCH)
        persistent = found.pop(MemoryRegion.PERSISTENT)
        return {"persistent": persistent, "arena": sum(found.values()), "beside": beside}


def padded(size: int = 4) -> dict[str, torch.Tensor]:
    return batch(size, 12, "right")


X = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}
MODELS: dict[str, tuple[Callable[[], Any], Any]] = {
    "gpt2": (gpt2, batch(4, 12)),
    "gpt2, padded": (gpt2, padded()),
    "bert, padded": (bert, padded()),
    "no transformer": (Shaped, X),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_explained_before_it_runs_is_the_one_that_runs(name: str, loop: str) -> None:
    make, given = MODELS[name]
    running = Running.of(loop, make(), **({"outputs": "loss"} if loop == "module" else {}))
    before = running.explain(given)
    running.step(given)
    after = running.explain()
    for found in (before, after):
        agrees(found, running)
    assert before.changes == after.changes


def agrees(found: StepExplanation, running: Running) -> None:
    plan, report, memory = running.plan, running.report, found.memory
    assert found.captured and found.loop == running.loop and memory is not None
    # passes: those of the compilation that made the running step
    explained = [(c.name, c.edits, c.after) for c in found.changes if c.edits is not None]
    ran = [(p["name"], p["edits"], p["nodes"]) for p in report["passes"]]
    assert explained == ran and any(edits for _, edits, _ in explained)
    assert list(found.near_misses) == report["near_misses"]
    assert list(found.notes) == report["notes"]
    # launches
    assert found.launch_count == len(plan.launches) == report["launches"]
    for item in found.launches:
        launches = [x.backward for x in plan.launches if x.op == item.op]
        assert (item.forward, item.backward) == (launches.count(False), launches.count(True))
    # bytes: of the plan, and of the tensors that hold it
    held = running.held()
    kinds = memory.kinds
    assert memory.arena == plan.arena_bytes == held["arena"]
    assert plan.sizes[MemoryRegion.PERSISTENT] == held["persistent"]
    assert kinds["row counting"] >= held["beside"]
    if running.loop == "trainer":  # whose arena is the step's: what is left are constants
        looks = running.who.snapshot().last_run.step.looks
        assert kinds["row counting"] == sum(look.sizes[MemoryRegion.PERSISTENT] for look in looks)
    assert max(sum(memory.alive[k][i] for k in ARENA) for i in range(len(plan.launches))) == (
        plan.lower_bound
    )
    own = kinds["optimizer"] if running.loop == "module" else 0
    outside = kinds["weights"] + own + kinds["row counting"] + copies(running, plan)
    assert memory.total == outside + plan.peak
    assert memory.total == sum(kinds[kind] for kind in KINDS) and min(kinds.values()) >= 0
    assert kinds["workspace"] == plan.workspace


def copies(running: Running, plan: Plan) -> int:
    """Bytes handed out beside the plan's memory: 64 for each scalar, and in a module the gradients
    of strided weights, which have their strides."""
    signature = plan.signature
    scalars = {*signature.results.values(), signature.loss, signature.grad_norm} - {None}
    weights = running.model.parameters() if running.loop == "module" else ()
    strided = sum(p.numel() * p.itemsize for p in weights if not p.is_contiguous())
    return 64 * len(scalars) + strided


@pytest.mark.parametrize("loop", LOOPS)
def test_kinds_are_what_their_owners_hold(loop: str) -> None:
    model = gpt2()
    running = Running.of(loop, model)
    running.step(batch(4, 12))
    memory = running.explain().memory
    assert memory is not None
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert memory.kinds["weights"] == weights + sum(b.numel() * b.itemsize for b in model.buffers())
    if loop == "module":
        running.optimizer.step()
    state = [t for s in running.optimizer.state.values() for t in s.values()]
    moments = sum(t.numel() * t.itemsize for t in state if t.numel() > 1)
    assert memory.kinds["optimizer"] == pytest.approx(moments, rel=0.01) and moments == 2 * weights
    assert memory.most("gradients") == pytest.approx(weights, rel=0.02)


def test_shared_and_strided_weights_are_counted_once_and_with_their_copy() -> None:
    found = onward.explain(Shaped(), X)
    assert found.memory is not None
    floats = 2 * (8 * 8) + 2 * 8 + 8  # the tied weight and its copy, two biases, a buffer
    assert found.memory.kinds["weights"] == 4 * floats


def test_gradients_of_several_micro_batches_and_momentum() -> None:
    model = gpt2(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    trainer = onward.Trainer(model, optimizer, options=options)
    weights = sum(p.numel() * 4 for p in model.parameters())
    memory = onward.explain(trainer, batch(4, 12)).memory
    assert memory is not None
    assert memory.kinds["optimizer"] == pytest.approx(weights, rel=0.01)
    assert memory.most("gradients") >= weights, "sums, and what is added to them"
    for _ in range(2):
        trainer.train_step(batch(4, 12))
    assert trainer.plan.sizes[MemoryRegion.PERSISTENT] == sum(
        memory.kinds[k] for k in ("optimizer", "constants")
    ) + (memory.kinds["gradients"] - memory.alive["gradients"][memory.fullest])


@pytest.mark.parametrize("loop", LOOPS)
def test_changes_are_counted_on_the_graphs_themselves(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle counts the nodes of each graph that the running compilation has noted."""
    seen: list[tuple[str, Counter[str]]] = []
    plain = Journal.note

    def note(self: Journal, stage: str, graph: Any, ends: Any = None) -> None:
        if type(self) is Journal and not self.quiet:
            seen.append((stage, Counter(n.op_type for n in graph)))
        plain(self, stage, graph, ends)

    monkeypatch.setattr(Journal, "note", note)
    running = Running.of(loop, bert())
    running.step(padded())
    monkeypatch.undo()
    found = running.explain()
    counts = dict(seen)
    before = counts["capture"]
    for change in found.changes:
        name = change.name if not change.stage else f"{change.stage}-{change.name}"
        after = counts.get(name, before)
        named = Counter({op: after[op] - before[op] for op in {*after, *before}})
        told = {op.rpartition("::")[2]: n for op, n in change.ops.items()}
        assert told == {op: n for op, n in named.items() if n}
        assert (change.before, change.after) == (before.total(), after.total())
        before = after
    fused = Counter[str]()
    for change in found.changes:
        fused.update(change.fused)
    assert fused["onward::FlashAttention"] == 1 and fused["onward::AddLayerNormalization"] == 2
    assert "onward::Rows" not in fused, "row demand fuses nothing"


@pytest.mark.parametrize(("length", "packed"), [(12, True), (40, False)])
def test_row_demand_that_is_not_taken_changes_nothing(length: int, packed: bool) -> None:
    """GPT-2 spares only the last row of 40 tokens, too little to run the packed form."""
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    found = onward.explain(trainer, batch(4, length))
    [rows] = [c for c in found.changes if c.name == "row_demand"]
    after = found.changes[found.changes.index(rows) + 1]
    assert rows.edits and rows.before != rows.after
    assert after.before == (rows.after if packed else rows.before)
    assert found.rows is not None and found.rows.packed == packed
    assert ("R0" in found.dims) == packed


@pytest.mark.parametrize("loop", LOOPS)
def test_rows_are_those_of_the_step(loop: str) -> None:
    running = Running.of(loop, bert())
    found, given = running.explain(padded()), padded()
    running.step(given)
    assert found.rows is not None and found.rows.packed
    counts = {s.count for s in found.rows.sets}
    real = int(given["attention_mask"].sum())
    assert real in counts and set(running.report["rows"]["counts"].values()) <= counts
    if loop == "trainer":
        assert str(found.rows) == str(running.who.explain(given).rows)


@pytest.mark.parametrize("loop", LOOPS)
def test_explaining_changes_nothing(loop: str) -> None:
    running = Running.of(loop, gpt2())
    running.step(batch(4, 12))
    model = running.model
    before = copy.deepcopy(dict(model.state_dict()))
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    flags, random = [m.training for m in model.modules()], torch.get_rng_state()
    report, plan = running.report, running.plan
    running.explain(profile=True)
    running.explain(batch(6, 12), memory="2MB", batch_sizes=(1, 3))
    assert torch.equal(random, torch.get_rng_state())
    assert flags == [m.training for m in model.modules()]
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert versions == [p._version for p in model.parameters()]
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or (p.grad is not None and torch.equal(p.grad, grad))
    assert running.report == report and running.plan is plan


def test_a_plain_model_stays_plain() -> None:
    model = gpt2()
    attributes = set(vars(model))
    found = onward.explain(model, batch(4, 12))
    assert found.captured and accelerated(model) is None and set(vars(model)) == attributes
    assert found.results == ("loss",), "logits wait for whoever reads them"


def test_what_is_read_is_what_is_explained() -> None:
    model = onward.Module(gpt2(), outputs="all")
    found = model.explain(batch(4, 12))
    assert found.results == ("loss", "logits")
    with torch.no_grad():
        alone = model.explain(batch(4, 12))
    assert not sum(item.backward for item in alone.launches)
    assert alone.memory is not None and found.memory is not None
    assert not alone.memory.most("gradients") and found.memory.most("gradients")


def test_timed_launches_add_up_and_an_untimed_explanation_has_no_seconds() -> None:
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    found = onward.explain(trainer, batch(4, 12), profile=True)
    assert all(item.seconds is not None and item.seconds > 0 for item in found.launches)
    seconds = [item.seconds or 0.0 for item in found.launches]
    assert seconds == sorted(seconds, reverse=True)
    plain = onward.explain(trainer, batch(4, 12))
    assert all(item.seconds is None for item in plain.launches)
    assert {x.op for x in found.launches} == {x.op for x in plain.launches}


def test_a_trainers_method_and_the_function_give_the_same() -> None:
    trainer, given = onward.Trainer(gpt2(layers=1), onward.optim.AdamW()), padded()
    with pytest.raises(OnwardError, match="no step has run yet"):
        trainer.explain()
    by_method, by_function = trainer.explain(given), onward.explain(trainer, given)
    assert type(by_method) is type(by_function) is StepExplanation
    assert by_method.as_dict() == by_function.as_dict()
    trainer.train_step(given)
    assert trainer.explain().as_dict() == onward.explain(trainer).as_dict()
    assert "logits" in trainer.explain(fetch=["logits"]).results
    assert trainer.explain(given, fetch=["logits"]).kept[0].why == "output 'logits'"


# ---- what runs in eager


def test_what_cannot_be_captured_is_said_with_the_reason() -> None:
    x = torch.ones(2, 4, dtype=torch.complex64)
    with pytest.raises(CaptureError) as error:
        onward.accelerate(nn.Linear(4, 4), strict=True)(x)
    trainer = onward.Trainer(nn.Linear(4, 4), onward.optim.SGD())
    for who in (trainer, onward.accelerate(nn.Linear(4, 4)), nn.Linear(4, 4)):
        found = onward.explain(who, x)
        assert not found.captured and found.memory is None
        [reason] = found.reasons
        assert reason in str(error.value) and "complex64" in reason and "fix:" in reason
        assert f"because {reason}" in str(found)
        assert json.loads(json.dumps(found.as_dict()))["captured"] is False


class Odd(nn.Module):
    """A model with two ops that no graph can hold, at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Eigenvalues()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.linalg.pinv(self.first(x))).sum()


class Eigenvalues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x)


def test_every_reason_of_a_refusal_is_one_of_its_own() -> None:
    with pytest.raises(CaptureError) as error:
        tiny.compiled(Odd(), {"x": torch.randn(4, 4)}, want_loss=False)
    found = reasons(error.value)
    lines = str(error.value).splitlines()[1:]
    assert len(found) == len(lines) > 1
    assert all(reason in line for reason, line in zip(found, lines, strict=True))
    assert any("second" in reason and "eigvalsh" in reason for reason in found)
    assert reasons("the model cannot be captured: a; b") == ("a; b",)


def test_surroundings_without_a_graph_are_said() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        found = onward.explain(mlp(), torch.randn(6, 8))
    assert not found.captured and "saved_tensors_hooks" in found.reasons[0]
    with torch.no_grad():
        cached = onward.explain(gpt2().eval(), {"input_ids": batch(2, 8)["input_ids"]})
    assert not cached.captured and "cache" in cached.reasons[0]


def test_regions_in_eager_are_shown_where_a_capture_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launches of products stand in for those of the region."""
    from onward.explanation import build

    @dataclass
    class Found:
        path: str
        reason: str

    plain = build.Remade.executable.fget
    assert plain is not None

    def of_site(self: Any) -> Any:
        executable = plain(self)
        for launch in executable.plan.launches:
            if launch.op == "Gemm":
                launch.attrs["site"] = 0
        return executable

    monkeypatch.setattr(build.Remade, "executable", property(of_site))
    monkeypatch.setattr(build, "REGION_OPS", ("Gemm",))
    model = mlp()
    found = onward.explain(model, torch.randn(6, 8), profile=True)
    assert not found.regions
    regions = (Found("inner", "no form"), Found("outer", "none either"))
    monkeypatch.setattr(build, "_parts", lambda captured: regions)
    found = onward.explain(model, torch.randn(6, 8), profile=True)
    assert [(r.path, r.reason) for r in found.regions] == [(r.path, r.reason) for r in regions]
    gemm = next(x.seconds for x in found.launches if x.op == "Gemm")
    whole = sum(x.seconds or 0.0 for x in found.launches)
    assert found.regions[0].seconds == pytest.approx(gemm) and gemm
    assert found.regions[0].share == pytest.approx(gemm / whole)
    assert found.regions[1].seconds == 0.0
    assert "  inner runs in eager PyTorch" in str(found)
    assert found.memory is not None and OF_REGIONS in found.memory.not_counted


# ---- arguments


def test_what_cannot_be_explained_is_refused_in_one_line() -> None:
    model = gpt2()
    trainer = onward.Trainer(model, onward.optim.AdamW())
    for act, text in (
        (lambda: onward.explain(3), "not a int"),
        (lambda: onward.explain(trainer), "no step has run yet"),
        (lambda: onward.explain(onward.accelerate(gpt2())), "no call has run"),
        (lambda: onward.explain(trainer, batch(2, 4), memory="much"), "memory='much'"),
        (lambda: onward.explain(trainer, batch(2, 4), memory=cast(Any, 0.5)), "memory=0.5"),
        (lambda: onward.explain(trainer, batch(2, 4), batch_sizes=(2, 0)), "batch_sizes holds 0"),
        (
            lambda: onward.explain(
                gpt2(), batch(2, 4), optimizer=torch.optim.Adagrad(model.parameters())
            ),
            "",
        ),
        (
            lambda: onward.explain(
                gpt2(), batch(2, 4), optimizer=torch.optim.Rprop(model.parameters())
            ),
            "Rprop has no state yet",
        ),
    ):  # fmt: skip
        if not text:
            assert act().captured  # Adagrad makes its state at once
            continue
        with pytest.raises(OnwardError, match=text) as error:
            act()
        assert "\n" not in str(error.value) and "fix:" in str(error.value)


def test_counts_name_own_ops() -> None:
    from tiny import compiled

    graph = compiled(gpt2(), batch(4, 12)).forward
    counts = count_ops(graph)
    own = [n for n in graph if n.domain]
    assert counts.total() == len(graph) and own
    assert sum(n for op, n in counts.items() if op.startswith("onward::")) == len(own)


def test_a_product_of_one_input_in_eager_is_no_reason_to_keep_rows() -> None:
    """A weight by spectral norm, and a table whose rows the loss reads by tokens."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 16)
            self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.table.weight

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(self.table(i))).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = onward.explain(Normed(), torch.randint(0, 20, (4, 8)))
    assert found.captured and found.regions and found.rows is not None
