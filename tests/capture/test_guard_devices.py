"""Guards of a capture that was made on one device, evaluated on a batch that lies on another: a
program for the device without numbers stands for one for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from onward.capture import CapturedModule, CaptureRequest, capture
from onward.capture.batch_guards.pinned import Pinned
from onward.capture.translate.batch_program import placed

Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of f32[B,4], i64[B,4]
META = torch.device("meta")


def of_positions(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x * 2 if (at == torch.arange(at.shape[1], device=at.device)).all() else x


def of_a_constant(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return x * 2 if (at == torch.tensor([0, 1, 2, 3], device=at.device)).all() else x


def without_gradients(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        seen = (at == torch.arange(at.shape[1], device=at.device)).all()
    return x * 2 if seen else x


def written(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    at.copy_(torch.minimum(at, torch.tensor([0, 1, 2, 3], device=at.device)))
    return x + at


def filled(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    at.copy_(torch.arange(4, device=at.device).expand_as(at))
    return x + at


def attended(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Attention of which a key is hidden where its number is below its place."""
    hidden = at < torch.arange(4, device=at.device)  # bool[B,4]
    mask = torch.zeros(at.shape, device=at.device).masked_fill(hidden, -3e38)
    q = x[:, None, :, None].expand(-1, 1, 4, 8)
    mask = mask[:, None, None, :].expand(-1, 1, 4, 4)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


# what each form makes of the batch's numbers where its guard refuses them
FORMS: dict[Form, Form] = {
    of_positions: lambda x, at: at + 1,
    without_gradients: lambda x, at: at + 1,
    filled: lambda x, at: at + 1,
    attended: lambda x, at: at - 10,
}


class Net(torch.nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.w = form, torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return self.form(x * self.w, at).square().mean()


def for_another_device(captured: CapturedModule) -> int:
    """Makes the guards' programs those of a capture on another device; returns the number of ops
    that name it."""
    captured._pinned = [Pinned(fact.question, fact.answer) for fact in captured._pinned]
    changed = sum(moved(fact.steps) for fact in captured._presumed)
    for fact in captured._pinned:
        for module in fact.question.modules():
            if isinstance(module, torch.fx.GraphModule):
                changed += moved(module.graph.nodes)
                module.recompile()
    return changed


def moved(nodes: Iterable[Any]) -> int:
    """Puts the device into the arguments of nodes in place of theirs."""

    def put(x: Any) -> Any:
        return META if isinstance(x, torch.device) else x

    changed = 0
    for node in nodes:
        args, kwargs = tuple(map(put, node.args)), {k: put(x) for k, x in node.kwargs.items()}
        changed += (args, kwargs) != (node.args, node.kwargs)
        node.args, node.kwargs = args, kwargs
    return changed


@pytest.mark.parametrize("form", FORMS)
def test_a_guard_gives_its_answer_wherever_the_batch_lies(form: Form) -> None:
    x, at = torch.ones(3, 4), torch.arange(4).repeat(3, 1)
    captured = capture(CaptureRequest(Net(form), (), {"x": x, "at": at}))
    assert for_another_device(captured) > 0, "nothing of the guard names a device"
    for _ in range(2):
        assert captured.suits([x, at])
        assert not captured.suits([x, FORMS[form](x, at)])


def test_constants_are_put_where_the_batch_lies_once() -> None:
    x, at = torch.ones(3, 4), torch.arange(4).repeat(3, 1)
    pinned = capture(CaptureRequest(Net(of_a_constant), (), {"x": x, "at": at}))._pinned
    there = placed(pinned[0].question, META)
    assert {t.device for t in there.buffers()} == {META}
    assert {t.device for t in pinned[0].question.buffers()} == {torch.device("cpu")}
    assert placed(pinned[0].question, torch.device("cpu")) is pinned[0].question
    fact = capture(CaptureRequest(Net(written), (), {"x": x, "at": at}))._presumed[0]
    [constant] = [step for step in fact.steps if step.name in fact.given.constants]
    found = [fact.given.value(constant, [x.to(META), at.to(META)], {}) for _ in range(2)]
    assert found[0].device == META and found[0] is found[1]
    assert fact.given.value(constant, [x, at], {}).tolist() == [0, 1, 2, 3]


def test_a_batch_on_several_devices_is_left_as_it_is() -> None:
    x, at = torch.ones(3, 4), torch.arange(4).repeat(3, 1)
    captured = capture(CaptureRequest(Net(of_positions), (), {"x": x, "at": at}))
    [fact] = captured._pinned
    assert replace(fact).holds([x.to(META), at])
