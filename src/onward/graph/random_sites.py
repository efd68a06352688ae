"""The random inputs of a graph, and the sites that draw: each op that does so has a number, by
which its random numbers differ from those of other sites in the step."""

from __future__ import annotations

from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops.random import offset_type, seed_type
from onward.graph.types import Size, divide


def random_site(b: Builder, x: Value, site: int, batch: Size | None) -> dict[str, Any]:
    """The inputs (seed, offset) and attributes (site, sample_dim) of a site that draws for a tensor
    of x's shape. batch: the number of samples; None where it is unknown. sample_dim: the dim of
    samples, -1 for none."""
    seed, offset = seed_inputs(b.graph)
    shape = type_of(x).shape
    sample_dim = next(
        (i for i, s in enumerate(shape[:-1]) if s == batch and (i == 0 or s != 1)), -1
    )
    if sample_dim < 0 and shape and batch is not None:  # flattened samples, [B*T, ...]
        rows = divide(shape[0], batch)
        if rows is not None and len(shape) > 1:
            sample_dim = 0
            offset = b.Mul(offset, b.squeeze(b.size(rows), [0]))
    return {"seed": seed, "offset": offset, "site": site, "sample_dim": sample_dim}


def dropout(b: Builder, x: Value, ratio: float, site: int, batch: Size | None) -> Value:
    """x after dropout with probability `ratio` at a site; batch: as for `random_site`."""
    if not type_of(x).rank:  # masks are drawn for rows
        return b.squeeze(dropout(b, b.unsqueeze(x, [0]), ratio, site, batch), [0])
    r = random_site(b, x, site, batch)
    return b.Dropout(
        x, r["seed"], r["offset"], ratio=ratio, site=r["site"], sample_dim=r["sample_dim"]
    )


def seed_inputs(graph: Graph) -> tuple[Value, Value]:
    """The graph's random inputs, seed and sample offset; makes them at the first site."""
    said = graph.signature
    if said.seed is None or said.sample_offset is None:
        seed = graph.input("seed", seed_type(), Role.RANDOM)
        offset = graph.input("sample_offset", offset_type(), Role.RANDOM)
        graph.signature = said.but(seed=seed.name, sample_offset=offset.name)
        return seed, offset
    return graph.find_input(said.seed), graph.find_input(said.sample_offset)


__all__ = ["dropout", "random_site", "seed_inputs"]
