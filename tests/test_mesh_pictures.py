"""docs/images/mesh-*.svg are what their table draws, and the table adds up to whole tensors."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
from mesh_pictures import IMAGES, KINDS, PICTURES, coordinates, held, svg

PAGES = IMAGES.parent


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_its_table(name: str) -> None:
    assert (IMAGES / f"mesh-{name}.svg").read_text(encoding="utf-8") == svg(PICTURES[name])


def test_pages_show_every_picture() -> None:
    pages = [PAGES / "distributed.md", *sorted((PAGES / "distributed").glob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    drawn = {path.stem.removeprefix("mesh-") for path in Path(IMAGES).glob("mesh-*.svg")}
    assert drawn == set(PICTURES)
    assert {name for name in PICTURES if f"images/mesh-{name}.svg" in text} == drawn


# bytes of a rank as a share of the whole, from the tables of docs/distributed/: tokens, weights,
# gradients, moments
SHARES = {
    "data": (1 / 4, 1, 1, 1), "zero-1": (1 / 4, 1, 1, 1 / 4),
    "zero-3": (1 / 4, 1 / 4, 1 / 4, 1 / 4), "tensor": (1, 1 / 4, 1 / 4, 1 / 4),
    "sequence": (1, 1 / 4, 1 / 4, 1 / 4), "context": (1 / 4, 1, 1, 1),
    "pipeline": (1, 1 / 4, 1 / 4, 1 / 4), "data-tensor": (1 / 2, 1 / 2, 1 / 2, 1 / 2),
}  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_shares_of_a_rank(name: str) -> None:
    picture = PICTURES[name]
    for at in coordinates(picture):
        kinds = ("tokens", "weights", "gradients", "moments")
        areas = [
            sum((bottom - top) * (right - left) for top, bottom, left, right in parts)
            for parts in (held(picture, kind, at) for kind in kinds)
        ]
        assert areas == pytest.approx(SHARES[name])


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_hold_the_whole(name: str, kind: str) -> None:
    picture = PICTURES[name]
    parts = [part for at in coordinates(picture) for part in held(picture, kind, at)]
    edges = sorted({edge for part in parts for edge in part} | {0.0, 1.0})
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    for y, x in product(middles, middles):
        assert any(top < y < bottom and left < x < right for top, bottom, left, right in parts)
