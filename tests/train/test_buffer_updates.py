"""Buffers that a forward writes, beside eager PyTorch: running statistics, averages, counts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import onward

STEPS = 4


class Written(torch.nn.Module):
    """A model with a part that writes its buffers, between two linear layers."""

    def __init__(self, part: torch.nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.part, self.last = torch.nn.Linear(4, 6), part, torch.nn.Linear(6, 3)
        self.shape = shape

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.part(self.first(x).view(-1, *self.shape))
        return F.cross_entropy(self.last(h.reshape(x.shape[0], -1, 6).mean(1)), y)


class Average(torch.nn.Module):
    """A module with an average that is read before and after it is written, a counter and a
    window."""

    mean: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now, before = x.detach().mean(0), self.mean * 1.0
        if self.spelling == "no_grad":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.seen[0] = x.mean(0)
        elif self.spelling == "lerp":
            self.mean.lerp_(now, 0.1)
            self.seen[1:].copy_(now[None])
        elif self.spelling == "sub":
            self.mean -= 0.1 * (self.mean - now)
            self.seen.zero_()
        elif self.spelling == "view":
            half, column = self.mean[:3], self.seen.t()[4:]
            self.mean.view(2, 3)[1].add_(1.0)
            half.mul_(0.5).add_(now[:3])
            column[0].copy_(now[:2])
            return x * (1 + self.mean) + half.sum() + column.sum() + before
        else:
            self.mean.copy_(self.mean * 0.9 + 0.1 * now)
            self.seen.fill_(2.0)
        self.count += 1
        return x * (1 + self.mean) + before + self.seen.sum(0) / self.count


PARTS: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm1d": lambda: Written(torch.nn.BatchNorm1d(6), (6,)),
    "BatchNorm1d of sequences": lambda: Written(torch.nn.BatchNorm1d(3), (3, 2)),
    "BatchNorm2d": lambda: Written(torch.nn.BatchNorm2d(1), (1, 2, 3)),
    "BatchNorm2d without affine": lambda: Written(torch.nn.BatchNorm2d(3, affine=False), (3, 2, 1)),
    "BatchNorm3d, momentum": lambda: Written(torch.nn.BatchNorm3d(3, momentum=0.7), (3, 1, 2, 1)),
    "BatchNorm1d, eps": lambda: Written(torch.nn.BatchNorm1d(6, eps=0.1), (6,)),
    **{
        f"BatchNorm{n}d over all batches": lambda n=n: Written(
            getattr(torch.nn, f"BatchNorm{n}d")(3, momentum=None), (3, 2, 1, 1)[: n + 1]
        )
        for n in (1, 2, 3)
    },
    "InstanceNorm1d": lambda: Written(
        torch.nn.InstanceNorm1d(2, affine=True, track_running_stats=True), (2, 3)
    ),
    "InstanceNorm2d": lambda: Written(
        torch.nn.InstanceNorm2d(1, track_running_stats=True, momentum=0.5), (1, 3, 2)
    ),
    "used twice": lambda: Written(
        torch.nn.Sequential(*[torch.nn.BatchNorm1d(6)] * 2, torch.nn.ReLU()), (6,)
    ),
    **{
        f"average: {spelling}": lambda spelling=spelling: Written(Average(spelling), (6,))
        for spelling in ("no_grad", "lerp", "sub", "copy", "view")
    },
}


class Sharing(torch.nn.Module):
    """A module with a buffer that a step cannot write as eager code does."""

    mean: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("shown", self.mean[:3] if how == "shown" else torch.zeros(3))
        self.plain = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "shown":
            self.mean.add_(x.detach().mean(0))
        elif self.how == "gradient":
            self.mean.copy_(x.mean(0))
        elif self.how == "plain":
            self.plain.add_(x.detach().mean(0))
        return x + self.mean


REFUSED = {
    "shown": "whose memory .* shares",
    "gradient": r"fix: write its \.detach",
    "plain": "fix: ",
}


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of several sizes."""
    torch.manual_seed(1)
    return [(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in (5, 8, 5, 3)]


def close(model: torch.nn.Module, eager: torch.nn.Module) -> None:
    for (name, mine), theirs in zip(
        model.state_dict().items(), eager.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def pair(make: Callable[[], torch.nn.Module]) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("window", [1, 2])
def test_buffers_are_written_as_in_eager_code(part: str, window: int) -> None:
    model, eager = pair(PARTS[part])
    options = onward.TrainerOptions(
        gradient_accumulation_steps=window, gradient_accumulation_average="micro_batches"
    )
    trainer, optimizer = onward.Trainer(model, sgd(model), options=options), sgd(eager)
    for step, (x, y) in enumerate(batches()):
        result = trainer.train_step(x, y)
        loss = eager(x, y)
        (loss / window).backward()
        if (step + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-5, atol=1e-6)
        close(model, eager)
    x, y = batches()[0]
    model.eval()
    eager.eval()
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(trainer.eval_step(x, y).loss, eager(x, y).detach())
    for name, value in model.state_dict().items():
        if part.startswith("average"):
            break  # writes in evaluation too
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("how", REFUSED)
def test_what_a_step_cannot_write_is_refused(how: str) -> None:
    model, _ = pair(lambda: Written(Sharing(how), (6,)))
    with pytest.raises(onward.CaptureError, match=REFUSED[how]):
        onward.Trainer(model, sgd(model)).train_step(*batches()[0])


def test_a_step_that_is_left_out_writes_no_buffer() -> None:
    model, _ = pair(PARTS["BatchNorm1d"])
    trainer = onward.Trainer(model, sgd(model), options=onward.TrainerOptions(skip_nonfinite=True))
    trainer.train_step(*batches()[0])
    before = copy.deepcopy(model.state_dict())
    x, y = batches()[1]
    assert trainer.train_step(x.fill_(torch.inf), y).skipped
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_step_that_fails_writes_no_buffer() -> None:
    model, _ = pair(PARTS["average: copy"])
    trainer = onward.Trainer(model, sgd(model))
    trainer.train_step(*batches()[0])
    before = copy.deepcopy(model.state_dict())
    x, y = batches()[0]
    with pytest.raises(IndexError):
        trainer.train_step(x, y + 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_capture_writes_no_buffer() -> None:
    """A capture writes no buffer, even where it runs the forward in eager to answer a question
    about a tensor."""

    class Asking(Written):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.dims = x.dim()
            return super().forward(x if bool((x < 100).all()) else x * 2, y)

    model, eager = pair(lambda: Asking(torch.nn.BatchNorm1d(6), (6,)))
    trainer = onward.Trainer(model, sgd(model))
    loss = trainer.train_step(*batches()[0]).loss
    expected = eager(*batches()[0])
    torch.testing.assert_close(loss, expected.detach())
    for (name, mine), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_verify_has_nothing_to_say_of_written_buffers() -> None:
    model, _ = pair(PARTS["BatchNorm1d"])
    trainer = onward.Trainer(model, sgd(model))
    before = copy.deepcopy(model.state_dict())
    report = trainer.verify(*batches()[0])
    assert report.ok, report
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
