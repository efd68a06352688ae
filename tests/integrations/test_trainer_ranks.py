"""transformers' Trainer on several processes over Gloo, with the step in one graph: losses, norms,
evaluations and weights are those of the stock Trainer with its DistributedDataParallel, and those
of the stock Trainer on one process where processes hold parts of the model."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_runs
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from trainer_ranks_program import CASES, PARTS, RANKS, STEPS, WHOLE, Case, of_parts, run

from onward.errors import OnwardError
from onward.integrations.trainer_ranks import (
    factor_of_loss,
    items_of_shares,
    mesh_of,
    options_of_ranks,
    share_batches,
)
from onward.integrations.transformers import Trainer
from onward.options import TrainerOptions


@pytest.mark.slow
def test_two_processes_are_the_stock_trainer_with_ddp(tmp_path: Path) -> None:
    found = run(tmp_path, "cases")
    for name, case in CASES.items():
        assert len({each[name]["weights"] for each in found}) == 1, f"{name}: weights of two ranks"
        for each in (rank[name] for rank in found):
            assert each["is whole"] == (case.kind != "served"), name
            assert each["apart"] < 1e-5, (name, each["apart"])
            history, want = each["history"], each["want"]
            assert len(history) == len(want) >= 4
            assert ("eval_loss" in want[2]) == ("eval_steps" in case.changes)
            for mine, theirs in zip(history, want, strict=True):
                assert mine.keys() == theirs.keys()
                for key, y in theirs.items():
                    assert math.isclose(mine[key], y, rel_tol=1e-5), (name, key, mine, theirs)


@pytest.mark.slow
def test_checkpoints_of_two_processes_and_what_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, "rest")
    first = found[0]["resumed"]
    assert first["kept"] == ["checkpoint-10", "checkpoint-15"]
    for each in (rank["resumed"] for rank in found):
        assert each["same"], "a resumed run has the weights of one that was not stopped"
        assert each["losses"] == first["losses"]
        assert each["losses"][0] == each["losses"][1]
        assert max(each["apart"]) < 1e-5, "either Trainer goes on from the other's checkpoint"
    for said in (rank["said"] for rank in found):
        assert list(said) == ["late", "mesh", "uneven", "lost", "optimizer"]
        for text, word in zip(
            said.values(),
            ("exchanges the gradients", "mesh of 3 ranks", "even_batches", "zero", "outside of"),
            strict=True,
        ):
            assert word in text and "; fix: " in text and "\n" not in text, text
    assert len(found) == RANKS


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"dp_shard": 2, "dp_replicate": 2}])
def test_a_mesh_without_processes_is_refused(mesh: Any, tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match=r"one process is started; fix: torchrun --nproc-per-n"):
        hf_runs.language(
            Trainer, hf_runs.causal_lm(), hf_runs.arguments(tmp_path), options={"mesh": mesh}
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", PARTS)
def test_parts_of_the_model_are_the_stock_trainer_of_one_process(
    tmp_path: Path, ranks: int
) -> None:
    case = Case({"optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 2})
    stock = of_parts(case, 1, tmp_path / "stock", ours=False)
    stock.train()
    weights = torch.cat([p.detach().double().reshape(-1) for p in stock.model.parameters()])
    torch.save(weights, tmp_path / "want.pt")
    found = run(tmp_path, "parts", ranks)
    want = hf_runs.history(stock)
    for name in PARTS[ranks]:
        assert len({each[name]["weights"] for each in found}) == 1, f"{name}: weights of ranks"
        is_cut = "cp" not in name
        for each in (rank[name] for rank in found):
            assert each["apart"] < 1e-6 and each["apart again"] < 1e-6, (name, each)
            assert each["best"] == Path(str(stock.state.best_model_checkpoint)).name
            assert (each["samples"], each["rows"]) == (48, 2 * WHOLE)
            assert each["whole"] == {
                "step": [not is_cut] * STEPS, "evaluate": [True] * 2, "save": [True] * 2,
                "end": [True],
            }, name  # fmt: skip
            assert len(each["history"]) == len(want)
            for mine, theirs in zip(each["history"], want, strict=True):
                assert mine.keys() == theirs.keys()
                for key, y in theirs.items():
                    assert math.isclose(mine[key], y, rel_tol=2e-6), (name, key, mine, theirs)
        saved = load_file(tmp_path / f"{name} 0" / "model.safetensors")
        rows = torch.cat([saved[n].double().reshape(-1) for n, _ in stock.model.named_parameters()])
        assert float((rows - weights).norm() / weights.norm()) < 1e-6, "saved by rank 0"


def test_a_mesh_that_weighs_micro_batches_itself_is_refused(tmp_path: Path) -> None:
    told = "transformers.Trainer says itself what each micro-batch weighs, but gradient_accumu"
    with pytest.raises(OnwardError, match=f"{told}.*; fix: another mesh, or onward.Trainer"):
        options_of_ranks(TrainerOptions(mesh={"pp": 2}), 2)


def rows_of(count: int) -> Any:
    """A dataset of numbers."""
    return list(range(count))


def test_batches_that_one_process_makes_cannot_be_shared() -> None:
    mesh = mesh_of(TrainerOptions(mesh={"dp_replicate": 2, "tp": 2}), 3)
    assert (mesh.share, mesh.batches) == (1, 2)
    with pytest.raises(OnwardError, match=r"not chosen by their number, .*; fix: a dataset w"):
        share_batches(DataLoader(rows_of(4)), mesh)
    alone = mesh_of(TrainerOptions(mesh={"dp_replicate": 4}), 3)
    loader = DataLoader(rows_of(4))
    assert share_batches(loader, alone) is loader


@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        ({"dp_replicate": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"tp": 2, "dp_shard": 2}, [0, 1, 0, 1]),
        ({"cp": 4}, [0, 0, 0, 0]),
        ({"dp_replicate": 4}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_processes_take_the_batches_of_their_share(mesh: dict[str, int], places: list[int]) -> None:
    """26 rows: where one share takes all, its last batch is as short as that of one process."""
    shares = max(places) + 1
    batches = [list(range(start, min(start + 4, 26))) for start in range(0, 26, 4)]
    for rank, place in enumerate(places):
        loader = prepare_data_loader(
            DataLoader(rows_of(26), batch_size=4), num_processes=4, process_index=rank,
            put_on_device=False,
        )  # fmt: skip
        shared = share_batches(loader, mesh_of(TrainerOptions(mesh=mesh), rank))
        found = [batch.tolist() for batch in shared]
        own = batches[place::shares]
        whole = [batch for batch in own if len(batch) == 4] if shares > 1 else own
        assert found[: len(whole)] == whole
        assert len(found) == len(shared) == -(-len(batches) // shares)


def test_numbers_of_items_count_each_batch_once() -> None:
    mesh = mesh_of(TrainerOptions(mesh={"dp_replicate": 2, "tp": 3}), 0)
    items, shared = torch.tensor(60.0), SimpleNamespace(average_tokens_across_devices=True)
    assert items_of_shares(items, mesh, shared) == 20.0
    assert factor_of_loss(mesh, shared, by_items=True) == 2.0
    apart = SimpleNamespace(average_tokens_across_devices=False)
    assert items_of_shares(items, mesh, apart) == 60.0
    assert factor_of_loss(mesh, apart, by_items=True) == 1.0
    assert items_of_shares(None, mesh, shared) is None


def test_one_process_is_a_mesh_of_one(tmp_path: Path) -> None:
    """A script that asks for all processes runs in one too."""
    trainers = []
    for options in ({"zero": 1}, {}):
        args = hf_runs.arguments(tmp_path, max_steps=2)
        trainer = hf_runs.language(Trainer, hf_runs.causal_lm(), args, options=options)
        trainer.train()
        trainers.append(trainer)
    hf_runs.assert_same_weights(trainers[0].model, trainers[1].model, rtol=0, atol=0)
