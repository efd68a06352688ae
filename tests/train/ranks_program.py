"""One of several processes that train a model together with a Trainer each, over Gloo, and what
each of them is given; `run` starts all of them and returns their results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks

Tensors = dict[str, torch.Tensor]
STEPS, ROWS, LENGTH = 20, 7, 8
ODD = 97
RATE = 0.05


def gpt2() -> torch.nn.Module:
    import tiny

    return tiny.gpt2(0.1, layers=1, width=16)


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
    share sequences, of as many as there are. pp: whether all share the layers. uneven: whether all
    ranks but one have no rows in some steps."""

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
    uneven: bool = False

    @property
    def has_parts(self) -> bool:
        """Says whether ranks have parts of the weights."""
        return self.zero == 3 or self.tp or self.pp

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        """The number of a rank's share of the batch, and the number of shares: ranks along `tp` and
        `cp`, who are neighbours, have the same, and so have all along `pp`."""
        if self.pp:
            return 0, 1
        same = min(2 if self.tp else max(self.cp, 1), ranks)
        return rank // same, ranks // same

    def options_of(self, ranks: int) -> dict[str, Any]:
        """The options of a run with this number of ranks."""
        if ranks == 1:
            return dict(self.options)
        if self.pp:
            return {**self.options, "mesh": {"pp": ranks}}
        if self.tp:
            zero = self.zero if ranks > 2 else 0
            sizes = {"dp_shard" if zero else "dp_replicate": ranks // 2, "tp": 2}
            return {**self.options, "mesh": sizes, "zero": zero}
        if self.cp:
            same = min(self.cp, ranks)
            return {**self.options, "mesh": {"dp_replicate": ranks // same, "cp": same}}
        sizes = {"dp_replicate": ranks // 2, "dp_shard": 2}
        mesh = sizes if self.zero or self.is_cut else {"dp_replicate": ranks}
        return {**self.options, "mesh": mesh, "zero": self.zero}


WINDOW = {"gradient_accumulation_steps": 2}
CLIPPED, LOW = {"max_grad_norm": 0.5}, {"optimizer_state": "bf16"}
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
    "gpt2 zero 3": Case(gpt2, CLIPPED, "AdamW", zero=3),
    "bert zero 3": Case(
        bert, {**WINDOW, "max_grad_value": 0.01}, "AdamW", padding=True, early=8, zero=3
    ),
    "t5 zero 3": Case(t5, {**WINDOW, "memory_budget": 0.5}, "AdamW", padding=True, early=2, zero=3),
    "llama zero 3": Case(llama, CLIPPED, zero=3),
    "gpt2 zero 3 bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED}, "AdamW", near="gpt2 zero 3", zero=3
    ),
    "gpt2 tp": Case(gpt2, CLIPPED, "AdamW", tp=True),
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
    "gpt2 odd tp": Case(odd, CLIPPED, "AdamW", tp=True),
    "gpt2 tp zero": Case(gpt2, CLIPPED, "AdamW", zero=1, tp=True),
    "odd tp zero 2": Case(odd, {**WINDOW, **CLIPPED}, "AdamW", early=4, zero=2, tp=True),
    "t5 tp zero 3": Case(t5, WINDOW, "AdamW", padding=True, early=2, zero=3, tp=True),
    "llama tp state": Case(llama, LOW, "AdamW", near="llama tp", zero=1, tp=True),
    "llama zero bf16": Case(llama, LOW, "AdamW", near="llama zero", zero=1),
    "gpt2 pp": Case(gpt2, {**CLIPPED, "pipeline_microbatches": 3}, "AdamW", pp=True),
    "bert pp": Case(
        bert, {**WINDOW, "max_grad_value": 0.01, "pipeline_schedule": "GPipe"}, padding=True,
        pp=True,
    ),
    "t5 pp": Case(t5, {**CLIPPED, "pipeline_schedule": "InterleavedZeroBubble"}, "AdamW",
                  padding=True, pp=True),
    "llama pp lamb": Case(llama, {"pipeline_schedule": "Interleaved1F1B"}, "LAMB", pp=True),
    "gpt2 pp bf16": Case(
        gpt2, {"mixed_precision": "bf16", **CLIPPED, "pipeline_microbatches": 5}, "AdamW",
        near="gpt2 pp", pp=True,
    ),
    "gpt2 pp fp16": Case(
        gpt2, {"mixed_precision": "fp16", **WINDOW}, near="gpt2 window", pp=True
    ),
}  # fmt: skip


GROUPS = {  # by what ranks share
    "the batch": {
        n: c for n, c in CASES.items() if not (c.zero or c.tp or c.cp or c.pp or c.uneven)
    },
    "uneven rows": {n: case for n, case in CASES.items() if case.uneven},
    "state": {n: case for n, case in CASES.items() if case.zero and not (case.tp or case.uneven)},
    "weights": {n: case for n, case in CASES.items() if case.tp and not case.zero},
    "weights and state": {n: case for n, case in CASES.items() if case.tp and case.zero},
    "sequences": {n: case for n, case in CASES.items() if case.cp},
    "layers": {n: case for n, case in CASES.items() if case.pp},
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
    options = {**case.options_of(ranks), **more}
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


def outcome(case: Case, rank: int, ranks: int) -> Tensors:
    """The weights after the run, and its losses f64[steps]."""
    trainer = trainer_of(case, ranks)
    losses = trained(trainer, case, rank, ranks, range(STEPS))
    if case.has_parts and ranks > 1:
        evaluated(trainer, case, rank, ranks)
    made = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    if case.options.get("ema_decay"):
        made |= {f"average.{n}": p for n, p in trainer.ema_state_dict().items()}
    if (case.zero or case.tp or case.pp) and case.near is None and not trainer.micro_steps:
        made |= {f"state.{n}": x for n, x in trainer.state_dict()["optimizer"].items()}
        held = trainer._updates.state.tensors  # what lies in this rank's memory
        numbers = sum(x.numel() for slots in held.values() for x in slots.values())
        made["numbers held"] = torch.tensor([float(numbers)])
    return made | {"losses": torch.tensor(losses, dtype=torch.float64)}


def evaluated(trainer: Any, case: Case, rank: int, ranks: int) -> None:
    """Evaluates while this rank has parts of the weights; then gathers them, and compares with
    eager PyTorch."""
    number, count = case.share(rank, ranks)
    data: Any = {n: x[number::count].clone() for n, x in rows(case, STEPS).items()}
    found = float(trainer.eval_step(data).loss)
    cut = [bool(p.isnan().all()) for p in trainer.model.parameters() if p.numel() >= 64]
    whole_parts = case.zero == 3 and not case.tp
    assert all(cut) if whole_parts else sum(cut) > (0 if case.pp else len(cut) // 2), cut
    trainer.gather()
    assert not any(p.isnan().any() for p in trainer.model.parameters())
    with torch.no_grad():
        want = float(trainer.model.eval()(**data).loss)
    assert abs(found - want) < (2e-2 if case.near else 1e-5) * abs(want), (found, want)


# ---- what ranks may not do, and checkpoints


class Draws:
    """An object of the user's own with another state on each rank."""

    def __init__(self, rank: int) -> None:
        self.count = 10 * rank

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def resumed(folder: Path, rank: int, ranks: int, case: Case) -> str:
    """Goes on from a checkpoint within a window, and says what differs from the run that saved."""

    def made() -> tuple[Any, Draws]:
        trainer, draws = trainer_of(case, ranks), Draws(rank)
        trainer.register_for_checkpointing(draws)
        return trainer, draws

    trainer, draws = made()
    torch.manual_seed(5 + rank)
    trained(trainer, case, rank, ranks, range(4))
    torch.rand(3)
    draws.count += 1
    trained(trainer, case, rank, ranks, [5])
    path = trainer.save(folder / "run", save_total_limit=2)
    want = trained(trainer, case, rank, ranks, range(6, 11)), torch.rand(3)
    trainer.gather()
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    other, found = made()
    torch.manual_seed(99)
    assert other.resume(folder / "run") == path
    assert found.count == draws.count == 10 * rank + 1
    have = trained(other, case, rank, ranks, range(6, 11)), torch.rand(3)
    assert have[0] == want[0] and torch.equal(have[1], want[1]), (have, want)
    other.gather()
    assert all(map(torch.equal, weights, other.model.parameters()))
    path = other.save(folder / "later", background=True)
    other.finish_saves()
    return path.name


def refusal(act: Callable[[], Any]) -> str:
    """The message of the refusal."""
    from onward.errors import OnwardError

    try:
        act()
    except OnwardError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def refusals(folder: Path, rank: int, ranks: int) -> dict[str, str]:
    """What each rank says where rank 1 does something else than the others; the ranks go on
    afterwards."""
    case, odd = CASES["gpt2"], rank == 1
    said: dict[str, str] = {}

    def once(trainer: Any) -> None:
        trained(trainer, case, rank, ranks, [0])

    def weights() -> None:
        trainer = trainer_of(case, ranks)
        with torch.no_grad():
            trainer.model.transformer.wpe.weight[0, 0] += 1e-6 * odd
        once(trainer)

    def rate() -> None:
        trainer = trainer_of(case, ranks)
        once(trainer)
        trainer.optimizer.param_groups[0]["lr"] *= 1 + odd
        once(trainer)

    def method() -> None:
        trainer = trainer_of(CASES["gpt2 window"], ranks)
        once(trainer)
        trainer.update() if odd else once(trainer)

    def later() -> None:
        trainer = trainer_of(case, ranks, compare_ranks_every=2)
        once(trainer)
        with torch.no_grad():
            trainer.model.transformer.ln_f.bias[1] += odd
        once(trainer)
        once(trainer)

    def batch() -> None:
        trainer = trainer_of(CASES["bert"], ranks)
        data = rows(CASES["bert"], 0)
        trainer.train_step(data, fetch=["nothing"] if odd else [])

    def rowless() -> None:
        trainer = trainer_of(CASES["bert"], ranks)
        trainer.train_step({n: x[:0] for n, x in rows(CASES["bert"], 0).items()})

    def means() -> None:
        options: dict[str, Any] = {"gradient_accumulation_average": "micro_batches"}
        trainer = trainer_of(CASES["bert"], ranks, **options)
        data = rows(CASES["bert"], 0)
        trainer.train_step({n: x[:0] if odd else x for n, x in data.items()})

    def capture() -> None:
        trainer = trainer_of(case, ranks)
        if odd:
            trainer.model.transformer.h[0].forward = None
        once(trainer)

    def files() -> None:
        trainer = trainer_of(case, ranks)
        once(trainer)
        place = folder / "no folder"
        if rank == 0:
            place.write_text("")
        trainer.save(place)

    def trees() -> None:
        trainer = trainer_of(case, ranks)
        once(trainer)
        trainer.save(folder / "a")
        once(trainer)
        trainer.save(folder / "b")
        trainer.resume(folder / ("b" if odd else "a"))

    def within() -> None:
        trainer = trainer_of(CASES["gpt2 window"], ranks)
        once(trainer)
        trainer.state_dict()

    for act in (weights, rate, method, later, batch, rowless, means, capture, files, trees, within):
        said[act.__name__] = refusal(act)
    said["options"] = refusal(lambda: once(trainer_of(case, ranks, max_grad_norm=1.0 + odd)))
    said["sizes"] = refusal(lambda: trainer_of(case, ranks + 1))
    return said


def parts(rank: int, ranks: int) -> dict[str, str]:
    """What each rank says where state that is cut is asked for as if it were whole; and state goes
    from whole to parts and back."""
    import onward

    case, whole = CASES["gpt2 zero"], replace(CASES["gpt2 zero"], zero=0)
    trainer = trainer_of(case, ranks)
    trained(trainer, case, rank, ranks, [0, 1])
    other, again = trainer_of(whole, ranks), trainer_of(case, ranks)
    other.load_state_dict(trainer.state_dict())
    again.load_state_dict(other.state_dict())
    losses = [trained(each, case, rank, ranks, [2, 3]) for each in (trainer, other, again)]
    assert losses[0] == losses[2] and apart(*losses[:2]) < 1e-6, losses
    again.optimizer.load_state_dict(other.optimizer.state_dict())
    assert trained(again, case, rank, ranks, [4]) == trained(trainer, case, rank, ranks, [4])
    optimizer = trainer.optimizer
    said = {"optimizer": refusal(optimizer.state_dict)}
    again.optimizer.state[next(iter(again.model.parameters()))]["exp_avg"] = torch.zeros(3)
    said["half"] = refusal(lambda: trained(again, case, rank, ranks, [5]))
    if rank == 1:
        said["alone"] = refusal(partial(trained, trainer, case, rank, ranks, [5]))
    else:
        said["alone"] = refusal(trainer.state_dict)
    options, model = case.options_of(ranks), trainer.model
    said["second"] = refusal(lambda: onward.Trainer(model, optimizer, options=options))
    del trainer
    said["step"] = refusal(optimizer.step)
    said["lamb"] = refusal(lambda: trainer_of(replace(case, optimizer="LAMB"), ranks))
    return said


# ---- AdaSum


@dataclass(frozen=True)
class Adaptive:
    """A run whose replicas are combined by AdaSum. cut: ranks along dp_shard. early: the step after
    which a window of two micro-batches ends with one."""

    options: dict[str, Any] = field(default_factory=dict)
    cut: int = 1
    early: int | None = None

    def case(self, ranks: int) -> Case:
        """The case of the Trainers of these ranks."""
        sizes = {"dp_replicate": ranks // self.cut, "dp_shard": self.cut}
        options = {**self.options, "adasum": True, "mesh": sizes}
        return Case(steady, options, early=self.early)


def steady() -> torch.nn.Module:
    import tiny

    return tiny.gpt2(0.0, layers=1, width=16)


ADAPTIVE = {
    "clipped": Adaptive(CLIPPED),
    "window": Adaptive(WINDOW, early=4),
    "means": Adaptive({**WINDOW, "gradient_accumulation_average": "micro_batches"}, early=4),
    "replicas": Adaptive({**WINDOW, **CLIPPED}, cut=2, early=2),
}


def adaptive(folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """The weights and losses of each run; an update that one rank's NaN leaves out; a run that is
    resumed within a window."""
    import onward

    made: dict[str, Any] = {}
    for name, run_ in ADAPTIVE.items():
        if ranks == run_.cut:
            continue
        case = run_.case(ranks)
        trainer = onward.Trainer(
            case.model(), onward.optim.SGD(lr=RATE, momentum=0.9), options=case.options
        )
        torch.manual_seed(0)
        losses = trained(trainer, case, rank, ranks, range(8))
        made[name] = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        made[name]["losses"] = torch.tensor(losses, dtype=torch.float64)
    window = {**WINDOW, "adasum": True}
    made["resumed"] = resumed(folder / "adaptive", rank, ranks, Case(gpt2, window))
    torch.manual_seed(0)
    options = {"adasum": True, "mesh": {"dp_replicate": ranks}}
    trainer = onward.Trainer(
        torch.nn.Linear(3, 1),
        onward.optim.SGD(lr=0.1),
        torch.nn.functional.mse_loss,
        options=options,
    )
    x = torch.ones(2, 3)
    made["skipped"] = []
    for step in range(3):
        x[0, 0] = float("nan") if step == 1 and rank == 1 else 1.0
        result = trainer.train_step(x, torch.zeros(2, 1))
        made["skipped"].append(bool(result.skipped))
    made["after"] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return made


def apart(have: Sequence[float], want: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(have, want, strict=True))


def profiled(rank: int, ranks: int, case: Case) -> None:
    """What only looks at a Trainer does so on one rank alone; a profile takes all of them."""
    trainer = trainer_of(case, ranks, verify=True)
    trained(trainer, case, rank, ranks, [0])
    data = rows(case, 1)
    if rank == 0:
        trainer.eval_step(data)
        trainer.explain()
        trainer.explain(data)
        trainer.report()
    assert trainer.profile()["AllReduceStart"] > 0
    trained(trainer, case, rank, ranks, [1])


def lost(where: str, rank: int, ranks: int) -> dict[str, Any]:
    """What rank 0 says where rank 1 ends: before its step, or within the run of its graph."""
    from torch import distributed

    case = CASES["gpt2"]
    trainer = trainer_of(case, ranks)
    trained(trainer, case, rank, ranks, [0])
    if rank == 1:
        if where == "run":
            distributed.all_reduce = lambda *_, **__: os._exit(9)  # type: ignore[assignment]
            trained(trainer, case, rank, ranks, [1])
        os._exit(9)
    start = time.monotonic()
    said = refusal(lambda: trained(trainer, case, rank, ranks, [1]))
    again = refusal(lambda: trained(trainer, case, rank, ranks, [2]))
    return {"said": said, "again": again, "seconds": time.monotonic() - start}


# ---- processes


def run(folder: Path, ranks: int, what: str) -> list[dict[str, Any]]:
    """What each rank has saved. what: one of `GROUPS`, "refusals", "adaptive", or where rank 1
    ends."""
    codes = [0, *[9 if what in ("before", "run") else 0] * (ranks - 1)]
    run_ranks(__file__, [str(folder), str(ranks), what], ranks, codes)
    saved = [folder / f"{rank}.pt" for rank in range(ranks)]
    return [
        torch.load(path, weights_only=True)  # noqa: TID251  # written above, tensors and texts
        for path in saved
        if path.exists()
    ]


def join(folder: Path, rank: int, ranks: int) -> None:
    """Makes this process a rank, for which weights of tiny models are worth cutting."""
    from torch import distributed

    from onward import compile, shards
    from onward.distribute.tensor import DeviceRates

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part
    slow = DeviceRates(1e8, 1e9, 1e-7, 1e8, 1e-6)
    compile.link_rates = lambda *_: slow  # type: ignore[attr-defined]
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)


def main(folder: Path, ranks: int, what: str, rank: int) -> None:
    from torch import distributed

    join(folder, rank, ranks)
    made: dict[str, Any] = {}
    if what in GROUPS:
        made = {name: outcome(case, rank, ranks) for name, case in GROUPS[what].items()}
    elif what == "adaptive":
        made = adaptive(folder, rank, ranks)
    elif what != "refusals":
        torch.save(lost(what, rank, ranks), folder / f"{rank}.pt")
        return
    else:
        made["window"] = outcome(CASES["gpt2 window"], rank, ranks)
        made["resumed"] = resumed(folder, rank, ranks, CASES["gpt2 window"])
        made["resumed parts"] = resumed(folder / "parts", rank, ranks, CASES["gpt2 zero 2"])
        made |= parts(rank, ranks)
        profiled(rank, ranks, CASES["bert"])
        profiled(rank, ranks, replace(CASES["bert"], zero=1))
        made |= refusals(folder, rank, ranks)
    distributed.barrier()
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
