"""Numbers of the batch that a forward reads into Python, and masks that leave no row out: as in
eager, captured once for each of their values."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onward

Form = Callable[["Net", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    """`form(self, x * w, n, mask)`, squared. x: f[B,T,5]; n: i64[B]; mask: b[B,T]."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.w = form, torch.nn.Parameter(torch.linspace(0.5, 1.0, 5))

    def forward(self, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.form(self, x * self.w, n, mask).square().mean()


def item(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    longest = n.max().item()
    return x[:, :longest] / longest


def of_a_slice(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, n.min() - 1 : n.max()]


def as_lists(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Lists of sizes read from the batch, as for images that lie one after the other."""
    parts = x.flatten(0, 1)[: n.sum()].split(n.tolist())
    return torch.cat([part.cumsum(0) for part in parts])


def in_a_range(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for _ in range(n[0]):
        x = x * 1.5
    return x


def each_of_a_loop(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[i, : int(k)] for i, k in enumerate(n)])


def as_a_size(net: Any, x: torch.Tensor, n: Any, mask: torch.Tensor) -> torch.Tensor:
    return x[:, : n[0]] * torch.arange(n[0])[:, None] + torch.ones(n[0], 5)


def by_keyword(net: Any, x: torch.Tensor, n: Any, mask: torch.Tensor) -> torch.Tensor:
    high, wide = n[0], n[1]
    return torch.nn.functional.interpolate(x[:, None], size=(high, wide), mode="bilinear")


def repeated(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, n, dim=0).cumsum(0)


def beside_sizes(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A number read from a tensor made of the batch's sizes, beside one read from the batch
    itself."""
    chunks = torch.div(torch.tensor(x.shape[1] * 2), 2, rounding_mode="trunc")
    return x.reshape(x.shape[0], int(chunks), 5) * n[0].item()


def none_left_out(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows of zeros left out before a convolution, as Idefics leaves out empty images."""
    there = (n > 0).nonzero(as_tuple=True)[0]
    return torch.nn.functional.conv1d(x[n > 0].mT, torch.ones(2, 5, 3), padding=1)[there] * 2


def and_some_are(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mask that leaves rows out stays chosen rows, for any batch."""
    return x.flip(0)[n > 0].flip(0).mean() + x[mask].sum()


FORMS = (
    item, of_a_slice, as_lists, in_a_range, each_of_a_loop, as_a_size, by_keyword, repeated,
    beside_sizes, none_left_out, and_some_are,
)  # fmt: skip


def batches() -> list[tuple[torch.Tensor, ...]]:
    """Batches whose sizes change, and whose numbers change under the same sizes."""
    random = torch.Generator().manual_seed(0)
    made = []
    for size, length, n in ((3, 4, [2, 3, 2]), (3, 4, [3, 4, 1]), (4, 6, [2, 3, 2, 5])):
        x = torch.randn(size, length, 5, generator=random)
        mask = torch.rand(size, length, generator=random) > 0.4
        made.append((x, torch.tensor(n), mask))
    x, n, mask = made[0]
    return [*made, (x + 1, n.clone(), ~mask)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_each_batch_is_as_in_eager(form: Form) -> None:
    model = Net(form)
    twin = copy.deepcopy(model)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)
    for batch in batches():
        optimizer.zero_grad()
        loss = twin(*batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(trainer.train_step(*batch).loss, loss.detach())
        torch.testing.assert_close(model.w, twin.w)


def test_a_value_is_captured_once(captures: list[int]) -> None:
    model = Net(as_lists)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    first, other, *_, again = batches()
    for batch in (first, again, other, first, other):
        trainer.train_step(*batch)
    assert len(captures) == 2
    assert "captured again for other values" in str(trainer.report()["notes"])


def of_parameters(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, : (net.w > 0.7).sum().item()]


def of_chance(net: Any, x: torch.Tensor, n: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, : torch.randint(1, 4, ()).item()]


def of_rows_left_out(net: Any, x: torch.Tensor, n: torch.Tensor, mask: Any) -> torch.Tensor:
    return x[n > 2].flip(0).cumsum(0)


def of_rows_by_parameters(net: Any, x: torch.Tensor, n: torch.Tensor, mask: Any) -> torch.Tensor:
    """Rows chosen by the parameters; they happen to be all rows, but the batch does not decide
    it."""
    return x[x.sum((1, 2)) < 1e9].cumsum(0)


@pytest.mark.parametrize(
    "form", [of_parameters, of_chance, of_rows_left_out, of_rows_by_parameters]
)
def test_what_the_batch_does_not_decide_is_refused(form: Form) -> None:
    model = Net(form)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = torch.get_rng_state()
    with pytest.raises(onward.CaptureError):
        trainer.train_step(*batches()[0])
    assert torch.equal(before, torch.get_rng_state())


class Moved(torch.nn.Module):
    """A module that moves a layer to where it already is in every forward, as Switch Transformers'
    router does."""

    def __init__(self, *where: Any) -> None:
        super().__init__()
        self.layer, self.where = torch.nn.Linear(5, 5), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(*self.where)
        return self.layer(x).square().mean()


@pytest.mark.parametrize("where", [("cpu",), (torch.float32,), ("cpu", torch.float32)])
def test_a_module_is_put_where_it_is(where: tuple[Any, ...]) -> None:
    model = Moved(*where)
    twin = copy.deepcopy(model)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 5)
    torch.testing.assert_close(trainer.train_step(x).loss, twin(x).detach())
    (gradient,) = torch.autograd.grad(twin(x), [twin.layer.weight])
    torch.testing.assert_close(model.layer.weight, twin.layer.weight - 0.1 * gradient)


class Clipped(Moved):
    """A forward that writes a parameter through `.data`, which autograd does not see, as in Gemma
    3n."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x[:, : self.where[0].item()]).square().mean()


def test_a_parameter_that_is_written_is_refused_and_left() -> None:
    model = Clipped(torch.tensor(5))
    before = model.layer.weight.detach().clone()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(onward.CaptureError):
        trainer.train_step(torch.randn(3, 5))
    assert torch.equal(model.layer.weight, before)


def test_a_module_that_becomes_another_is_refused() -> None:
    model = Moved(torch.bfloat16)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(onward.CaptureError):
        trainer.train_step(torch.randn(3, 5))
    assert model.layer.weight.dtype == torch.float32


class Plain(torch.nn.Module):
    """A module with a tensor that is no buffer, of which the forward reads a number."""

    def __init__(self, read: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.t, self.read = torch.nn.Linear(4, 4), torch.tensor(1.0), read

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.l(x) * self.read(self.t)).square().mean()}


PLAIN: dict[str, Callable[[torch.Tensor], float]] = {
    "float": float,
    "int": int,
    "item": lambda t: float(t.item()),
    "math": math.exp,
    "complex": lambda t: abs(complex(t)),
}


@pytest.mark.parametrize("way", ["trainer", "call"])
@pytest.mark.parametrize("read", PLAIN)
def test_a_number_off_an_unregistered_tensor_is_watched(read: str, way: str) -> None:
    model, eager = Plain(PLAIN[read]), Plain(PLAIN[read])
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    trainer = None
    if way == "trainer":
        trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    else:
        onward.accelerate(model)
    for number in (1.0, 1.0, 2.0, 3.0):
        for m in (model, eager):
            m.t.fill_(number)
        found = model(x)["loss"] if trainer is None else trainer.train_step(x).loss
        torch.testing.assert_close(found.detach(), eager(x)["loss"].detach())
