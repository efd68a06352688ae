"""How often does verification refuse a right model? Ten models, many seeds, batches, threads.

    python tests/faults/false_alarms.py --runs 500

Each run draws new weights and a new batch and asks `Trainer.verify`. Exits with 1 after an alarm.
What depends on neither weights nor batch (the capture, its graphs, onnxruntime's sessions) is made
once for each model and kind of batch.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import tiny
import tiny_families as families
import torch
from torch import nn
from torch.utils import _pytree

import onward
from onward.capture import Captured, CapturedModule, CaptureRequest
from onward.compile import Compiler
from onward.graph.graph import Graph
from onward.prepare.graphs import Graphs
from onward.train.verify import step

Make = Callable[[], nn.Module]
Batch = Callable[[int], Any]


class Tagger(nn.Module):
    """PyTorch's own encoder between an embedding and a head; the loss is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids))).transpose(1, 2)


class Attention(nn.Module):
    """Attention written out, with a shared norm and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(12, 36)
        self.norm = nn.LayerNorm(12)
        self.out = nn.Linear(12, 12, bias=False)
        self.register_buffer("scale", torch.tensor(12.0).rsqrt())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(1, 2) * self.scale, -1)
        return self.norm(x + self.out(scores @ v)).pow(2).mean(1)


def padded(seed: int) -> tiny.Tensors:
    """Padding at another place, and ignored labels, from seed to seed."""
    place = (None, *tiny.PADDINGS)[seed % 4]
    return tiny.batch(4, 6 + 5 * (seed // 4 % 2), place, ignored=seed % 3 == 0, seed=seed)


def summaries(seed: int) -> tiny.Tensors:
    data = tiny.batch(4, 12, (None, *tiny.PADDINGS)[seed % 4], seed=seed)
    labels = tiny.tokens(4, 7, seed=seed + 1)
    labels[1, 4:] = labels[2, 6:] = -100
    return {**data, "labels": labels}


def classes(seed: int) -> tiny.Tensors:
    return {**padded(seed), "labels": torch.arange(4) % 3}


def numbers(*shape: int) -> Callable[[int], torch.Tensor]:
    def draw(seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return draw


def positional(x: Callable[[int], torch.Tensor], y: Callable[[int], torch.Tensor]) -> Batch:
    return lambda seed: (x(seed), y(seed))


def square(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).pow(2).mean()


cross_entropy = nn.functional.cross_entropy
MODELS: dict[str, tuple[Make, Batch, Any]] = {
    "gpt2": (tiny.gpt2, padded, None),
    "bert": (tiny.bert, padded, None),
    "bert classifier": (lambda: tiny.bert(classes=3), classes, None),
    "llama": (families.of("Llama", "CausalLM", num_hidden_layers=2), padded, None),
    "t5": (families.of("T5", "ConditionalGeneration"), summaries, None),
    "bart": (families.of("Bart", "ConditionalGeneration"), summaries, None),
    "nn.Transformer": (
        Tagger,
        positional(lambda s: tiny.tokens(3, 7, s), lambda s: tiny.tokens(3, 7, s) % 5),
        cross_entropy,
    ),
    "mlp": (
        tiny.mlp,
        positional(numbers(6, 8), lambda s: (torch.arange(6) + s) % 5),
        cross_entropy,
    ),
    "two towers": (families.Towers, families.pairs, None),
    "attention": (Attention, positional(numbers(3, 5, 12), numbers(3, 12)), square),
}  # fmt: skip


def trainer(name: str, precision: str = "no") -> onward.Trainer:
    make, _, loss_fn = MODELS[name]
    torch.manual_seed(0)
    options = onward.TrainerOptions(mixed_precision=precision)
    return onward.Trainer(make().train(), onward.optim.AdamW(), loss_fn=loss_fn, options=options)


def alarm(made: onward.Trainer, name: str, seed: int) -> str:
    """The report of a verification that failed; "" where it was right to be content."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in made.model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    data = MODELS[name][1](seed)
    report = made.verify(*data) if isinstance(data, tuple) else made.verify(data)
    return "" if report.ok else str(report)


class _Once(Compiler):
    """Captures and graphs are derived once for each question."""

    def capture(self, request: CaptureRequest) -> CapturedModule:
        call = [request.args, request.kwargs, request.target]
        tensors, shape = _pytree.tree_flatten(call)
        sizes = tuple(tuple(t.shape) for t in tensors)
        return _remember((request.model, shape, sizes), super().capture, request)

    def gradients(self, forward: Graph, wrt: Sequence[str], zeros: Collection[str]) -> Graph:
        key = (forward, "gradients", tuple(wrt))
        return _remember(key, super().gradients, forward, wrt, zeros)


_seen: dict[Any, Any] = {}


def _remember(key: Any, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if key not in _seen:
        _seen[key] = make(*args, **kwargs)
    return _seen[key]


def _graphs_once(compiler: Compiler, captured: Captured) -> Graphs:
    return _remember((id(captured), compiler.policy, "graphs"), Graphs, compiler, captured)


@contextmanager
def compiled_once() -> Iterator[None]:
    """Within it, verifications of one trainer share captures, graphs and sessions."""
    import onnxruntime as ort

    plain, session = (step.Compiler, step.Graphs), ort.InferenceSession

    def opened(content: bytes, *rest: Any, **more: Any) -> Any:
        key = hashlib.sha256(content).hexdigest()
        return _remember(key, session, content, *rest, **more)

    step.Compiler, step.Graphs = _Once, _graphs_once  # type: ignore[assignment,misc]
    ort.InferenceSession = opened
    try:
        yield
    finally:
        (step.Compiler, step.Graphs), ort.InferenceSession = plain, session
        _seen.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500, help="over all models")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--mixed-precision", default="no", choices=["no", "bf16"])
    given = parser.parse_args()
    alarms = done = 0
    for i, name in enumerate(given.models):
        count = (given.runs + i) // len(given.models)
        start, made, wrong = time.perf_counter(), trainer(name, given.mixed_precision), 0
        with compiled_once():
            for seed in range(given.first, given.first + count):
                torch.set_num_threads(given.threads[seed % len(given.threads)])
                found = alarm(made, name, seed)
                if found:
                    wrong += 1
                    print(f"{name}, seed {seed}: {found}", flush=True)
        alarms, done = alarms + wrong, done + count
        seconds = time.perf_counter() - start
        print(f"{name}: {wrong} false alarms in {count} runs ({seconds:.0f} s)", flush=True)
    print(f"{alarms} false alarms in {done} runs")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
