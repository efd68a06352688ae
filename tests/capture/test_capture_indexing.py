"""Reading and writing by index tensors, wherever they stand: eager PyTorch's numbers."""

from __future__ import annotations

import itertools

import pytest
import tiny
import torch
from torch import nn

SHAPE = (3, 4, 2, 5)  # of the indexed tensor
# what may stand at a dim: everything, or numbers of rows of a shape that goes with the others'
PARTS = {
    ":": None,
    "i": [0, -1],
    "j": [[1], [0]],
    "k": [1],
}
FORMS = [form for form in itertools.product(PARTS, repeat=4) if any(p != ":" for p in form)]


def weights_of(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(y.numel()).reshape(y.shape).sin().to(y.dtype)


class Indexing(nn.Module):
    def __init__(self, form: tuple[str, ...], written: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(5, 5))
        self.source = nn.Parameter(torch.randn(()))
        self.form, self.written = form, written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.reshape(SHAPE) @ self.w
        indices = [None if p == ":" else torch.tensor(PARTS[p]) for p in self.form]
        if self.written == "read":
            at = tuple(slice(None) if i is None else i for i in indices)
            return (y[at] * weights_of(y[at])).sum()
        shown = torch.ops.aten.index(y, indices)
        accumulate = self.written == "added"
        rows = self.source * weights_of(shown) if accumulate else self.source.expand(shown.shape)
        z = torch.ops.aten.index_put(y, indices, rows, accumulate)
        return (z * weights_of(z)).sum()


@pytest.mark.sample(32)
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("written", ["read", "written", "added"])
def test_index_tensors_at_any_dims(form: tuple[str, ...], written: str) -> None:
    model = Indexing(form, written)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    have = tiny.gradients(model, {"x": x})
    for name, want in tiny.eager(model, {"x": x}, torch.float64).items():
        # sums of terms of both signs: what is left of them is not what they round to
        torch.testing.assert_close(have[name].double(), want, rtol=1e-5, atol=1e-5, msg=name)
