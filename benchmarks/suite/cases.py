"""The cases: which model, batch and precision each benchmark times, and their tiny forms."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Case:
    """One thing to time. `precision`: fp32, tf32 (products of fp32 tensors), bf16 (autocast).

    causal: whether attention's scores above the diagonal are needed by nobody.
    real, labelled, fit: read by the padded workloads only. The share of tokens that are no
    padding; the share of those that have a label; whether a batch is cut to its longest sequence.
    """

    name: str
    model: str  # a key of workloads.MODELS
    batch: int  # sequences per step
    tokens: int  # per sequence; the longer side of a two-tower model
    precision: str = "fp32"
    dropout: float = 0.1
    size: str = "full"  # or "tiny", to try the scripts
    causal: bool = True
    real: float = 1.0
    labelled: float = 1.0
    fit: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Input positions per step, padding included."""
        short = self.tokens // 4 if self.model.startswith("two_tower") else 0
        return self.batch * (self.tokens + short)

    def tiny(self) -> Case:
        """This case on a model small enough to step in milliseconds."""
        # Few pairs make a loss that jumps, few sequences a share of padding that does.
        batch = 16 if "two_tower" in self.model else 4 if "padded" in self.model else 2
        return replace(self, size="tiny", batch=batch, tokens=32)


CPU = (
    Case("GPT-2, 4 layers", "gpt2_small", batch=4, tokens=256),
    Case("tutorial transformer", "tutorial", batch=20, tokens=35, dropout=0.2),
)

PADDED = (
    Case("BERT MLM, padded", "bert_padded", batch=16, tokens=128, real=0.46, labelled=0.15),
    Case("two towers, padded", "two_tower_padded", batch=64, tokens=64, real=0.45),
    Case("two towers by weights", "two_tower_weighted", batch=64, tokens=64, real=0.45),
    Case("two towers, first and mean", "two_tower_joined", batch=64, tokens=64, real=0.45),
    Case("two towers, both ways", "two_tower_contrastive", batch=64, tokens=64, real=0.45),
)

# A model of each family, with the dropout that it has by default.
FAMILIES = (
    Case("Llama", "llama", batch=4, tokens=256, dropout=0.0),
    Case("Qwen3", "qwen3", batch=4, tokens=256, dropout=0.0),
    Case("ViT", "vit", batch=8, tokens=197, dropout=0.0, causal=False),
    Case("Whisper-tiny", "whisper", batch=1, tokens=128, dropout=0.0, causal=False),
    Case("ModernBERT, padded", "modernbert", batch=8, tokens=256, dropout=0.0, real=0.7,
         labelled=0.15, causal=False),
    Case("DeBERTa v3, padded", "deberta", batch=8, tokens=128, real=0.7, labelled=0.15,
         causal=False),
    Case("T5", "t5", batch=4, tokens=256, causal=False),
    Case("GPT-2, 1024 tokens", "gpt2_small", batch=1, tokens=1024),
    Case("GPT-J, 512 tokens", "gptj", batch=2, tokens=512),
    Case("RoBERTa class, padded", "roberta", batch=16, tokens=128, real=0.45, causal=False),
    Case("CLIP", "clip", batch=8, tokens=64, dropout=0.0, real=0.7, causal=False),
    Case("mixture of experts", "qwen3_moe", batch=4, tokens=256, dropout=0.0),
)  # fmt: skip


def in_precision(case: Case, precision: str) -> Case:
    """The case in another precision; the case itself if `precision` is empty or its own."""
    if precision in ("", case.precision):
        return case
    name = case.name.removesuffix(", bf16")
    name = name if precision == "fp32" else f"{name}, {precision}"
    return replace(case, name=name, precision=precision)


# A model of each kind, in bfloat16.
MIXED = tuple(
    in_precision(case, "bf16")
    for case in (*CPU, *PADDED[:2], *FAMILIES)
    if case.name in (
        "GPT-2, 4 layers", "Llama", "BERT MLM, padded", "two towers, padded",
        "tutorial transformer", "T5", "ModernBERT, padded", "ViT",
    )
)  # fmt: skip

# The most telling cases come first: what a slow machine has no time for is at the end.
GPU = (
    Case("GPT-2 medium, bf16", "gpt2_medium", batch=8, tokens=1024, precision="bf16"),
    Case("BERT-large 128, bf16", "bert_large", batch=64, tokens=128, precision="bf16"),
    Case("tutorial transformer, fp32", "tutorial", batch=20, tokens=35, dropout=0.2),
    Case("two towers, tf32", "two_tower", batch=64, tokens=64, precision="tf32"),
    # A large batch is halved, so that the engines, which take turns, fit in memory side by side.
    Case("GPT-2 medium, tf32", "gpt2_medium", batch=4, tokens=1024, precision="tf32"),
    Case("BERT-large 512, bf16", "bert_large", batch=16, tokens=512, precision="bf16"),
    Case("GPT-2 medium, fp32", "gpt2_medium", batch=4, tokens=1024, precision="fp32"),
    Case("BERT-large 128, a quarter padding, bf16", "bert_large_padded", batch=64, tokens=128,
         precision="bf16", real=0.75, labelled=0.15),
    Case("BERT-large 512, half padding, bf16", "bert_large_padded", batch=16, tokens=512,
         precision="bf16", real=0.5, labelled=0.15),
    Case("Llama 1.2 B, bf16", "llama_1b", batch=4, tokens=1024, precision="bf16", dropout=0.0),
    Case("T5-base, bf16", "t5_base", batch=16, tokens=512, precision="bf16", causal=False),
    Case("two towers, bf16", "two_tower", batch=64, tokens=64, precision="bf16"),
)  # fmt: skip

# Steps whose memory on a GPU is predicted: the seeds of what is measured above, and larger ones.
MEMORY = tuple(
    in_precision(case, precision)
    for case in (
        *(Case("GPT-2 medium", "gpt2_medium", batch=n, tokens=1024) for n in (1, 4, 8)),
        Case("BERT-large 128", "bert_large", batch=64, tokens=128),
        Case("BERT-large 512", "bert_large", batch=16, tokens=512),
        Case("tutorial transformer", "tutorial", batch=20, tokens=35, dropout=0.2),
        Case("two towers", "two_tower", batch=64, tokens=64),
        Case("two towers, large", "two_tower", batch=4096, tokens=64),
        Case("Llama, 1.2 B", "llama_1b", batch=1, tokens=1024, dropout=0.0),
    )
    for precision in ("fp32", "bf16")
)

# Timed steps per round, so that a round of any of these models takes about as long.
STEPS: Mapping[str, int] = {
    "gpt2_small": 3,
    "tutorial": 12,
    "bert_padded": 3,
    **dict.fromkeys((case.model for case in PADDED if case.model.startswith("two_tower")), 5),
    **dict.fromkeys((case.model for case in FAMILIES if case.model != "gpt2_small"), 2),
}


def chosen(
    cases: Sequence[Case], part: str = "", quick: bool = False, precision: str = ""
) -> list[Case]:
    """The cases whose name contains `part`, or else one of its parts between commas; `quick`: their
    tiny forms, one where none is named.

    Exits with status 2 where there is none.
    """
    found = [case for case in cases if part in case.name]
    if not found:
        parts = [one.strip() for one in part.split(",")]
        found = [case for case in cases if any(one in case.name for one in parts)]
    if not found:
        names = ", ".join(case.name for case in cases)
        print(f"no such case: {part}; there are {names}", file=sys.stderr)
        raise SystemExit(2)
    found = [in_precision(case, precision) for case in found]
    if not quick:
        return found
    return [case.tiny() for case in (found if part else found[:1])]
