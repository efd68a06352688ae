"""The first step's parts, in fresh processes: cold, and with the graphs of a run before on disk.

Imports and the making of the model come before the clock. Growth with depth is of narrow layers,
whose arithmetic is nothing. A capture's memory is the highest resident set
during it, less that before.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.memory import Memory
from suite.progress import Clock, say
from suite.question import answer, ask
from suite.report import MIB, Writer, heading, markdown, started

SMALL = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257}
TINY = {"layers": 2, "width": 32, "heads": 2, "vocabulary": 100}
HALF_A_BILLION = {"layers": 36, "width": 1024, "heads": 16, "vocabulary": 50257}
DEPTHS = (12, 24, 48, 96)
GRAPHS = ("forward", "pack", "differentiate", "updates", "step")
PLANS = ("specialize", "plan")


def run(quick: bool, rounds: int, write: Writer) -> tuple[dict[str, Any], Path]:
    """Rounds of a cold and a warm first step in turn; then depths; then a capture's memory."""
    report = started("Time to the first step") | {"first": [], "depths": [], "memory": None}
    clock = Clock(0.0)
    size = TINY if quick else SMALL
    rounds = rounds or (1 if quick else 3)
    tokens = 16 if quick else 128
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                found = _ask({"what": "first", "size": size, "tokens": tokens}, folder)
                report["first"].append({"kind": kind, "round": turn} | found)
                say(f"{kind}: {found['seconds']:.2f} s, {clock.spent():.0f} s so far")
    for layers in DEPTHS[:2] if quick else DEPTHS:
        with tempfile.TemporaryDirectory() as folder:
            narrow = {**TINY, "layers": layers}
            request = {"what": "first", "size": narrow, "tokens": 16}
            stages = [_ask(request, folder + f"/{turn}")["stages"] for turn in range(rounds)]
            least = {name: min(found[name] for found in stages) for name in stages[0]}
            report["depths"].append({"layers": layers, "stages": least})
            say(f"{layers} layers, {clock.spent():.0f} s so far")
    with tempfile.TemporaryDirectory() as folder:
        large = TINY if quick else HALF_A_BILLION
        report["memory"] = _ask({"what": "memory", "size": large, "tokens": tokens}, folder)
    return report, write(report, table(report))


def _ask(request: Mapping[str, Any], folder: str) -> Any:
    return ask("suite.first_step", request, {"ONWARD_CACHE": folder, "ONWARD_GRAPH_CACHE": "1"})


def table(report: Mapping[str, Any]) -> str:
    """The parts, each the least of all rounds; the depths; the memory."""
    lines = [
        *heading(report),
        "",
        "Seconds, the least of all rounds; in brackets processor time.",
        "",
    ]
    held = {k: [r for r in report["first"] if r["kind"] == k] for k in ("cold", "warm")}
    names = list(dict.fromkeys(n for r in report["first"] for n in r["parts"]))
    rows = [
        [name, *(f"{min(r['parts'].get(name, 0.0) for r in held[k]):.3f}" for k in held)]
        for name in names
    ]
    whole = [
        f"{min(r['seconds'] for r in held[k]):.2f} ({min(r['processor'] for r in held[k]):.2f})"
        for k in held
    ]
    lines += markdown(["part", *held], [*rows, ["**all**", *whole]])
    lines += [
        "",
        "Growth with depth: narrow layers, seconds, the least of all rounds.",
        "",
    ]
    depths = [
        [
            str(r["layers"]), f"{r['stages'].get('capture', 0.0):.2f}",
            *(f"{sum(r['stages'].get(n, 0.0) for n in group):.2f}" for group in (GRAPHS, PLANS)),
            f"{1e3 * sum(r['stages'].get(n, 0.0) for n in GRAPHS + PLANS) / r['layers']:.1f}",
        ]
        for r in report["depths"]
    ]  # fmt: skip
    head = ["layers", "capture", "rewrite and differentiate", "specialize and plan", "ms a layer"]
    lines += markdown(head, depths)
    memory = report["memory"]
    lines += [
        "",
        f"Capture of {memory['parameters'] / 1e6:.0f} M parameters "
        f"({memory['parameter_bytes'] / MIB:.0f} MiB): {memory['more_bytes'] / MIB:.0f} MiB "
        "more at the most.",
    ]
    return "\n".join(lines) + "\n"


# ---- the far side


def _model(size: Mapping[str, int], tokens: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=size["layers"], n_embd=size["width"], n_head=size["heads"],
            vocab_size=size["vocabulary"], n_positions=max(tokens, 1024), bos_token_id=0,
            eos_token_id=0, use_cache=False,
        )
    ).train()  # fmt: skip


def _prepared(request: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Model and batch, with all that Onward and torch import at their first use imported."""
    import torch

    import onward

    warming = torch.nn.Linear(3, 3)
    trainer = onward.Trainer(warming, onward.optim.SGD(lr=0.0), torch.nn.functional.mse_loss)
    trainer.train_step(torch.ones(2, 3), torch.ones(2, 3))
    model = _model(request["size"], request["tokens"])
    ids = torch.randint(0, request["size"]["vocabulary"], (1, request["tokens"]))
    return model, {"input_ids": ids, "labels": ids}


def first(request: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of the first step, by its parts."""
    import torch

    import onward

    model, data = _prepared(request)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    gc.collect()
    start, processor = time.perf_counter(), time.process_time()
    trainer = onward.Trainer(model, optimizer)
    loss = float(trainer.train_step(**data).loss)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    stages = dict(trainer.report()["compile_seconds"])
    again = time.perf_counter()
    float(trainer.train_step(**data).loss)
    step = time.perf_counter() - again
    parts = {"capture": stages["capture"], "graph cache": stages.get("graph cache", 0.0)}
    parts["rewrite and differentiate"] = sum(stages.get(n, 0.0) for n in GRAPHS)
    parts["specialize and plan"] = sum(stages.get(n, 0.0) for n in PLANS)
    parts["bind launches"] = stages["bind"]
    parts["the step itself"] = step
    parts["state, pages and guards"] = seconds - sum(parts.values())
    return {
        "seconds": seconds, "processor": processor, "parts": parts, "stages": stages,
        "loss": loss,
    }  # fmt: skip


def memory(request: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes that a capture takes at most beside the model."""
    from onward.capture import CaptureRequest, capture

    model, data = _prepared(request)
    tensors = {id(p): p for p in model.parameters()}.values()
    held = Memory("cpu")
    before = held.now()
    held.reset_peak()
    captured = capture(CaptureRequest(model, (), data))
    peak = held.peak()
    assert captured.parameters
    return {
        "parameters": sum(p.numel() for p in tensors),
        "parameter_bytes": sum(p.nbytes for p in tensors),
        "more_bytes": max(0, peak - before),
    }


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """One question of the near side."""
    return {"first": first, "memory": memory}[request["what"]](request)


if __name__ == "__main__":
    answer(answered)
