"""docs/images/mesh-*.svg: what each rank of a mesh holds of tokens, weights and state.

`python tests/support/mesh_pictures.py` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from itertools import product
from pathlib import Path

from onward.mesh_sizes import AXES

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"


@dataclass(frozen=True)
class MeshPicture:
    """A mesh of ranks, its sizes by axis with neighbours last, and the options beside it."""

    title: str
    sizes: Mapping[str, int]
    zero: int = 0
    sequence_parallel: bool = False


PICTURES = {
    "data": MeshPicture("Data parallel", {"dp_replicate": 4}),
    "zero-1": MeshPicture("ZeRO-1", {"dp_shard": 4}, zero=1),
    "zero-3": MeshPicture("ZeRO-3", {"dp_shard": 4}, zero=3),
    "tensor": MeshPicture("Tensor parallel", {"tp": 4}),
    "sequence": MeshPicture(
        "Tensor and sequence parallel", {"tp": 4}, sequence_parallel=True
    ),
    "context": MeshPicture("Context parallel", {"cp": 4}),
    "pipeline": MeshPicture("Pipeline parallel", {"pp": 4}),
    "data-tensor": MeshPicture("Data and tensor parallel", {"dp_replicate": 2, "tp": 2}),
}  # fmt: skip

# a part of a square of side 1: top, bottom, left, right
Part = tuple[float, float, float, float]
KINDS = ("tokens", "activations", "weights", "gradients", "moments")
AXES_OF = {  # what runs down and what runs across the square of each kind
    "tokens": ("sequences", "positions"), "activations": ("sequences", "positions"),
    "weights": ("layers", "heads and features"), "gradients": ("layers", "heads and features"),
    "moments": ("layers", "heads and features"),
}  # fmt: skip
LAYERS = 4  # bands of the square of weights


def coordinates(picture: MeshPicture) -> list[dict[str, int]]:
    """Each rank's place along the axes, ranks in order: the last axis has neighbours."""
    axes = list(picture.sizes)
    return [
        dict(zip(axes, at, strict=True))
        for at in product(*(range(picture.sizes[axis]) for axis in axes))
    ]


def held(picture: MeshPicture, kind: str, at: Mapping[str, int]) -> list[Part]:
    """The parts of a kind that the rank at these coordinates holds.

    tokens are the rows of the batch that it works on; activations those that norms, dropout and
    residuals keep for backward.
    """
    sizes = {axis: picture.sizes.get(axis, 1) for axis in AXES}
    place = {axis: at.get(axis, 0) for axis in AXES}
    if kind in ("tokens", "activations"):
        replicas = sizes["dp_replicate"] * sizes["dp_shard"]
        share = place["dp_replicate"] * sizes["dp_shard"] + place["dp_shard"]
        across = (place["cp"], sizes["cp"])
        if kind == "activations" and picture.sequence_parallel:
            across = (place["tp"], sizes["tp"])
        return [(*_span(share, replicas), *_span(*across))]
    from_stage = {"weights": 3, "gradients": 2, "moments": 1}[kind]
    cut = sizes["dp_shard"] if picture.zero >= from_stage else 1
    first, last = _span(place["pp"], sizes["pp"])
    left, right = _span(place["tp"], sizes["tp"])
    bands = range(round(first * LAYERS), round(last * LAYERS))
    inner = _span(place["dp_shard"] if cut > 1 else 0, cut)
    return [((b + inner[0]) / LAYERS, (b + inner[1]) / LAYERS, left, right) for b in bands]


def _span(place: int, size: int) -> tuple[float, float]:
    return place / size, (place + 1) / size


# ---- drawing

SIDE, GAP, DOWN, LEFT, TOP = 84, 34, 14, 150, 62  # pixels
STYLE = """
  text { font: 12px sans-serif; fill: #1f2937 } .faint { fill: #6b7280; font-size: 10px }
  .title { font-size: 14px; font-weight: bold } .whole { fill: #e5e7eb; stroke: #9ca3af }
  .held { fill: #1f6f78 } .line { stroke: #9ca3af; stroke-width: .5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb } .faint { fill: #9ca3af } .whole { fill: #374151; stroke: #6b7280 }
    .held { fill: #4fb3bf } .line { stroke: #6b7280 }
  }
""".strip("\n")


def svg(picture: MeshPicture) -> str:
    """Draws a column for each rank and a row for each kind: the whole in grey, what the rank holds
    in colour."""
    ranks = coordinates(picture)
    kinds = [k for k in KINDS if k != "activations" or picture.sequence_parallel]
    parts = [f'<text class="title" x="8" y="20">{escape(_heading(picture))}</text>']
    for r, at in enumerate(ranks):
        x = LEFT + r * (SIDE + GAP)
        parts.append(f'<text x="{x}" y="{TOP - 24}">rank {r}</text>')
        place = ", ".join(f"{axis} {n}" for axis, n in at.items())
        parts.append(f'<text class="faint" x="{x}" y="{TOP - 10}">{place}</text>')
        for k, kind in enumerate(kinds):
            parts += _square(x, TOP + k * (SIDE + DOWN), held(picture, kind, at))
    for k, kind in enumerate(kinds):
        y = TOP + k * (SIDE + DOWN)
        down, across = AXES_OF[kind]
        parts.append(f'<text x="8" y="{y + 20}">{kind}</text>')
        parts.append(f'<text class="faint" x="8" y="{y + 38}">down: {down}</text>')
        parts.append(f'<text class="faint" x="8" y="{y + 52}">across: {across}</text>')
    width, height = LEFT + len(ranks) * (SIDE + GAP), TOP + len(kinds) * (SIDE + DOWN)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n<style>\n{STYLE}\n</style>\n{body}\n</svg>\n'
    )


def _heading(picture: MeshPicture) -> str:
    said = ", ".join(f'"{axis}": {n}' for axis, n in picture.sizes.items())
    more = f", zero={picture.zero}" if picture.zero else ""
    more += ", sequence_parallel=True" if picture.sequence_parallel else ""
    return f"{picture.title}: mesh={{{said}}}{more}"


def _square(x: float, y: float, parts: list[Part]) -> list[str]:
    drawn = [f'<rect class="whole" x="{x}" y="{y}" width="{SIDE}" height="{SIDE}"/>']
    for top, bottom, left, right in parts:
        drawn.append(
            f'<rect class="held" x="{x + left * SIDE:g}" y="{y + top * SIDE:g}" '
            f'width="{(right - left) * SIDE:g}" height="{(bottom - top) * SIDE:g}"/>'
        )
    for i in range(1, LAYERS):
        at = y + i * SIDE / LAYERS
        drawn.append(f'<line class="line" x1="{x}" x2="{x + SIDE}" y1="{at:g}" y2="{at:g}"/>')
    return drawn


def main() -> None:
    for name, picture in PICTURES.items():
        (IMAGES / f"mesh-{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
