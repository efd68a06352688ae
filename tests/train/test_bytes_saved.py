"""What another `optimizer_state` would save, as an error for memory says it, beside states of that
form."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import batch, gpt2, mlp
from torch import nn

import onward
from onward import OnwardError
from onward.distribute import Mesh
from onward.train.torch_optimizer import TorchOptimizer

FORMS = ("fp32", "bf16", "8bit")


def test_what_another_form_saves_is_known_without_it() -> None:
    """Predicted from a Trainer of each form for each other one; a part of the weights stays fp32 in
    codes."""

    def made(form: str) -> onward.Trainer:
        model: Any = gpt2(dropout=0.0, width=64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        trainer = onward.Trainer(model, optimizer, options={"optimizer_state": form})
        data: Any = batch(4, 12)
        trainer.train_step(**data)
        return trainer

    trainers = {form: made(form) for form in FORMS}
    held = {
        form: sum(t.nbytes for t in trainer.state_dict()["optimizer"].values())
        for form, trainer in trainers.items()
    }
    assert held["fp32"] == 2 * held["bf16"] > held["8bit"] > held["fp32"] // 4
    for form, trainer in trainers.items():
        for other in FORMS:
            saved = trainer._optimizer.bytes_saved(other, trainer.model.parameters())
            assert saved == held[form] - held[other], (form, other)


def test_ranks_that_hold_a_part_of_the_state_save_in_that_part() -> None:
    mesh = Mesh(("dp_shard",), (2,), (1,))
    held, optimizers = {}, {}
    for form in FORMS:
        model = nn.Linear(100, 97)  # rows of codes are cut at other places than those of numbers
        optimizer = torch.optim.AdamW(model.parameters())
        optimizers[form] = made = TorchOptimizer(model, optimizer, form, mesh=mesh, zero=1)
        state = made.updates.state
        held[form] = sum(
            state.fresh(p, name).nbytes for p in model.parameters() for name in state.names(p)
        )
    assert held["fp32"] < 8 * 60 * 97, "it is cut"
    for form, optimizer in optimizers.items():
        for other in FORMS:
            saved = optimizer.bytes_saved(other, optimizer.model.parameters())
            assert saved == held[form] - held[other], (form, other)


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, partial(torch.optim.AdamW, amsgrad=True)], ids=["SGD", "amsgrad"]
)
def test_a_form_that_would_be_refused_saves_nothing(make: Any) -> None:
    model = mlp()
    trainer = onward.Trainer(model, make(model.parameters(), lr=0.1))
    for form in ("bf16", "8bit"):
        assert trainer._optimizer.bytes_saved(form, model.parameters()) == 0
        other = mlp()
        with pytest.raises(OnwardError, match="is not supported"):
            onward.Trainer(other, make(other.parameters()), options={"optimizer_state": form})
