"""The peers that spare rows by hand, beside the model that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from suite.batches import Batch
from suite.cases import Case
from suite.losses import worst
from suite.report import heading, markdown
from suite.row_engines import engines
from suite.workloads import make_batches, make_model

LOSS, GRADIENT = 1e-5, 1e-4  # relative tolerances


def differences(case: Case) -> list[dict[str, Any]]:
    """For each peer of the case: how far its loss and its gradients are from the model's.

    A gradient's distance is relative to the largest element of any, as some are zero but for
    rounding.
    """
    model, (batch,) = make_model(case), make_batches(case, 1)
    loss, gradients = _pass(model, model, batch)
    largest = max(float(g.abs().max()) for g in gradients)
    rows: list[dict[str, Any]] = []
    for name, engine in engines().items():
        if engine.change is None or (name == "eager-labels" and "labels" not in batch):
            continue
        have, made = _pass(engine.change(model), model, batch)
        apart = worst(float((a - b).abs().max()) for a, b in zip(made, gradients, strict=True))
        rows.append(
            {"case": case.name, "peer": name, "loss": abs(have - loss) / abs(loss),
             "gradient": apart / largest}
        )  # fmt: skip
    return rows


def failed(report: Mapping[str, Any]) -> bool:
    """Whether a peer computes something else; a NaN is something else."""
    return not all(r["loss"] <= LOSS and r["gradient"] <= GRADIENT for r in report["rows"])


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    rows = [
        [r["case"], r["peer"], f"{r['loss']:.1e}", f"{r['gradient']:.1e}"] for r in report["rows"]
    ]
    head = ["workload", "peer", "loss", "gradient"]
    return "\n".join([*heading(report), "", *markdown(head, rows, left=2)]) + "\n"


def _pass(module: nn.Module, model: nn.Module, batch: Batch) -> tuple[float, list[Tensor]]:
    """The loss, and the gradients of the model's parameters, 0 where there is none."""
    model.zero_grad(set_to_none=True)
    output = module(**batch)
    loss = output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return float(loss.detach()), [g.clone() for g in found]
