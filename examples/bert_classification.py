"""Trains a small BERT to tell two kinds of sentences apart, on batches that are padded.

    python bert_classification.py

The sentences are made up: of class 1 are those in which some word comes twice. Padded tokens are
not computed, and neither are tokens of the last layer that the classifier does not read.
"""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification

import onward

WORDS, LONGEST, BATCH, STEPS = 60, 24, 32, 150


def sentences(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A padded batch: ids i64[B,T], attention_mask i64[B,T], labels i64[B]."""
    ids = torch.zeros(count, LONGEST, dtype=torch.int64)  # 0 pads
    mask = torch.zeros_like(ids)
    labels = torch.randint(0, 2, (count,), generator=generator)
    for row, label in enumerate(labels.tolist()):
        length = int(torch.randint(4, LONGEST, (1,), generator=generator))
        words = torch.randperm(WORDS, generator=generator)[:length] + 2
        if label:
            words[-1] = words[0]
        words = words[torch.randperm(length, generator=generator)]
        ids[row, : length + 1] = torch.cat([torch.tensor([1]), words])  # 1 opens a sentence
        mask[row, : length + 1] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def main() -> tuple[float, float]:
    """The evaluation loss before and after."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    config = BertConfig(vocab_size=WORDS + 2, hidden_size=64, num_hidden_layers=2,
                        num_attention_heads=4, intermediate_size=128,
                        max_position_embeddings=LONGEST)  # fmt: skip
    model = BertForSequenceClassification(config)
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    held_out = sentences(128, generator)
    before = float(trainer.eval_step(held_out).loss)
    for step in range(STEPS):
        loss = trainer.train_step(sentences(BATCH, generator)).loss
        if step % 50 == 0:
            print(f"step {step:4}  loss {float(loss):.3f}")

    result = trainer.eval_step(held_out, fetch="logits")
    right = result.outputs["logits"].argmax(-1) == held_out["labels"]
    print(
        f"held out: loss {before:.3f} -> {float(result.loss):.3f}, {right.float().mean():.0%} right"
    )
    print(trainer.explain(held_out).rows)  # which rows of which layer a batch needs
    return before, float(result.loss)


if __name__ == "__main__":
    main()
