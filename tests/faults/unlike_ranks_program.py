"""One of two processes that train a model together over Gloo, where rank 1 has something else than
rank 0: `run` returns what each of them says, and what a batch with NaN on rank 1 alone does."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from rank_processes import run_ranks
from torch import distributed, nn

RANKS, WIDTH = 2, 16
NAN_CASES = ((0, "SGD"), (1, "SGD"), (1, "LAMB"), (3, "LAMB"))  # the stage, and the optimizer


def trainer_of(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    import onward

    made = onward.optim.SGD(lr=0.05) if optimizer is None else optimizer
    return onward.Trainer(model, made, options={"mesh": {"dp_shard": RANKS}, **options})


def gpt2(width: int = WIDTH) -> nn.Module:
    return tiny.gpt2(0.0, layers=1, width=width)


def batch(rank: int) -> dict[str, torch.Tensor]:
    return tiny.batch(2 + rank, 8, seed=rank)


# ---- what differs on rank 1; each returns a Trainer


def options(odd: int) -> Any:
    return trainer_of(gpt2(), max_grad_norm=1.0 + odd)


def precision(odd: int) -> Any:
    return trainer_of(gpt2(), mixed_precision="bf16" if odd else "no")


def element_type(odd: int) -> Any:
    model = gpt2()
    return trainer_of(model.double() if odd else model)


def width(odd: int) -> Any:
    return trainer_of(gpt2(width=32 if odd else WIDTH))


def parameters(odd: int) -> Any:
    model = gpt2()
    if odd:
        model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    return trainer_of(model)


def frozen(odd: int) -> Any:
    model = gpt2()
    next(model.parameters()).requires_grad_(not odd)
    return trainer_of(model)


def ties(odd: int) -> Any:
    model: Any = gpt2()
    if odd:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return trainer_of(model)


def seed(odd: int) -> Any:
    model: Any = gpt2()
    torch.manual_seed(odd)
    nn.init.normal_(model.transformer.wpe.weight)
    return trainer_of(model)


def optimizer(odd: int) -> Any:
    import onward

    return trainer_of(gpt2(), onward.optim.AdamW(lr=0.05) if odd else None)


def setting(odd: int) -> Any:
    import onward

    return trainer_of(gpt2(), onward.optim.SGD(lr=0.05, momentum=0.5 * odd))


def groups(odd: int) -> Any:
    model = gpt2()
    head, *rest = model.parameters()
    split = [{"params": [head]}, {"params": rest}] if odd else [{"params": [head, *rest]}]
    return trainer_of(model, torch.optim.SGD(split, lr=0.05))


def version(odd: int) -> Any:
    from onward.train import ranks

    ranks.version = lambda name: f"0.0.{odd}"  # type: ignore[attr-defined]
    return trainer_of(gpt2())


UNLIKE: tuple[Callable[[int], Any], ...] = (
    options, precision, element_type, width, parameters, frozen, ties, seed, optimizer, setting,
    groups, version,
)  # fmt: skip


def refusal(act: Callable[[], Any]) -> str:
    """What is said where something is refused."""
    try:
        act()
    except (ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# ---- batches


def more_keys(rank: int) -> dict[str, Any]:
    """One step in which rank 1 alone gives a mask, which hides nothing."""
    trainer = trainer_of(gpt2())
    data = batch(rank)
    if rank:
        data["attention_mask"] = torch.ones_like(data["input_ids"])
    else:
        data.pop("attention_mask", None)
    loss = float(trainer.train_step(data).loss)
    return {"loss": loss, "weights": [p.detach().clone() for p in trainer.model.parameters()]}


def wrong_id(rank: int) -> str:
    """What is said of an id on rank 1 that no row of the table has."""
    trainer, data = trainer_of(gpt2(), ranks_timeout=60), batch(rank)
    trainer.train_step(data)
    data["input_ids"][0, 0] = 10**6 if rank else 1
    return refusal(lambda: trainer.train_step(data))


def no_such_rows(rank: int) -> list[dict[str, Any]]:
    """What is said of ids and labels that no rank along `tp` has a row for, and what one process
    says: of a vocabulary that the ranks divide, and of one that is padded."""
    found: list[dict[str, Any]] = []
    for words in (96, 97):
        both = [tiny.gpt2(0.0, layers=1, width=WIDTH, vocab_size=words) for _ in range(2)]
        trainers = [trainer_of(both[0], mesh={"tp": RANKS}), trainer_of(both[1], mesh=None)]
        data = {name: x % words for name, x in batch(0).items()}
        for trainer in trainers:
            trainer.train_step(data)
        states = [trainer.state_dict() for trainer in trainers]
        for name, bad in (
            ("input_ids", words), ("input_ids", 10**6), ("input_ids", -words - 1),
            ("labels", words), ("labels", 10**6), ("labels", -1),
        ):  # fmt: skip
            wrong = {key: x.clone() for key, x in data.items()}
            wrong[name][1, 3] = bad
            said: list[str] = []
            for trainer, state in zip(trainers, states, strict=True):
                said.append(refusal(lambda: trainer.train_step(wrong)))  # noqa: B023
                trainer.load_state_dict(state)
                said.append(refusal(lambda: trainer.eval_step(wrong)))  # noqa: B023
            own = trainers[0]._weights.stored(trainers[0].model.lm_head.weight)
            found.append({"words": words, "bad": bad, "said": said, "rows": own.shape[0]})
    return found


def not_a_number(rank: int, zero: int, name: str = "SGD") -> dict[str, Any]:
    """A step in which a number of rank 1 is NaN, between steps that are finite. name: of the
    optimizer."""
    import onward

    said: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Lines(logging.WARNING)
    logging.getLogger("onward").addHandler(handler)
    trainer = trainer_of(gpt2(), getattr(onward.optim, name)(lr=0.05), zero=zero)
    labels = torch.arange(16).reshape(2, 8)

    def state() -> list[torch.Tensor]:
        held = map(trainer._weights.stored, trainer.model.parameters())
        return [p.detach().clone() for p in held]

    def step(x: torch.Tensor) -> Any:
        return trainer.train_step(inputs_embeds=x, labels=labels)

    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank))
    bad = x.clone()
    if rank:
        bad[1, 2, 3] = torch.nan
    step(x)
    before = state()
    skipped = bool(step(bad).skipped)
    same = all(map(torch.equal, before, state()))
    goes_on = not step(x).skipped and not all(map(torch.equal, before, state()))
    logging.getLogger("onward").removeHandler(handler)
    return {"skipped": skipped, "same": same, "goes on": goes_on, "said": "\n".join(said)}


def run(folder: Path) -> list[dict[str, Any]]:
    """What each rank has found."""
    run_ranks(__file__, [str(folder)], RANKS)
    paths = [folder / f"{rank}.pt" for rank in range(RANKS)]
    # written above: tensors and texts
    return [torch.load(path, weights_only=True) for path in paths]  # noqa: TID251


def main(folder: Path, rank: int) -> None:
    from onward import compile, shards
    from onward.distribute.tensor import DeviceRates

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part, so that parameters of tiny models are cut
    slow = DeviceRates(1e8, 1e9, 1e-7, 1e8, 1e-6)
    compile.link_rates = lambda *_: slow  # type: ignore[attr-defined]
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    made: dict[str, Any] = {
        each.__name__: refusal(lambda each=each: each(rank).train_step(batch(rank)))
        for each in UNLIKE[:-1]
    }
    made["more keys"] = more_keys(rank)
    made["NaN"] = [not_a_number(rank, *case) for case in NAN_CASES]
    made["no such rows"] = no_such_rows(rank)
    made["wrong id"] = wrong_id(rank)
    last = UNLIKE[-1]  # which does not go back
    made[last.__name__] = refusal(lambda: last(rank).train_step(batch(rank)))
    distributed.barrier()
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
