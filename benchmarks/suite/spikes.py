"""How many flipped bits and odd batches `loss_spikes` finds, and its false alarms."""

from __future__ import annotations

import copy
import logging
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import onward
from suite.held_out_text import Data
from suite.progress import Clock, say
from suite.report import markdown

LATER = 3  # updates after a fault in which it may be found


@dataclass(frozen=True)
class Size:
    """The model, its batches i64[rows,tokens], and how many steps and faults there are."""

    vocabulary: int = 2000
    width: int = 64
    layers: int = 2
    rows: int = 8
    tokens: int = 32
    steps: int = 1000  # of each run that counts false alarms
    before: int = 200  # updates before faults
    faults: int = 200  # of each kind
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    thresholds: tuple[float, ...] = (5.0, 8.0, 12.0)


QUICK = Size(
    vocabulary=200, width=16, layers=1, rows=2, tokens=16, steps=60, before=50, faults=4,
    rates=(1e-3,), thresholds=(8.0,),
)  # fmt: skip


@dataclass
class Found:
    """Faults of one kind: how many were found, and by how much the others raised the loss."""

    tried: int = 0
    found: int = 0
    nonfinite: int = 0  # found as infinite or NaN
    missed: list[float] = field(default_factory=list)  # rise of the loss, in nats


def model(size: Size, seed: int) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.vocabulary, n_embd=size.width, n_layer=size.layers, n_head=4,
            n_positions=size.tokens, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def trainer_of(size: Size, seed: int, rate: float, **options: Any) -> onward.Trainer:
    net = model(size, seed)
    return onward.Trainer(
        net, torch.optim.AdamW(net.parameters(), lr=rate), options={"seed": seed, **options}
    )


def batches(size: Size, data: Data, seed: int) -> Callable[[], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        ids = data.batch(size.rows, size.tokens, generator)
        return {"input_ids": ids, "labels": ids}

    return draw


def false_alarms(size: Size, data: Data, rate: float, threshold: float) -> int:
    """Updates that are left out in a run without a fault."""
    trainer = trainer_of(
        size, 0, rate, loss_spikes="skip", loss_spike_threshold=threshold, max_skipped_updates=None
    )
    draw = batches(size, data, 1)
    return sum(trainer.train_step(draw()).skipped for _ in range(size.steps))


def flip_exponent(net: torch.nn.Module, draw: random.Random) -> None:
    """Flips one of the 8 bits of the exponent of one weight, as a fault of memory would."""
    weights = list(net.parameters())
    [p] = draw.choices(weights, [p.numel() for p in weights])
    with torch.no_grad():
        flat = p.view(-1)
        i = draw.randrange(flat.numel())
        [bits] = struct.unpack("<I", struct.pack("<f", float(flat[i])))
        [changed] = struct.unpack("<f", struct.pack("<I", bits ^ (1 << draw.randrange(23, 31))))
        flat[i] = changed


def odd_labels(data: dict[str, Tensor], draw: random.Random, vocabulary: int) -> dict[str, Tensor]:
    """The batch with labels at random, as from a file that was read wrongly."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    labels = torch.randint(0, vocabulary, data["labels"].shape, generator=generator)
    return {**data, "labels": labels}


def detection(size: Size, data: Data, kind: str, threshold: float) -> Found:
    """Puts faults of one kind into a run, each from the same state before it."""
    trainer = trainer_of(size, 0, 1e-3, loss_spikes="skip", loss_spike_threshold=threshold)
    draw, chance, found = batches(size, data, 1), random.Random(7), Found()
    for _ in range(size.before):
        trainer.train_step(draw())
    state = copy.deepcopy(trainer.state_dict())
    level = sum(float(trainer.train_step(draw()).loss) for _ in range(20)) / 20
    for _ in range(size.faults):
        trainer.load_state_dict(state)
        if kind == "a bit of an exponent":
            flip_exponent(trainer.model, chance)
        found.tried += 1
        worst = -1e9
        for later in range(LATER):
            batch = draw()
            if kind == "labels at random":
                if later:
                    break
                batch = odd_labels(batch, chance, size.vocabulary)
            result = trainer.train_step(batch)
            loss = float(result.loss)
            worst = max(worst, loss - level)
            if result.skipped:
                found.found += 1
                found.nonfinite += not torch.isfinite(result.loss)
                break
        else:
            found.missed.append(worst)
    return found


def measured(size: Size, data: Data, clock: Clock) -> dict[str, Any]:
    """All that is measured, as far as the budget goes."""
    logging.getLogger("onward").setLevel(logging.ERROR)  # a line for each update that is left out
    report: dict[str, Any] = {"size": vars(size), "source": data.source, "alarms": [], "found": []}
    for threshold in size.thresholds:
        for rate in size.rates:
            if clock.over():
                return report
            count = false_alarms(size, data, rate, threshold)
            say(f"threshold {threshold:g}, learning rate {rate:g}: {count} of {size.steps}")
            report["alarms"].append({"threshold": threshold, "rate": rate, "count": count})
        for kind in ("a bit of an exponent", "labels at random"):
            if clock.over():
                return report
            found = detection(size, data, kind, threshold)
            say(f"threshold {threshold:g}, {kind}: {found.found} of {found.tried}")
            report["found"].append({"threshold": threshold, "kind": kind, **vars(found)})
    return report


def table(report: Mapping[str, Any]) -> list[str]:
    """The two tables as lines of Markdown."""
    steps = report["size"]["steps"]
    alarms = markdown(
        ["threshold", "learning rate", f"false alarms in {steps} updates"],
        [[f"{x['threshold']:g}", f"{x['rate']:g}", str(x["count"])] for x in report["alarms"]],
    )
    rows = []
    for x in report["found"]:
        missed = sorted(x["missed"])
        harmful = sum(rise > 0.5 for rise in missed)
        most = f"{missed[-1]:.2f}" if missed else ""
        rows.append(
            [f"{x['threshold']:g}", x["kind"], f"{x['found']} of {x['tried']}", str(x["nonfinite"]),
             str(harmful), most]
        )  # fmt: skip
    head = ["threshold", "fault", "left out", "of these not finite", "missed, over 0.5 nats",
            "largest rise missed, nats"]  # fmt: skip
    return [*alarms, "", *markdown(head, rows, left=2)]
