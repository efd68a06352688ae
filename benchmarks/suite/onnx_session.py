"""An exported model in a session beside its module in a Trainer: seconds, memory, fused ops."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.progress import say
from suite.question import answer, ask
from suite.report import MIB, Writer, heading, markdown, started

EXPORTERS = {"torchscript": False, "torch.export": True}
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "vocabulary": 50257,
        "rows": 4,
        "tokens": 128,
    },
    "bert": {"layers": 6, "width": 512, "heads": 8, "vocabulary": 30522, "rows": 8, "tokens": 128},
}
TINY = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 100, "rows": 2, "tokens": 16}
HEAD = [
    "model", "exporter", "file, MB", "open, s", "first step, s", "of the Trainer, s", "session, ms",
    "Trainer, ms", "session / Trainer", "peak, MiB", "of the Trainer, MiB", "ops otherwise",
]  # fmt: skip


def run(quick: bool, pairs: int, models: str, write: Writer) -> tuple[dict[str, Any], Path]:
    """One process for each model and exporter."""
    report = started("ONNX files in a session, beside the module in a Trainer") | {"rows": []}
    for model in models.split(",") if models else SIZES:
        for exporter, modern in EXPORTERS.items():
            if modern and importlib.util.find_spec("onnxscript") is None:
                continue
            request = {"model": model, "exporter": exporter, "pairs": pairs}
            request |= TINY if quick else SIZES[model]
            with tempfile.TemporaryDirectory() as folder:
                found = ask("suite.onnx_session", request | {"folder": folder}, timeout=1200.0)
            report["rows"].append({"model": model, "exporter": exporter} | found)
            say(f"{model} {exporter}: {found['ratio']:.3f} of the Trainer's seconds")
    return report, write(report, table(report))


def table(report: Mapping[str, Any]) -> str:
    """A row per model and exporter."""
    rows = [
        [
            r["model"], r["exporter"], f"{r['bytes'] / 1e6:.0f}", f"{r['open']:.2f}",
            f"{r['first'][0]:.2f}", f"{r['first'][1]:.2f}", f"{1e3 * r['seconds'][0]:.0f}",
            f"{1e3 * r['seconds'][1]:.0f}",
            f"{r['ratio']:.3f} ({r['middle'][0]:.3f} to {r['middle'][1]:.3f})",
            *(f"{x / MIB:.0f}" for x in r["peaks"]),
            ", ".join(f"{n} {a}/{b}" for n, (a, b) in r["ops"].items()) or "none",
        ]
        for r in report["rows"]
    ]  # fmt: skip
    said = [
        "Medians of steps in turn; in brackets the quartiles of the pairs' ratios. The first step",
        "counts from the session's or the Trainer's making to the loss. The peak is the plan's.",
        "Ops otherwise: calls in the session's step and in the Trainer's, where they differ.",
    ]
    return "\n".join([*heading(report), "", *said, "", *markdown(HEAD, rows, left=2)]) + "\n"


# ---- the far side


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """One model by one exporter, trained by both."""
    import torch

    import onward
    from onward import loss

    torch.manual_seed(0)
    model = _model(request)
    with torch.no_grad():  # exporters store equal tensors once, as all biases of a new model are
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    ids = torch.randint(0, request["vocabulary"], (request["rows"], request["tokens"]))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    path = Path(request["folder"]) / "model.onnx"
    _export(model, given, path, EXPORTERS[request["exporter"]])
    causal = request["model"] == "gpt2"
    batch = {**given, "labels": ids}
    feeds = {name: x.numpy() for name, x in batch.items()}
    _warm_up()

    begin = time.perf_counter()
    session = onward.TrainingSession(
        path, onward.optim.AdamW(lr=1e-4), loss.cross_entropy("logits", shift=causal)
    )
    opened = time.perf_counter() - begin
    losses = [session.step(feeds).loss]
    first = [time.perf_counter() - begin]
    begin = time.perf_counter()
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-4))
    losses.append(float(trainer.train_step(batch).loss))
    first.append(time.perf_counter() - begin)
    if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[1]):
        raise RuntimeError(f"the losses differ: {losses}")
    steps: list[tuple[float, float]] = []
    for _ in range(request["pairs"] + 1):
        times = [time.perf_counter()]
        session.step(feeds)
        times.append(time.perf_counter())
        float(trainer.train_step(batch).loss)
        times.append(time.perf_counter())
        steps.append((times[1] - times[0], times[2] - times[1]))
    steps = steps[1:]  # the first of each finds cold caches
    ratios = [a / b for a, b in steps]
    plans = session.trainer.plan, trainer.plan
    return {
        "bytes": path.stat().st_size, "open": opened, "first": first, "losses": losses,
        "seconds": [statistics.median(column) for column in zip(*steps, strict=True)],
        "ratio": statistics.median(ratios), "middle": statistics.quantiles(ratios, n=4)[::2],
        "peaks": [plan.peak for plan in plans], "ops": _otherwise(*plans),
    }  # fmt: skip


def _model(request: Mapping[str, Any]) -> Any:
    import transformers

    width, tokens = request["width"], request["tokens"]
    if request["model"] == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=request["layers"], n_embd=width, n_head=request["heads"],
                vocab_size=request["vocabulary"], n_positions=tokens, use_cache=False,
                attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=request["layers"], hidden_size=width, intermediate_size=4 * width,
            num_attention_heads=request["heads"], vocab_size=request["vocabulary"],
            max_position_embeddings=tokens, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def _export(model: Any, given: Mapping[str, Any], path: Path, modern: bool) -> None:
    """Writes the model's logits as ONNX by one of torch's exporters, with open sizes."""
    import copy

    import torch

    class Logits(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits

    names = {"input_names": list(given), "output_names": ["logits"]}
    sizes = {0: "B", 1: "T"}
    if modern:
        open_sizes = {n: {i: torch.export.Dim(d) for i, d in sizes.items()} for n in given}
        more: dict[str, Any] = {"dynamic_shapes": open_sizes, "external_data": False}
    else:
        more = {"dynamic_axes": dict.fromkeys(given, sizes), "opset_version": 17}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(  # noqa: TID251 - files that another tool wrote are what is measured
            Logits(copy.deepcopy(model)).eval(), tuple(given.values()), path, dynamo=modern,
            **names, **more,
        )  # fmt: skip


def _warm_up() -> None:
    """Has what Onward and torch import at their first use imported."""
    import torch

    import onward

    layer = torch.nn.Linear(3, 3)
    trainer = onward.Trainer(layer, onward.optim.SGD(lr=0.0), torch.nn.functional.mse_loss)
    trainer.train_step(torch.ones(2, 3), torch.ones(2, 3))


def _otherwise(a: Any, b: Any) -> dict[str, list[int]]:
    """Calls by op of two plans, where their numbers differ."""
    from collections import Counter

    counts = [Counter(launch.op for launch in plan.launches) for plan in (a, b)]
    names = sorted(counts[0] | counts[1])
    return {n: [c[n] for c in counts] for n in names if counts[0][n] != counts[1][n]}


if __name__ == "__main__":
    answer(answered)
