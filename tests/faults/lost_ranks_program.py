"""One of several processes that train a model together over Gloo, of which the last one is lost at
a moment that is given; `survivors` starts all of them and returns what the others say at their end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import rank_processes

SECONDS = 15.0  # ranks_timeout, where that is to pass
LONG = 1000.0  # where it is not


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_for_a_file_that_never_comes() -> NoReturn:
    while True:
        time.sleep(0.5)


def holds_the_lock() -> None:
    """Waits in C without letting go of Python's lock, so that no thread of Python runs."""
    ctypes.PyDLL(None).sleep(10**6)


def raises() -> None:
    raise ArithmeticError("a planted error")


@dataclass(frozen=True)
class Loss:
    """The way in which one of the ranks is lost. where: the moment, a function below. torchs: the
    timeout is given to torch, not to the Trainer. at_first: rank 0 is lost, which has torch's
    store."""

    happens: Callable[[], None]
    where: str
    seconds: float = LONG
    ranks: int = 2
    torchs: bool = False
    at_first: bool = False

    @property
    def lost(self) -> int:
        return 0 if self.at_first else self.ranks - 1


LOSSES: Mapping[str, Loss] = {
    "killed before the first step": Loss(killed, "before"),
    "killed between steps": Loss(killed, "between"),
    "killed in a step": Loss(killed, "exchange", ranks=4),
    "killed with the store": Loss(killed, "between", at_first=True),
    "killed in a save": Loss(killed, "save"),
    "killed while it writes": Loss(killed, "write", at_first=True),
    "stopped before the first step": Loss(stopped, "before", SECONDS),
    "stopped in a step": Loss(stopped, "exchange", SECONDS, ranks=4),
    "stopped with torch's timeout": Loss(stopped, "exchange", SECONDS, ranks=4, torchs=True),
    "stopped with the store": Loss(stopped, "between", SECONDS, at_first=True),
    "hung in its loader": Loss(waits_for_a_file_that_never_comes, "between", SECONDS),
    "hung in an evaluation": Loss(waits_for_a_file_that_never_comes, "evaluation", SECONDS),
    "holds Python's lock": Loss(holds_the_lock, "between", SECONDS),
    "failed in a step": Loss(raises, "exchange"),
}


def survivors(folder: Path, name: str) -> tuple[int, dict[int, str]]:
    """The process of the rank that is lost, and the last line that each other rank says."""
    from torch import distributed

    stores: Any = distributed
    loss = LOSSES[name]
    with rank_processes.free_port() as port:
        pass
    store = None
    if not loss.at_first:  # of the launcher, as torchrun has it
        store = stores.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    arguments = [str(folder), name, str(port)]
    ended = rank_processes.ends_of_ranks(__file__, arguments, loss.ranks, {loss.lost})
    del store
    pid = int((folder / "lost").read_text(encoding="ascii"))
    return pid, {
        rank: end.said[-1] for rank, end in enumerate(ended) if rank != loss.lost and end.code == 1
    }


def main(folder: Path, name: str, port: int, rank: int) -> None:
    import tiny
    import torch
    from torch import distributed

    import onward
    from onward import shards

    loss = LOSSES[name]
    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part, so that parameters of tiny models are cut
    has_store = loss.at_first and rank == 0
    stores: Any = distributed
    store = stores.TCPStore("127.0.0.1", port, is_master=has_store, wait_for_workers=False)
    waits = timedelta(seconds=loss.seconds if loss.torchs else LONG)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=loss.ranks, timeout=waits
    )
    options: dict[str, Any] = {} if loss.torchs else {"ranks_timeout": loss.seconds}
    if loss.ranks == 4:
        options |= {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "zero": 1}
    else:
        options["mesh"] = {"dp_replicate": loss.ranks}
    torch.manual_seed(0)
    model = tiny.gpt2(0.1, layers=1, width=16)
    trainer = onward.Trainer(model, onward.optim.AdamW(), options=options)

    def train(steps: int) -> None:
        for step in range(steps):
            trainer.train_step(tiny.batch(2, 8, seed=10 * step + rank))

    def happens() -> None:
        (folder / "lost").write_text(str(os.getpid()), encoding="ascii")
        loss.happens()

    is_lost = rank == loss.lost
    if loss.where == "before":
        distributed.barrier()  # all have a Trainer
        if is_lost:
            happens()
    train(2)
    if is_lost:
        MOMENTS[loss.where](trainer, happens, tiny.batch(2, 8))
    if loss.where in ("save", "write"):
        trainer.save(folder / "run", save_total_limit=1)
    elif is_lost and loss.where == "exchange":
        try:
            train(1)
        finally:  # a process that goes on, as a notebook's
            waits_for_a_file_that_never_comes()
    train(2)


def _between(trainer: Any, happens: Callable[[], None], batch: Any) -> None:
    happens()


def _evaluation(trainer: Any, happens: Callable[[], None], batch: Any) -> None:
    trainer._remember = lambda _: happens()
    trainer.eval_step(batch)


def _exchange(trainer: Any, happens: Callable[[], None], batch: Any) -> None:
    from onward.kernels.collective import RankGroups

    waiting = RankGroups.waiting

    def found(self: RankGroups, attrs: Mapping[str, Any]) -> Any:
        if "gradients" in attrs["record"]:
            happens()
        return waiting(self, attrs)

    RankGroups.waiting = found  # type: ignore[method-assign]


def _save(trainer: Any, happens: Callable[[], None], batch: Any) -> None:
    from onward.train import trainer_checkpoints

    def taken(*_: Any, **__: Any) -> Any:
        happens()

    trainer_checkpoints.take_checkpoint = taken


def _write(trainer: Any, happens: Callable[[], None], batch: Any) -> None:
    from onward.train import trainer_checkpoints

    trainer_checkpoints.rotate = lambda *_: happens()


MOMENTS: Mapping[str, Callable[[Any, Callable[[], None], Any], None]] = {
    "before": _between, "between": _between, "evaluation": _evaluation, "exchange": _exchange,
    "save": _save, "write": _write,
}  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
