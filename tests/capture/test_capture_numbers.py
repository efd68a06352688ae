"""Whole numbers, truth values and floats mixed, in the spellings that torch promotes: each form is
captured and equals eager, or is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward

I = torch.tensor([[3, -2, 5], [0, 7, -8]])  # noqa: E741
X = torch.tensor([[0.3, -2.0, 0.5], [0.0, 1.7, -0.8]])
B = torch.tensor([[True, False, True], [False, False, True]])

NAN, INF = float("nan"), float("inf")
ENDS = torch.tensor([-1.0, 0.0, 0.5, 1.0])

Form = Callable[[Any, Any, Any], torch.Tensor]
FORMS: dict[str, Form] = {
    "clamp int by float": lambda x, i, b: i.clamp(min=0.5),
    "clamp int max float": lambda x, i, b: i.clamp(max=2.5),
    "clamp int both": lambda x, i, b: i.clamp(-1, 4),
    "clamp_max int": lambda x, i, b: torch.clamp_max(i, 2),
    "clamp_max float": lambda x, i, b: torch.clamp_max(x, 0.2),
    "clamp_min float": lambda x, i, b: torch.clamp_min(x, -0.2),
    "clamp_max int by float": lambda x, i, b: torch.clamp_max(i, 2.5),
    "hardtanh": lambda x, i, b: F.hardtanh(x, -0.5, 0.4),
    "relu6": lambda x, i, b: F.relu6(x * 4),
    "not int": lambda x, i, b: ~i,
    "not bool": lambda x, i, b: ~b,
    "not int32": lambda x, i, b: ~i.int(),
    "not u8": lambda x, i, b: ~i.to(torch.uint8),
    "relu int": lambda x, i, b: F.relu(i),
    "rsub alpha": lambda x, i, b: torch.rsub(x, 2 * x.sin(), alpha=3),
    "rsub scalar alpha": lambda x, i, b: torch.rsub(x, 2.0, alpha=3),
    "rsub int alpha": lambda x, i, b: torch.rsub(i, i * i, alpha=2),
    "sub alpha": lambda x, i, b: torch.sub(x, i, alpha=2),
    "add alpha float": lambda x, i, b: torch.add(x, i, alpha=0.5),
    "int div": lambda x, i, b: i / 4,
    "int floordiv": lambda x, i, b: i // 4,
    "int mod": lambda x, i, b: i % 4,
    "float mod": lambda x, i, b: x % 0.4,
    "trunc div": lambda x, i, b: torch.div(i, 4, rounding_mode="trunc"),
    "floor div": lambda x, i, b: torch.div(i, 4, rounding_mode="floor"),
    "int pow": lambda x, i, b: i**3,
    "2**i": lambda x, i, b: 2.0**i,
    "2**x": lambda x, i, b: 2**x,
    "int mean": lambda x, i, b: i.float().mean(),
    "bool sum": lambda x, i, b: b.sum(),
    "bool mul": lambda x, i, b: b * b,
    "bool add": lambda x, i, b: b + b,
    "bool mul float": lambda x, i, b: b * x,
    "bool add int": lambda x, i, b: b + i,
    "bool sub": lambda x, i, b: b.int() - 1,
    "max bool": lambda x, i, b: torch.maximum(b, ~b),
    "max int": lambda x, i, b: torch.maximum(i, -i),
    "min int float": lambda x, i, b: torch.minimum(i, x),
    "and int": lambda x, i, b: i & 3,
    "or int": lambda x, i, b: i | 3,
    "xor int": lambda x, i, b: i ^ 3,
    "shift": lambda x, i, b: i << 1,
    "shift back": lambda x, i, b: i >> 1,
    "shift by places": lambda x, i, b: (i << (i + 60) % 70) % 1000,
    "shift back by places": lambda x, i, b: (i * 2**40 - 5) >> (i + 38) % 70,
    "shift of i32": lambda x, i, b: (i.int() << 29) // 2 + (i.int() >> i.abs().int()),
    "shift of a number": lambda x, i, b: 3 << i.abs(),
    "shift u8": lambda x, i, b: i.abs().to(torch.uint8) << 1,
    "logical_and int": lambda x, i, b: torch.logical_and(i, i + 2),
    "logical_not int": lambda x, i, b: torch.logical_not(i),
    "logical_not float": lambda x, i, b: torch.logical_not(x),
    "logical_xor": lambda x, i, b: torch.logical_xor(i, b),
    "eq int float": lambda x, i, b: i == 3.0,
    "lt int float": lambda x, i, b: i < 2.5,
    "ge bool": lambda x, i, b: b >= 1,
    "eq bool int": lambda x, i, b: b == 1,
    "gt bool half": lambda x, i, b: b > 0.5,
    "cmp int32 int64": lambda x, i, b: i.int() < i + 1,
    "eq int big float": lambda x, i, b: i + 2**24 == i.float() + 2**24,
    "neg int": lambda x, i, b: -i,
    "abs int": lambda x, i, b: i.abs(),
    "sqrt int": lambda x, i, b: (i * i).sqrt(),
    "exp int": lambda x, i, b: i.exp(),
    "sigmoid int": lambda x, i, b: i.sigmoid(),
    "sin bool": lambda x, i, b: b.sin(),
    "recip int": lambda x, i, b: (i * i + 1).reciprocal(),
    "rsqrt int": lambda x, i, b: (i * i + 1).rsqrt(),
    "cumsum int": lambda x, i, b: i.cumsum(1),
    "cumsum bool": lambda x, i, b: b.cumsum(1),
    "cumsum 0d": lambda x, i, b: x[0, 0].cumsum(0),
    "softmax 0d": lambda x, i, b: x[0, 0].softmax(0),
    "softmax int": lambda x, i, b: i.softmax(-1, dtype=torch.float32),
    "argmax": lambda x, i, b: x.argmax(1),
    "argmax int": lambda x, i, b: i.argmax(1),
    "argmax none": lambda x, i, b: i.argmax(),
    "prod": lambda x, i, b: i.prod(),
    "any": lambda x, i, b: b.any(1),
    "all": lambda x, i, b: b.all(1),
    "any int": lambda x, i, b: i.any(1),
    "amax": lambda x, i, b: i.amax(1),
    "amin": lambda x, i, b: i.amin(1),
    "norm int": lambda x, i, b: i.float().norm(),
    "where mixed": lambda x, i, b: torch.where(b, i, x),
    "where int float": lambda x, i, b: torch.where(b, i, 0.5),
    "masked_fill int": lambda x, i, b: i.masked_fill(b, 7),
    "masked_fill int float": lambda x, i, b: i.masked_fill(b, 7.0),
    "where scalar": lambda x, i, b: torch.where(b, 1, 2.5),
    "floor": lambda x, i, b: x.floor(),
    "floor int": lambda x, i, b: i.floor(),
    "round": lambda x, i, b: (x * 2.5).round(),
    "trunc": lambda x, i, b: x.trunc(),
    "ceil": lambda x, i, b: x.ceil(),
    "sign": lambda x, i, b: x.sign(),
    "to int": lambda x, i, b: (x * 3).int(),
    "to long": lambda x, i, b: (x * 3).long(),
    "to bool": lambda x, i, b: x.bool(),
    "to uint8": lambda x, i, b: i.abs().to(torch.uint8) * 100,
    "to int8": lambda x, i, b: (i * 50).to(torch.int8),
    "int32 overflow": lambda x, i, b: i.int() * 2**30,
    "full int": lambda x, i, b: torch.full((2, 3), 2) * i,
    "full_like": lambda x, i, b: torch.full_like(i, 2.7),
    "arange float": lambda x, i, b: torch.arange(0, 1.5, 0.5) * x,
    "arange neg": lambda x, i, b: torch.arange(3, 0, -1) * x,
    "linspace": lambda x, i, b: torch.linspace(0, 1, 3) * x,
    "ones bool": lambda x, i, b: torch.ones(2, 3, dtype=torch.bool) & b,
    "tri": lambda x, i, b: x.tril(-1) + x.triu(1),
    "tri int": lambda x, i, b: i.tril(),
    "flip": lambda x, i, b: x.flip(0, 1),
    "roll": lambda x, i, b: x.roll(1, 0),
    "one_hot": lambda x, i, b: F.one_hot(i.abs(), 9),
    "bincount": lambda x, i, b: i.abs().flatten().bincount(),
    "gather": lambda x, i, b: x.gather(1, i.abs() % 3),
    "scatter": lambda x, i, b: torch.zeros(2, 3).scatter(1, i.abs() % 3, x),
    "index_select": lambda x, i, b: x.index_select(1, (i.abs() % 3)[0]),
    "take": lambda x, i, b: x.take(i.abs() % 6),
    "isnan": lambda x, i, b: x.isnan(),
    "isinf int": lambda x, i, b: i.isinf(),
    "nan_to_num": lambda x, i, b: x.nan_to_num(),
    "erf int": lambda x, i, b: i.erf(),
    "gelu": lambda x, i, b: F.gelu(x),
    "gelu tanh": lambda x, i, b: F.gelu(x, approximate="tanh"),
    "silu": lambda x, i, b: F.silu(x),
    "leaky": lambda x, i, b: F.leaky_relu(x, 0.2),
    "elu": lambda x, i, b: F.elu(x, 1.3),
    "selu": lambda x, i, b: F.selu(x),
    "softplus": lambda x, i, b: F.softplus(x, 2.0, 1.0),
    "hardswish": lambda x, i, b: F.hardswish(x),
    "mish": lambda x, i, b: F.mish(x),
    "logsigmoid": lambda x, i, b: F.logsigmoid(x),
    "std": lambda x, i, b: x.std(1),
    "var0": lambda x, i, b: x.var(1, correction=0),
    "mean int": lambda x, i, b: i.double().mean().float(),
    "sum dtype": lambda x, i, b: i.sum(dtype=torch.float32),
    "mean dtype": lambda x, i, b: i.mean(1, dtype=torch.float32),
    "pow float": lambda x, i, b: (i * i) ** 1.5,
    "argmin of bytes": lambda x, i, b: (i % 3).to(torch.uint8).argmin(-1),
    "min of bytes": lambda x, i, b: (i % 3).to(torch.uint8).min(-1).indices,
    "argmin of the least": lambda x, i, b: torch.where(i == i.amin(), -(2**63), i).argmin(),
    "max of bools": lambda x, i, b: b.max(-1).indices,
    "min of bools": lambda x, i, b: b.min(-1).values,
    "floordiv of the least": lambda x, i, b: torch.where(i > 0, -(2**63), i) // 3 % 1000,
    "floordiv of a tenth": lambda x, i, b: i / 1.0 // 0.1,
    "floordiv below 0": lambda x, i, b: (i / 1.0) // -0.1,
    "floordiv by halves": lambda x, i, b: torch.div(
        i * 0.5, i.flip(1) * 0.05, rounding_mode="floor"
    ),
    "floordiv by 0": lambda x, i, b: (x.detach() // torch.zeros(())).nan_to_num(7.0, 8.0, 9.0),
    "number floordiv": lambda x, i, b: 1 // (i * 0.1 + 0.05),
    "floordiv of ends": lambda x, i, b: (torch.where(b, INF, i * 1.0) // 0.1).nan_to_num(7.0, 8.0),
    "floor of log2": lambda x, i, b: torch.log2(2.0 ** (i.abs() + 5)).floor(),
    "floor of log10": lambda x, i, b: torch.log10(10.0 ** i.abs()).floor(),
    "log2": lambda x, i, b: x.abs().add(0.1).log2(),
    "bucketize NaN": lambda x, i, b: torch.bucketize(torch.where(b, x, NAN), ENDS),
    "bucketize NaN, right": lambda x, i, b: torch.bucketize(
        torch.where(b, x, NAN), ENDS, right=True
    ),
    "searchsorted NaN": lambda x, i, b: torch.searchsorted(ENDS, torch.where(b, x, NAN)),
    "bucketize int": lambda x, i, b: torch.bucketize(i, torch.tensor([-2, 0, 5]), right=True),
    "order of bools": lambda x, i, b: (b < ~b).int() + 2 * (b >= b.flip(0)).int() + 4 * (b != ~b),
    "a step from before": lambda x, i, b: x[..., -9::2],
}
REFUSED = {  # no translation yet, or none for these dtypes
    "not u8",
    "shift u8",
    "to int8",
    "bincount",
}


class Net(nn.Module):
    """The sum of a form's numbers, each with a weight of its own."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.w, self.form = nn.Parameter(torch.tensor(1.25)), form

    def forward(self, x: torch.Tensor, i: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = self.form(x * self.w, i, b).to(torch.float32).reshape(-1)
        return self.w * 0.5 + (y * torch.cos(torch.arange(y.numel()) * 0.7 + 0.3)).sum()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FORMS)
def test_numbers_of_mixed_kinds_are_eagers_or_refused(name: str) -> None:
    model, twin = Net(FORMS[name]), Net(FORMS[name])
    want = twin(X, I, B)
    want.backward()
    options = {"strict": name in REFUSED}  # what has no translation could run in PyTorch
    trainer = onward.Trainer(model, onward.optim.SGD(lr=1.0), options=options)
    if name in REFUSED:
        with pytest.raises(onward.CaptureError, match=r"translation|trace|dims|not supported"):
            trainer.train_step(x=X, i=I, b=B)
        return
    found = trainer.train_step(x=X, i=I, b=B).loss
    torch.testing.assert_close(found, want.detach(), rtol=1e-5, atol=1e-5)
    assert twin.w.grad is not None
    torch.testing.assert_close(1.25 - model.w.detach(), twin.w.grad, rtol=1e-5, atol=1e-5)


# By element type: numbers at which a comparison in another type than the one that torch promotes to
# has another answer.
NUMBERS = {
    torch.bool: [False, True, False, True, True, False],
    torch.uint8: [0, 1, 2, 44, 255, 3],
    torch.int32: [0, 1, -1, 44, 2**31 - 1, 2**24 + 1],
    torch.int64: [0, 1, 2**33, 300, 2**24 + 1, 2**53 + 1],
    torch.float32: [0.0, 1.0, 0.1, 2.0**24, -1.0, 2.5],
    torch.float64: [0.0, 1.0 + 1e-12, 0.1, 2.0**24 + 1, 2.0**53, 2.5],
}
OTHERS: dict[str, torch.Tensor | float] = {
    **{str(dtype): torch.tensor(NUMBERS[dtype], dtype=dtype)[:, None] for dtype in NUMBERS},
    **{f"{dtype}, no dims": torch.tensor(NUMBERS[dtype][2], dtype=dtype) for dtype in NUMBERS},
    "True": True, "-1": -1, "2": 2, "0.1": 0.1, "1.0": 1.0, "1e-12": 1e-12,
}  # fmt: skip
COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


class Compared(nn.Module):
    """A weighted sum of all comparisons of two arguments, of which the first is a tensor."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor | float) -> None:
        super().__init__()
        self.w, self.a, self.b = nn.Parameter(torch.tensor(1.25)), a, b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.stack([compare(self.a, self.b).float() for compare in COMPARISONS])
        weights = torch.cos(torch.arange(found.numel()) * 0.7 + 0.3)
        return (found.flatten() * weights).sum() * self.w + x.sum()


@pytest.mark.sample(12)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dims", [1, 0])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_comparisons_are_in_the_type_that_torch_promotes_to(
    dtype: torch.dtype, dims: int, other: str
) -> None:
    a = torch.tensor(NUMBERS[dtype] if dims else NUMBERS[dtype][1], dtype=dtype)
    model, x = Compared(a, OTHERS[other]), torch.zeros(2)
    want = model(x).detach()
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0), options={"strict": True})
    if dtype is torch.uint8 and other == "-1":  # a number that the type has not
        with pytest.raises(onward.CaptureError, match="out of bounds for uint8"):
            trainer.train_step(x=x)
        return
    torch.testing.assert_close(trainer.train_step(x=x).loss, want, rtol=1e-5, atol=1e-5)
