"""Cases of training on several ranks: models, options, batches, and who gets which rows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
STEPS, ROWS, LENGTH = 20, 7, 8
ODD = 97
RATE = 0.05


def gpt2() -> torch.nn.Module:
    import tiny

    return tiny.gpt2(0.1, layers=1, width=16)


def wide() -> torch.nn.Module:
    """Weights of 4,096 elements, whose moments are kept in 8 bits."""
    import tiny

    return tiny.gpt2(0.1, layers=2, width=32)


def odd() -> torch.nn.Module:
    """A vocabulary that no number of ranks divides."""
    import tiny

    return tiny.gpt2(0.1, layers=1, width=16, vocab_size=ODD)


def bert() -> torch.nn.Module:
    import tiny

    return tiny.bert(0.1, layers=1, width=16)


def t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=100, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.1,
        use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, use_cache=False,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1, use_cache=False,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


@dataclass(frozen=True)
class Case:
    """A run that several ranks make, and one as well. padding: whether rows are of different
    lengths. early: the step after which a window of two micro-batches ends with one. near: the case
    in fp32, where this one has less precision. zero: the stage of ZeRO. is_cut: whether the ranks
    are along dp_shard too. tp: whether pairs of ranks share weights. cp: the number of ranks that
    share sequences, of as many as there are. pp: whether ranks share the layers, and pipelines: in
    how many groups, each with a share of the batch, of four ranks. uneven: whether all ranks but
    one have no rows in some steps. positions: whether pairs of ranks also share the positions
    between the weights. disk: whether the ranks, but not the one, have moments in files."""

    model: Callable[[], torch.nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    padding: bool = False
    early: int | None = None
    near: str | None = None
    zero: int = 0
    is_cut: bool = False
    tp: bool = False
    cp: int = 0
    pp: bool = False
    pipelines: int = 1
    uneven: bool = False
    positions: bool = False
    disk: bool = False

    @property
    def ring(self) -> bool:
        """Says whether keys and values go round a ring."""
        return self.options.get("context_parallel_method") == "ring"

    @property
    def has_parts(self) -> bool:
        """Says whether ranks have parts of the weights."""
        return self.zero == 3 or self.tp or self.pp

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        """The number of a rank's share of the batch, and the number of shares: ranks along `tp` and
        `cp`, who are neighbours, have the same, and so have those along `pp`."""
        if self.pp:
            same = ranks // self._pipelines(ranks)
            return rank // same, ranks // same
        same = min((2 if self.tp else 1) * max(self.cp, 1), ranks)
        return rank // same, ranks // same

    def options_of(self, ranks: int) -> dict[str, Any]:
        """The options of a run with this number of ranks."""
        if ranks == 1:
            return dict(self.options)
        if self.pp:
            number = self._pipelines(ranks)
            zero = self.zero if number > 1 else 0
            sizes = {"dp_shard" if zero else "dp_replicate": number, "pp": ranks // number}
            if self.tp and ranks > 2:
                sizes = {"pp": ranks // 2, "tp": 2}
            if self.cp and ranks > 2:
                sizes = {"pp": ranks // 2, "cp": 2}
            split = {"sequence_parallel": True} if self.positions and "tp" in sizes else {}
            return {**self.options, **split, "mesh": sizes, "zero": zero}
        if self.cp and (self.tp or self.zero):
            return {**self.options, **self._of_sequences(ranks)}
        if self.tp:
            zero = self.zero if ranks > 2 else 0
            sizes = {"dp_shard" if zero else "dp_replicate": ranks // 2, "tp": 2}
            split = {"sequence_parallel": True} if self.positions else {}
            return {**self.options, **split, "mesh": sizes, "zero": zero}
        if self.cp:
            same = min(self.cp, ranks)
            return {**self.options, "mesh": {"dp_replicate": ranks // same, "cp": same}}
        sizes = {"dp_replicate": ranks // 2, "dp_shard": 2}
        mesh = sizes if self.zero or self.is_cut else {"dp_replicate": ranks}
        return {**self.options, "mesh": mesh, "zero": self.zero}

    def _of_sequences(self, ranks: int) -> dict[str, Any]:
        """Sequences in parts beside weights or state, of four ranks or more."""
        tp = 2 if self.tp else 1
        axis = "dp_shard" if self.zero else "dp_replicate"
        sizes = {axis: ranks // (self.cp * tp), "cp": self.cp, "tp": tp}
        return {"mesh": sizes, "zero": self.zero}

    def _pipelines(self, ranks: int) -> int:
        return self.pipelines if ranks > 2 else 1


WINDOW = {"gradient_accumulation_steps": 2}
CLIPPED, LOW = {"max_grad_norm": 0.5}, {"optimizer_state": "bf16"}
RING = {"context_parallel_method": "ring"}
CASES = {
    "gpt2": Case(gpt2, CLIPPED),
    "gpt2 bf16": Case(gpt2, {"mixed_precision": "bf16", **CLIPPED}, near="gpt2"),
    "gpt2 window": Case(gpt2, WINDOW, early=4),
    "gpt2 fp16": Case(gpt2, {"mixed_precision": "fp16", **WINDOW}, early=4, near="gpt2 window"),
    "gpt2 adamw": Case(gpt2, {"ema_decay": 0.9}, "AdamW"),
    "bert": Case(bert, padding=True),
    "bert window": Case(bert, {**WINDOW, "max_grad_value": 0.01}, padding=True, early=8),
    "bert every row": Case(bert, {"disable": "row_demand"}, padding=True),
    "t5": Case(t5, CLIPPED, padding=True),
    "t5 window": Case(t5, WINDOW, padding=True, early=2),
    "llama": Case(llama, {"memory_budget": 0.5}),
    "llama window": Case(llama, WINDOW),
    "llama bf16 sums": Case(
        llama, {**WINDOW, "gradient_accumulation_dtype": "bf16"}, near="llama window"
    ),
    "gpt2 uneven": Case(gpt2, CLIPPED, uneven=True),
    "bert uneven": Case(bert, WINDOW, padding=True, early=8, uneven=True),
    "t5 uneven": Case(t5, {**WINDOW, **CLIPPED}, padding=True, early=2, zero=2, uneven=True),
    "gpt2 shards": Case(gpt2, CLIPPED, is_cut=True),
    "gpt2 zero": Case(gpt2, CLIPPED, "AdamW", zero=1),
    "gpt2 zero 2": Case(gpt2, {**WINDOW, **CLIPPED, "ema_decay": 0.9}, early=4, zero=2),
    "gpt2 zero fp16": Case(
        gpt2, {"mixed_precision": "fp16", **WINDOW}, early=4, near="gpt2 window", zero=2
    ),
    "bert zero": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, zero=1
    ),
    "t5 zero": Case(t5, WINDOW, "AdamW", padding=True, early=2, zero=2),
    "llama zero": Case(llama, {}, "AdamW", zero=1),
    "gpt2 zero 3": Case(gpt2, {**CLIPPED, "ema_decay": 0.9}, "AdamW", zero=3),
    "bert zero 3": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, zero=3
    ),
    "t5 zero 3": Case(t5, {**WINDOW, "memory_budget": 0.5}, "AdamW", padding=True, early=2, zero=3),
    "llama zero 3": Case(llama, CLIPPED, zero=3),
    "gpt2 zero lamb": Case(gpt2, {**WINDOW, **CLIPPED}, "LAMB", early=4, zero=1),
    "llama zero 2 muon": Case(llama, {**WINDOW, **CLIPPED}, "MuonWithAdamW", early=4, zero=2),
    "bert zero 2 adafactor": Case(bert, WINDOW, "Adafactor", padding=True, early=8, zero=2),
    "gpt2 zero 3 lamb": Case(gpt2, {**CLIPPED, "ema_decay": 0.9}, "LAMB", zero=3),
    "t5 zero 3 muon": Case(t5, WINDOW, "MuonWithAdamW", padding=True, early=2, zero=3),
    "gpt2 zero 3 bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 zero 3", zero=3
    ),
    "gpt2 tp": Case(gpt2, {**CLIPPED, "ema_decay": 0.9}, "AdamW", tp=True),
    "bert tp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, tp=True
    ),
    "t5 tp": Case(t5, WINDOW, padding=True, early=2, tp=True),
    "llama tp": Case(llama, {"memory_budget": 0.5, **CLIPPED}, "AdamW", tp=True),
    "llama tp lamb": Case(llama, {}, "LAMB", tp=True),
    "mixtral tp": Case(mixtral, WINDOW, "AdamW", early=4, tp=True),
    "gpt2 tp adafactor": Case(gpt2, WINDOW, "Adafactor", early=4, tp=True),
    "gpt2 tp bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 tp", tp=True
    ),
    "gpt2 cp": Case(gpt2, {**CLIPPED, "ema_decay": 0.9}, "AdamW", cp=2),
    "gpt2 cp 4": Case(gpt2, {**WINDOW, "gradient_accumulation_average": "micro_batches"}, cp=4),
    "bert cp": Case(bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, cp=2),
    "t5 cp": Case(t5, {**WINDOW, "memory_budget": 0.5}, padding=True, early=2, cp=4),
    "llama cp": Case(llama, CLIPPED, "LAMB", cp=2),
    "llama cp sums": Case(
        llama, {**WINDOW, "gradient_accumulation_dtype": "bf16"}, near="llama window", cp=2
    ),
    "gpt2 cp bf16": Case(gpt2, {"mixed_precision": "bf16", **CLIPPED}, near="gpt2", cp=2),
    "gpt2 cp fp16": Case(
        gpt2, {"mixed_precision": "fp16", **WINDOW}, early=4, near="gpt2 window", cp=4
    ),
    "gpt2 ring": Case(gpt2, {**CLIPPED, **RING}, "AdamW", cp=4),
    "gpt2 ring window": Case(gpt2, {**WINDOW, **RING}, early=4, cp=2),
    "bert ring": Case(
        bert, {**WINDOW, "max_grad_value": 0.01, **RING}, "AdamW", padding=True, early=8, cp=4
    ),
    "t5 ring": Case(t5, {**WINDOW, **RING}, padding=True, early=2, cp=2),
    "llama ring": Case(llama, {"memory_budget": 0.5, **RING}, "AdamW", cp=4),
    "gpt2 ring bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED, **RING}, near="gpt2", cp=4
    ),
    "llama ring tp": Case(llama, {**CLIPPED, **RING}, "AdamW", tp=True, cp=2),
    "gpt2 ring zero 2": Case(gpt2, {**WINDOW, **RING}, "AdamW", early=4, zero=2, cp=2),
    "gpt2 cp tp": Case(gpt2, CLIPPED, "AdamW", tp=True, cp=2),
    "bert cp tp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, tp=True, cp=2
    ),
    "t5 cp tp": Case(t5, {**WINDOW, "memory_budget": 0.5}, padding=True, early=2, tp=True, cp=2),
    "llama cp tp": Case(llama, CLIPPED, "LAMB", tp=True, cp=2),
    "odd cp tp bf16": Case(
        odd, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 odd tp", tp=True, cp=2
    ),
    "gpt2 cp zero": Case(gpt2, CLIPPED, "AdamW", zero=1, cp=2),
    "bert cp zero 2": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, zero=2, cp=2
    ),
    "t5 cp zero 3": Case(t5, WINDOW, "AdamW", padding=True, early=2, zero=3, cp=2),
    "llama cp zero 2": Case(llama, {**WINDOW, **CLIPPED}, "AdamW", zero=2, cp=2),
    "gpt2 cp zero 3 bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 zero 3", zero=3, cp=2
    ),
    "gpt2 tp positions": Case(gpt2, CLIPPED, "AdamW", tp=True, positions=True),
    "bert tp positions": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, padding=True, early=8, tp=True, positions=True
    ),
    "llama tp positions bf16": Case(
        llama, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="llama tp", tp=True,
        positions=True,
    ),
    "t5 tp zero 2 positions": Case(
        t5, {**WINDOW, "memory_budget": 0.5}, "AdamW", padding=True, early=2, zero=2, tp=True,
        positions=True,
    ),
    "gpt2 odd tp": Case(odd, CLIPPED, "AdamW", tp=True),
    "gpt2 tp zero": Case(gpt2, CLIPPED, "AdamW", zero=1, tp=True),
    "odd tp zero 2": Case(odd, {**WINDOW, **CLIPPED}, "AdamW", early=4, zero=2, tp=True),
    "t5 tp zero 3": Case(
        t5, {**WINDOW, "ema_decay": 0.9}, "AdamW", padding=True, early=2, zero=3, tp=True
    ),
    "llama tp state": Case(llama, LOW, "AdamW", near="llama tp", zero=1, tp=True),
    "llama zero bf16": Case(llama, LOW, "AdamW", near="llama zero", zero=1),
    "gpt2 pp": Case(gpt2, {**CLIPPED, "pipeline_microbatches": 3}, "AdamW", pp=True),
    "bert pp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01, "pipeline_schedule": "GPipe"}, padding=True,
        early=8, pp=True,
    ),
    "t5 pp": Case(t5, {**CLIPPED, "pipeline_schedule": "InterleavedZeroBubble"}, "AdamW",
                  padding=True, pp=True),
    "llama pp lamb": Case(llama, {"pipeline_schedule": "Interleaved1F1B"}, "LAMB", pp=True),
    "gpt2 pp bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED, "pipeline_microbatches": 5}, "AdamW",
        near="gpt2 pp", pp=True,
    ),
    "gpt2 pp average": Case(gpt2, {**WINDOW, "ema_decay": 0.9}, "AdamW", early=4, pp=True),
    "bert pp budget": Case(
        bert, {"memory_budget": 0.5, "pipeline_microbatches": 3}, "AdamW", padding=True, pp=True
    ),
    "llama pp state": Case(llama, LOW, "AdamW", near="llama tp", pp=True),
    "wide pp budget": Case(wide, {**CLIPPED, "memory_budget": 0.1}, "AdamW", pp=True),
    "wide pp 8bit": Case(
        wide, {**WINDOW, "optimizer_state": "8bit"}, "AdamW", near="wide pp budget", pp=True
    ),
    "gpt2 pp fp16": Case(
        gpt2, {"mixed_precision": "fp16", **WINDOW}, early=4, near="gpt2 window", pp=True
    ),
    "gpt2 pp tp": Case(gpt2, {**CLIPPED, "pipeline_microbatches": 3}, "AdamW", tp=True, pp=True),
    "bert pp tp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01, "pipeline_schedule": "GPipe"}, "AdamW",
        padding=True, early=8, tp=True, pp=True,
    ),
    "t5 pp tp": Case(
        t5, {**CLIPPED, "pipeline_schedule": "InterleavedZeroBubble"}, "AdamW", padding=True,
        tp=True, pp=True,
    ),
    "gpt2 odd pp tp": Case(odd, WINDOW, "AdamW", tp=True, pp=True),
    "gpt2 pp tp bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 pp", tp=True, pp=True
    ),
    "bert pp tp positions": Case(
        bert, {**WINDOW, "pipeline_microbatches": 3}, "AdamW", padding=True, early=8, tp=True,
        pp=True, positions=True,
    ),
    "gpt2 pp cp": Case(gpt2, {**CLIPPED, "ema_decay": 0.9}, "AdamW", cp=2, pp=True),
    "bert pp cp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01, "pipeline_schedule": "GPipe"}, "AdamW",
        padding=True, early=8, cp=2, pp=True,
    ),
    "t5 pp cp": Case(
        t5, {**CLIPPED, "pipeline_schedule": "InterleavedZeroBubble"}, "AdamW", padding=True,
        cp=2, pp=True,
    ),
    "llama pp cp lamb": Case(
        llama, {"pipeline_microbatches": 3, "memory_budget": 0.5}, "LAMB", cp=2, pp=True
    ),
    "gpt2 pp cp bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 pp", cp=2, pp=True
    ),
    "gpt2 pp cp fp16": Case(
        gpt2, {"mixed_precision": "fp16", **WINDOW}, early=4, near="gpt2 window", cp=2, pp=True
    ),
    "gpt2 pp dp": Case(
        gpt2, {**CLIPPED, "pipeline_microbatches": 3}, "AdamW", pp=True, pipelines=2
    ),
    "bert pp dp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01, "pipeline_schedule": "GPipe"}, padding=True,
        early=8, pp=True, pipelines=2, uneven=True,
    ),
    "t5 pp zero 2": Case(
        t5, {**WINDOW, **CLIPPED, "pipeline_schedule": "InterleavedZeroBubble"}, "AdamW",
        padding=True, early=2, zero=2, pp=True, pipelines=2,
    ),
    "llama pp zero": Case(
        llama, {**CLIPPED, "pipeline_schedule": "Interleaved1F1B"}, "AdamW", zero=1, pp=True,
        pipelines=2,
    ),
    "gpt2 pp zero bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED, "pipeline_microbatches": 3}, "AdamW",
        near="gpt2 pp", zero=2, pp=True, pipelines=2,
    ),
    "gpt2 pp zero 3": Case(
        gpt2, {**CLIPPED, "ema_decay": 0.9, "pipeline_microbatches": 3}, "AdamW", zero=3, pp=True,
        pipelines=2,
    ),
    "t5 pp zero 3": Case(
        t5, {**WINDOW, "memory_budget": 0.5, "pipeline_schedule": "InterleavedZeroBubble"}, "AdamW",
        padding=True, early=2, zero=3, pp=True, pipelines=2,
    ),
    "bert pp zero 3 bf16": Case(
        bert, {"mixed_precision": "bf16", **CLIPPED, "pipeline_schedule": "GPipe"}, "AdamW",
        padding=True, near="bert pp budget", zero=3, pp=True, pipelines=2,
    ),
    "gpt2 pp dp fp16": Case(
        gpt2, {"mixed_precision": "fp16", **WINDOW}, early=4, near="gpt2 window", pp=True,
        pipelines=2,
    ),
    "gpt2 pp zero lamb": Case(gpt2, CLIPPED, "LAMB", zero=1, pp=True, pipelines=2),
    "llama pp zero 2 muon": Case(
        llama, {**WINDOW, **CLIPPED, "pipeline_schedule": "Interleaved1F1B"}, "MuonWithAdamW",
        early=4, zero=2, pp=True, pipelines=2,
    ),
    "bert pp zero 2 adafactor": Case(
        bert, WINDOW, "Adafactor", padding=True, early=8, zero=2, pp=True, pipelines=2
    ),
    "gpt2 disk": Case(gpt2, CLIPPED, "AdamW", disk=True),
    "gpt2 zero 2 disk": Case(gpt2, {**WINDOW, **CLIPPED}, "AdamW", early=4, zero=2, disk=True),
    "llama zero 3 muon disk": Case(llama, WINDOW, "MuonWithAdamW", zero=3, disk=True),
    "odd tp zero disk": Case(odd, CLIPPED, "AdamW", zero=1, tp=True, disk=True),
    "gpt2 pp disk": Case(gpt2, WINDOW, "AdamW", early=4, pp=True, disk=True),
}  # fmt: skip


_HELD = {name: case for name, case in CASES.items() if not case.disk}
GROUPS = {  # by what ranks share
    "the batch": {
        n: c for n, c in _HELD.items() if not (c.zero or c.tp or c.cp or c.pp or c.uneven)
    },
    "uneven rows": {n: case for n, case in _HELD.items() if case.uneven and not case.pp},
    "state": {n: c for n, c in _HELD.items() if c.zero and not (c.tp or c.cp or c.uneven or c.pp)},
    "weights": {
        n: c for n, c in _HELD.items() if c.tp and not (c.zero or c.cp or c.pp or c.positions)
    },
    "weights and state": {
        n: c for n, c in _HELD.items() if c.tp and c.zero and not (c.cp or c.positions)
    },
    "positions between weights": {n: c for n, c in _HELD.items() if c.positions and not c.pp},
    "sequences": {
        n: c for n, c in _HELD.items() if c.cp and not (c.tp or c.zero or c.ring or c.pp)
    },
    "sequences in a ring": {n: c for n, c in _HELD.items() if c.ring and not (c.tp or c.zero)},
    "sequences and weights": {n: case for n, case in _HELD.items() if case.cp and case.tp},
    "sequences and state": {n: case for n, case in _HELD.items() if case.cp and case.zero},
    "layers": {n: c for n, c in _HELD.items() if c.pp and c.pipelines == 1 and not (c.tp or c.cp)},
    "layers and sequences": {n: case for n, case in _HELD.items() if case.pp and case.cp},
    "layers and weights": {n: case for n, case in _HELD.items() if case.pp and case.tp},
    "files": {name: case for name, case in CASES.items() if case.disk},
    "layers and the batch": {n: case for n, case in _HELD.items() if case.pipelines > 1},
}


def shares(step: int, ranks: int, uneven: bool = False) -> list[int]:
    """The rows of each rank in a step: unequal, and other ones in the next step; uneven: in each
    third step all rows are one rank's."""
    if uneven and step % 3 == 0:
        return [ROWS * (rank == step // 3 % ranks) for rank in range(ranks)]
    sizes = [1] * ranks
    for i in range(ROWS - ranks):
        sizes[(i * i + step) % ranks] += 1
    return sizes


def rows(case: Case, step: int) -> Tensors:
    """The batch of all ranks; the rows have unequal numbers of labels, one of them none."""
    import tiny

    data = tiny.batch(ROWS, LENGTH, "right" if case.padding else None, seed=step)
    if case.model is odd:
        data = {n: x % ODD for n, x in data.items()}
    data["labels"][step % ROWS] = -100
    data["labels"][::2, : step % 5] = -100
    return data


def own_rows(case: Case, step: int, rank: int, ranks: int) -> Tensors:
    """A rank's share of the batch of a step."""
    number, count = case.share(rank, ranks)
    sizes = shares(step, count, case.uneven)
    start = sum(sizes[:number])
    return {n: x[start : start + sizes[number]] for n, x in rows(case, step).items()}


def trainer_of(case: Case, ranks: int, model: torch.nn.Module | None = None, **more: Any) -> Any:
    """A Trainer of a case's model, or of another one, with more options."""
    import onward

    torch.manual_seed(0)
    sgd, adamw = onward.optim.SGD(lr=RATE, momentum=0.9), onward.optim.AdamW(lr=1e-3, eps=1e-4)
    adafactor = onward.optim.Adafactor(lr=1e-3)
    made = {"SGD": sgd, "AdamW": adamw, "LAMB": onward.optim.LAMB(), "Adafactor": adafactor}
    made["MuonWithAdamW"] = onward.optim.MuonWithAdamW(lr=1e-3, eps=1e-4)
    options = {**case.options_of(ranks), **more}
    if case.disk and ranks > 1:
        options |= {"offload_optimizer": "disk", "offload_dir": tempfile.gettempdir()}
    model = case.model() if model is None else model
    return onward.Trainer(model, made[case.optimizer], options=options)


def trained(trainer: Any, case: Case, rank: int, ranks: int, steps: Sequence[int]) -> list[float]:
    """The losses of these steps."""
    losses: list[float] = []
    for step in steps:
        part = own_rows(case, step, rank, ranks)
        losses.append(float(trainer.train_step(part).loss))
        if step == case.early:
            assert trainer.update() is not None
    return losses


def apart(found: Tensors, want: Tensors) -> float:
    """The largest distance of a tensor from the one that it should be, relative to its norm."""
    assert found.keys() == want.keys()
    return max(
        float((found[name].double() - y.double()).norm() / y.double().norm())
        for name, y in want.items()
    )
