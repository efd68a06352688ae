"""A run that is stopped and resumed is the run that never stopped, to the bit."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import bert, gpt2
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, get_scheduler

import onward
from onward.data import ResumableDataLoader
from onward.errors import CheckpointError, OnwardError

SAMPLES, BATCH, WINDOW = 10, 4, 2  # an epoch: 3 micro-batches, the last one of 2 samples
STEPS = 8  # micro-batches of a run: two epochs and more, four windows


def t5() -> nn.Module:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 97, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
        "decoder_start_token_id": 0, "dropout_rate": 0.1,
    }  # fmt: skip
    return T5ForConditionalGeneration(T5Config(**settings)).train()


FAMILIES: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "bert": bert, "t5": t5}


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Token ids that are drawn anew each time a sample is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, 97, (6,))
        ids[0], ids[1] = index, random.randrange(1, 97)
        ids[2] = int(np.random.randint(1, 97))
        return {"input_ids": ids, "labels": ids}


class Run:
    """A Trainer with all that a loop has: data, a schedule, numbers that the loop itself draws."""

    def __init__(
        self, model: nn.Module, precision: str = "no", workers: int = 0, **options: Any
    ) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = {
            "gradient_accumulation_steps": WINDOW, "max_grad_norm": 1.0,
            "mixed_precision": precision, **options,
        }  # fmt: skip
        self.trainer = onward.Trainer(model, self.optimizer, options=settings)
        self.scheduler = get_scheduler("cosine", self.optimizer, 1, STEPS // WINDOW)
        self.data = ResumableDataLoader(Tokens(), BATCH, seed=1, num_workers=workers)
        self.trainer.register_for_checkpointing(self.scheduler, self.data)
        self.batches: Iterator[Any] = iter(())
        self.log: list[tuple[float, ...]] = []

    def begin(self) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(7)

    @property
    def done(self) -> int:
        return self.trainer.updates * WINDOW + self.trainer.micro_steps

    def step(self) -> None:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.data)
            batch = next(self.batches)
        result = self.trainer.train_step(batch)
        if result.updated:
            self.scheduler.step()
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        self.log.append((float(result.loss), result.lr, *drawn))

    def resume(self, folder: Path) -> None:
        self.trainer.resume(folder, strict=True)
        self.batches = iter(())

    def digest(self) -> str:
        """A digest of everything that the run may leave."""
        state = self.trainer.state_dict()
        numbers = hashlib.sha256(repr(self.log[-1]).encode())
        for tensors in (state["model"], state["optimizer"]):
            for name in sorted(tensors):
                numbers.update(tensors[name].float().numpy().tobytes())
        numbers.update(repr([state["counts"], self.data.state_dict()]).encode())
        return numbers.hexdigest()


def whole(run: Run, folder: Path, steps: int = STEPS) -> list[str]:
    """The digests behind each micro-batch of a run that saves before each, and at its end."""
    run.begin()
    run.trainer.save(folder / "0")
    found: list[str] = []
    for number in range(1, steps + 1):
        run.step()
        found.append(run.digest())
        run.trainer.save(folder / str(number))
    return found


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_every_step(family: str, precision: str, tmp_path: Path) -> None:
    """Within an epoch and at its end, within a window and at its end, before the first step."""
    want = whole(Run(FAMILIES[family](), precision), tmp_path)
    other = Run(FAMILIES[family](), precision)
    with torch.no_grad():
        for p in other.trainer.model.parameters():
            p.add_(1)  # nothing of its own is left
    for stop in range(STEPS):
        random.seed(stop)
        torch.manual_seed(stop)
        other.resume(tmp_path / str(stop))
        assert other.done == stop
        for number in range(stop, STEPS):
            other.step()
            assert other.digest() == want[number], (stop, number)


def test_three_times_within_an_epoch(tmp_path: Path) -> None:
    """Each time by a Trainer of its own, and with other numbers of workers."""
    want = whole(Run(Small()), tmp_path / "whole")
    run = Run(Small())
    run.begin()
    for turn in range(1, STEPS + 1):
        run.step()
        assert run.digest() == want[turn - 1]
        if turn in (1, 2, 3, 6):
            run.trainer.save(tmp_path / "run", save_total_limit=1)
            run = Run(Small(), workers=turn % 3)
            run.resume(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-3"]


PROGRAM = """
import sys
from pathlib import Path
import pytest
sys.path[:0] = {path!r}
from checkpoint.test_resume import Run, STEPS, gpt2, whole
import torch
torch.set_num_threads(1)
if __name__ == "__main__":
    folder = Path({folder!r})
    if sys.argv[1] == "whole":
        print(whole(Run(gpt2()), folder)[-1])
    else:
        run = Run(gpt2(), workers=2)
        run.resume(folder / sys.argv[1])
        while run.done < STEPS:
            run.step()
        print(run.digest())
"""


@pytest.mark.slow
def test_by_a_new_process(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    program = tmp_path / "program.py"
    paths = [str(tests), str(tests / "support")]
    program.write_text(PROGRAM.format(path=paths, folder=str(tmp_path)))

    def run(argument: str) -> str:
        return subprocess.run(
            [sys.executable, str(program), argument], check=True, capture_output=True, text=True
        ).stdout.strip()

    want = run("whole")
    assert run("5") == want


class Small(nn.Module):
    """A layer with dropout, which runs as a graph in no time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = nn.functional.dropout(self.table(input_ids), 0.2, self.training)
        loss = nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss}


ACTIONS = ("step", "step", "step", "evaluate", "save", "save in a thread", "resume", "new process")


@pytest.mark.sample(20)
@pytest.mark.parametrize("seed", range(200))
def test_random_programs(seed: int, tmp_path: Path) -> None:
    """Steps, evaluations, saves and resumes in any order, beside a run without all that."""
    want = whole(Run(Small()), tmp_path / "whole", steps=12)
    draw = random.Random(seed)
    run, saved = Run(Small()), 0
    run.begin()
    for action in draw.choices(ACTIONS, k=40):
        if action == "step" and run.done < len(want):
            run.step()
            assert run.digest() == want[run.done - 1]
        elif action == "evaluate":
            run.trainer.eval_step(input_ids=torch.ones(2, 3).long(), labels=torch.ones(2, 3).long())
        elif action.startswith("save") and run.done:
            run.trainer.save(
                tmp_path / "run", background="thread" in action, save_total_limit=draw.randint(1, 3)
            )
            saved = run.done
        elif action in ("resume", "new process") and saved:
            if action == "new process":
                run.trainer.finish_saves()
                run = Run(Small(), workers=draw.choice((0, 0, 1, 2)))
            run.resume(tmp_path / "run")
            assert run.done == saved
    assert run.done


# ---- what is refused, and changes nothing


def test_what_does_not_fit(tmp_path: Path) -> None:
    run = Run(gpt2())
    run.step()
    run.step()
    run.trainer.save(tmp_path)
    for other, said in (
        (Run(gpt2(width=48)), "transformer"),
        (Run(bert()), "of the model: in one of the two only"),
    ):
        held = {k: v.clone() for k, v in other.trainer.model.state_dict().items()}
        drawn = torch.get_rng_state()
        with pytest.raises(OnwardError, match=said):
            other.trainer.resume(tmp_path)
        assert all(torch.equal(v, held[k]) for k, v in other.trainer.model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), drawn)
        assert (other.data.epoch, other.data.samples) == (0, 0)


@pytest.mark.parametrize("registered", [(), ("data",), ("data", "scheduler")], ids=str)
def test_other_objects_are_registered(registered: Sequence[str], tmp_path: Path) -> None:
    run = Run(Small())
    run.step()
    run.trainer.save(tmp_path)
    other = Run(Small())
    other.trainer.registered[:] = [getattr(other, name) for name in registered]
    with pytest.raises(OnwardError, match=r"it holds the states of \['LambdaLR', 'Resumable"):
        other.trainer.resume(tmp_path)


def test_objects_without_a_state(tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match="object has no state_dict and load_state_dict"):
        Run(Small()).trainer.register_for_checkpointing(object())  # type: ignore[arg-type]


def test_an_object_whose_state_no_file_holds(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

        def load_state_dict(self, state: Any) -> None: ...

    run = Run(Small())
    run.trainer.register_for_checkpointing(Odd())
    with pytest.raises(CheckpointError, match=r"state\.registered\.2\.1\.function is a builtins"):
        run.trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_resume_that_fails_leaves_objects_as_they_were(tmp_path: Path) -> None:
    """Objects keep their state also where their `state_dict` returns their own `__dict__`."""

    class Counts:
        def __init__(self) -> None:
            self.count, self.seen = 1, [1]

        def state_dict(self) -> dict[str, Any]:
            return self.__dict__

        def load_state_dict(self, state: Any) -> None:
            self.__dict__.update(state)

    class Fails(Counts):
        def load_state_dict(self, state: Any) -> None:
            if state["count"] == 1:
                raise RuntimeError("no")

    run, one, other = Run(Small()), Counts(), Fails()
    run.trainer.register_for_checkpointing(one, other)
    run.step()
    run.trainer.save(tmp_path)
    one.count, other.count = 7, 7
    one.seen.append(7)
    with pytest.raises(RuntimeError, match="no"):
        run.trainer.resume(tmp_path)
    assert (one.count, one.seen) == (7, [1, 7])


def test_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            Run(Small()).trainer.resume(folder)


def test_the_state_file_names_its_step(tmp_path: Path) -> None:
    run = Run(Small())
    for _ in range(3):
        run.step()
    path = run.trainer.save(tmp_path)
    assert path.name == "checkpoint-1-1"
    state = json.loads((path / "trainer_state.json").read_text())
    assert state["global_step"] == 1
