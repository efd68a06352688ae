"""Where a user's tensors lie: any layout trains as in eager; memory that is shared is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import OPTIMIZERS, Pair, assert_unchanged, frozen_copy
from torch import nn

import onward
from onward import OnwardError

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x.clone(),
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, x + 9], -1).flatten(1)[:, ::2],
    "every other row": lambda x: torch.stack([x, x + 9], 1).flatten(0, 1)[::2],
    "columns of a wider one": lambda x: torch.cat([x + 9, x], 1)[:, x.shape[1] :],
    "behind an offset": lambda x: torch.cat([x + 9, x])[x.shape[0] :],
}  # fmt: skip


class Layers(nn.Module):
    """A model whose parameters have one dim or two: a lookup, products both ways round, a norm, a
    buffer."""

    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.square = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.randn(11, 8))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.table(ids) + self.shift[: ids.shape[1]]
        h = self.norm(torch.tanh(self.first(h)) @ self.square + self.second(h))
        logits = h @ self.table.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def laid_out(model: nn.Module, how: str) -> nn.Module:
    """Give the model's tensors other memory layouts with the same numbers; vectors get gaps."""
    change = LAYOUTS[how]
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        wide = p.detach()
        vector = torch.stack([wide, wide + 9], -1)[:, 0] if how != "plain" else wide.clone()
        made = change(wide) if p.dim() == 2 else vector
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(p, nn.Parameter):
            setattr(owner, name.rpartition(".")[2], nn.Parameter(made))
        else:
            owner.register_buffer(name.rpartition(".")[2], made)
    return model


def ids(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 11, (3, 5), generator=generator) for name in ("ids", "labels")
    }  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", LAYOUTS)
def test_parameters_of_any_layout_train_as_in_eager(how: str, optimizer: str) -> None:
    model = laid_out(Layers(), how)
    pointers = {n: (p.data_ptr(), p.stride()) for n, p in model.named_parameters()}
    pair = Pair(model, OPTIMIZERS[optimizer])
    for i in range(3):
        pair.step(**ids(i))
    assert pointers == {n: (p.data_ptr(), p.stride()) for n, p in model.named_parameters()}
    with torch.no_grad():
        want = pair.eager_loss(**ids(9))
    torch.testing.assert_close(pair.trainer.eval_step(**ids(9)).loss, want)


def test_batches_of_any_layout() -> None:
    pair = Pair(Layers())
    for step, change in enumerate(LAYOUTS.values()):
        data = {n: change(x) for n, x in ids(step).items()}
        data = {n: x.clamp(max=10) for n, x in data.items()}
        pair.step(**data)


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", LAYOUTS)
def test_storage_replaced_between_steps(how: str) -> None:
    """`p.data = ...` may give a parameter other memory and another layout between steps."""
    pair = Pair(Layers(), OPTIMIZERS["momentum"])
    pair.step(**ids(0))
    for model in (pair.model, pair.twin):
        for p in model.parameters():
            if p.dim() == 2:
                p.data = LAYOUTS[how](p.data)
    pair.step(**ids(1))
    square = pair.model.get_parameter("square")
    twin = pair.twin.get_parameter("square")
    square.data, twin.data = square.data.t(), twin.data.t()  # the same place, read the other way
    pair.step(**ids(2))


class Two(nn.Module):
    c: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.register_buffer("c", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a @ self.b @ self.c).pow(2).mean()


def _views(model: Two) -> None:
    whole = torch.randn(6, 4)
    model.a.data, model.b.data = whole[:4], whole[2:]


def _same(model: Two) -> None:
    model.b.data = model.a.data


def _expanded(model: Two) -> None:
    model.a.data = torch.randn(1, 4).expand(4, 4)


def _buffer(model: Two) -> None:
    model.c = model.a.detach()


def _interleaved(model: Two) -> None:
    whole = torch.randn(4, 8)
    model.a.data, model.b.data = whole[:, ::2], whole[:, 1::2]


SHARED = [_views, _same, _expanded, _buffer, _interleaved]


@pytest.mark.parametrize("share", SHARED)
@pytest.mark.parametrize("when", ["before", "after the first step"])
def test_shared_memory_is_refused(share: Callable[[Two], None], when: str) -> None:
    model, x = Two(), torch.randn(2, 4)
    trainer = onward.Trainer(model, onward.optim.SGD())
    if when != "before":
        trainer.train_step(x)
    share(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(OnwardError, match=r"shares? (memory|.*storage)|one storage|expanded"):
        trainer.train_step(x)
    assert_unchanged(before, model.state_dict())


def test_parameters_side_by_side_in_one_buffer() -> None:
    """Two parameters in one storage that share no byte are served, as DeepSpeed lays them out."""
    pair = Pair(Two(), OPTIMIZERS["momentum"])
    held: Any = pair.model
    both: list[Any] = [held, pair.twin]
    for model in both:
        flat = torch.cat([model.a.data.flatten(), model.b.data.flatten()])
        model.a.data, model.b.data = flat[:16].view(4, 4), flat[16:].view(4, 4)
    for _ in range(2):
        pair.step(torch.randn(2, 4))
    assert held.a.untyped_storage().data_ptr() == held.b.untyped_storage().data_ptr()


def test_a_view_that_nobody_writes_may_be_shared() -> None:
    """Two buffers on one storage, and a frozen parameter beside them."""

    class Reading(nn.Module):
        first: torch.Tensor
        second: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4))
            whole = torch.randn(6)
            self.register_buffer("first", whole[:4])
            self.register_buffer("second", whole[2:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w * self.first + self.second).pow(2).mean()

    pair = Pair(Reading())
    for _ in range(2):
        pair.step(torch.randn(3, 4))


def _wider(model: Layers) -> None:
    model.square.data = torch.randn(8, 9)


def _shrunk(model: Layers) -> None:
    model.table.weight.data = model.table.weight.data[:7]


def _double(model: Layers) -> None:
    model.double()


@pytest.mark.parametrize("change", [_wider, _shrunk, _double])
def test_another_shape_or_dtype_is_refused_before_anything_moves(
    change: Callable[[Any], None],
) -> None:
    model, small = Layers(), {n: x.clamp(max=5) for n, x in ids().items()}
    trainer = onward.Trainer(model, onward.optim.AdamW())
    trainer.train_step(**small)
    guard = torch.full((64,), 7.0)  # foreign memory near by
    change(model)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(OnwardError):
            trainer.train_step(**small)
    assert_unchanged(before, model.state_dict())
    assert bool((guard == 7.0).all())


def test_double_and_back_goes_on() -> None:
    pair = Pair(Layers())
    pair.step(**ids(0))
    for model in (pair.model, pair.twin):
        model.double().float()
    pair.step(**ids(1))


def test_state_stays_with_its_own_trainer() -> None:
    """A model whose storage is replaced keeps its moments."""
    pair = Pair(Layers())
    pair.step(**ids(0))
    before = frozen_copy(pair.trainer)["optimizer"]
    for p in pair.model.parameters():
        p.data = p.data.clone()
    assert_unchanged(before, frozen_copy(pair.trainer)["optimizer"])
    pair.step(**ids(1))
