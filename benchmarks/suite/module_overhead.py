"""Microseconds of a call of an accelerated model, by its parts.

Each part is timed by itself over many calls, in processor time, and as the least of all: on a
machine that others use too, the least is what the part costs, and a median is what others cost as
well. Launches alone, over and over, find all that they need in the processor's caches; within a
call they do not. The parts overlap: `autograd` is a function of torch's over as many parameters
that does nothing, which no call through autograd can do without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from suite.progress import say
from suite.question import answer, ask
from suite.report import Writer, heading, markdown, started

LAYERS = (4, 12)
PARTS = {
    "eager": "eager PyTorch: call and backward",
    "whole": "accelerated: call and backward",
    "launches": "the same plan's launches alone",
    "within": "its launches within the call, between other work",
    "beyond": "**beyond the launches alone**",
    "autograd": "of it: an autograd function of as many parameters",
    "guards": "of it: the guards of the module",
    "arguments": "of it: binding the arguments",
}


def run(calls: int, write: Writer) -> tuple[dict[str, Any], Path]:
    """The parts for each number of layers."""
    report = started("Overhead of an accelerated call", threads=1) | {"calls": calls, "sizes": []}
    for layers in LAYERS:
        request = {"layers": layers, "calls": calls}
        found = ask("suite.module_overhead", request, {"OMP_NUM_THREADS": "1"})
        report["sizes"].append({"layers": layers} | found)
        say(f"{layers} layers")
    return report, write(report, table(report))


def table(report: Mapping[str, Any]) -> str:
    """Microseconds, the least and in brackets the median."""
    sizes = report["sizes"]
    rows = [
        [text, *(f"{s['least'][name]:.0f} ({s['median'][name]:.0f})" for s in sizes)]
        for name, text in PARTS.items()
    ]
    rows.append(["parameters, launches", *(f"{s['parameters']}, {s['count']}" for s in sizes)])
    lines = [
        *heading(report), "",
        f"Microseconds of processor time, the least of {report['calls']} calls; in brackets the "
        "median.", "",
        *markdown(["part", *(f"{s['layers']} layers" for s in sizes)], rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


# ---- the far side


def _timed(act: Callable[[], Any], calls: int, after: Callable[[], Any] = lambda: None) -> Any:
    """Least and median microseconds of processor time of `act`; `after` is not timed."""
    found: list[float] = []
    for _ in range(calls):
        start = time.process_time_ns()
        act()
        found.append((time.process_time_ns() - start) / 1e3)
        after()
    return min(found), statistics.median(found)


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """The parts of one model."""
    import copy

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import onward
    from onward.module import accelerated
    from onward.module.arguments import bind_call
    from onward.prepare.guards import Guards

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_layer=request["layers"], n_embd=16, n_head=2, n_positions=32,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    plain = GPT2LMHeadModel(config).train()
    model: Any = onward.accelerate(copy.deepcopy(plain))
    ids = torch.randint(1, 61, (2, 7))
    data = {"input_ids": ids, "labels": ids, "use_cache": False}

    def step(model: Any) -> Callable[[], None]:
        return lambda: model(**data).loss.backward()

    def without(parameters: list[Any]) -> Callable[[], None]:
        def forget() -> None:
            for p in parameters:
                p.grad = None

        return forget

    calls, own = request["calls"], list(model.parameters())
    theirs = list(plain.parameters())
    _timed(step(model), 10, without(own))
    held, guards = accelerated(model), Guards()
    assert held is not None
    launches = list(held.launches)
    guards.changed(model, None, training=False)

    parts = {
        "eager": _timed(step(plain), calls, without(theirs)),
        "whole": _timed(step(model), calls, without(own)),
        "launches": _timed(lambda: [launch() for launch in launches], calls),
        "within": _within(step(model), calls, without(own)),
        "autograd": _timed(_autograd(own), calls, without(own)),
        "guards": _timed(lambda: guards.same(model), calls),
        "arguments": _timed(lambda: bind_call((), data), calls),
    }
    found = {
        kind: {name: value[i] for name, value in parts.items()}
        for i, kind in enumerate(("least", "median"))
    }
    for values in found.values():
        values["beyond"] = values["whole"] - values["launches"]
    return found | {"parameters": len(own), "count": len(launches)}


def _within(act: Callable[[], Any], calls: int, after: Callable[[], Any]) -> Any:
    """Shortest and median time of the launches within one `act()`, in microseconds of process
    time."""
    from onward.execute.binder import Binder

    plain, spent, found = Binder.run, [0.0], list[float]()

    def timed(self: Any, numbers: range) -> None:
        start = time.process_time_ns()
        plain(self, numbers)
        spent[0] += (time.process_time_ns() - start) / 1e3

    Binder.run = timed  # type: ignore[method-assign]
    for _ in range(calls):
        spent[0] = 0.0
        act()
        found.append(spent[0])
        after()
    Binder.run = plain  # type: ignore[method-assign]
    return min(found), statistics.median(found)


def _autograd(parameters: list[Any]) -> Callable[[], None]:
    """A function over these parameters, forward and backward, that computes nothing."""
    import torch

    given = [torch.zeros_like(p) for p in parameters]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
            return torch.zeros(())

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> Any:
            return tuple(g.data for g in given)

    def step() -> None:
        result: Any = Nothing.apply(*parameters)
        result.backward()

    return step


if __name__ == "__main__":
    answer(answered)
