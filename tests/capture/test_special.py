"""Functions by series, over all of their range: values and slopes are no further from those in
fp64 than eager's are, or than a rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from torch import nn

EACH = torch.tensor(
    [-30.5, -9.2, -5.0, -3.3, -2.6, -1.5, -0.97, -0.3, -1e-3, -1e-20, 0.0, 1e-20, 1e-4, 0.2, 0.5,
     0.93, 1.0, 1.46, 2.0, 3.0, 4.5, 6.0, 9.0, 12.5, 26.0, 80.0, 1e4, 1e8]
)  # fmt: skip
ABOVE = EACH[EACH > 0]
APART = EACH[(EACH > 0) | (EACH.round() != EACH)]  # no poles
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "erfc": (torch.erfc, EACH),
    "erfcx": (torch.special.erfcx, EACH[(EACH > -9) & (EACH < 100)]),
    "log_ndtr": (torch.special.log_ndtr, EACH),
    "lgamma": (torch.lgamma, APART[APART.abs() > 1e-10]),
    "lgamma of small numbers": (torch.lgamma, ABOVE),
    "digamma": (torch.digamma, APART),
    "gammaln": (torch.special.gammaln, ABOVE),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 3), EACH[EACH > 1]),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], count: int) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.zeros(count))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.function(x + self.w)
        return {"loss": y.sum(), "y": y}


def values_and_slopes(
    model: nn.Module, x: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    twin = tiny.copy.deepcopy(model).to(dtype)
    made = twin(x.to(dtype))
    made["loss"].backward()
    slopes = twin.get_parameter("w").grad
    assert slopes is not None
    return {"y": made["y"].detach(), "grad.w": slopes}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_slopes_are_exact_everywhere(name: str) -> None:
    function, x = FUNCTIONS[name]
    model = Net(function, len(x))
    made = tiny.compiled(model, {"x": x})
    graph = made.differentiated(tiny.trained(made))
    have = tiny.plain(tiny.execute(made, graph, {"x": x}))
    eager, exact = (values_and_slopes(model, x, t) for t in (torch.float32, torch.float64))
    for key, truth in exact.items():
        off, plain = ((y[key].double() - truth).abs() for y in (have, eager))
        bound = 2 * plain.nan_to_num(torch.inf) + 2e-7 * truth.abs() + 2e-13
        assert (off <= bound).all(), (key, x[off > bound], have[key][off > bound])


@pytest.mark.parametrize("name", ["erfc", "lgamma"])
def test_the_ends(name: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -2.0, 1e30])
    made = tiny.compiled(Net(FUNCTIONS[name][0], len(x)), {"x": x})
    have = tiny.plain(tiny.execute(made, made.forward, {"x": x}))["y"]
    want = FUNCTIONS[name][0](x)
    finite = want.isfinite()
    assert torch.equal(finite, have.isfinite())
    torch.testing.assert_close(have[finite], want[finite])
