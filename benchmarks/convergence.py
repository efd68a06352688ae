"""Train a small GPT-2 on real text with eager PyTorch and with Onward, and compare where they end.

    python benchmarks/convergence.py                  # under ten minutes on two cores
    python benchmarks/convergence.py --text wiki.train.tokens --eval wiki.valid.tokens
    python benchmarks/convergence.py --quick --out DIR

For each of three seeds: equal initial weights, equal batches in equal order, 200 steps of AdamW
with warm-up and linear decay (which takes noise out of the end), dropout 0.1. The dropout masks are
equal in distribution only, so the runs end apart; how far apart that alone takes them is measured
as well, by a second eager run with other masks. Every model is evaluated by eager PyTorch on text
it was not trained on: the mean loss in nats per token. Exit status 1: the mean over seeds differs
from eager's by more than 0.5 %.

Then the same run without dropout, step by step: eager and Onward in fp32, each against eager in
fp64. AdamW divides by the root of a gradient's square, so that rounding in small gradients grows to
differences in the loss; the fp64 run says whose rounding it was.

The text is the language reference that Python's pydoc carries unless `--text` names a file; its end
is held out unless `--eval` names another. On the reference single runs of either engine end on one
of two levels, 6 % apart, as chance has it; WikiText-2 (validation to train on, test to evaluate on)
leaves 0.1 %. A token is a word, a sign or a line's end, from the most frequent ones of the
training text; any other is one and the same unknown token. Results are written after every run; no
seed starts after `--budget` seconds.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import onward
from harness import say
from onward.recipes.corpus import read_text_file
from report import command, heading, machine, markdown, write

TOLERANCE = 0.005  # of the mean evaluation loss, relative
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")
_UNKNOWN = 0


@dataclass(frozen=True)
class Size:
    """The model and the run. `vocabulary` counts the unknown token."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    steps: int
    warmup: int
    eval_batches: int
    exact_steps: int
    learning_rate: float = 1e-3
    dropout: float = 0.1


FULL = Size(4, 192, 6, 4096, batch=8, tokens=128, steps=200, warmup=20, eval_batches=16,
            exact_steps=100)  # fmt: skip
QUICK = Size(2, 32, 2, 256, batch=4, tokens=32, steps=12, warmup=4, eval_batches=4,
             exact_steps=10)  # fmt: skip
# The last is eager once more with other masks: what masks alone do.
ENGINES = ("eager", "onward", "eager, other masks")
DOUBLE = "eager, fp64"


@dataclass(frozen=True)
class Data:
    """Token ids `i64[n]` of both sides, and what they were made of."""

    train: Tensor
    evaluation: Tensor
    source: str
    unknown: float  # share of the evaluation text

    def batch(self, size: Size, generator: torch.Generator) -> Tensor:
        """`i64[B,T]`: windows of the training text at random places."""
        starts = torch.randint(len(self.train) - size.tokens, (size.batch,), generator=generator)
        return torch.stack([self.train[s : s + size.tokens] for s in starts.tolist()])

    def evaluation_batches(self, size: Size) -> list[Tensor]:
        """The first windows of the held-out text, one after the other."""
        count = min(size.eval_batches * size.batch, len(self.evaluation) // size.tokens)
        rows = self.evaluation[: count * size.tokens].reshape(count, size.tokens)
        return list(rows.split(size.batch))


def read(text: Path | None, held_out: Path | None, vocabulary: int) -> Data:
    """The two sides as ids; the vocabulary is made from the training side."""
    if text is None:
        from pydoc_data.topics import topics

        words, source = "\n".join(topics.values()), "the language reference in pydoc"
    else:
        words, source = read_text_file(text, "text").documents[0], text.name
    train = _TOKEN.findall(words)
    if held_out is None:
        cut = len(train) * 19 // 20
        train, evaluation = train[:cut], train[cut:]
    else:
        evaluation = _TOKEN.findall(read_text_file(held_out, "eval").documents[0])
        source += f", evaluated on {held_out.name}"
    frequent = Counter(train).most_common(vocabulary - 1)
    ids = {token: i + 1 for i, (token, _) in enumerate(frequent)}
    rows = [torch.tensor([ids.get(t, _UNKNOWN) for t in side]) for side in (train, evaluation)]
    unknown = float((rows[1] == _UNKNOWN).float().mean())
    return Data(rows[0], rows[1], source, unknown)


def trained(engine: str, seed: int, size: Size, data: Data) -> dict[str, Any]:
    """One run: the evaluation loss before and after, the training losses, seconds."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=size.layers, n_embd=size.width, n_head=size.heads, vocab_size=size.vocabulary,
        n_positions=size.tokens, resid_pdrop=size.dropout, embd_pdrop=size.dropout,
        attn_pdrop=size.dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if engine == DOUBLE:
        model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    before = evaluated(model, data, size)
    order = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed + (7000 if "other masks" in engine else 5000))
    trainer = onward.Trainer(model, optimizer) if engine == "onward" else None
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(
            (step + 1) / size.warmup, (size.steps - step) / (size.steps - size.warmup)
        ),
    )
    losses: list[float] = []
    begin = time.perf_counter()
    for step in range(size.steps):
        ids = data.batch(size, order)
        if trainer is not None:
            loss = trainer.train_step(input_ids=ids, labels=ids).loss
        else:
            optimizer.zero_grad(set_to_none=True)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 50 == 0:
            mean = statistics.fmean(losses[-50:])
            say(f"  {engine}, seed {seed}: step {step + 1}, loss {mean:.4f}")
    seconds = time.perf_counter() - begin
    return {
        "seed": seed, "before": before, "eval_loss": evaluated(model, data, size),
        "train_losses": losses, "seconds": seconds,
    }  # fmt: skip


def evaluated(model: torch.nn.Module, data: Data, size: Size) -> float:
    """Mean loss on the held-out windows, by eager PyTorch, without dropout."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in data.evaluation_batches(size):
            total += float(model(input_ids=ids, labels=ids).loss) * len(ids)
            count += len(ids)
    model.train()
    return total / count


def step_by_step(size: Size, data: Data) -> dict[str, Any]:
    """Distances of fp32 losses to fp64's, relative, without dropout and from equal weights."""
    exact = replace(size, dropout=0.0, steps=size.exact_steps, warmup=size.exact_steps // 5)
    losses = {
        engine: trained(engine, 0, exact, data)["train_losses"]
        for engine in (DOUBLE, "eager", "onward")
    }
    want = losses.pop(DOUBLE)
    return {
        engine: [abs(a - b) / abs(b) for a, b in zip(made, want, strict=True)]
        for engine, made in losses.items()
    }


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each engine against eager over the seeds that both have."""
    eager = {run["seed"]: run["eval_loss"] for run in runs["eager"]}
    result: dict[str, dict[str, Any]] = {}
    for engine, made in runs.items():
        own = {run["seed"]: run["eval_loss"] for run in made if run["seed"] in eager}
        if not own:
            continue
        peer = statistics.fmean(eager[seed] for seed in own)
        result[engine] = {
            "mean": statistics.fmean(own.values()),
            "mean_difference": (statistics.fmean(own.values()) - peer) / peer,
            "seed_difference": {
                seed: (loss - eager[seed]) / eager[seed] for seed, loss in own.items()
            },
        }
    return result


def agrees(report: Mapping[str, Any]) -> bool:
    """Whether Onward has runs and its mean is within the tolerance; a NaN is not."""
    found = report["compared"].get("onward")
    return found is not None and abs(found["mean_difference"]) <= TOLERANCE


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    size, data = report["size"], report["data"]
    seeds = [run["seed"] for run in report["runs"]["eager"]]
    head = ["engine", *(f"seed {seed}" for seed in seeds), "mean", "to eager's mean"]
    head += ["each seed to eager's", "s per run"]
    rows: list[list[str]] = []
    for engine, runs in report["runs"].items():
        if engine not in report["compared"]:
            continue
        found = report["compared"][engine]
        losses = {run["seed"]: run["eval_loss"] for run in runs}
        rows.append(
            [
                engine,
                *(f"{losses[seed]:.4f}" if seed in losses else "" for seed in seeds),
                f"{found['mean']:.4f}",
                f"{found['mean_difference']:+.2%}",
                ", ".join(f"{d:+.2%}" for d in found["seed_difference"].values()),
                f"{statistics.fmean(run['seconds'] for run in runs):.1f}",
            ]
        )
    start = statistics.fmean(run["before"] for run in report["runs"]["eager"])
    verdict = "agree" if agrees(report) else "DISAGREE"
    lines = [
        *heading(report), "",
        f"GPT-2, {size['layers']} layers, {size['width']} wide, {size['heads']} heads, "
        f"V={size['vocabulary']}; {size['batch']} x {size['tokens']} tokens, {size['steps']} AdamW "
        f"steps, learning rate {size['learning_rate']:g}, dropout {size['dropout']}.",
        f"Text: {data['source']}; {data['train']} training tokens, "
        f"{data['unknown']:.1%} of the evaluation text unknown.", "",
        *markdown(head, rows), "",
        f"Mean evaluation loss; {start:.4f} before training. Onward and eager {verdict} "
        f"(tolerance {TOLERANCE:.1%} of the mean).",
    ]  # fmt: skip
    if report["exact"]:
        rows = [
            [
                engine,
                f"{math.sqrt(statistics.fmean(d * d for d in found)):.1e}",
                f"{max(found):.1e}",
                str(found.index(max(found)) + 1),
            ]
            for engine, found in report["exact"].items()
        ]
        head = ["engine", "root mean square", "largest", "at step"]
        steps = size["exact_steps"]
        lines += ["", f"Without dropout, losses of {steps} steps against eager's in fp64:", ""]
        lines += markdown(head, rows)
    if report["skipped"]:
        lines.append(f"Not run, out of time: seeds {', '.join(map(str, report['skipped']))}.")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, help="training text; default: pydoc's topics")
    parser.add_argument("--eval", type=Path, help="held-out text; default: the end of --text")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=0, help="AdamW steps of a run; default: 200")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; then nothing starts")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.eval is not None and options.text is None:
        parser.error("--eval needs --text")
    if options.threads:
        torch.set_num_threads(options.threads)
    size = QUICK if options.quick else FULL
    if options.steps:
        size = replace(size, steps=options.steps)

    begin = time.monotonic()
    data = read(options.text, options.eval, size.vocabulary)
    report: dict[str, Any] = {
        "title": "Training to the same loss",
        "command": command(),
        "machine": machine("cpu"),
        "size": asdict(size),
        "data": {
            "source": data.source, "train": len(data.train), "unknown": data.unknown,
        },
        "runs": {engine: [] for engine in ENGINES}, "compared": {}, "exact": {}, "skipped": [],
    }  # fmt: skip
    stem = "convergence-quick" if options.quick else "convergence"
    path = options.out
    for seed in range(options.seeds):
        if time.monotonic() - begin > options.budget:
            report["skipped"].append(seed)
            continue
        for engine in ENGINES:
            run = trained(engine, seed, size, data)
            report["runs"][engine].append(run)
            say(f"{engine}, seed {seed}: evaluation loss {run['eval_loss']:.4f}")
            report["compared"] = compared(report["runs"])
            path = write(report, options.out, stem, table(report))
    if time.monotonic() - begin <= options.budget:
        report["exact"] = step_by_step(size, data)
        path = write(report, options.out, stem, table(report))
    say(f"\n{table(report)}\nwritten: {path}, {time.monotonic() - begin:.0f} s")
    return int(not agrees(report))


if __name__ == "__main__":
    sys.exit(main())
