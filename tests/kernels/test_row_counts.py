"""Products of rounded row counts, beside torch's of the rows themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from onward.kernels.aten.row_counts import LEAST, further, product, rounded

LOW = (torch.bfloat16, torch.float16)
ROOM, BEYOND = 40, 7  # rows to spare, and rows of others behind them


def test_few_counts() -> None:
    """At most eight in an octave, none below its number and none an eighth above."""
    for n in range(1, 5000):
        assert n <= rounded(n)
        assert rounded(n) % LEAST == 0
        assert rounded(n) - n < max(LEAST, n / 8 + 1)
    for low in (256, 512, 1024, 2048):
        assert len({rounded(n) for n in range(low, 2 * low)}) <= 9


def test_rows_to_spare_are_the_least_of_all() -> None:
    assert further(70, 100, 100) == rounded(70) - 70 == 26
    assert further(70, 100, 3) == 3
    assert further(70, 0, 100) == 0


class Memory:
    """Rows `[n,width]` in a buffer: behind them ROOM of nobody's, NaN, then others' rows."""

    def __init__(self, n: int, width: int, dtype: torch.dtype, seed: int, at: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.whole = torch.full((n + ROOM + BEYOND, width + at), float("nan"), dtype=dtype)
        self.whole[:n] = torch.randn(n, width + at, generator=draw)
        self.whole[n + ROOM :] = 3.0
        self.x = self.whole[:n, at:]

    def others_are_untouched(self) -> bool:
        return bool((self.whole[-BEYOND:] == 3.0).all())


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("at", [0, 8], ids=["whole", "columns of wider rows"])
@pytest.mark.parametrize(
    ("across", "added"),
    [(False, ""), (False, "rows"), (False, "in place"), (False, "one"), (True, ""), (True, "all")],
)
@pytest.mark.parametrize("n", [1, 31, 33, 64, 100])
def test_products(dtype: torch.dtype, at: int, across: bool, added: str, n: int) -> None:
    m = 24 if across else n
    a = Memory(n, 24, dtype, 1, at)
    b = Memory(n if across else 24, 16, dtype, 2, at)
    y = Memory(m, 16, dtype, 3, at)
    c: torch.Tensor | None = None
    held = [a, b, y]
    if added == "rows":
        held.append(Memory(m, 16, dtype, 4))
        c = held[-1].x
    elif added == "in place":
        c = y.x
    elif added == "one":
        c = torch.randn(16).to(dtype)
    elif added == "all":
        c = torch.randn(24, 16).to(dtype)
    left = a.x.t() if across else a.x
    exact = left.double() @ b.x.double() + (0 if c is None else c.double())
    spare = {id(h.x): ROOM for h in held}
    if not across:
        spare.pop(id(b.x))
    launches = product(a.x, b.x, y.x, lambda x: spare.get(id(x), 0), across, c)
    for launch in launches:
        launch()
    torch.testing.assert_close(y.x.double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    assert all(h.others_are_untouched() for h in held)


@pytest.mark.parametrize("roomy", ["none", "a", "y"])
def test_without_rows_to_spare_nothing_else_is_read_or_written(roomy: str) -> None:
    """Operand and result must both have spare rows for a product to use them."""
    a, b, y = (
        Memory(n, w, torch.bfloat16, s) for n, w, s in ((33, 24, 1), (24, 16, 2), (33, 16, 3))
    )
    y.whole[33:] = 3.0
    held = {"a": a.x, "y": y.x}.get(roomy)
    for launch in product(a.x, b.x, y.x, lambda x: ROOM if x is held else 0):
        launch()
    assert torch.equal(y.x, a.x @ b.x)
    assert bool((y.whole[33:] == 3.0).all())


def test_a_sum_over_rows_takes_none_of_what_is_behind_them() -> None:
    """Where one operand alone has rows to spare the sum is of the rows themselves."""
    for spare_a, spare_b in itertools.product((0, ROOM), repeat=2):
        a, b = Memory(33, 24, torch.bfloat16, 1), Memory(33, 16, torch.bfloat16, 2)
        y = torch.empty(24, 16, dtype=torch.bfloat16)
        room = {id(a.x): spare_a, id(b.x): spare_b}
        for launch in product(a.x, b.x, y, lambda x, r=room: r.get(id(x), 0), across=True):
            launch()
        torch.testing.assert_close(y, a.x.t() @ b.x, rtol=0.02, atol=0.05)
