"""Specializes a graph: replaces symbols by numbers, or by names with the number planned for.

Sizes that change from batch to batch stay open, so that one plan serves all batches up to its own
sizes. Values that depend on sizes alone become inputs whose content is known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from onward.errors import OnwardError
from onward.graph.build import settle_stops
from onward.graph.graph import Graph, Role, Value, content_of, type_of
from onward.graph.types import DType, Size, symbol
from onward.rewrite.constant_folding import constant_folding
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.noop import noop
from onward.rewrite.run import keep_outputs


def specialize(
    graph: Graph,
    dims: Mapping[str, int],
    open: Collection[str] = (),
    outputs: Iterable[str] | None = None,
) -> Graph:
    """Returns a copy of the graph with `dims` (symbol -> size) put in; symbols in `open` keep their
    names. outputs: those that the copy computes; None: all.

    Raises OnwardError naming a missing symbol.
    """
    missing = [name for name in graph.symbols if name not in dims]
    if missing:
        raise OnwardError(f"no size given for {', '.join(missing)}; fix: pass every named size")
    sizes: dict[str, Size] = {n: symbol(n, at=s) if n in open else s for n, s in dims.items()}
    made = graph.clone(sizes)
    if outputs is not None:
        keep_outputs(made, outputs)
    settle_stops(made)
    constant_folding(made)
    noop(made)  # removing no-ops may add new `Shape` nodes
    if open:
        name_sizes(made)
    dead_code_elimination(made)
    for node in made:
        for value in node.outputs:
            left = [d for d in type_of(value).shape if not isinstance(d, int) and d.at is None]
            assert not left, f"{value.name}: {type_of(value)} stayed symbolic"
    return made


def name_sizes(graph: Graph) -> None:
    """Replaces `Shape(x)`, and values computed from it, by inputs with known content."""
    made: dict[tuple[object, ...], Value] = {}
    for node in list(graph):
        value = node.outputs[0]
        type, content = type_of(value), content_of(value)
        if content is None or type.dtype != DType.INT64 or type.rank > 1:
            continue
        key = (type, content)
        if key not in made:
            made[key] = graph.input(graph.fresh("size"), type, Role.SIZE)
            made[key].meta["content"] = content
        graph.replace(value, made[key])
        graph.remove([node])
