"""Streams of the `datasets` package: read as they are needed, shuffled anew in each epoch by the
package itself, and gone on with at any batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.data import ResumableDataLoader

EPOCHS, SIZE, BATCH = 3, 30, 4


def stream(folder: Path) -> Any:
    """A stream of a file of numbers, shuffled in a buffer, mapped and filtered."""
    datasets = pytest.importorskip("datasets")
    path = folder / "numbers.jsonl"
    path.write_text("\n".join(json.dumps({"n": n}) for n in range(SIZE)))
    found = datasets.load_dataset(
        "json", data_files=str(path), split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    return (
        found.shuffle(seed=5, buffer_size=8)
        .map(lambda row: {"x": [row["n"] / SIZE, 1.0], "y": [row["n"] % 7 / 7]})
        .filter(lambda row: row["n"] % 5 != 0)
        .remove_columns(["n"])
    )


def collated(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in ("x", "y")}


def loader(dataset: Any, workers: int = 0) -> ResumableDataLoader:
    return ResumableDataLoader(dataset, BATCH, num_workers=workers, collate_fn=collated)


def batches(dataset: Any, stops: Sequence[int] = (), workers: int = 0) -> list[Any]:
    """All batches of the epochs; behind these ones another loader goes on."""
    own, seen = loader(dataset, workers), list[Any]()
    while own.epoch < EPOCHS:
        for batch in own:
            seen.append(batch["x"].tolist())
            if len(seen) in stops:
                state = own.state_dict()
                own = loader(dataset, workers)
                own.load_state_dict(state)
                break
    return seen


def test_epochs_are_those_of_the_package(tmp_path: Path) -> None:
    dataset = stream(tmp_path)
    want: list[Any] = []
    for epoch in range(EPOCHS):
        dataset.set_epoch(epoch)
        rows = [row["x"] for row in dataset]
        want += [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    found = batches(dataset)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-7)
    assert len(want) == EPOCHS * 6 and want[:6] != want[6:12], "each epoch has its own order"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_at_any_batch(workers: int, tmp_path: Path) -> None:
    dataset = stream(tmp_path)
    assert batches(dataset, [1, 6, 8, 13], workers) == batches(dataset)


def test_a_run_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    dataset = stream(tmp_path)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (self.line(x) - y).square().mean()

    def trainer() -> onward.Trainer:
        torch.manual_seed(0)
        return onward.Trainer(Model(), onward.optim.AdamW(lr=0.1))

    def trained(stop: int) -> dict[str, Any]:
        own, data = trainer(), loader(dataset)
        own.register_for_checkpointing(data)
        done = 0
        while data.epoch < 2:
            for batch in data:
                own.train_step(batch)
                done += 1
                if done == stop:
                    path = own.save(tmp_path / f"stop-{stop}")
                    own, data = trainer(), loader(dataset)
                    own.register_for_checkpointing(data)
                    own.resume(path)
                    break
        assert done == 12
        return own.model.state_dict()

    whole = trained(0)
    for stop in (2, 6, 9):
        again = trained(stop)
        assert all(torch.equal(again[name], tensor) for name, tensor in whole.items())
