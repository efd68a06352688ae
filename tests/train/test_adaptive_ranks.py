"""Trainers that combine their gradients by AdaSum, on two and on four processes over Gloo, beside
eager PyTorch in one process with the formula of the paper (arXiv 2006.02924)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import ranks_program
import torch
from ranks_cases import RATE, Case, Tensors, rows, shares
from ranks_program import ADAPTIVE, Adaptive, steady
from torch.nn.functional import cross_entropy

STEPS = 8


def two(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product, first, second = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = 1 - product / (2 * first) if first else 1.0
    right = 1 - product / (2 * second) if second else 1.0
    return left * a + right * b


def eager(run: Adaptive, ranks: int) -> tuple[Tensors, list[float]]:
    """The weights after the run, and the losses of its steps."""
    torch.manual_seed(0)
    case, model = run.case(ranks), steady()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    window = case.options.get("gradient_accumulation_steps", 1)
    by_labels = "gradient_accumulation_average" not in case.options
    replicas = ranks // run.cut
    losses: list[float] = []
    held: list[list[list[tuple[Any, int]]]] = [[] for _ in range(replicas)]
    names = [n for n, _ in model.named_parameters()]

    def mean(replica: int) -> list[torch.Tensor]:
        ranks_of_all = [one for micro in held[replica] for one in micro]
        if by_labels:
            count = max(1, sum(labels for _, labels in ranks_of_all))
            parts = [[g.double() / count for g in grads] for grads, _ in ranks_of_all]
        else:
            parts = [
                [g.double() / max(1, labels) / len(ranks_of_all) for g in grads]
                for grads, labels in ranks_of_all
            ]
        return [torch.stack(each).sum(0) for each in zip(*parts, strict=True)]

    def update() -> None:
        found = [mean(replica) for replica in range(replicas)]
        while len(found) > 1:
            found = [
                [two(a, b) for a, b in zip(*pair, strict=True)]
                for pair in zip(found[::2], found[1::2], strict=True)
            ]
        for p, g in zip(model.parameters(), found[0], strict=True):
            p.grad = g.float()
        if "max_grad_norm" in case.options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.options["max_grad_norm"])
        optimizer.step()
        for each in held:
            each.clear()

    for step in range(STEPS):
        data, sizes = rows(Case(steady), step), shares(step, ranks)
        starts = [sum(sizes[:rank]) for rank in range(ranks)]
        sums: list[tuple[float, int]] = []
        for replica in range(replicas):
            micro: list[tuple[Any, int]] = []
            for rank in range(replica * run.cut, (replica + 1) * run.cut):
                part = {n: x[starts[rank] : starts[rank] + sizes[rank]] for n, x in data.items()}
                labels = part.pop("labels")[:, 1:]
                logits: Any = model(**part).logits[:, :-1]
                total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                grads = torch.autograd.grad(total, list(model.parameters()))
                count = int((labels != -100).sum())
                micro.append((grads, count))
                sums.append((float(total.detach()), count))
            held[replica].append(micro)
        if by_labels:
            losses.append(sum(s for s, _ in sums) / sum(n for _, n in sums))
        else:
            losses.append(sum(s / n if n else math.nan for s, n in sums) / ranks)
        if len(held[0]) == window or step == run.early:
            update()
    return dict(zip(names, (p.detach() for p in model.parameters()), strict=True)), losses


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_are_eager_pytorch_with_the_formula(ranks: int, tmp_path: Path) -> None:
    found = ranks_program.run(tmp_path, ranks, "adaptive")
    for name, run in ADAPTIVE.items():
        if ranks == run.cut:
            assert name not in found[0]
            continue
        weights, losses = eager(run, ranks)
        for rank in range(1, ranks):
            for key, y in found[0][name].items():
                other = found[rank][name][key]  # the mean over no label is NaN
                torch.testing.assert_close(other, y, rtol=0, atol=0, equal_nan=True)
        assert found[0][name].pop("losses").tolist() == pytest.approx(
            losses, rel=1e-5, nan_ok=True
        ), name
        assert found[0][name].keys() == weights.keys()
        for key, want in weights.items():
            far = float((found[0][name][key] - want).norm() / want.norm())
            assert far < 1e-5, f"{name}: {key} is {far:.1e} away"
    assert {each["resumed"] for each in found} == {"checkpoint-5"}
    for each in found:
        assert each["skipped"] == [False, True, False]
        assert torch.equal(each["after"], found[0]["after"]) and each["after"].isfinite().all()
