"""One of two processes that hold a part of each large weight, over Gloo (ZeRO stage 3, tensor
parallelism): what they may do with a model whose weights are cut, what is refused, and that nothing
is lost."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from ranks_cases import CASES, Case, gpt2, own_rows, rows, trained, trainer_of
from ranks_program import join, refusal, resumed
from torch import nn

CASE = CASES["gpt2 zero 3"]  # or another, by the program's argument
RANKS = 2
Said = dict[str, Any]


def weights_of(trainer: Any) -> list[torch.Tensor]:
    trainer.gather()
    return [p.detach().clone() for p in trainer.model.parameters()]


def steps(trainer: Any, rank: int, *numbers: int, case: Case | None = None) -> list[float]:
    return trained(trainer, CASE if case is None else case, rank, RANKS, numbers)


def uncut(zero: int = 0) -> Case:
    """The case with whole weights on every rank."""
    return replace(CASE, zero=zero, tp=False)


def refused(folder: Path, rank: int) -> Said:
    """What is said where whole weights are asked for, and where the model is changed."""
    trainer = trainer_of(CASE, RANKS)
    steps(trainer, rank, 0)
    data, model = rows(CASE, 0), trainer.model
    said: Said = {
        "state_dict": refusal(model.state_dict),
        "part of the model": refusal(model.transformer.h[0].state_dict),
        "save_pretrained": refusal(lambda: model.save_pretrained(folder / "whole")),
        "a copy": refusal(copy.deepcopy(model).state_dict),
        "verify": refusal(lambda: trainer.verify(data)),
        "export_onnx": refusal(lambda: trainer.export_onnx(folder / "m.onnx")),
        "export_training": refusal(lambda: trainer.export_training(folder / "t")),
        "whole": refusal(lambda: trainer_of(uncut(1), RANKS, model=model)),
    }
    hook = model.register_state_dict_post_hook(_copies)
    said["copies"] = refusal(trainer.state_dict)
    hook.remove()
    if CASE.zero:
        other = trainer_of(CASE, RANKS, model=model, optimizer_state="bf16")
        said["blocks"] = refusal(lambda: steps(other, rank, 1))
        trainer = trainer_of(CASE, RANKS, model=model)
    p = model.transformer.h[0].attn.c_attn.weight
    try:
        with torch.no_grad():
            p.mul_(2)
    except RuntimeError as error:
        said["in place"] = str(error)
    shown = p.data
    p.data = torch.ones_like(p)
    said["replaced"] = refusal(lambda: steps(trainer, rank, 1))
    p.data = shown
    steps(trainer, rank, 1)
    assert not list(folder.glob("*.onnx")) and not (folder / "t").exists()
    return said


def _copies(module: nn.Module, state: Said, prefix: str, metadata: Any) -> None:
    state.update({name: x.detach().clone() for name, x in state.items()})


def captured_again(rank: int) -> int:
    """The number of captures of a run that gathers its weights between steps; its numbers are those
    of a run that does not."""
    from onward.compile import Compiler

    want = trainer_of(CASE, RANKS)
    losses = steps(want, rank, 0, 1, 2, 3)
    captures: list[Any] = []
    before = Compiler.capture

    def counted(compiler: Compiler, request: Any) -> Any:
        captures.append(request)
        return before(compiler, request)

    Compiler.capture = counted  # type: ignore[method-assign]
    try:
        trainer = trainer_of(CASE, RANKS)
        found = steps(trainer, rank, 0, 1)
        trainer.gather()
        trainer.model.state_dict()
        found += steps(trainer, rank, 2)
        trainer.gather()
        trainer.gather()
        found += steps(trainer, rank, 3)
    finally:
        Compiler.capture = before  # type: ignore[method-assign]
    assert found == losses
    assert all(map(torch.equal, weights_of(trainer), weights_of(want)))
    return len(captures)


def changed_between(rank: int) -> None:
    """A change of whole weights counts, as it does for one process."""
    trainer, other = trainer_of(CASE, RANKS), trainer_of(uncut(1), RANKS)
    for each, case in ((trainer, CASE), (other, uncut(1))):
        steps(each, rank, 0, case=case)
        each.gather()
        with torch.no_grad():
            for p in each.model.parameters():
                p.mul_(0.5)
    found, want = steps(trainer, rank, 1, 2), steps(other, rank, 1, 2, case=uncut(1))
    assert max(abs(a - b) for a, b in zip(found, want, strict=True)) < 1e-6


def outlived(rank: int) -> None:
    """Weights that are cut outlive their Trainer: another one gathers them, or goes on."""
    trainer = trainer_of(CASE, RANKS)
    steps(trainer, rank, 0)
    model, state = trainer.model, trainer.state_dict()
    del trainer
    gc.collect()
    trainer = trainer_of(CASE, RANKS, model=model)
    trainer.gather()
    assert all(torch.equal(model.state_dict()[n], x) for n, x in state["model"].items())
    steps(trainer, rank, 1)
    copied = copy.deepcopy(model)
    shown = [[bool(p.isnan().all()) for p in m.parameters()] for m in (copied, model)]
    assert shown[0] == shown[1] and any(shown[0])


def states(rank: int) -> None:
    """State goes from parts to whole weights and back, before the first step too; what does not fit
    leaves the parts as they were."""
    trainer, whole = trainer_of(CASE, RANKS), trainer_of(uncut(), RANKS)
    steps(trainer, rank, 0, 1)
    state = trainer.state_dict()
    assert not any(x.isnan().any() for x in state["model"].values())
    again = trainer_of(CASE, RANKS)
    for other in (whole, again):
        other.load_state_dict(state)
    wrong = {**state, "optimizer": {**state["optimizer"], "exp_avg.nothing": torch.zeros(1)}}
    refusal(lambda: trainer.load_state_dict(wrong))
    hook = trainer.model.register_load_state_dict_post_hook(_fails)
    other_weights = {n: x * 2 for n, x in state["model"].items()}
    try:
        trainer.load_state_dict({**state, "model": other_weights})
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the hook did not run")
    hook.remove()
    cases = [(trainer, CASE), (again, CASE), (whole, uncut())]
    losses = [steps(each, rank, 2, 3, case=case) for each, case in cases]
    assert losses[0] == losses[1], losses
    assert max(abs(a - b) for a, b in zip(losses[0], losses[2], strict=True)) < 1e-6, losses
    fresh = trainer_of(CASE, RANKS)
    fresh.load_state_dict(whole.state_dict())  # before anything is cut
    found, want = steps(fresh, rank, 4, 5), steps(whole, rank, 4, 5, case=uncut())
    assert max(abs(a - b) for a, b in zip(found, want, strict=True)) < 1e-6, (found, want)
    again.load_state_dict(state)  # while its weights are cut
    assert steps(again, rank, 2, 3) == losses[0]
    assert all(map(torch.equal, weights_of(again), weights_of(trainer)))


def _fails(module: nn.Module, keys: Any) -> None:
    raise ZeroDivisionError


def other_kinds(rank: int) -> None:
    """A batch of another kind is captured while the weights are cut; frozen weights are cut too,
    and may be trained later; weights in another layout come back in it."""

    def model() -> nn.Module:
        made = gpt2()
        attention = made.transformer.h[0].attn.c_attn.weight  # type: ignore[union-attr,index]
        attention.data = attention.data.t().contiguous().t()
        for p in made.transformer.h[0].mlp.parameters():  # type: ignore[union-attr,index]
            p.requires_grad_(False)
        return made

    found: list[list[float]] = []
    kept: list[list[torch.Tensor]] = []
    for kind in (CASE, uncut()):
        case = replace(kind, model=model)
        trainer = trainer_of(case, RANKS)
        losses = steps(trainer, rank, 0, case=case)
        data = own_rows(case, 1, rank, RANKS)
        places = torch.arange(data["input_ids"].shape[1]).expand_as(data["input_ids"])
        losses.append(float(trainer.train_step({**data, "position_ids": places.clone()}).loss))
        frozen = trainer.model.transformer.h[0].mlp.c_fc.weight
        assert bool(frozen.isnan().all()) or not case.zero
        for p in trainer.model.parameters():
            p.requires_grad_(True)
        trainer.gather()
        group = trainer.optimizer.param_groups[0]
        trained_before = {id(p) for p in group["params"]}
        more = [p for p in trainer.model.parameters() if id(p) not in trained_before]
        if more:
            trainer.optimizer.add_param_group({"params": more})
        losses += steps(trainer, rank, 2, 3, case=case)
        trainer.gather()
        weight = trainer.model.transformer.h[0].attn.c_attn.weight
        assert weight.stride() == (1, weight.shape[0])
        found.append(losses)
        kept.append(weights_of(trainer))
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-6, found
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*kept, strict=True))


def batches(rank: int) -> str:
    """What is said where ranks that share weights have other batches."""
    trainer = trainer_of(CASE, RANKS)
    steps(trainer, rank, 0)
    data = rows(CASE, 0)
    data["labels"][1, 2 + rank] = -100
    said = refusal(lambda: trainer.eval_step(data))
    assert said == refusal(lambda: trainer.train_step(data))
    return said


def alone(rank: int) -> str:
    """What is said where one rank evaluates and the other trains."""
    trainer = trainer_of(CASE, RANKS)
    steps(trainer, rank, 0)
    if rank:
        return refusal(lambda: trainer.eval_step(rows(CASE, 1)))
    return refusal(lambda: steps(trainer, rank, 1))


def said_by(folder: Path, rank: int) -> Said:
    checks: list[Callable[[int], Any]] = [changed_between, outlived, states, other_kinds]
    for check in checks:
        check(rank)
    said = refused(folder / str(rank), rank)
    said["captures"] = captured_again(rank)
    said["alone"] = alone(rank)
    if CASE.tp:
        said["batches"] = batches(rank)
    window = replace(CASE, options={**CASE.options, "gradient_accumulation_steps": 2}, early=4)
    said["resumed"] = resumed(folder / "run", rank, RANKS, window)
    return said


# ---- processes


def run(folder: Path, case: str) -> list[Said]:
    """What each rank has said of a case."""
    run_ranks(__file__, [str(folder), case], RANKS)
    return [
        torch.load(folder / f"{rank}.pt", weights_only=True)  # noqa: TID251  # written above, texts
        for rank in range(RANKS)
    ]


def main(folder: Path, case: str, rank: int) -> None:
    from torch import distributed

    global CASE
    CASE = CASES[case]
    join(folder, rank, RANKS)
    (folder / str(rank)).mkdir()
    made = said_by(folder, rank)
    distributed.barrier()
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
