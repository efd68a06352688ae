"""Memory of accelerated models: forwards without a backward, outputs that are dropped, exceptions
in between, threads: nothing grows."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from models import Positional, W
from process_memory import measured, said_by
from torch.utils.checkpoint import checkpoint
from twins import Twins, total

import onward
from onward.module import accelerated

FLAT = """
import gc, json, sys
import torch
torch.set_num_threads(1)
gc.disable()  # what only a collection would free counts as well
from process_memory import malloced, resident
from tiny import batch, gpt2
import onward
from onward.module import accelerated

def held():
    return malloced(), resident()

model = onward.accelerate(gpt2(width=16))
turns, kept = int(sys.argv[1]), []

def turn(i):
    data = batch(2, 8 + (i % 60 == 0), "right", seed=i)
    match i % 5:
        case 0:
            model(**data).loss.backward()
            model.zero_grad()
        case 1:
            out = model(**data)
            out.logits
        case 2:
            with torch.no_grad():
                model(**data)
        case 3:
            try:
                (model(**data).loss + torch.ones(2)).backward()
            except RuntimeError:
                pass
        case 4:
            try:
                model(**{**data, "input_ids": data["input_ids"] + 10 ** 6})
            except (IndexError, RuntimeError):
                pass
    if len(sys.argv) > 2:
        kept.append(model(**data).loss)

for i in range(130):
    turn(i)
kept.clear()
memory = accelerated(model)._memory
gc.collect()
before = held()
for i in range(turns):
    turn(i)
after = held()
memory.blocks._sweep()
print(json.dumps([after[0] - before[0], after[1] - before[1], len(memory.blocks._lent)]))
"""


def growth(*arguments: str) -> list[int]:
    """Bytes of the C allocator and of the process over so many calls, and blocks that are lent."""
    return said_by(FLAT, *arguments)


@pytest.mark.slow
@measured
def test_a_thousand_calls_of_all_kinds_leave_memory_as_it_was() -> None:
    """A block of one forward has 40 KB."""
    malloced, resident, lent = growth("1000")
    assert malloced < 1 << 20
    assert resident < 4 << 20
    assert lent == 0


@pytest.mark.slow
@measured
def test_the_measure_sees_what_is_kept() -> None:
    malloced, _, lent = growth("30", "keep")
    assert malloced > 1 << 19
    assert lent > 28


def test_threads_leave_no_block_behind() -> None:
    twins = Twins(Positional())
    data = [torch.randn(2 + i % 3, W) for i in range(12)]
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i, given in enumerate(data):
                out = twins.ours(given)
                if (i + number) % 3 == 0:
                    total(out).backward()
                elif (i + number) % 3 == 1:
                    torch.autograd.grad(out.sum(), [twins.ours.a.weight])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    twins.ours.zero_grad()
    held: Any = accelerated(twins.ours)
    gc.collect()
    held._memory.blocks._sweep()
    nbytes = held._memory.blocks.nbytes
    for given in data:
        total(twins.ours(given)).backward()
        twins.ours.zero_grad()
    held._memory.blocks._sweep()
    assert held._memory.blocks.nbytes <= nbytes


@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_that_are_gone_leave_no_block(checkpointed: bool) -> None:
    """With their gradients, but for one that somebody still holds."""
    keeper = onward.accelerate(Positional())
    total(keeper(torch.ones(2, W))).backward()
    held: Any = accelerated(keeper)
    keeper.zero_grad()
    gc.collect()
    held._memory.blocks._sweep()
    before = len(held._memory.blocks._lent)
    for _ in range(4):
        model, given = onward.accelerate(Positional()), torch.ones(3, W)
        out = checkpoint(model, given, use_reentrant=False) if checkpointed else model(given)
        total(out).backward()
        kept = model.a.weight.grad
    del model, out
    gc.collect()
    held._memory.blocks._sweep()
    assert len(held._memory.blocks._lent) == before + 1
    assert kept is not None and kept.isfinite().all()
