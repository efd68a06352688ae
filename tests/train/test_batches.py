"""What a batch may be made of: each spelling gives the loss that tensors give, or one line."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loops import OPTIMIZERS, Pair
from torch import nn

import onward
from onward import OnwardError
from onward.prepare.batch import bind_batch

pytestmark = pytest.mark.usefixtures("captures_kept")

loss_fn = nn.functional.cross_entropy
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6) % 3


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@dataclasses.dataclass
class Record:
    input: Any
    labels: Any


class Doubling(torch.Tensor):
    """A tensor subclass whose tanh is twice torch's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs or {})
        return y * 2 if func is torch.tanh else y


class Plain(torch.Tensor):
    """A tensor subclass that adds nothing but its name."""


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


Named = namedtuple("Named", ["input", "labels"])
still = X.numpy().copy()
still.flags.writeable = False
SPELLINGS: dict[str, Any] = {
    "tuple": (X, Y),
    "list": [X, Y],
    "mapping": {"input": X, "labels": Y},
    "user dict": UserDict(input=X, labels=Y),
    "dataclass": Record(X, Y),
    "named tuple": Named(X, Y),
    "numpy": (X.numpy(), Y.numpy()),
    "numpy that cannot be written": (still, Y.numpy()),
    "numpy backwards": (X.flip(0).numpy()[::-1], Y.numpy()),
    "numpy columns": (np.asfortranarray(X.numpy()), Y.numpy()),
    "lists": (X.tolist(), Y.tolist()),
    "list of arrays": ([row.numpy() for row in X], [np.int64(y) for y in Y]),
    "dataclass of lists": Record(X.tolist(), Y.numpy()),
}


def test_spellings_of_a_batch_are_one() -> None:
    trainer = onward.Trainer(net(), onward.optim.SGD(lr=0.0), loss_fn=loss_fn)
    expected = loss_fn(net()(X), Y).item()
    for name, given in SPELLINGS.items():
        for step in (trainer.train_step, trainer.eval_step):
            assert float(step(given).loss) == pytest.approx(expected, rel=1e-6), name


def leaves(value: Any) -> Any:
    return bind_batch((), {"x": value, "y": X}, False).kwargs["x"]


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3], [[1, 2], [3, 4]], [1.5, 2], [True, False], [(1, 2), (3, 4)],
        np.arange(3, dtype=np.int32), np.ones(2), np.ones(2, np.float16), np.array(3),
        np.array([True]),
    ],
    ids=repr,
)  # fmt: skip
def test_numbers_become_what_torch_makes_of_them(value: Any) -> None:
    found, want = leaves(value), torch.as_tensor(value)
    assert torch.equal(found, want)
    assert found.dtype == want.dtype


def test_containers_and_plain_values_stay() -> None:
    tensors = [torch.ones(2), torch.zeros(2)]
    found = leaves(tensors)
    assert type(found) is list
    assert found[0] is tensors[0]
    assert leaves((2, 3)) == (2, 3), "a tuple of numbers is a value of the program"
    assert leaves([]) == []
    assert leaves(["a", "b"]) == ["a", "b"]
    nested = leaves(UserDict(a=UserDict(b=[1, 2]), c=None))
    assert type(nested) is type(nested["a"]) is dict
    assert torch.equal(nested["a"]["b"], torch.tensor([1, 2]))
    for value in (None, True, 3, 2.5, "mean", torch.float32, Ellipsis):
        assert leaves(value) is value
    assert type(leaves(np.float32(0.5))) is float


def noted(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.note = "first"  # type: ignore[attr-defined]
    return x


WRONG: dict[str, tuple[Any, str]] = {
    "ragged": ([[1, 2], [3]], "'x' is a list that cannot become a tensor.*pad"),
    "ragged arrays": ([np.ones(2), np.ones(3)], "'x' is a list that cannot become a tensor"),
    "too large": ([2**70], "'x' is a list that cannot become a tensor"),
    "strings": (np.array(["a"]), "'x' is a numpy array of <U1"),
    "objects": (np.array([None, 1]), "'x' is a numpy array of object"),
    "other bytes": (np.arange(3, dtype=">i8"), "'x' is a numpy array of >i8"),
    "object": (object(), "'x' is a object, neither a tensor nor a plain value"),
    "nested object": ({"a": [object()]}, "'x' is a object"),
    "set": ({1, 2}, "'x' is a set"),
    "dataclass inside": (Record(X, Y), "'x' is a Record"),
    "function": (len, "'x' is a builtin_function"),
    "sparse": (X.to_sparse(), r"'x' is a tensor of layout torch.sparse_coo, .*fix: to_dense"),
    "mkldnn": (X.to_mkldnn(), r"'x' is a tensor of layout torch._mkldnn, .*fix: to_dense"),
    "jagged": (
        torch.nested.nested_tensor([X, X[1:]], layout=torch.jagged),
        "'x' is a tensor of layout torch.jagged",
    ),
    "meta": (X.to("meta"), "'x' is on the meta device, where tensors have no data"),
    "functions of its own": (
        X.as_subclass(Doubling),
        "'x' is of Doubling, a subclass of torch.Tensor",
    ),
    "dispatch of its own": (
        X.as_subclass(Dispatching),
        "'x' is of Dispatching, a subclass of torch.Tensor",
    ),
    "class of its own": (X.as_subclass(Plain), "'x' is of Plain, a subclass of torch.Tensor"),
    "attribute of its own": (noted(X), "'x' is a tensor with the attribute note, which"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tensor_is_refused_in_one_line(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(OnwardError, match=message) as raised:
        leaves(value)
    assert "fix: " in str(raised.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensor_is_refused_in_one_line() -> None:
    with pytest.raises(OnwardError, match=r"'x' is a nested tensor, .*fix: to_padded_tensor"):
        leaves(torch.nested.nested_tensor([X, X[1:]]))


class Marked(nn.Parameter):
    """A Parameter subclass that a forward may test for, though it does nothing else."""


PUT: dict[str, Callable[[nn.Module, torch.Tensor], None]] = {
    "parameter": lambda m, t: m.register_parameter("own", nn.Parameter(t)),
    "marked": lambda m, t: m.register_parameter("own", Marked(t)),
    "buffer": lambda m, t: m.register_buffer("own", t),
}


@pytest.mark.parametrize("late", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("put", PUT)
def test_parameters_and_buffers_of_their_own_class_are_refused(put: str, late: bool) -> None:
    model = net()
    PUT[put](model, torch.ones(3) if late or put == "marked" else torch.ones(3).as_subclass(Plain))
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), loss_fn=loss_fn)
    if late and put != "marked":
        trainer.train_step(X, Y)
        held: Any = model.own
        held.__class__ = Marked if put == "parameter" else Plain
    with pytest.raises(OnwardError, match=r"own is of (Plain|Marked), a subclass of torch"):
        trainer.train_step(X, Y)


def test_parameters_may_have_attributes() -> None:
    """Attributes that trainers and initialisers set on parameters are kept; names that torch.export
    sets on tensors are refused."""
    model = net()
    for p in model.parameters():
        p.no_decay, p._is_hf_initialized = True, True  # type: ignore[attr-defined]
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0), loss_fn=loss_fn)
    expected = loss_fn(net()(X), Y)
    torch.testing.assert_close(trainer.train_step(X, Y).loss, expected.detach())
    next(model.parameters()).constant = 1.0  # type: ignore[attr-defined]
    with pytest.raises(
        OnwardError, match=r"weight has the attribute constant.*rename the attribute"
    ):
        trainer.train_step(X, Y)


def test_keys_are_names() -> None:
    with pytest.raises(OnwardError, match="key 3, which cannot name an argument"):
        bind_batch(({3: X},), {}, False)


def test_values_that_only_look_alike_are_other_programs() -> None:
    """Values that Python calls equal (1, 1.0 and True, 0.0 and -0.0) are programs of their own;
    NaN, which is not equal to itself, is one program."""
    values = [1, 1.0, True, 0, 0.0, -0.0, False, float("nan"), None]
    kinds = [bind_batch((), {"x": v, "y": X}, False).kind for v in values]
    assert len(set(kinds)) == len(values)
    assert kinds[7] == bind_batch((), {"x": float("nan"), "y": X}, False).kind


def test_integers_and_floats_of_one_value_compute_their_own() -> None:
    class Powers(nn.Linear):
        def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:  # type: ignore[override]
            y = super().forward(x).sum()
            return y * 2 if isinstance(how, bool) else y * 3 if isinstance(how, int) else y

    model = Powers(4, 2)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.0))
    for how in (1, True, 1.0):
        expected = model(X, how).item()
        assert float(trainer.eval_step(x=X, how=how).loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*")
def test_batch_without_rows_is_eagers() -> None:
    """The loss is NaN and the gradients are 0: AdamW moves by its moments and decay."""
    model, twin = net(), net()
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), 0.01), loss_fn=loss_fn)
    theirs = torch.optim.AdamW(twin.parameters(), 0.01)
    for n in (6, 0, 6):
        got = trainer.train_step(X[:n], Y[:n]).loss
        theirs.zero_grad()
        loss = loss_fn(twin(X[:n]), Y[:n])
        loss.backward()
        theirs.step()
        torch.testing.assert_close(got, loss.detach(), equal_nan=True, rtol=1e-5, atol=1e-6)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Pools(nn.Module):
    """Causal attention of one head, pooled over the tokens."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, 4), nn.Linear(4, 12), nn.Linear(4, 3)
        self.tokens = tokens

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(ids)).split(4, -1)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.tokens:
            return self.out(h).square().sum() + 0.0 * labels.sum()
        return loss_fn(self.out(h.softmax(1).amax(1)), labels)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "pooled"])
def test_sizes_of_one_and_none_are_eagers(tokens: bool) -> None:
    torch.manual_seed(0)
    model = Pools(tokens)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    twin = Pools(tokens)
    twin.load_state_dict(model.state_dict())
    for rows, length in [(2, 5), (1, 5), (3, 1), (1, 1), (0, 3), (2, 0), (2, 5)]:
        if not length and not tokens:
            continue  # eager has no maximum of nothing
        ids, labels = torch.randint(0, 11, (rows, length)), torch.randint(0, 3, (rows,))
        loss = twin(ids, labels)
        twin.zero_grad()
        loss.backward()
        got = trainer.train_step(ids, labels)
        torch.testing.assert_close(got.loss, loss.detach(), equal_nan=True, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert q.grad is not None
                if not got.skipped:
                    q.sub_(0.01 * q.grad)
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class Reads(nn.Module):
    """Attention of two heads from queries to keys, one of which may be none."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.embed, self.out, self.mask = nn.Embedding(11, 4), nn.Linear(4, 3), mask

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        q, k = (self.embed(x).unflatten(-1, (2, 2)).transpose(1, 2) for x in (queries, keys))
        mask = None
        if self.mask:
            shown = (keys >= 0)[:, None, None]
            mask = shown if self.mask == "bool" else torch.where(shown, 0.5, -1e9)
        h = nn.functional.scaled_dot_product_attention(q, k, k, mask)
        return self.out(h.transpose(1, 2).flatten(2)).square().sum() + self.embed(keys).sum()


@pytest.mark.parametrize("mask", ["", "bool", "float"])
def test_attention_from_or_to_nothing_is_eagers(mask: str) -> None:
    torch.manual_seed(0)
    pair = Pair(Reads(mask), OPTIMIZERS["sgd"])
    for queries, keys in [(3, 4), (0, 4), (3, 0), (0, 0), (3, 4)]:
        batch = torch.randint(0, 11, (2, queries)), torch.randint(0, 11, (2, keys))
        if mask == "float" and keys == 0:
            with pytest.raises(OnwardError, match="may hide every key"):
                pair.trainer.train_step(*batch)
        else:
            pair.step(*batch)


WITH_GRADIENTS = {
    "leaf": lambda: {"input": X.clone().requires_grad_(), "labels": Y},
    "computed": lambda: {"input": nn.Linear(4, 4)(X), "labels": Y},
    "parameter": lambda: {"input": nn.Parameter(X.clone()), "labels": Y},
    "by position": lambda: (X.clone().requires_grad_(), Y),
}


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_of_the_batch_are_refused(name: str) -> None:
    """In eager code they would arrive where the input came from. An evaluation has none."""
    trainer = onward.Trainer(net(), onward.optim.SGD(lr=0.1), loss_fn=loss_fn)
    batch = WITH_GRADIENTS[name]()
    with pytest.raises(OnwardError, match=r"the batch's input(_0)? requires grad"):
        trainer.train_step(batch)
    assert trainer.eval_step(batch).loss.isfinite()
