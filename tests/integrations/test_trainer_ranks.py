"""transformers' Trainer on two processes over Gloo, with the step in one graph: losses, norms,
evaluations and weights are those of the stock Trainer with its DistributedDataParallel."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hf_runs
import pytest
from trainer_ranks_program import CASES, RANKS, run

from onward.errors import OnwardError
from onward.integrations.transformers import Trainer


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


def test_ranks_with_one_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match="options has cp in its mesh, whose processes take one"):
        Trainer(
            hf_runs.causal_lm(), hf_runs.arguments(tmp_path), options={"mesh": {"cp": 2}}
        ).train()


def test_one_process_is_a_mesh_of_one(tmp_path: Path) -> None:
    """A script that asks for all processes runs in one too."""
    trainers = []
    for options in ({"zero": 1}, {}):
        args = hf_runs.arguments(tmp_path, max_steps=2)
        trainer = hf_runs.language(Trainer, hf_runs.causal_lm(), args, options=options)
        trainer.train()
        trainers.append(trainer)
    hf_runs.assert_same_weights(trainers[0].model, trainers[1].model, rtol=0, atol=0)
