"""What a memory budget costs: time of a step at fractions of its unconstrained peak.

    python benchmarks/recompute.py [fraction ...]

GPT-2 with 8 layers, 256 wide, vocabulary 1000, 8 sequences of 256 tokens, dropout on, AdamW: most
of its memory is what forward keeps for backward. Processor time on one thread, the smallest of
several steps, the budgets in turn; that is steady on a machine which others use too.

The fractions here are of the whole unconstrained peak, and are given to the Trainer as bytes. (A
fraction given to the Trainer itself is one of what recomputing can spare.)
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import onward

STEPS = 6
FRACTIONS = (0.8, 0.6, 0.5, 0.4, 0.3)


def trainer_of(budget: int | None) -> onward.Trainer:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=256, n_head=4, n_positions=256, vocab_size=1000,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    options = onward.TrainerOptions(seed=1, memory_budget=budget)
    return onward.Trainer(model, onward.optim.AdamW(lr=5e-5), options=options)


def main(fractions: tuple[float, ...]) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (8, 256), generator=generator)
    data = {"input_ids": ids, "labels": ids}
    trainers: dict[float, onward.Trainer] = {}
    free = trainer_of(None)
    free.train_step(data)
    trainers[1.0] = free
    for fraction in fractions:
        trainer = trainer_of(int(fraction * free.plan.peak))
        try:
            trainer.train_step(data)
        except onward.OnwardError as error:
            print(f"{fraction}: {error}")
        else:
            trainers[fraction] = trainer
    best = dict.fromkeys(trainers, float("inf"))
    for _ in range(STEPS):
        for fraction, trainer in trainers.items():
            start = time.process_time()
            trainer.train_step(data)
            best[fraction] = min(best[fraction], time.process_time() - start)
    print("| budget | peak MiB | of unconstrained | step ms | slower | launches | search s |")
    print("|---|---|---|---|---|---|---|")
    whole = trainers[1.0].plan.peak
    for fraction, trainer in trainers.items():
        plan, report = trainer.plan, trainer.report()
        print(
            f"| {fraction} | {plan.peak / 2**20:.0f} | {plan.peak / whole:.3f} | "
            f"{best[fraction] * 1e3:.0f} | {best[fraction] / best[1.0]:.2f}x | "
            f"{len(plan.launches)} | {report['compile_seconds'].get('recompute', 0.0):.2f} |"
        )


if __name__ == "__main__":
    main(tuple(float(word) for word in sys.argv[1:]) or FRACTIONS)
