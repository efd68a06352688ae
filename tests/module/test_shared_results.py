"""Results that share memory with inputs, the module's tensors or each other, as in eager mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model
from twins import Twins, assert_same

import onward
from onward import EagerWarning
from onward.module import accelerated


class Layer(nn.Module):
    """A linear layer with a buffer, and a forward of the test's."""

    b: torch.Tensor

    def __init__(self, returns: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.returns = nn.Linear(4, 4), returns
        self.register_buffer("b", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.returns(self, x, self.l(x))


def written(_: Any, x: Any, y: Any) -> Any:
    part = y[:, 0]
    y.mul_(2)
    return y, part


def parts(_: Any, x: Any, y: Any) -> Any:
    both = torch.complex(y, 2 * y)
    return both.real, both.imag


# what is returned, and which result the caller writes into
SHARED: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "flat": (lambda m, x, y: (y, y.view(-1)), 0),
    "flat, first": (lambda m, x, y: (y.view(-1), y), 0),
    "by its size": (lambda m, x, y: (y, y.view(x.shape[0] * 2, 2)), 1),
    "by a size of the result": (lambda m, x, y: (y, y.view(y.size(0) * 2, -1)), 1),
    "detached": (lambda m, x, y: (y, y.detach()), 1),
    "transposed twice": (lambda m, x, y: (y.t(), y, y.t().t()[1:]), 2),
    "of the input": (lambda m, x, y: (y, x[:, :2]), 1),
    "the input by a view": (lambda m, x, y: (y, x.view_as(x)), 1),
    "of a buffer": (lambda m, x, y: (y, m.b[0]), 1),
    "of a parameter": (lambda m, x, y: (y, m.l.weight.t(), m.l.weight[0]), 2),
    "written before": (written, 1),
    "parts of a complex tensor": (parts, 0),
    "split": (lambda m, x, y: (y, *y.split(2, 1)), 2),
}


@pytest.mark.parametrize("how", SHARED)
def test_a_write_into_one_is_seen_in_the_other(how: str) -> None:
    returns, place = SHARED[how]
    twins = Twins(Layer(returns))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", EagerWarning)
        for rows in (3, 5, 3):
            torch.manual_seed(rows)
            found = []
            for model, x in zip(twins.both, [torch.randn(rows, 4)] * 2, strict=True):
                x = x.clone()
                outputs = model(x)
                outputs[place].fill_(7.0)
                found.append((*outputs, x))
            assert_same(*found)
            twins.same_buffers()
            assert_same(*[[p.detach() for p in m.parameters()] for m in twins.both])
    assert twins.ran()


@pytest.mark.parametrize("how", [n for n in SHARED if n not in ("detached", "written before")])
def test_gradients_of_all_of_them_are_eager_s(how: str) -> None:
    returns, _ = SHARED[how]
    twins = Twins(Layer(returns))
    for rows in (3, 4):
        x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for model, given in zip(twins.both, inputs, strict=True):
            torch.stack([r.sin().sum() for r in model(given)]).sum().backward()
        twins.same_gradients()
        torch.testing.assert_close(*[given.grad for given in inputs])
    assert twins.ran()


def test_a_write_with_gradients_is_eager_s() -> None:
    twins = Twins(Layer(lambda m, x, y: (y, y.view(-1), y.detach())))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    for model in twins.both:
        whole, flat, bare = model(x)
        assert flat.requires_grad and not bare.requires_grad
        whole.mul_(3)
        (flat.sin().sum() + (whole * bare).sum()).backward()
    twins.same_gradients()


def test_views_that_overlap_without_their_tensor_run_in_eager() -> None:
    twins = Twins(Layer(lambda m, x, y: (y[:, :3], y[:, 1:])))
    with pytest.warns(EagerWarning, match=r"are views of one tensor.*fix: return a clone\(\)"):
        ours, eager = twins.each(lambda m: [r.detach() for r in m(torch.ones(2, 4))])
    for outputs in (ours, eager):
        outputs[0].fill_(3.0)
    assert_same(ours, eager)


def test_a_complex_tensor_s_part_overlaps_with_all_of_it() -> None:
    def returns(_: Any, x: Any, y: Any) -> Any:
        both = torch.complex(y, 2 * y)
        return torch.view_as_real(both)[1:], both.imag

    twins = Twins(Layer(returns))
    with pytest.warns(EagerWarning, match="are views of one tensor"):
        ours, eager = twins.each(lambda m: [r.detach() for r in m(torch.ones(2, 4))])
    for outputs in (ours, eager):
        outputs[0].fill_(3.0)
    assert_same(ours, eager)


def test_a_view_made_without_gradients_runs_in_eager() -> None:
    def returns(_: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            part = x[:, :2]
        return y, part

    twins = Twins(Layer(returns))
    with pytest.warns(EagerWarning, match="by a view that a call cannot repeat"):
        twins.same(lambda m: m(torch.ones(2, 4)))


def test_parts_that_do_not_overlap_are_results_of_the_graph() -> None:
    twins = Twins(Layer(lambda m, x, y: y.split(2, 1)))
    twins.step(lambda m: m(torch.ones(2, 4)))
    assert twins.ran()


def test_a_pooled_row_of_transformers_is_a_view() -> None:
    config = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    twins = Twins(Dinov2Model(config).eval())
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(4):  # after which what is not read would wait
        with torch.no_grad():
            found = twins.same(lambda m: m(pixel_values=pixels))
        pooled, last = found.pooler_output, found.last_hidden_state
        assert pooled.data_ptr() == last.data_ptr()
    assert twins.ran()


def test_the_views_of_a_loss_that_alone_is_read() -> None:
    """A field that others are views of is computed at once, though nobody reads it."""
    text = {
        "vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 8, "eos_token_id": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    torch.manual_seed(0)
    twins = Twins(CLIPModel(config))
    ids = torch.randint(3, 31, (2, 6), generator=torch.Generator().manual_seed(0))
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    call: Callable[[Any], Any] = lambda m: m(input_ids=ids, pixel_values=pixels, return_loss=True)  # noqa: E731
    for _ in range(4):
        for output in twins.each(call):
            output.loss.backward()
    ours, eager = twins.each(call)
    assert ours.logits_per_image.data_ptr() == ours.logits_per_text.data_ptr()
    assert ours.logits_per_image.stride() == eager.logits_per_image.stride()
    assert_same(ours.logits_per_image.detach(), eager.logits_per_image.detach())
    assert_same(ours.text_embeds.detach(), eager.text_embeds.detach())
    assert twins.ran()


@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_the_option(outputs: str) -> None:
    model = Layer(lambda m, x, y: {"loss": y.sum(), "y": y, "flat": y.view(-1)})
    ours: Any = onward.accelerate(model, outputs=outputs)
    found = ours(torch.ones(2, 4))
    held = accelerated(ours)
    assert held is not None and held._last is not None
    if outputs == "loss":
        assert found["y"] is None and found["flat"] is None
    else:
        assert found["flat"].data_ptr() == found["y"].data_ptr()
