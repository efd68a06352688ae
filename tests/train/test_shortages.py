"""Memory that cannot be allocated: what is said, that nothing changes, and that training goes on.

The address space of a process is limited while it runs a step (tests/support/short_of_memory.py).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.errors import OutOfMemoryError
from onward.execute import Executable, Memory
from onward.execute.shortage import free_bytes, held_bytes, is_shortage, shortage
from onward.plan import MemoryRegion
from onward.recipes.devices import free_memory
from onward.train import ways_out

PROGRAM = Path(__file__).parents[1] / "support" / "short_of_memory.py"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PROGRAM)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mib(text: str) -> float:
    return float(text.replace(",", "")) * 2**20


def test_a_trainer_says_what_the_step_needs_and_the_ways_out(found: dict[str, Any]) -> None:
    said = found["trainer"]["said"]
    planned = re.search(r"planned: ([\d.,]+) MiB beyond the weights", said)
    assert planned, said
    assert mib(planned[1]) == pytest.approx(found["trainer"]["peak"], rel=1e-3)
    assert re.search(r"measured: the process holds [\d.,]+ MiB, and [\d.,]+ MiB are free", said)
    assert said.count("kept for backward") == 4, "the largest buffers, with op and module"
    saved = [mib(x) for x in re.findall(r"([\d.,]+) MiB less with", said)]
    assert len(saved) == 3 and saved == sorted(saved, reverse=True)
    assert said.splitlines()[-1].startswith("fix: batches of half the size")


def test_nothing_has_changed_and_training_goes_on_as_if_it_had_not_been(
    found: dict[str, Any],
) -> None:
    assert found["trainer"]["is a MemoryError"]
    assert found["trainer"]["unchanged"] and found["trainer"]["goes on"]
    assert found["loop"]["worst"] < 1e-6, "gradients of the next call are eager's"


def test_a_batch_that_does_not_fit_is_split(found: dict[str, Any]) -> None:
    parts = found["parts"]
    assert parts["peaks"][0] < parts["peaks"][1] / 3, "it had to be split"
    assert parts["loss"][0] == pytest.approx(parts["loss"][1], rel=1e-5)
    assert parts["worst"] < 1e-6, "weights after it"
    assert not parts["accumulates"], "a batch that fits is not split"


def test_the_ways_out_save_what_they_say(found: dict[str, Any]) -> None:
    """The plans of steps with the options have the peaks that the message predicts."""
    sys.path.insert(0, str(PROGRAM.parent))
    from short_of_memory import batch, model, trainer_of

    said, peak = found["trainer"]["said"], found["trainer"]["peak"]
    ways = dict(re.findall(r"([\d.,]+) MiB less with (.*)", said))
    by_way = {way: mib(saved) for saved, way in ways.items()}
    [budget] = [way for way in by_way if way.startswith("memory_budget")]
    least = int(re.findall(r"\d+", budget)[0])
    small = trainer_of(model(), memory_budget=least)
    small.train_step(*batch(16384))
    assert small.plan.peak <= least
    assert peak - small.plan.peak == pytest.approx(by_way[budget], rel=0.01)
    [half] = [way for way in by_way if "half" in way]
    halved = trainer_of(model(), gradient_accumulation_steps=2)
    for _ in range(2):
        halved.train_step(*batch(8192))
    assert peak - halved.plan.peak == pytest.approx(by_way[half], rel=0.05)
    [codes] = [way for way in by_way if "8bit" in way]
    coded = trainer_of(model(), optimizer_state="8bit")
    coded.train_step(*batch(16384))
    assert peak - coded.plan.peak == pytest.approx(by_way[codes], rel=0.01)


def test_a_loop_of_ones_own_says_it_too(found: dict[str, Any]) -> None:
    said = found["loop"]["said"]
    assert "planned:" in said and said.splitlines()[-1].startswith("fix: a smaller batch")


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("out of memory"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_what_a_shortage_is(error: BaseException, short: bool) -> None:
    assert is_shortage(error) is short


def test_the_allocators_own_error_is_one() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_shortage(raised.value)


def test_measured_bytes_are_of_this_process_and_machine() -> None:
    device = torch.device("cpu")
    held, free = held_bytes(device), free_bytes(device)
    assert held is not None and 50 << 20 < held < 1 << 40
    assert free is not None and 0 < free < 1 << 44


def test_memory_that_pytorch_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose allocator keeps what smaller steps have freed: a batch that fits is not split."""
    device, numbers = torch.device("cuda", 0), {"memory_reserved": 900, "memory_allocated": 300}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    for name, number in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, number=number: number)
    assert free_bytes(device) == free_memory(device) == 700
    memory = Memory(torch.device("cpu"))
    memory.device, memory.is_bounded = device, True
    monkeypatch.setattr(memory, "_block", lambda n, _: torch.empty(n, dtype=torch.uint8))
    memory.reserve({MemoryRegion.RESIDUAL: 500, MemoryRegion.SCRATCH: 100})
    with pytest.raises(OutOfMemoryError):
        memory.reserve({MemoryRegion.RESIDUAL: 600, MemoryRegion.SCRATCH: 801})


def test_the_memory_told_is_that_of_the_device_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of the host for a model on a device: the message has the device's numbers."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = onward.Trainer(model, optimizer, torch.nn.functional.mse_loss)
    batch, told = (torch.zeros(3, 8), torch.zeros(3, 4)), []
    trainer.train_step(*batch)
    plan, device = trainer.plan, torch.device("meta")

    def fails(*_: Any, **__: Any) -> None:
        raise shortage(plan, device, "too much")

    monkeypatch.setattr(Executable, "run", fails)
    monkeypatch.setattr(trainer.memory, "device", device)
    plain = ways_out.shortage
    monkeypatch.setattr(
        ways_out, "shortage", lambda p, d, *rest: (told.append(d), plain(p, d, *rest))[1]
    )
    with pytest.raises(OutOfMemoryError, match="too much"):
        trainer.train_step(*batch)
    assert told == [device]
