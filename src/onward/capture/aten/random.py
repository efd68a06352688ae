"""Random numbers: each site's place in the step's stream, and dropout."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops.random import offset_type, seed_type
from onward.graph.types import divide


def random_site(c: Call, x: Value) -> dict[str, Any]:
    """The next dropout site's attributes and inputs, for a tensor of `x`'s logical shape."""
    graph, batch, shape = c.t.graph, c.t.batch_size, type_of(x).shape
    seed, offset = _seed_inputs(graph)
    site, c.t.sites = c.t.sites, c.t.sites + 1
    sample_dim = next(
        (i for i, s in enumerate(shape[:-1]) if s == batch and (i == 0 or s != 1)), -1
    )
    if sample_dim < 0 and shape and batch is not None:  # rows of samples: [B*T, ...]
        rows = divide(shape[0], batch)
        if rows is not None and len(shape) > 1:
            sample_dim = 0
            offset = c.b.Mul(offset, c.b.squeeze(c.b.size(rows), [0]))
    return {"seed": seed, "offset": offset, "site": site, "sample_dim": sample_dim}


def _seed_inputs(graph: Graph) -> tuple[Value, Value]:
    """The graph's random inputs, made at the first dropout."""
    said = graph.signature
    if said.seed is None or said.sample_offset is None:
        seed = graph.input("seed", seed_type(), Role.RANDOM)
        offset = graph.input("sample_offset", offset_type(), Role.RANDOM)
        graph.signature = said.but(seed=seed.name, sample_offset=offset.name)
        return seed, offset
    return graph.find_input(said.seed), graph.find_input(said.sample_offset)


def _dropout(c: Call, x: Value, ratio: float, train: bool) -> Value:
    if "feature" in str(c.node.target):
        raise CaptureError("feature dropout")
    if not train or ratio == 0.0:
        return x
    r = random_site(c, x)
    return c.b.Dropout(
        x, r["seed"], r["offset"], ratio=float(ratio), site=r["site"], sample_dim=r["sample_dim"]
    )


TABLE = table({_dropout: "dropout.default dropout_.default feature_dropout.default"})
