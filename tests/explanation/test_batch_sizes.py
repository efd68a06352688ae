"""Memory at other batch sizes and the largest batch: told without running it, and tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from process_memory import measured, said_by
from test_explained_steps import LOOPS, Running
from tiny import batch
from torch import nn

import onward
from onward.explanation.sizes import MOST, largest

gpt2, bert = partial(tiny.gpt2, layers=1), partial(tiny.bert, layers=1)


def running_of(loop: str, model: Any) -> Running:
    """The model in a loop that reads the loss alone."""
    return Running.of(loop, model, **({"outputs": "loss"} if loop == "module" else {}))


def repeated(given: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """A batch of `size` samples, made by repeating the given ones."""
    count = next(iter(given.values())).shape[0]
    return {name: t[torch.arange(size) % count] for name, t in given.items()}


def held(running: Running, outside: int) -> int:
    """Bytes that the last step has in memory, with those that no tensor of the memory shows."""
    return sum(running.held().values()) + running.plan.workspace + outside


CASES: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor]]] = {
    "gpt2": (gpt2, batch(4, 12)),
    "bert, padded": (bert, batch(4, 12, "right")),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", CASES)
def test_the_largest_batch_fits_and_three_percent_more_do_not(name: str, loop: str) -> None:
    make, given = CASES[name]
    memory = 3_000_000
    found = running_of(loop, make()).explain(given, memory=memory)
    assert found.largest is not None and found.memory is not None
    told = found.largest.batch_size
    assert found.largest.nbytes is not None and found.largest.beyond is not None
    assert found.largest.nbytes <= memory < found.largest.beyond
    assert found.largest.nbytes > 0.95 * memory and told > 33, "3 % of it is a sample at least"
    kinds = found.memory.kinds
    outside = kinds["weights"] + (kinds["optimizer"] if loop == "module" else 0)
    for size, fits in ((told, True), (math.ceil(1.03 * told), False)):
        running = running_of(loop, make())  # whose arena is of this batch alone
        running.step(repeated(given, size))
        real = held(running, outside)
        assert (real <= memory) == fits, f"{size}: {real}"
        if fits:
            assert real == pytest.approx(found.largest.nbytes, rel=0.02)


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_predicted_sizes_are_those_of_the_steps(loop: str) -> None:
    """A batch of 1 has a capture of its own; no size was run before its memory was told."""
    given = batch(4, 12)
    found = running_of(loop, gpt2()).explain(given, batch_sizes=(1, 2, 4, 9))
    assert [s.batch_size for s in found.sizes] == [1, 2, 4, 9] and found.memory is not None
    assert found.sizes[2].nbytes == found.memory.total
    kinds = found.memory.kinds
    outside = kinds["weights"] + (kinds["optimizer"] if loop == "module" else 0)
    for item in found.sizes:
        running = running_of(loop, gpt2())
        running.step(repeated(given, item.batch_size))
        assert item.nbytes == pytest.approx(held(running, outside), rel=0.02)


def test_an_example_of_one_sample_says_as_much() -> None:
    one, four = batch(1, 12), repeated(batch(1, 12), 4)
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    told = onward.explain(trainer, one, memory="1MB", batch_sizes=(1, 4))
    same = onward.explain(trainer, four, memory="1MB", batch_sizes=(1, 4))
    for a, b in zip(told.sizes, same.sizes, strict=True):
        assert a.nbytes == pytest.approx(b.nbytes, rel=0.01)
    assert told.largest is not None and same.largest is not None
    assert told.largest.batch_size == pytest.approx(same.largest.batch_size, rel=0.02)
    assert told.largest.batch_size > 4


def test_a_memory_budget_lets_more_in() -> None:
    plain = onward.Trainer(gpt2(layers=2), onward.optim.AdamW())
    tight = onward.Trainer(
        gpt2(layers=2), onward.optim.AdamW(), options=onward.TrainerOptions(memory_budget=0.01)
    )
    sizes = []
    for trainer in (plain, tight):
        found = onward.explain(trainer, batch(4, 12), memory="2MB").largest
        assert found is not None
        sizes.append(found.batch_size)
    assert sizes[1] > sizes[0]
    changes = onward.explain(tight, batch(4, 12)).changes
    assert [c for c in changes if c.name == "recompute" and c.edits]


def test_too_little_memory_for_one_sample() -> None:
    found = onward.explain(gpt2(), batch(4, 12), memory=2)
    assert found.largest is not None
    assert (found.largest.batch_size, found.largest.nbytes) == (0, None)
    assert found.largest.beyond is not None and found.largest.beyond > 2
    assert "none: one takes" in str(found)


class Fixed(nn.Module):
    """A model that takes batches of exactly three samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.out = nn.Parameter(torch.randn(3, 3)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix @ x).square().mean()


def test_a_graph_for_one_batch_size_says_so() -> None:
    found = onward.explain(Fixed(), {"x": torch.randn(3, 4)}, memory="1MB", batch_sizes=(3, 6))
    assert found.largest is not None and found.largest.nbytes is None
    assert found.largest.reason == "the model's graph is fixed to the batch size 3"
    assert found.sizes[0].nbytes and found.sizes[1].nbytes is None and found.sizes[1].reason


class Pairs(nn.Module):
    """A model that compares neighbours in the batch, so that batch sizes must be even."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).view(x.shape[0] // 2, 2, 4)
        return (h[:, 0] - h[:, 1]).square().mean()


def test_batches_of_pairs_are_told_in_pairs() -> None:
    found = onward.explain(Pairs(), {"x": torch.randn(6, 4)}, memory="64KiB", batch_sizes=(8, 9))
    assert found.sizes[0].nbytes
    assert found.sizes[1].nbytes is None and found.sizes[1].reason
    assert found.largest is not None and found.largest.nbytes is not None
    assert found.largest.batch_size % 2 == 0 and found.largest.batch_size > 6


# ---- the search

LINES: dict[str, Callable[[int], float]] = {
    "a line": lambda n: 1000 + 37 * n,
    "a line through zero": lambda n: n,
    "steps": lambda n: 1000 + 640 * math.ceil(n / 16),
    "a bend": lambda n: 1000 + 5 * n + max(0, n - 300) * 50,
    "a parabola": lambda n: 10 + n * n,
    "a root": lambda n: 10 + 1000 * math.sqrt(n),
    "flat": lambda n: 5,
    "too much": lambda n: 10**9 + n,
}


@pytest.mark.parametrize("start", [1, 4, 777])
@pytest.mark.parametrize("name", LINES)
def test_the_search_finds_the_last_that_fits(name: str, start: int) -> None:
    memory, asked = 20_000, list[int]()

    def nbytes(n: int) -> int:
        asked.append(n)
        return int(LINES[name](n))

    found = largest(nbytes, memory, start)
    by_hand = 0
    while by_hand < 25_000 and LINES[name](by_hand + 1) <= memory:
        by_hand += 1
    assert found == (MOST if name == "flat" else by_hand)
    assert len(asked) <= (12 if "line" in name else 60) and len(set(asked)) == len(asked)


# ---- the process

TRIED = """
import gc, json, math, sys
import torch
torch.set_num_threads(1)
from process_memory import malloced
from tiny import batch, gpt2
import onward

def held():
    gc.collect()
    return malloced()

loop, memory = sys.argv[1], int(sys.argv[2])
model = gpt2(width=128, layers=1)
optimizer = torch.optim.AdamW(model.parameters())
if loop == "trainer":
    who, more = onward.Trainer(model, optimizer), {}
    step = who.train_step
else:
    who, more = onward.accelerate(model), {"optimizer": optimizer}
    def step(given):
        model(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
for _ in range(3):
    step(batch(2, 48))
start, small = held(), onward.explain(who, batch(2, 48), **more).memory.total
found = onward.explain(who, batch(8, 48), memory=memory, **more).largest
assert found.planned, "told by plans"
before_step = held() - start
sizes = []
for size in (found.batch_size, math.ceil(1.03 * found.batch_size)):
    for _ in range(2):
        step(batch(size, 48))
    sizes.append(held() - start + small)
print(json.dumps([found.nbytes, before_step, *sizes]))
"""


@pytest.mark.slow
@pytest.mark.sample(2)
@measured
@pytest.mark.parametrize("loop", LOOPS)
def test_the_process_holds_what_was_told(loop: str) -> None:
    """The C allocator measures by how much a step of the largest batch exceeds one of two
    samples."""
    memory = 80_000_000
    told, before, fits, more = said_by(TRIED, loop, str(memory))
    assert before < 0.01 * memory, "to tell it takes no such memory"
    assert told <= memory and fits == pytest.approx(told, rel=0.02)
    assert more > memory and fits < 1.02 * memory
