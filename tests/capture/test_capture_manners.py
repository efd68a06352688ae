"""What a capture refuses, and that it leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import Compiled, Mlp, batch, bert, compiled, dropout_nodes, execute, gpt2, mlp, trained
from torch import nn
from torch.utils.checkpoint import checkpoint

import onward
from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

X, Y = torch.randn(6, 8), torch.arange(6) % 5
loss_fn = nn.functional.cross_entropy


class Logit(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(x)


class Fold(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.ndtri(x)


class Odd(Mlp):
    """Two submodules whose ops no table will ever hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Logit(), Fold()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(super().forward(x)))


def test_unsupported_ops_are_listed_whole_with_their_modules() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(CaptureRequest(Odd().train(), (X,), {}, (Y,), loss_fn))
    text = str(caught.value)
    assert "2 op(s)" in text
    lines = [line for line in text.splitlines() if " at " in line]
    assert len(lines) == 2
    assert any(
        "special_i0" in line and " at first (by i0.default): no op" in line for line in lines
    ), text
    assert any("special_ndtri" in line and " at second: no op" in line for line in lines), text


class Checkpointed(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


SCRIPTS: dict[str, Callable[[Any], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda m: torch.jit.trace(m, torch.zeros(2, 4)),
    "scripted within": lambda m: nn.Sequential(torch.jit.script(m[0]), m[1]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("kind", SCRIPTS)
def test_torchscript_is_refused(kind: str) -> None:
    model = SCRIPTS[kind](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))
    loss_fn = nn.functional.cross_entropy
    trainer = onward.Trainer(model, onward.optim.SGD(), loss_fn=loss_fn, options={"strict": True})
    with pytest.raises(CaptureError, match="is TorchScript"):
        trainer.train_step(torch.zeros(2, 4), torch.tensor([0, 1]))


def test_checkpointing_is_inlined() -> None:
    torch.manual_seed(0)
    model = Checkpointed().train()
    made = Compiled(model, (X,), {}, (Y,), loss_fn)
    graph = made.differentiated(trained(made))
    got = execute(made, graph, {"x": X, "target": Y})
    loss_fn(model(X), Y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[f"grad.param.{name}"], p.grad)


class PartlyFrozen(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = torch.tanh(self.inner(x))
        return self.outer(h)


def test_region_without_gradients_is_never_given_some() -> None:
    model = PartlyFrozen().train()
    made = Compiled(model, (X,), {}, (Y,), loss_fn)
    outputs = made.differentiated(trained(made)).outputs
    assert {n for n in outputs if n.startswith("grad.")} == {
        "grad.param.outer.weight",
        "grad.param.outer.bias",
    }


def test_autocast_is_refused() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast"):
        capture(CaptureRequest(mlp(), (X,), {}, (Y,), loss_fn))


def test_parameters_that_share_storage_are_refused_by_name() -> None:
    model = mlp()
    whole = torch.randn(16 * 8 + 5 * 16 - 1)  # they have one number in common
    model.inner.weight = nn.Parameter(whole[: 16 * 8].view(16, 8))
    model.outer.weight = nn.Parameter(whole[16 * 8 - 1 :].view(5, 16))
    with pytest.raises(CaptureError, match=r"outer\.weight and inner\.weight"):
        capture(CaptureRequest(model, (X,), {}, (Y,), loss_fn))


def test_refusals_come_together() -> None:
    model = mlp()
    whole = torch.randn(16 * 8 + 5 * 16 - 1)  # they have one number in common
    model.inner.weight = nn.Parameter(whole[: 16 * 8].view(16, 8))
    model.outer.weight = nn.Parameter(whole[16 * 8 - 1 :].view(5, 16))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError) as caught:
        capture(CaptureRequest(model, (X,), {}, (Y,), loss_fn))
    assert "autocast" in str(caught.value)
    assert "one storage" in str(caught.value)


# ---- no trace


def trace(model: nn.Module) -> dict[str, Any]:
    """Everything a capture could leave changed."""
    from transformers import masking_utils

    transformer = torch.nn.modules.transformer
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    return {
        "training": [m.training for m in model.modules()],
        "hooks": [dict(getattr(m, h)) for m in model.modules() for h in hooks],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "config": [c.to_dict() for c in configs],
        "attention": [c._attn_implementation for c in configs],
        "rng": torch.get_rng_state().tolist(),
        "apply": [dict(vars(c)) for c in torch.autograd.Function.__mro__],
        "functions": dict(vars(torch.autograd.function)),
        "causal": transformer._detect_is_causal_mask,
        "packed": masking_utils.find_packed_sequence_indices,
        "grads": [p.grad for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "values": [p.detach().clone() for p in model.parameters()],
        "grad mode": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key, value in before.items():
        if key == "values":
            assert all(torch.equal(a, b) for a, b in zip(value, after[key], strict=True))
        else:
            assert value == after[key], f"{key} changed"


@pytest.mark.sample(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
def test_capture_leaves_no_trace(make: Any, attention: str) -> None:
    model = make(attn_implementation=attention)
    model.get_submodule("transformer.h.0" if make is gpt2 else "bert.encoder.layer.0").eval()
    assert model.config._attn_implementation == attention
    before = trace(model)
    capture(CaptureRequest(model, (), batch(padding="right")))
    assert_same(before, trace(model))


class Broken(nn.Module):
    """A Hugging Face model whose head cannot be captured."""

    def __init__(self, inner: nn.Module, fault: Any) -> None:
        super().__init__()
        self.inner, self.fault = inner, fault

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.fault(self.inner(**batch).loss)


def raises(loss: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("a fault of the user's own")


class Custom(torch.autograd.Function):
    """A function whose backward returns no gradient for its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()


FAULTS = {
    "no translation": torch.special.i0,
    "own backward": Custom.apply,
    "data-dependent": lambda loss: loss if loss.item() > 0 else -loss,
    "raises": raises,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_capture_leaves_no_trace_either(fault: str) -> None:
    model = Broken(gpt2(), FAULTS[fault]).train()
    before = trace(model)
    with pytest.raises(CaptureError):
        capture(CaptureRequest(model, (), batch(padding="right")))
    assert_same(before, trace(model))
    # A capture that failed must leave the model able to run in plain PyTorch.
    assert model.inner(**batch(padding="right")).loss.isfinite()


def test_batch_is_not_touched() -> None:
    data = batch(padding="middle", ignored=True)
    kept = copy.deepcopy(data)
    capture(CaptureRequest(bert(), (), data))
    assert all(torch.equal(data[k], kept[k]) for k in kept)


class Wrapped(nn.Module):
    """Hides the model's `use_cache`, so that the cache's own concatenations are captured."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.inner(**batch).loss


def test_model_with_its_cache_on_is_the_same_model() -> None:
    model = Wrapped(gpt2(dropout=0.0)).train()
    data = batch(padding="right")
    made = compiled(model, data)
    got = execute(made, made.forward, data, ["loss"])["loss"]
    torch.testing.assert_close(got, model(**data).detach(), rtol=1e-5, atol=0)


def test_submodules_keep_their_own_mode() -> None:
    """A frozen block in evaluation mode has no dropout, in the graph as in PyTorch."""
    model = gpt2()
    model.transformer.h[0].eval()
    assert len(dropout_nodes(capture(CaptureRequest(model, (), batch())).graph)) == 1 + 3
