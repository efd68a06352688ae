"""onward.evaluate beside transformers' Trainer.evaluate, and beside metrics by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments

import onward
from onward.fitting import Predictions

F = nn.functional


def token_model() -> BertForTokenClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    config.num_labels = 3
    return BertForTokenClassification(config)


def token_batches(lengths: list[int], sizes: list[int]) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    made: list[dict[str, torch.Tensor]] = []
    for length, size in zip(lengths, sizes, strict=True):
        labels = torch.randint(0, 3, (size, length))
        labels[:, -1] = -100
        made.append({"input_ids": torch.randint(0, 40, (size, length)), "labels": labels})
    return made


def test_loss_and_predictions_are_those_of_transformers(tmp_path: Path) -> None:
    """Batches of other lengths and a last one of another size: padded and weighed alike."""
    net, seen = token_model(), list[Any]()
    batches = token_batches([7, 9, 5], [4, 4, 3])

    def metrics(found: Any) -> dict[str, float]:
        seen.append(tuple(found))
        predictions, labels = found
        counted = labels != -100
        right = predictions.argmax(-1) == labels
        return {"accuracy": float(right[counted].mean())}

    class Given(Trainer):
        def get_eval_dataloader(self, *args: Any) -> Any:
            return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    arguments = TrainingArguments(
        str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=4
    )
    wanted = Given(net, arguments, compute_metrics=metrics).evaluate([])  # type: ignore[arg-type]
    trainer = onward.Trainer(net, onward.optim.SGD(lr=0.1))
    found = onward.evaluate(trainer, batches, compute_metrics=metrics)
    for own, other in zip(seen[1], seen[0], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
        assert own.dtype == other.dtype
    assert found.metrics["accuracy"] == wanted["eval_accuracy"]
    assert found.samples == 11
    with torch.no_grad():
        losses = [float(net.eval()(**b).loss) * len(b["labels"]) for b in batches]
    by_hand = sum(losses) / 11
    assert found.loss == pytest.approx(by_hand, rel=1e-5)
    names = set(wanted) - {"epoch", "eval_model_preparation_time"}
    assert set(found.named()) == names
    assert net.training is False


class Streamed:
    """An accuracy in torchmetrics' form."""

    def __init__(self) -> None:
        self.right = self.seen = -1

    def reset(self) -> None:
        self.right = self.seen = 0

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        self.right += int((predictions.argmax(-1) == labels).sum())
        self.seen += len(labels)

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.right / self.seen)


def mlp() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))


def test_metrics_that_stream_see_every_batch_once() -> None:
    net, metric = mlp(), Streamed()
    trainer = onward.Trainer(net, onward.optim.SGD(lr=0.1), F.cross_entropy)
    batches = [(torch.randn(n, 5), torch.randint(0, 4, (n,))) for n in (6, 6, 2)]
    for _ in range(2):  # reset before each evaluation
        found = onward.evaluate(trainer, batches, metrics={"accuracy": metric})
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with torch.no_grad():
            right = (net.eval()(x).argmax(-1) == y).float().mean()
        assert found.metrics["accuracy"] == pytest.approx(float(right))
        assert metric.seen == 14


def test_fetch_names_what_metrics_get() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.body(x)
            return {"loss": F.mse_loss(h.sum(-1), labels), "hidden": h, "score": h.sum(-1)}

    net, got = Two(), list[Any]()

    def metrics(found: Predictions) -> dict[str, float]:
        got.append(found.predictions)
        return {}

    trainer = onward.Trainer(net, onward.optim.SGD(lr=0.1))
    batches = [{"x": torch.randn(3, 4), "labels": torch.randn(3)}]
    onward.evaluate(trainer, batches, compute_metrics=metrics)
    onward.evaluate(trainer, batches, compute_metrics=metrics, fetch="score")
    assert [x.shape for x in got[0]] == [(3, 4), (3,)]
    assert got[1].shape == (3,)
    assert trainer.output_names(batches[0]) == ("hidden", "score")
    with pytest.raises(onward.OnwardError, match="'scores'"):
        onward.evaluate(trainer, batches, compute_metrics=metrics, fetch="scores")


def test_an_evaluation_changes_nothing() -> None:
    net = mlp()
    trainer = onward.Trainer(net, onward.optim.AdamW(lr=0.1), F.cross_entropy)
    batch = torch.randn(6, 5), torch.randint(0, 4, (6,))
    trainer.train_step(batch)
    before = trainer.state_dict()
    weights = {name: w.clone() for name, w in net.state_dict().items()}
    onward.evaluate(trainer, [batch, batch])
    after = trainer.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in net.state_dict().items())
    for name, held in before["optimizer"].items():
        assert torch.equal(held, after["optimizer"][name])


@pytest.mark.parametrize(
    ("batches", "metrics", "words"),
    [
        ([], None, "no batch"),
        (None, lambda found: {"all": found.predictions}, "'all'"),
        (None, lambda found: {"name": "good"}, "'good'"),
    ],
)
def test_what_gives_no_numbers_is_refused(batches: Any, metrics: Any, words: str) -> None:
    trainer = onward.Trainer(mlp(), onward.optim.SGD(lr=0.1), F.cross_entropy)
    if batches is None:
        batches = [(torch.randn(6, 5), torch.randint(0, 4, (6,)))]
    with pytest.raises(onward.OnwardError, match=words):
        onward.evaluate(trainer, batches, compute_metrics=metrics)
