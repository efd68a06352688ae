"""Ops without a translation of their own, as PyTorch makes them of others: eager's numbers, also
far from zero, where a part that is not taken may overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
import torch.nn.functional as F

from onward.capture.aten import TABLE

Form = Callable[[torch.Tensor], torch.Tensor]
FORMS: dict[str, Form] = {
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "einsum of heads": lambda x: torch.einsum("bid,bjd,bkd->bijk", x, x, x),
    "movedim": lambda x: x.movedim(0, 1) * 2,
    "logsumexp": lambda x: x.logsumexp(-1),
    "subtract": lambda x: torch.subtract(x, 1),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": F.softplus,
    "softplus of two": lambda x: F.softplus(x, 2.0, 10.0),
    "mish": F.mish,
    "glu": lambda x: F.glu(x[..., :4]),
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "tanhshrink": F.tanhshrink,
    "huber": lambda x: F.huber_loss(x, x * 2),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x * 2),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "lerp": lambda x: torch.lerp(x, x * 2, 0.5),
    "norm": lambda x: x.norm(dim=-1),
    "cosine": lambda x: F.cosine_similarity(x, x + 1),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var((0, 2), unbiased=False),
    "log1p": lambda x: x.abs().log1p(),
    "expm1": lambda x: (-x.abs()).expm1(),
    "atan2": lambda x: torch.atan2(x, x + 3),
    "remainder": lambda x: x.remainder(0.7),
    "max": lambda x: x.max(),
    "max of a dim": lambda x: x.max(-1).values,
    "sort": lambda x: x.sort(descending=True)[0],
    "topk": lambda x: x.topk(2, 1, largest=False)[0],
    "prod": lambda x: (x * 0.01).prod(-1),
    "diagonal": lambda x: x[0, :4, :4].diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "scatter": lambda x: x.scatter(1, torch.zeros(3, 1, 5, dtype=torch.long), x[:, 1:2]),
    "index_put": lambda x: x.index_put((torch.tensor([0]),), x[1]),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x * 2),
    "bucketize": lambda x: x * torch.bucketize(x.detach(), torch.tensor([0.0, 1.0])),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([1], [1])),  # type: ignore
    "meshgrid": lambda x: torch.meshgrid(x[0, 0], x[0, 1], indexing="ij")[0],
}


class Net(torch.nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.w = form, torch.nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.form(x * self.w)
        weights = torch.cos(torch.arange(y.numel()) * 0.7 + 0.3).to(y.dtype)
        return (y.reshape(-1) * weights).sum()


@pytest.mark.sample(2)
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("name", FORMS)
def test_loss_and_gradient_are_eagers(name: str, scale: float) -> None:
    model, data = Net(FORMS[name]), {"x": torch.randn(3, 4, 5) * scale}
    exact, plain = (tiny.eager(model, data, t) for t in (torch.float64, torch.float32))
    have = tiny.gradients(model, data)
    for key, truth in exact.items():
        room = 4 * float((plain[key].double() - truth).norm()) + 2e-5 * float(truth.norm())
        assert float((have[key].double() - truth).norm()) <= room + 1e-6, key


def test_most_of_them_have_no_translation_of_their_own() -> None:
    assert not {"movedim.int", "logsumexp.default", "glu.default"} & set(TABLE)
