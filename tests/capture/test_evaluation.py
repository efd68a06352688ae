"""An evaluation is made of the capture in training where the forward asks its mode for dropout
alone, and captured by itself where it may ask for more: its numbers are eager's either way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from exports import Exports, exports
from tiny_families import CASES
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import dropout as taken
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import onward
from onward.capture import CaptureRequest, capture, evaluation
from onward.compile import Compiler

__all__ = ["exports"]  # a fixture

P = 0.5


class Net(nn.Module):
    """`head(body(x))`; what is tried stands in `body`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop, self.p = nn.Dropout(P), P
        self.scale = 1.0

    def body(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x)))


# ---- dropout alone


class Module(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(x)


class Keyword(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=self.p, training=self.training)


class Positional(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.dropout(x, self.p, self.training)


class OverLines(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        made = nn.functional.dropout(
            torch.sin(x),
            p=self.p,
            training=self.training,
        )
        return made + 1


class Ratio(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=self.p if self.training else 0.0)


class Negated(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=0 if not self.training else self.p)


class Attends(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unsqueeze(1)
        return F.scaled_dot_product_attention(
            q, q, q, dropout_p=self.p if self.training else 0.0
        ).squeeze(1)


class Subclassed(nn.Dropout):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class OfSubclass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Subclassed(P)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x)


class NoneAtAll(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class WritesElsewhere(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y += 2
        return self.drop(x) * y


class OffByRatio(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.drop(x), 0.0)


# ---- more than dropout, or what may be


class Branch(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = x + 1
        return self.drop(x)


class BranchOnSize(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and x.shape[0] > 3:
            x = x + 1
        return self.drop(x)


class Variable(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        p = self.p if self.training else 0.1
        return x * 2 if p == 0.1 else F.dropout(x, p)


class OtherWay(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=0.0 if self.training else 1.0)


class NotQuiteOff(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=self.p if self.training else 1.0)


class Asked(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * (1.0 if getattr(self, "training") else 3.0)  # noqa: B009


class FromItsDict(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * (1.0 if vars(self)["training"] else 3.0)


class OfAnother(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.p, training=self.drop.training) * (2 - self.drop.training)


class Property(Net):
    @property
    def trains(self) -> bool:
        return self.training

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.trains else x


def attend(x: torch.Tensor, dropout: float) -> torch.Tensor:
    return x * 5 if dropout == 0.0 else F.dropout(x, dropout)


class OwnFunction(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return attend(x, dropout=0.0 if not self.training else self.p)


class FromImport(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return taken(x, p=self.p, training=self.training)


class Torch(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, self.p, self.training)


class GradMode(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * (1.0 if torch.is_grad_enabled() else 3.0)


class HasGradient(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * (1.0 if x.requires_grad else 3.0)


class HasNode(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * (3.0 if x.grad_fn is None else 1.0)


class Inference(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * (3.0 if torch.is_inference_mode_enabled() else 1.0)


class WritesIntoDropped(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(x)
        y += 1  # where nothing is dropped that is x
        return x + y


class WritesIntoAView(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(x.view(-1, 3))
        y.view(-1).add_(1.0)
        return x * y.view(-1, 6)


class WritesBehind(Net):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(x)
        x.mul_(2.0)
        return x + y


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(P, inplace=True)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5
        return self.drop(x) + x


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x))


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 6, num_layers=2, dropout=P)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.unsqueeze(0))[0].squeeze(0)


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=P)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class OwnMode(Net):
    def train(self, mode: bool = True) -> OwnMode:
        self.scale = 1.0 if mode else 4.0
        return super().train(mode)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * self.scale


DROPOUT = [Module, Keyword, Positional, OverLines, Ratio, Negated, Attends, OfSubclass, NoneAtAll,
           WritesElsewhere, OffByRatio]  # fmt: skip
MORE = [Branch, BranchOnSize, Variable, OtherWay, NotQuiteOff, Asked, FromItsDict, OfAnother,
        Property, OwnFunction, FromImport, Torch, GradMode, HasGradient, HasNode, Inference,
        WritesIntoDropped, WritesIntoAView, WritesBehind, InPlace, Normed, Recurrent, Attention,
        OwnMode]  # fmt: skip


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(n, 6) for n in (3, 4, 7)]


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


@pytest.mark.parametrize("kind", [*DROPOUT, *MORE])
def test_an_evaluation_of_an_accelerated_model_is_eagers(kind: type[Net], exports: Exports) -> None:
    model = kind()
    onward.accelerate(model)
    model.train()
    first, *rest = batches()
    model(first).sum().backward()
    model.zero_grad()
    plain = copy.deepcopy(model).eval()
    model.eval()
    made = exports.count
    with torch.inference_mode():
        for x in rest:
            with onward.eager():
                want = plain(x)
            torch.testing.assert_close(model(x), want)
    assert (exports.count == made) == (kind in DROPOUT), "whether it was traced again"


@pytest.mark.parametrize("kind", [*DROPOUT, *MORE])
def test_an_evaluation_of_a_trainer_is_eagers(kind: type[Net], exports: Exports) -> None:
    if kind is Inference:
        pytest.skip("an evaluation of a Trainer's is no inference mode")
    model = kind()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_of)
    first, *rest = batches()
    trainer.train_step(first, first)
    plain = copy.deepcopy(model).eval()
    made = exports.count
    for x in rest:
        with torch.no_grad():
            want = loss_of(plain(x), x)
        torch.testing.assert_close(torch.tensor(float(trainer.eval_step(x, x).loss)), want)
    assert (exports.count == made) == (kind in DROPOUT), "whether it was traced again"


def test_what_always_drops_drops_in_evaluation_too() -> None:
    class Always(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x) + F.dropout(x, 0.5)

    class Native(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x) + torch.native_dropout(x, 0.5, True)[0]

    class Drawn(Net):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(x) * torch.rand_like(x)

    for kind in (Always, Native, Drawn):
        model = kind()
        onward.accelerate(model)
        x = batches()[0]
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            assert not torch.equal(model(x), model(x)), kind.__name__


def test_another_part_in_evaluation_keeps_its_own_dropout_off() -> None:
    """In training too; and the other way round, what stays in training drops."""
    model = Module()
    onward.accelerate(model)
    model.drop.eval()
    x = batches()[0]
    model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        want = model.last(2 * model.first(x))
        torch.testing.assert_close(model(x), want)
        model.drop.train()
        assert not torch.equal(model(x), model(x))


def test_a_dropout_of_the_users_in_torchs_place_may_do_more(
    monkeypatch: pytest.MonkeyPatch, exports: Exports
) -> None:
    plain = F.dropout

    def doubled(x: torch.Tensor, p: float = 0.5, training: bool = True, *more: Any) -> torch.Tensor:
        return plain(x, p, training) if training else 2 * x

    monkeypatch.setattr(F, "dropout", doubled)
    model, x = Keyword(), batches()[0]
    twin = copy.deepcopy(model)
    onward.accelerate(model)
    model(x).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), twin.eval()(x))
    assert exports.count == 2


def test_attention_drops_in_evaluation_whatever_flag_it_is_given(exports: Exports) -> None:
    """transformers' sdpa function takes the ratio alone, and any keyword."""

    class Attending(transformers.LlamaForCausalLM):
        pass

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = Attending(config)

    def forward(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (
            p(hidden_states).view(*hidden_states.shape[:-1], 2, 4).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        name = self.config._attn_implementation
        function = transformers.AttentionInterface().get_interface(name, sdpa_attention_forward)
        y, _ = function(self, q, k, v, attention_mask, dropout=0.5, training=self.training)
        return self.o_proj(y.reshape(hidden_states.shape)), None

    monkey = pytest.MonkeyPatch()
    monkey.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    try:
        onward.accelerate(model)
        ids = torch.arange(12).view(2, 6)
        model(input_ids=ids, labels=ids).loss.backward()
        model.eval()
        with torch.no_grad():
            one, two = (float(model(input_ids=ids, labels=ids).loss) for _ in range(2))
    finally:
        monkey.undo()
    assert one != two, "eager PyTorch drops there"


def test_a_mode_of_the_models_own_is_put_back_after_an_evaluation() -> None:
    model, x = OwnMode(), batches()[0]
    model.drop.p = 0.0
    plain = copy.deepcopy(model)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_of)
    for _ in range(2):
        for mode, step in ((True, trainer.train_step), (False, trainer.eval_step)):
            plain.train(mode)
            want = float(loss_of(plain(x), x).detach())
            assert float(step(x, x).loss) == pytest.approx(want, rel=1e-5), mode
    assert model.training and model.scale == 1.0


def test_with_gradients_an_evaluation_is_captured_by_itself(exports: Exports) -> None:
    model = Module()
    onward.accelerate(model)
    x = batches()[0]
    model(x).sum().backward()
    made = exports.count
    model.eval().zero_grad()
    model(x).sum().backward()
    grad = model.first.weight.grad
    with onward.eager():
        model.zero_grad()
        model(x).sum().backward()
    torch.testing.assert_close(grad, model.first.weight.grad)
    assert exports.count == made + 1


def test_the_compiler_says_why_an_evaluation_is_more() -> None:
    x = batches()[0]
    found = {
        k.__name__: capture(CaptureRequest(k().train(), (x,), {}, want_loss=False)).asks
        for k in MORE[:4]
    }
    assert all("mode" in why for why in found.values()), found
    captured = capture(CaptureRequest(Module(), (x,), {}, want_loss=False))
    made = evaluation(captured)
    assert captured.asks == "" and made is not None
    assert made.graph.signature.seed is None and captured.graph.signature.seed is not None
    assert "Dropout" not in {n.op_type for n in made.graph}
    assert Compiler.evaluation.__doc__


AGAIN = {  # families of transformers' models whose evaluation is traced again
    "Bart", "Llama 4, turned as complex numbers", "Gemma 2, soft caps",
    "ModernBERT, a gate of one product", "Llama, packed documents", "GPT-2, packed documents",
    "Mistral, sliding window", "BERT, mask of bools", "BERT, mask added",
}  # fmt: skip


def let_drop(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.1
        for name, value in vars(m).items():
            if "drop" in name and "layer" not in name and type(value) is float:
                setattr(m, name, 0.1)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_of_each_family_is_eagers(name: str, exports: Exports) -> None:
    make, data_of = CASES[name]
    model, data = make(), data_of()
    let_drop(model)
    onward.accelerate(model.train(), strict=True)
    model(**data).loss.backward()
    model.eval()
    made = exports.count
    with torch.no_grad():
        have = model(**data).loss
        with onward.eager():
            want = model(**data).loss
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
    assert (exports.count > made) == (name in AGAIN)
