"""onward.fit and onward.evaluate on two ranks with samples of their own: both evaluate all samples,
and choose, save, stop and end alike; beside eager PyTorch and torchmetrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks_fit_program
import torch
from ranks_fit_program import DATA, HELD, Classifier, collate
from safetensors.torch import load_file

from onward.data import ResumableDataLoader

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_fit_program.run(tmp_path_factory.mktemp("fit"))


def model() -> Classifier:
    torch.manual_seed(3)
    return Classifier()


@pytest.mark.parametrize("save", ["epoch", "best"])
def test_ranks_choose_one_checkpoint_and_end_with_its_weights(
    save: str, found: list[dict[str, Any]]
) -> None:
    """Each rank alone would have chosen another one: the loss of one's samples falls, and that of
    the other's rises."""
    first, second = (each[save] for each in found)
    for name in ("steps", "best", "best metric", "history", "rate", "eager"):
        assert first[name] == second[name], name
    assert torch.equal(first["weights"], second["weights"])
    assert first["steps"] < 16 and first["rate"] < 0.5, "stopped early, at a lower rate"
    losses = [dict(log)["eval_loss"] for log in first["history"]]
    assert Path(first["best"]).name == f"checkpoint-{4 * (losses.index(min(losses)) + 1)}"
    saved = load_file(Path(first["best"]) / "model.safetensors")
    assert torch.equal(first["weights"], saved["head.weight"])
    for log, right in zip(first["history"], first["eager"], strict=True):
        assert dict(log)["eval_accuracy"] == pytest.approx(right)
        assert dict(log)["eval_rows"] == len(HELD), "without the one that the sampler repeats"


def test_an_evaluation_is_that_of_all_samples(found: list[dict[str, Any]]) -> None:
    held, net = collate(HELD), model()
    with torch.no_grad():
        eager = net.eval()(**held)
    right = float((eager["logits"].argmax(-1) == held["labels"]).double().mean())
    for each in found:
        assert each["samples"] == each["every samples"] == len(HELD)
        assert each["every"]["accuracy"] == pytest.approx(right)
        assert each["every"]["streamed"] == each["every"]["rows"] == len(HELD)
        assert each["every loss"] == pytest.approx(float(eager["loss"]), rel=1e-5)
    order = [0, 2, 1, 3, 4, 6, 5]  # by two from each rank, as accelerate gathers them
    assert found[0]["labels"] == held["labels"][order].tolist()
    assert found[1]["labels"] == [], "rank 0 alone computes"


def test_metrics_of_torchmetrics_join_the_samples_of_ranks(found: list[dict[str, Any]]) -> None:
    metric = pytest.importorskip("torchmetrics").classification.MulticlassAccuracy(
        ranks_fit_program.CLASSES, average="micro"
    )
    held = collate(HELD)
    want = float(metric(model()(**held)["logits"].detach(), held["labels"]))
    for each in found:
        assert each["shared"]["joined"] == each["every"]["joined"] == pytest.approx(want)


def test_what_ranks_do_not_have_alike_is_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["local"].startswith("the metric 'n' has no distributed sync, and 2 of 2")
        assert each["unlike"].startswith("rank 1 evaluates by the metrics ['compute_metrics'], and")
        assert each["lengths"].startswith(
            "the number of batches in an epoch on rank 1 (3) is not that of rank 0 (4), so that"
        )
    assert found[0]["fails"] == "a planted error"
    assert found[1]["fails"].startswith("rank 0 has failed, while rank 1 joins its evaluation with")


def test_samples_that_all_ranks_train_are_told_once(found: list[dict[str, Any]]) -> None:
    said = [each["same samples"] for each in found]
    assert said[0].startswith("ranks have the same samples in their first batch, as where each of")
    assert said[1] == "" and all(each["no warning"] for each in found)


def test_shares_of_a_loader_train_the_run_of_eager_pytorch_with_whole_batches(
    found: list[dict[str, Any]],
) -> None:
    """The run ends where a callback of one rank has asked for it."""
    net, updates = model(), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    loader = ResumableDataLoader(DATA, 12, collate_fn=collate)
    while updates < 3:
        for batch in loader:
            optimizer.zero_grad()
            net(**batch)["loss"].backward()
            optimizer.step()
            updates += 1
            if updates == 3:
                break
    want = net.head.weight.detach()
    for each in found:
        assert each["ended"] == 3
        torch.testing.assert_close(each["resumable"], want, rtol=1e-5, atol=1e-6)
