"""The memory of a session: nothing allocated while running, nothing growing, nothing aliased."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_memory import measured, said_by
from tiny import batch, bert, gpt2
from torch.profiler import ProfilerActivity, profile

import onward
from onward.errors import OutOfMemoryError
from onward.execute import Executable, Memory
from onward.plan import MemoryRegion

pytestmark = pytest.mark.usefixtures("captures_kept")

MAKERS = {"gpt2": gpt2, "bert": bert}


def trainer_of(kind: str, **more: Any) -> onward.Trainer:
    model = MAKERS[kind]()
    options = onward.TrainerOptions(seed=1, max_grad_norm=1.0, **more)
    return onward.Trainer(model, torch.optim.AdamW(model.parameters()), options=options)


def allocations(run: Any) -> tuple[int, int, int]:
    """The peak of bytes that the CPU allocator had outstanding, the bytes left, the number of
    events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, nbytes in memory:
        held += nbytes
        peak = max(peak, held)
    return peak, held, len(memory)


def test_measure_sees_an_allocation() -> None:
    kept = []
    assert allocations(lambda: kept.append(torch.empty(1 << 20, dtype=torch.uint8)))[:2] == (
        1 << 20,
        1 << 20,
    )
    assert allocations(lambda: torch.ones(1 << 18).sum())[0] >= 1 << 20


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_run_allocates_no_more_than_the_declared_workspace(
    kind: str, native: bool, monkeypatch: pytest.MonkeyPatch, build: Callable[[str], None]
) -> None:
    if not native:
        build("0")
    trainer = trainer_of(kind, disable=("row_demand",))
    data = batch(4, 24, "right")
    trainer.train_step(data)
    trainer.train_step(data)
    found: list[tuple[int, int, int]] = []
    plain = Executable.run

    def measured(self: Executable, inputs: Any, dims: Any, done: Any, accept: Any = None) -> bool:
        found.append(allocations(lambda: plain(self, inputs, dims)))
        done(True)
        return True

    monkeypatch.setattr(Executable, "run", measured)
    result = trainer.train_step(data)
    assert result.loss.isfinite()
    [(peak, left, _)] = found
    plan = trainer.plan
    assert left == 0
    assert peak <= plan.workspace
    assert (peak == 0) == native, "native kernels allocate nothing, PyTorch's do"
    assert plan.workspace < plan.arena_bytes, "workspace is what kernels need, not a second arena"


@pytest.mark.parametrize("kind", MAKERS)
def test_a_step_on_counted_rows_allocates_no_more_either(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row counts differ from the plan's, so that launches are bound anew before the measured
    run."""
    trainer = trainer_of(kind)
    for seed in (1, 2):
        trainer.train_step(batch(4, 24, "right", seed=seed))
    data = batch(3, 20, "right")
    trainer.train_step(data)
    plan, found, plain = trainer.plan, [], Executable.run

    def measured(
        self: Executable, inputs: Any, dims: Any = None, done: Any = None, accept: Any = None
    ) -> bool:
        found.append((self, allocations(lambda: plain(self, inputs, dims))))
        if done is not None:
            done(True)
        return True

    monkeypatch.setattr(Executable, "run", measured)
    trainer.train_step(data)
    assert trainer.plan is plan and plan.open == {"B", "T", *trainer.report()["rows"]["counts"]}
    assert len(found) == 3, "ids are looked at, the rows are counted, then the step runs"
    for executable, (peak, left, _) in found:
        assert left == 0
        assert peak <= executable.plan.workspace


@pytest.mark.parametrize("kind", MAKERS)
def test_bytes_held_are_the_bytes_predicted(kind: str) -> None:
    trainer = trainer_of(kind)
    trainer.train_step(batch(4, 24, "right"))
    executable = trainer.snapshot().last_run.prepared.executable
    assert executable is not None
    assert executable.nbytes() == executable.plan.sizes
    assert executable.nbytes()[MemoryRegion.SCRATCH] > 0
    # persistent: two moments a parameter, constants and scalars
    moments = 2 * sum(p.nbytes for p in trainer.model.parameters())
    assert moments <= executable.nbytes()[MemoryRegion.PERSISTENT] <= moments + 64 * 1024


def arena(trainer: onward.Trainer) -> int:
    return sum(trainer.memory.arena_bytes(r) for r in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH))


def test_arena_is_that_of_the_largest_shape() -> None:
    trainer = trainer_of("gpt2")
    trainer.train_step(batch(4, 24))
    largest, version = arena(trainer), trainer.memory.version
    for size, length in ((2, 24), (4, 12), (3, 5)):
        trainer.train_step(batch(size, length))
        assert arena(trainer) == largest
        assert trainer.memory.version == version, "an arena that fits does not move"
    trainer.eval_step(batch(4, 24))
    assert arena(trainer) == largest
    trainer.train_step(batch(6, 24))
    assert arena(trainer) > largest


def test_shapes_by_turns_give_what_each_gives_alone() -> None:
    """Plans of several sizes share one arena: running one must not disturb another."""
    sizes = [(4, 24), (2, 9), (6, 30), (4, 24), (2, 9)]

    def losses(order: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        model = gpt2()
        trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0))
        found, start = {}, trainer.state_dict()
        for size in order:
            trainer.load_state_dict(start)  # the masks of the first step each time
            loss = float(trainer.train_step(batch(*size)).loss)
            assert found.setdefault(size, loss) == loss
        return found

    together = losses(sizes)
    for size in set(sizes):
        assert losses([size]) == {size: together[size]}


def storages(tensors: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def test_nothing_handed_out_aliases_the_session() -> None:
    model = gpt2()
    trainer = onward.Trainer(model, onward.optim.AdamW(), options=onward.TrainerOptions(
        max_grad_norm=1.0, fetch=("logits",), seed=1
    ))  # fmt: skip
    data = batch()
    first = trainer.train_step(data)
    own = storages([*trainer.memory._named.values(), *trainer.memory._arenas.values()])
    own |= storages(model.parameters()) | storages(data.values())
    own |= storages(t for held in trainer._updates.state.tensors.values() for t in held.values())
    assert first.grad_norm is not None
    given = [first.loss, first.grad_norm, first.outputs["logits"]]
    evaluated = trainer.eval_step(data, fetch=["logits"])
    given += [evaluated.loss, evaluated.outputs["logits"]]
    state = trainer.state_dict()
    given += [state["seed"], *state["model"].values(), *state["optimizer"].values()]
    assert not storages(given) & own
    assert not any(t.requires_grad for t in given)
    kept = [t.clone() for t in given]
    for seed in range(3):
        trainer.train_step(batch(seed=seed + 5))
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))


def test_the_users_batch_is_copied_not_kept() -> None:
    trainer = trainer_of("bert")
    data = batch()
    kept = {k: v.clone() for k, v in data.items()}
    expected = trainer.eval_step(data).loss
    assert all(torch.equal(data[k], kept[k]) for k in kept)
    for value in data.values():
        value.zero_()
    assert torch.equal(trainer.eval_step(kept).loss, expected)


FLAT = """
import gc, json, sys
import torch
torch.set_num_threads(1)
from process_memory import malloced, resident
from tiny import batch, bert, gpt2
import onward

def held():
    gc.collect()
    return malloced(), resident()

model = {"gpt2": gpt2, "bert": bert}[sys.argv[1]](width=64)
trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters()),
                         options=onward.TrainerOptions(max_grad_norm=1.0))
data = [batch(8, 48, "right", seed=i) for i in range(20)]
for item in data[:4]:
    float(trainer.train_step(item).loss)
leak = []
before = held()
for item in data:
    float(trainer.train_step(item).loss)
    if len(sys.argv) > 2:
        leak.append(torch.ones(1 << 16))
after = held()
print(json.dumps([after[0] - before[0], after[1] - before[1], trainer.plan.peak]))
"""


@pytest.mark.slow
@pytest.mark.sample(2)
@measured
@pytest.mark.parametrize("kind", MAKERS)
def test_process_does_not_grow_over_twenty_steps(kind: str) -> None:
    """What C++ and Python hold, by the C allocator and by the kernel, against a step's 3 MB."""
    malloced, resident, peak = said_by(FLAT, kind)
    assert peak > 2_000_000
    assert malloced < 64 * 1024
    assert resident < 1024 * 1024


@pytest.mark.slow
@measured
def test_the_measure_sees_a_leak() -> None:
    malloced, resident, _ = said_by(FLAT, "gpt2", "leak")
    assert malloced > 20 * (1 << 18) * 0.9
    assert resident > 20 * (1 << 18) * 0.5


def test_an_arena_that_grows_is_freed_before_the_larger_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory(torch.device("cpu"))
    memory.reserve({MemoryRegion.RESIDUAL: 64, MemoryRegion.SCRATCH: 64})
    before = [
        weakref.ref(memory._arenas[region])
        for region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)
    ]
    alive: list[bool] = []
    make = torch.empty

    def empty(*args: Any, **more: Any) -> torch.Tensor:
        alive.append(before[len(alive)]() is not None)
        return make(*args, **more)

    monkeypatch.setattr(torch, "empty", empty)
    memory.reserve({MemoryRegion.RESIDUAL: 128, MemoryRegion.SCRATCH: 128})
    assert alive == [False, False]


@pytest.mark.parametrize(
    "raised, said",
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
        (RuntimeError("CUDA error: out of memory"), OutOfMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it."), OutOfMemoryError),
    ],
)
def test_an_error_of_an_earlier_launch_is_no_shortage(
    raised: RuntimeError, said: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU reports it at whatever the host asks next, such as the arena of a larger batch."""

    def refused(*args: Any, **more: Any) -> torch.Tensor:
        raise raised

    memory = Memory(torch.device("cpu"))
    memory.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "empty", refused)
    with pytest.raises(said) as found:
        memory._block(64, MemoryRegion.SCRATCH)
    assert isinstance(found.value, OutOfMemoryError) == (said is OutOfMemoryError)
