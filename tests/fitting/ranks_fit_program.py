"""One of two processes that call `onward.fit` and `onward.evaluate` together over Gloo, each with
its share of the samples; `run` starts them and returns what each has found."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

RANKS, CLASSES, WIDTH = 2, 3, 6
TRAIN, HELD_OUT = 24, 7
Found = dict[str, Any]


def samples(count: int, seed: int, wrong: int = 0) -> list[dict[str, torch.Tensor]]:
    """Samples of a teacher. wrong: every such one has another label, so that its loss rises."""
    made = torch.Generator().manual_seed(seed)
    teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(9))
    found: list[dict[str, torch.Tensor]] = []
    for number in range(count):
        x = torch.randn(WIDTH, generator=made)
        label = (x @ teacher).argmax()
        if wrong and number % wrong == wrong - 1:
            label = (label + 1) % CLASSES
        found.append({"x": x, "labels": label})
    return found


# rank 0 has those that the model learns, rank 1 those whose loss rises
DATA, HELD = samples(TRAIN, 0), samples(HELD_OUT, 1, wrong=2)


class Classifier(nn.Module):
    """x f32[B,6], labels i64[B] -> loss f32[], logits f32[B,3]."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trainer_of(ranks: int = RANKS) -> Any:
    import onward

    torch.manual_seed(3)
    options = {"mesh": {"dp_replicate": ranks}, "ranks_timeout": 60} if ranks > 1 else {}
    return onward.Trainer(Classifier(), onward.optim.SGD(lr=0.5), options=options)


def shared(data: list[Any], rank: int, size: int, shuffle: bool = False) -> Any:
    sampler = DistributedSampler(data, RANKS, rank, shuffle=shuffle)  # type: ignore[arg-type]
    return DataLoader(data, size, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def accuracy(found: Any) -> dict[str, float]:
    predictions, labels = found
    right = (predictions.argmax(-1) == labels).mean()
    return {"accuracy": float(right), "rows": len(labels)}


def fitted(folder: Path, rank: int, save: str) -> Found:
    """A run whose ranks would each choose another checkpoint by their own samples."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    import onward

    trainer, eager, held = trainer_of(), list[float](), collate(HELD)

    class Watch(TrainerCallback):
        """Computes the accuracy in eager PyTorch."""

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            with torch.no_grad():
                right = trainer.model.eval()(**held)["logits"].argmax(-1) == held["labels"]
            eager.append(float(right.double().mean()))

    options = onward.FitOptions(
        num_train_epochs=4, eval_strategy="epoch", save_strategy=save, output_dir=str(folder),
        load_best_model_at_end=True, logging_strategy="epoch", save_total_limit=1,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(trainer.optimizer, patience=0)
    result = onward.fit(
        trainer, shared(DATA, rank, 3, shuffle=True), shared(HELD, rank, 2), options=options,
        compute_metrics=accuracy, callbacks=[Watch(), EarlyStoppingCallback(1)],
        lr_scheduler=scheduler,
    )  # fmt: skip
    evaluations = [log for log in result.log_history if "eval_loss" in log]
    return {
        "steps": result.global_step,
        "best": str(result.best_model_checkpoint),
        "best metric": result.best_metric,
        "history": [sorted(log.items()) for log in evaluations],
        "rate": trainer.optimizer.param_groups[0]["lr"],
        "weights": trainer.model.head.weight.detach().clone(),
        "eager": eager,
    }


def by_torchmetrics() -> dict[str, Any]:
    """A metric that joins what all processes have, where the package is installed."""
    try:
        from torchmetrics.classification import MulticlassAccuracy
    except ImportError:
        return {}
    return {"joined": MulticlassAccuracy(CLASSES, average="micro")}


def evaluated(rank: int) -> Found:
    import onward
    from onward.errors import OnwardError

    trainer, joined = trainer_of(), by_torchmetrics()
    loader = shared(HELD, rank, 2)
    found = onward.evaluate(trainer, loader, metrics=joined)
    same = DataLoader(HELD, 4, collate_fn=collate)  # type: ignore[arg-type]
    every = onward.evaluate(
        trainer, same, compute_metrics=accuracy, metrics={**joined, "streamed": Counted()}
    )
    labels: list[int] = []

    def seen(predictions: Any) -> dict[str, float]:
        labels.extend(predictions.label_ids.tolist())
        return {}

    onward.evaluate(trainer, loader, compute_metrics=seen)
    said: Found = {"shared": found.metrics, "samples": found.samples}
    said["labels"] = labels
    said |= {"every": every.metrics, "every loss": every.loss, "every samples": every.samples}
    own = {"local": {"metrics": {"n": Counted()}}, "unlike": {"compute_metrics": accuracy}}
    for name, more in own.items():
        asked: dict[str, Any] = more if rank or name == "local" else {}
        try:
            onward.evaluate(trainer, loader, **asked)
        except OnwardError as error:
            said[name] = str(error)

    def fails(_: Any) -> dict[str, float]:
        raise ArithmeticError("a planted error")

    try:
        onward.evaluate(trainer, loader, compute_metrics=fails)
    except (OnwardError, ArithmeticError) as error:
        said["fails"] = str(error)
    assert onward.evaluate(trainer, loader).loss == found.loss
    return said


class Counted:
    """A metric that counts the samples of this process."""

    def reset(self) -> None:
        self.count = 0

    def update(self, predictions: Any, labels: Any) -> None:
        self.count += len(labels)

    def compute(self) -> int:
        return self.count


def alike(rank: int) -> Found:
    """What is said where ranks have other lengths or the same samples; and how they end."""
    from transformers import TrainerCallback

    import onward
    from onward.errors import OnwardError

    said: Found = {}
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("onward").addHandler(Lines(logging.WARNING))
    whole = DataLoader(DATA, 6, collate_fn=collate)  # type: ignore[arg-type]
    some = DataLoader(DATA[: 24 - 6 * rank], 6, collate_fn=collate)  # type: ignore[arg-type]
    try:
        onward.fit(trainer_of(), some, options={"num_train_epochs": 1})
    except OnwardError as error:
        said["lengths"] = str(error)
    assert not lines
    onward.fit(trainer_of(), whole, options={"max_steps": 2})
    said["same samples"] = lines.pop() if lines else ""

    class Ends(TrainerCallback):
        """Ends the run on rank 1 alone, as one that looks at a clock."""

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = bool(rank) and state.global_step == 3

    loader = onward.data.ResumableDataLoader(
        DATA, 6, collate_fn=collate, num_replicas=RANKS, rank=rank
    )
    trainer = trainer_of()
    result = onward.fit(trainer, loader, options={"num_train_epochs": 3}, callbacks=[Ends()])
    said |= {"ended": result.global_step, "no warning": not lines}
    said["resumable"] = trainer.model.head.weight.detach().clone()
    return said


def run(folder: Path) -> list[Found]:
    """What each rank has found."""
    run_ranks(__file__, [str(folder)], RANKS, seconds=300)
    paths = [folder / f"{rank}.pt" for rank in range(RANKS)]
    # written below: tensors, numbers and texts
    return [torch.load(path, weights_only=True) for path in paths]  # noqa: TID251


def main(folder: Path, rank: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    found: Found = {save: fitted(folder / save, rank, save) for save in ("epoch", "best")}
    found |= evaluated(rank) | alike(rank)
    distributed.barrier()
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
