"""Complex numbers inside a forward: loss and gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn

from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

Body = Callable[[torch.Tensor], torch.Tensor]  # of f32[B,T,8]


def turned(h: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as Llama's first code has it."""
    pairs = torch.view_as_complex(h.float().reshape(*h.shape[:-1], -1, 2))
    angles = torch.outer(torch.arange(h.shape[1]).float(), torch.arange(4).add(1.0).reciprocal())
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs * turns[None]).flatten(2).type_as(h)


def complexes(h: torch.Tensor) -> torch.Tensor:
    return torch.complex(h[..., :4], h[..., 4:])


def shown(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(z).flatten(-2)


BODIES: dict[str, Body] = {
    "rotary": turned,
    "parts": lambda h: complexes(h).real * complexes(h.sin()).imag,
    "conjugate": lambda h: shown(complexes(h).conj() * complexes(h.cos())),
    "abs": lambda h: complexes(h).abs(),
    "abs of zero": lambda h: complexes(h * 0).abs() + h[..., :4],
    "by a number": lambda h: shown(complexes(h) * (0.5 - 2j) * 3.0 / 4.0),
    "by a real tensor": lambda h: shown(complexes(h) * h[..., 2:6] / 2),
    "a real tensor by it": lambda h: shown(h[..., 2:6] * complexes(h)),
    "sums": lambda h: shown(complexes(h) + h[..., :4] - complexes(h.sin()) + 1),
    "negative": lambda h: shown(-complexes(h)),
    "product of matrices": lambda h: shown(complexes(h) @ complexes(h.tanh()).transpose(1, 2)),
    "moved": lambda h: shown(complexes(h).transpose(1, 2)[:, 1:3].unsqueeze(1).reshape(-1, 2)),
    "joined": lambda h: shown(torch.cat([complexes(h), complexes(h.sin())[:, :2]], dim=1)),
    "split": lambda h: shown(complexes(h).split(2, -1)[1] * complexes(h).chunk(2, -1)[0]),
    "converted": lambda h: (h.to(torch.complex64) * 1j).imag,
    "polar": lambda h: shown(torch.polar(h.abs() + 0.5, h)),
    "Fourier": lambda h: shown(torch.fft.fft(h)),
    "Fourier, both dims": lambda h: torch.fft.fftn(h, dim=(1, 2)).real,
    "Fourier, the length": lambda h: shown(torch.fft.fft(h, dim=1, norm="ortho")),
    "Fourier of two": lambda h: shown(torch.fft.fft2(h, norm="forward")),
    "Fourier and back": lambda h: torch.fft.ifft(torch.fft.fft(h) * h.sin()).real,
    "inverse of two": lambda h: shown(torch.fft.ifft2(complexes(h), norm="forward")),
    "inverse, ortho": lambda h: shown(torch.fft.ifftn(complexes(h), dim=[1], norm="ortho")),
}


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.body = nn.Parameter(torch.randn(8, 8) / 3), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x @ self.w)
        return (y * (torch.arange(y.shape[-1]) + 1)).square().mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BODIES)
def test_loss_and_gradient_at_every_length(name: str) -> None:
    model = Net(BODIES[name])
    batches = [{"x": torch.randn(3, length, 8)} for length in (5, 6)]
    made = tiny.compiled(model, batches[0])
    found = []
    for data in batches:
        leaves = list(data.values())
        if made.captured.dims(leaves) is None or not made.captured.suits(leaves):
            made = tiny.compiled(model, data)
        graph = made.differentiated(tiny.trained(made))
        found.append(tiny.plain(tiny.execute(made, graph, data, list(graph.outputs))))
    assert_same(found, model, batches)


REFUSED: dict[str, tuple[Body, str]] = {
    "divided": (lambda h: (1 / complexes(h)).real, "complex tensor.*; fix: "),
    "exponential": (lambda h: complexes(h).exp().real, "exp.*for complex tensors; fix: compute"),
    "Fourier, another size": (lambda h: torch.fft.fft(h, 16).real, "with n= or s= .*; fix: pad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_ops_are_refused(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        capture(CaptureRequest(Net(body), (), {"x": torch.randn(3, 5, 8)}))
