"""One of several processes that train a model together with a Trainer each, over Gloo, and what
each of them is given; `run` starts all of them and returns their results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from ranks_cases import (
    CASES,
    CLIPPED,
    GROUPS,
    RATE,
    STEPS,
    WINDOW,
    Case,
    Tensors,
    gpt2,
    rows,
    trained,
    trainer_of,
)


def outcome(case: Case, rank: int, ranks: int) -> Tensors:
    """The weights after the run, and its losses f64[steps]."""
    trainer = trainer_of(case, ranks)
    losses = trained(trainer, case, rank, ranks, range(STEPS))
    if case.has_parts and ranks > 1:
        evaluated(trainer, case, rank, ranks)
    made = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    if case.options.get("ema_decay"):
        made |= {f"average.{n}": p for n, p in trainer.ema_state_dict().items()}
    if (case.zero or case.tp or case.pp) and case.near is None and not trainer.micro_steps:
        state = trainer.state_dict()["optimizer"]  # a key's bias has a gradient of rounding alone
        made |= {f"state.{n}": x for n, x in state.items() if not n.endswith("self.key.bias")}
        held = trainer._updates.state.tensors  # what lies in this rank's memory
        numbers = sum(x.numel() for slots in held.values() for x in slots.values())
        made["numbers held"] = torch.tensor([float(numbers)])
    return made | {"losses": torch.tensor(losses, dtype=torch.float64)}


def evaluated(trainer: Any, case: Case, rank: int, ranks: int) -> None:
    """Evaluates while this rank has parts of the weights; then gathers them, and compares with
    eager PyTorch."""
    number, count = case.share(rank, ranks)
    data: Any = {n: x[number::count].clone() for n, x in rows(case, STEPS).items()}
    found = float(trainer.eval_step(data).loss)
    cut = [bool(p.isnan().all()) for p in trainer.model.parameters() if p.numel() >= 64]
    whole_parts = case.zero == 3 and not (case.tp or case.pp)
    assert all(cut) if whole_parts else sum(cut) > (0 if case.pp else len(cut) // 2), cut
    if case.options.get("ema_decay"):
        with trainer.ema_weights():
            assert refusal(trainer.gather), "averages would become the weights"
            averaged = float(trainer.eval_step(data).loss)
        assert float(trainer.eval_step(data).loss) == found, "its own weights again"
    trainer.gather()
    if case.options.get("ema_decay"):
        with torch.no_grad(), trainer.ema_weights():
            again = float(trainer.model.eval()(**data).loss)
        assert abs(averaged - again) < 1e-5 * abs(again) and averaged != found
    assert not any(p.isnan().any() for p in trainer.model.parameters())
    with torch.no_grad():
        want = float(trainer.model.eval()(**data).loss)
    assert abs(found - want) < (2e-2 if case.near else 1e-5) * abs(want), (found, want)


# ---- what ranks may not do, and checkpoints


class Draws:
    """An object of the user's own with another state on each rank."""

    def __init__(self, rank: int) -> None:
        self.count = 10 * rank

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def resumed(folder: Path, rank: int, ranks: int, case: Case) -> str:
    """Goes on from a checkpoint within a window, and says what differs from the run that saved."""

    def made() -> tuple[Any, Draws]:
        trainer, draws = trainer_of(case, ranks), Draws(rank)
        trainer.register_for_checkpointing(draws)
        return trainer, draws

    trainer, draws = made()
    torch.manual_seed(5 + rank)
    trained(trainer, case, rank, ranks, range(4))
    torch.rand(3)
    draws.count += 1
    trained(trainer, case, rank, ranks, [5])
    path = trainer.save(folder / "run", save_total_limit=2)
    want = trained(trainer, case, rank, ranks, range(6, 11)), torch.rand(3)
    trainer.gather()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    other, found = made()
    torch.manual_seed(99)
    assert other.resume(folder / "run") == path
    assert found.count == draws.count == 10 * rank + 1
    have = trained(other, case, rank, ranks, range(6, 11)), torch.rand(3)
    assert have[0] == want[0] and torch.equal(have[1], want[1]), (have, want)
    other.gather()
    assert all(map(torch.equal, weights, other.model.parameters()))
    path = other.save(folder / "later", background=True)
    other.finish_saves()
    return path.name


def refusal(act: Callable[[], Any]) -> str:
    """The message of the refusal."""
    from onward.errors import OnwardError

    try:
        act()
    except OnwardError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refusals(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """What each rank says where rank 1 does something else than the others; the ranks go on
    afterwards."""
    case, odd = CASES["gpt2"], rank == 1
    said: dict[str, str] = {}

    def once(trainer: Any) -> None:
        trained(trainer, case, rank, ranks, [0])

    def weights() -> None:
        trainer = trainer_of(case, ranks)
        with torch.no_grad():
            trainer.model.transformer.wpe.weight[0, 0] += 1e-6 * odd
        once(trainer)

    def rate() -> None:
        trainer = trainer_of(case, ranks)
        once(trainer)
        trainer.optimizer.param_groups[0]["lr"] *= 1 + odd
        once(trainer)

    def method() -> None:
        trainer = trainer_of(CASES["gpt2 window"], ranks)
        once(trainer)
        trainer.update() if odd else once(trainer)

    def later() -> None:
        trainer = trainer_of(case, ranks, compare_ranks_every=2)
        once(trainer)
        with torch.no_grad():
            trainer.model.transformer.ln_f.bias[1] += odd
        once(trainer)
        once(trainer)

    def moments() -> None:
        trainer, other = trainer_of(case, ranks), trainer_of(case, ranks)
        once(trainer)
        state = trainer.optimizer.state_dict()
        next(x for x in state["state"][1].values() if x.dim()).view(-1)[0] += 1e-6 * odd
        other.model.load_state_dict(trainer.model.state_dict())
        other.optimizer.load_state_dict(state)
        once(other)

    def batch() -> None:
        trainer = trainer_of(CASES["bert"], ranks)
        data = rows(CASES["bert"], 0)
        trainer.train_step(data, fetch=["nothing"] if odd else [])

    def rowless() -> None:
        trainer = trainer_of(CASES["bert"], ranks)
        trainer.train_step({n: x[:0] for n, x in rows(CASES["bert"], 0).items()})

    def means() -> None:
        options: dict[str, Any] = {"gradient_accumulation_average": "micro_batches"}
        trainer = trainer_of(CASES["bert"], ranks, **options)
        data = rows(CASES["bert"], 0)
        trainer.train_step({n: x[:0] if odd else x for n, x in data.items()})

    def capture() -> None:
        trainer = trainer_of(case, ranks)
        if odd:
            trainer.model.transformer.h[0].forward = None
        once(trainer)

    def files() -> None:
        trainer = trainer_of(case, ranks)
        once(trainer)
        place = folder / "no folder"
        if rank == 0:
            place.write_text("")
        trainer.save(place)

    def trees() -> None:
        trainer = trainer_of(case, ranks)
        once(trainer)
        trainer.save(folder / "a")
        once(trainer)
        trainer.save(folder / "b")
        trainer.resume(folder / ("b" if odd else "a"))

    def within() -> None:
        trainer = trainer_of(CASES["gpt2 window"], ranks)
        once(trainer)
        trainer.state_dict()

    for act in (
        weights,
        moments,
        rate,
        method,
        later,
        batch,
        rowless,
        means,
        capture,
        files,
        trees,
        within,
    ):
        said[act.__name__] = refusal(act)
    said["options"] = refusal(lambda: once(trainer_of(case, ranks, max_grad_norm=1.0 + odd)))
    said["sizes"] = refusal(lambda: trainer_of(case, ranks + 1))
    return said


def parts(rank: int, ranks: int) -> dict[str, str]:
    """What each rank says where state that is cut is asked for as if it were whole; and state goes
    from whole to parts and back."""
    import onward

    case, whole = CASES["gpt2 zero"], replace(CASES["gpt2 zero"], zero=0)
    trainer = trainer_of(case, ranks)
    trained(trainer, case, rank, ranks, [0, 1])
    other, again = trainer_of(whole, ranks), trainer_of(case, ranks)
    other.load_state_dict(trainer.state_dict())
    again.load_state_dict(other.state_dict())
    losses = [trained(each, case, rank, ranks, [2, 3]) for each in (trainer, other, again)]
    assert losses[0] == losses[2] and apart(*losses[:2]) < 1e-6, losses
    again.optimizer.load_state_dict(other.optimizer.state_dict())
    assert trained(again, case, rank, ranks, [4]) == trained(trainer, case, rank, ranks, [4])
    optimizer = trainer.optimizer
    said = {"optimizer": refusal(optimizer.state_dict)}
    again.optimizer.state[next(iter(again.model.parameters()))]["exp_avg"] = torch.zeros(3)
    said["half"] = refusal(lambda: trained(again, case, rank, ranks, [5]))
    if rank == 1:
        said["alone"] = refusal(partial(trained, trainer, case, rank, ranks, [5]))
    else:
        said["alone"] = refusal(trainer.state_dict)
    options, model = case.options_of(ranks), trainer.model
    said["second"] = refusal(lambda: onward.Trainer(model, optimizer, options=options))
    del trainer
    said["step"] = refusal(optimizer.step)
    return said


# ---- AdaSum


@dataclass(frozen=True)
class Adaptive:
    """A run whose replicas are combined by AdaSum. cut: ranks along dp_shard. early: the step after
    which a window of two micro-batches ends with one."""

    options: dict[str, Any] = field(default_factory=dict)
    cut: int = 1
    early: int | None = None

    def case(self, ranks: int) -> Case:
        """The case of the Trainers of these ranks."""
        sizes = {"dp_replicate": ranks // self.cut, "dp_shard": self.cut}
        options = {**self.options, "adasum": True, "mesh": sizes}
        return Case(steady, options, early=self.early)


def steady() -> torch.nn.Module:
    import tiny

    return tiny.gpt2(0.0, layers=1, width=16)


ADAPTIVE = {
    "clipped": Adaptive(CLIPPED),
    "window": Adaptive(WINDOW, early=4),
    "means": Adaptive({**WINDOW, "gradient_accumulation_average": "micro_batches"}, early=4),
    "replicas": Adaptive({**WINDOW, **CLIPPED}, cut=2, early=2),
}


def adaptive(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """The weights and losses of each run; an update that one rank's NaN leaves out; a run that is
    resumed within a window."""
    import onward

    made: dict[str, Any] = {}
    for name, run_ in ADAPTIVE.items():
        if ranks == run_.cut:
            continue
        case = run_.case(ranks)
        trainer = onward.Trainer(
            case.model(), onward.optim.SGD(lr=RATE, momentum=0.9), options=case.options
        )
        torch.manual_seed(0)
        losses = trained(trainer, case, rank, ranks, range(8))
        made[name] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        made[name]["losses"] = torch.tensor(losses, dtype=torch.float64)
    window = {**WINDOW, "adasum": True}
    made["resumed"] = resumed(folder / "adaptive", rank, ranks, Case(gpt2, window))
    torch.manual_seed(0)
    options = {"adasum": True, "mesh": {"dp_replicate": ranks}}
    trainer = onward.Trainer(
        torch.nn.Linear(3, 1),
        onward.optim.SGD(lr=0.1),
        torch.nn.functional.mse_loss,
        options=options,
    )
    x = torch.ones(2, 3)
    made["skipped"] = []
    for step in range(3):
        x[0, 0] = float("nan") if step == 1 and rank == 1 else 1.0
        result = trainer.train_step(x, torch.zeros(2, 1))
        made["skipped"].append(bool(result.skipped))
    made["after"] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return made


def apart(have: Sequence[float], want: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(have, want, strict=True))


def profiled(rank: int, ranks: int, case: Case) -> None:
    """What only looks at a Trainer does so on one rank alone; a profile takes all of them."""
    trainer = trainer_of(case, ranks, verify=True)
    trained(trainer, case, rank, ranks, [0])
    data = rows(case, 1)
    if rank == 0:
        trainer.eval_step(data)
        trainer.explain()
        trainer.explain(data)
        trainer.report()
    assert trainer.profile()["AllReduceStart"] > 0
    trained(trainer, case, rank, ranks, [1])


def lost(where: str, rank: int, ranks: int) -> dict[str, Any]:
    """What rank 0 says where rank 1 ends: before its step, or within the run of its graph."""
    from torch import distributed

    case = CASES["gpt2"]
    trainer = trainer_of(case, ranks)
    trained(trainer, case, rank, ranks, [0])
    if rank == 1:
        if where == "run":
            distributed.all_reduce = lambda *_, **__: os._exit(9)  # type: ignore[assignment]
            trained(trainer, case, rank, ranks, [1])
        os._exit(9)
    start = time.monotonic()
    said = refusal(lambda: trained(trainer, case, rank, ranks, [1]))
    again = refusal(lambda: trained(trainer, case, rank, ranks, [2]))
    return {"said": said, "again": again, "seconds": time.monotonic() - start}


# ---- processes


def run(folder: Path, ranks: int, what: str) -> list[dict[str, Any]]:
    """What each rank has saved. what: one of `GROUPS`, "refusals", "adaptive", or where rank 1
    ends."""
    codes = [0, *[9 if what in ("before", "run") else 0] * (ranks - 1)]
    run_ranks(__file__, [str(folder), str(ranks), what], ranks, codes)
    saved = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [
        torch.load(path, weights_only=True)  # noqa: TID251  # written above, tensors and texts
        for path in saved
        if path.exists()
    ]


def join(folder: Path, rank: int, ranks: int) -> None:
    """Makes this process a rank, for which weights of tiny models are worth cutting."""
    from torch import distributed

    from onward import compile, shards
    from onward.distribute.tensor import DeviceRates
    from onward.execute import state_store
    from onward.plan import offloaded

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part
    offloaded.PART, state_store.SMALL = 256, 1
    slow = DeviceRates(1e8, 1e9, 1e-7, 1e8, 1e-6)
    compile.link_rates = lambda *_: slow  # type: ignore[attr-defined]
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)


def main(folder: Path, ranks: int, what: str, rank: int) -> None:
    from torch import distributed

    join(folder, rank, ranks)
    made: dict[str, Any] = {}
    if what in GROUPS:
        made = {name: outcome(case, rank, ranks) for name, case in GROUPS[what].items()}
    elif what == "adaptive":
        made = adaptive(folder, rank, ranks)
    elif what != "refusals":
        torch.save(lost(what, rank, ranks), folder / f"{rank}.pt")
        return
    else:
        made["window"] = outcome(CASES["gpt2 window"], rank, ranks)
        made["resumed"] = resumed(folder, rank, ranks, CASES["gpt2 window"])
        made["resumed parts"] = resumed(folder / "parts", rank, ranks, CASES["gpt2 zero 2"])
        made |= parts(rank, ranks)
        profiled(rank, ranks, CASES["bert"])
        profiled(rank, ranks, replace(CASES["bert"], zero=1))
        made |= refusals(folder, rank, ranks)
    distributed.barrier()
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
