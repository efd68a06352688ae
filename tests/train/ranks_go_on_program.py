"""One of two processes that train together over Gloo, where one of them fails or does something
else: what each of them says, and that they go on afterwards. `run` starts them."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from ranks_program import join, refusal

RANKS, WIDTH = 2, 8
Said = dict[str, Any]


def trainer_of(zero: int = 0, **options: Any) -> Any:
    import onward

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3))
    mesh = {"dp_shard" if zero else "dp_replicate": RANKS}
    options = {"mesh": mesh, "zero": zero, "ranks_timeout": 40, **options}
    loss = torch.nn.functional.cross_entropy
    return onward.Trainer(model, onward.optim.SGD(lr=0.1, momentum=0.9), loss, options=options)


def batch(rank: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank))
    return x, torch.arange(rows) % 3


class Held:
    """An object of the user's own with a state."""

    def __init__(self, state: Any = 0) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def goes_on(trainer: Any, rank: int) -> None:
    before = trainer.updates
    trainer.train_step(batch(rank))
    assert trainer.updates == before + 1


# ---- what is refused before anything has run


def refused(rank: int) -> Said:
    """A Trainer that has refused a step makes the next one."""
    trainer, odd = trainer_of(), rank == 1
    goes_on(trainer, rank)
    said = {"no rows": refusal(lambda: trainer.train_step(batch(rank, rows=0)))}
    goes_on(trainer, rank)
    [group] = trainer.optimizer.param_groups
    group["lr"] = 0.2 if odd else 0.1
    said["rate"] = refusal(lambda: trainer.train_step(batch(rank)))
    group["lr"] = "fast" if odd else 0.1
    said["alone"] = failure(lambda: trainer.train_step(batch(rank)))
    group["lr"] = 0.1
    goes_on(trainer, rank)
    window = trainer_of(gradient_accumulation_steps=2)
    window.train_step(batch(rank))
    [group] = window.optimizer.param_groups
    group["lr"] = "fast" if odd else 0.1
    said["window"] = failure(window.update)
    group["lr"] = 0.1
    assert window.update() is not None
    return said


def failure(act: Callable[[], Any]) -> str:
    try:
        act()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing has failed")


# ---- where non-finite numbers come from


def origin(rank: int) -> Said:
    trainer = trainer_of()
    x, y = batch(rank)
    x[0, 0] = torch.nan if rank else 1.0
    assert trainer.train_step(x, y).skipped
    found = trainer.nonfinite_origin()
    act = trainer.nonfinite_origin if rank == 0 else lambda: trainer.train_step(batch(rank))
    said = {"origin": str(found), "origin alone": refusal(act)}
    goes_on(trainer, rank)
    return said


# ---- checkpoints


def slow_writes() -> Callable[[], None]:
    """Has each checkpoint come late. Returns what ends this."""
    from onward.checkpoint import PackedCheckpoint

    before = PackedCheckpoint.write

    def late(*args: Any) -> None:
        time.sleep(1.0)
        before(*args)

    PackedCheckpoint.write = late  # type: ignore[method-assign]

    def end() -> None:
        PackedCheckpoint.write = before  # type: ignore[method-assign]

    return end


def in_background(folder: Path, rank: int) -> Said:
    """The checkpoint that each rank goes on from while rank 0 still writes the newest."""
    trainer = trainer_of()
    goes_on(trainer, rank)
    trainer.save(folder / "run")
    end = slow_writes()
    goes_on(trainer, rank)
    trainer.save(folder / "run", background=True, save_total_limit=1)
    said: Said = {"resumed": trainer.resume(folder / "run").name}
    goes_on(trainer, rank)
    trainer.save(folder / "run", background=True)
    said["loaded"] = trainer.load_weights(folder / "run").name
    goes_on(trainer, rank)
    path = trainer.save(folder / "run", background=True)
    trainer.finish_saves()
    said["finished"] = (path / "manifest.json").exists()
    end()
    goes_on(trainer, rank)
    other = trainer.save(folder / "other")
    said["others"] = refusal(lambda: trainer.load_weights(other if rank else path))
    said["nowhere"] = refusal(lambda: trainer.resume(folder / ("nothing" if rank else "run")))
    said["none"] = refusal(lambda: trainer.resume(folder / "nothing"))
    goes_on(trainer, rank)
    return said


def saves(folder: Path, rank: int) -> Said:
    """What each rank says where one of them cannot save, or stands elsewhere."""
    from onward.checkpoint import Checkpoint
    from onward.errors import CheckpointError

    trainer = trainer_of()
    held = Held(datetime.datetime(2020, 1, 1) if rank else 1)
    trainer.register_for_checkpointing(held)
    goes_on(trainer, rank)
    said = {"no file": refusal(lambda: trainer.save(folder / "a"))}
    goes_on(trainer, rank)
    held.state = 1
    packed = Checkpoint.packed

    def fails(_: Checkpoint) -> Any:
        raise CheckpointError("a planted error")

    Checkpoint.packed = fails  # type: ignore[method-assign]
    said["packed"] = refusal(lambda: trainer.save(folder / "a"))
    Checkpoint.packed = packed  # type: ignore[method-assign]
    trainer._window.left_out += rank
    said["position"] = refusal(lambda: trainer.save(folder / "a"))
    trainer._window.left_out -= rank
    assert not (folder / "a").exists()
    trainer.save(folder / "a")
    goes_on(trainer, rank)
    return said


# ---- weights in parts


def evaluations(rank: int) -> Said:
    """What each rank says where memory is short on one of them in an evaluation of parts, where its
    batch is wrong, and where one fails among the exchanges."""
    from onward.errors import OutOfMemoryError
    from onward.execute import Executable
    from onward.graph.ops.collective import STARTS
    from onward.kernels.collective import RankGroups

    trainer = trainer_of(zero=3)
    goes_on(trainer, rank)
    want = float(trainer.eval_step(batch(0)).loss)
    bind = Executable.bind

    def short(self: Executable, dims: Any = None) -> None:
        if any(launch.op in STARTS for launch in self.plan.launches):
            raise OutOfMemoryError("a planted shortage")
        bind(self, dims)

    if rank:
        Executable.bind = short  # type: ignore[method-assign]
    said: Said = {"short": refusal(lambda: trainer.eval_step(batch(0)))}
    said["short step"] = refusal(lambda: trainer.train_step(batch(rank)))
    Executable.bind = bind  # type: ignore[method-assign]
    assert float(trainer.eval_step(batch(0)).loss) == want
    goes_on(trainer, rank)
    x, y = batch(0)
    wrong = torch.full_like(y, 99) if rank else y
    said["wrong"] = "nothing"
    try:
        trainer.eval_step(x, wrong)
    except IndexError as error:
        said["wrong"] = str(error)
    goes_on(trainer, rank)

    def planted(*_: Any) -> Any:
        raise ArithmeticError("a planted error")

    waiting = RankGroups.waiting
    if rank:
        RankGroups.waiting = planted  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        said["among"] = refusal(lambda: trainer.eval_step(batch(0)))
    except ArithmeticError as error:
        said["among"] = str(error)
    said["seconds"] = time.monotonic() - start
    RankGroups.waiting = waiting  # type: ignore[method-assign]
    acts: list[Callable[[], Any]] = [
        lambda: trainer.eval_step(batch(0)), lambda: trainer.train_step(batch(0)), trainer.gather,
        trainer.state_dict, trainer.profile, trainer.nonfinite_origin,
        lambda: trainer.save("nowhere"),
    ]  # fmt: skip
    said["lost"] = [refusal(act) for act in acts]
    trainer.finish_saves()  # waits for nobody
    return said


# ---- processes


def run(folder: Path) -> list[Said]:
    """What each rank has said."""
    run_ranks(__file__, [str(folder)], RANKS, seconds=300)
    paths = [folder / f"{rank}.pt" for rank in range(RANKS)]
    # written below: numbers and texts
    return [torch.load(path, weights_only=True) for path in paths]  # noqa: TID251


def main(folder: Path, rank: int) -> None:
    from torch import distributed

    join(folder, rank, RANKS)
    said = {**refused(rank), **origin(rank), **in_background(folder, rank), **saves(folder, rank)}
    said |= evaluations(rank)
    distributed.barrier()
    torch.save(said, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
