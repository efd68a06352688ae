"""Trains tiny models in the ways there are, and prints for each the losses, the exports and the
seconds: what `test_kept_captures.py` runs twice.

    python tests/capture/kept_program.py gpt2 bert ...
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import tiny

import onward


def trainer(model: Any, batch: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ours = onward.Trainer(model, optimizer, options={"seed": 3})
    return [float(ours.train_step(**batch).loss) for _ in range(3)]


def own_loop(model: Any, batch: Any) -> list[float]:
    onward.accelerate(model)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def loop(kind: Any, model: Any, batch: Any) -> list[float]:
    rows = [{k: v[i] for k, v in batch.items()} for i in range(len(batch["labels"]))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0,
        )  # fmt: skip
        ours = kind(model=model, args=arguments, train_dataset=rows)
        ours.train()
    return [line["loss"] for line in ours.state.log_history if "loss" in line]


def drop_in(model: Any, batch: Any) -> list[float]:
    from onward.integrations.transformers import Trainer

    return loop(Trainer, model, batch)


def their_own(model: Any, batch: Any) -> list[float]:
    return loop(transformers.Trainer, onward.accelerate(model), batch)


def accelerated(model: Any, batch: Any) -> list[float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(onward.accelerate(model), optimizer)
    found = []
    for _ in range(2):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def t5() -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"decoder_start_token_id": 0}
    config = transformers.T5Config(
        d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=tiny.VOCABULARY,
        **settings,
    )  # fmt: skip
    return tiny.ready(transformers.T5ForConditionalGeneration(config))


def labels(batch: Any) -> Any:
    return {**batch, "labels": torch.arange(len(batch["labels"])) % 3}


RUNS: dict[str, Callable[[], list[float]]] = {
    "gpt2": lambda: trainer(tiny.gpt2(), tiny.batch(padding="right")),
    "bert": lambda: trainer(tiny.bert(classes=3), labels(tiny.batch(padding="right"))),
    "t5": lambda: trainer(t5(), tiny.batch(padding="right")),
    "gpt2 in a loop": lambda: own_loop(tiny.gpt2(), tiny.batch(padding="right")),
    "bert in a loop": lambda: own_loop(tiny.bert(classes=3), labels(tiny.batch())),
    "t5 in a loop": lambda: own_loop(t5(), tiny.batch(padding="right")),
    "accelerate": lambda: accelerated(tiny.gpt2(), tiny.batch()),
    "their Trainer": lambda: their_own(tiny.gpt2(), tiny.batch(padding="right")),
    "the Trainer in its place": lambda: drop_in(tiny.gpt2(), tiny.batch(padding="right")),
    "the Trainer of a classifier": lambda: drop_in(tiny.bert(classes=3), labels(tiny.batch())),
}


def main() -> None:
    """Runs what is asked for, or all."""
    warnings.simplefilter("ignore")
    exports, real = [0], torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        exports[0] += 1
        return real(*args, **kwargs)

    torch.export.export = counted  # type: ignore[assignment]
    found = {}
    for name in sys.argv[1:] or RUNS:
        exports[0] = 0
        torch.manual_seed(0)
        start = time.perf_counter()
        results = RUNS[name]()
        found[name] = [[x.hex() for x in results], exports[0], time.perf_counter() - start]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
