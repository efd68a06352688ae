"""Vocabularies that ranks along `tp` do not divide: rows of zeros behind a table that is cut.

A table w f[V,D] is taken to be f[V',D], where V' is the next multiple of the ranks. Ids and labels
from V on raise IndexError. In a head and its loss the rows from V on have the bias -inf, so that
their logits are -inf, their probabilities 0, and so are their gradients and moments: a padding of
zeros stays zeros. All other readers get the rows of the table alone. Masks of this kind are
Megatron-LM's (arXiv 1909.08053), which pads the vocabulary of the model itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from onward.distribute.tensor.numbers_in_range import within
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, attributes, type_of
from onward.graph.ops.loss import ignored_label
from onward.graph.types import Type

_HEAD = "LinearCrossEntropy"


def padded_size(size: int, ranks: int) -> int:
    """The next multiple of the ranks."""
    return -(-size // ranks) * ranks


def paddable(forward: Graph, ranks: int, but: Collection[str] = ()) -> dict[str, int]:
    """The tables of a forward graph, by name, whose rows ranks do not divide, and the rows that
    they would have; not those in `but`. A table is read by ids, or is the weight of a head and its
    loss."""
    found: dict[str, int] = {}
    for value in forward.inputs_with(Role.PARAM):
        kind, name = type_of(value), value.name or ""
        size = kind.shape[0] if kind.rank == 2 else None
        if not isinstance(size, int) or name in but or not _is_table(forward, value):
            continue
        if size % ranks and size > ranks:
            found[name] = padded_size(size, ranks)
    return found


def rows_padded(
    types: Mapping[str, Type], cuts: Mapping[str, tuple[int, int]], ranks: int
) -> dict[str, int]:
    """The rows, with the padding, of parameters that are cut along dim 0 into parts that ranks do
    not divide. types: of parameters, by name. cuts: by name, the dim and its groups."""
    found: dict[str, int] = {}
    for name, kind in types.items():
        size = kind.shape[0] if cuts.get(name) == (0, 1) else None
        if isinstance(size, int) and size % ranks:
            found[name] = padded_size(size, ranks)
    return found


def padded(forward: Graph, rows: Mapping[str, int]) -> Graph:
    """A copy of a forward graph in which these parameters, by name, have so many rows."""
    if not rows:
        return forward
    graph = forward.clone()
    for name, size in rows.items():
        _pad(graph, graph.find_input(name), size)
    return graph


def _is_table(graph: Graph, value: Value) -> bool:
    """Whether something reads a parameter that takes rows of padding."""
    return any(
        _takes(node, i) and (node.op_type != "Cast" or _is_table(graph, node.outputs[0]))
        for node, i in _uses(value)
    )


def _takes(node: Node, i: int) -> bool:
    """Whether a reader gives the same result where its input has more rows, as `_pad` changes
    it."""
    attrs = attributes(node)
    if node.op_type == "Gather":
        return i == 0 and attrs.get("axis", 0) == 0
    if node.op_type == _HEAD:
        has_weights = len(node.inputs) > 4 and node.inputs[4] is not None
        return i == 1 and not has_weights and not attrs.get("label_smoothing")
    return node.op_type == "Embedding" or node.op_type == "Cast"


def _uses(value: Value) -> list[tuple[Node, int]]:
    return [(use.node, use.idx) for use in value.uses()]


def _pad(graph: Graph, value: Value, size: int) -> None:
    """Gives a value more rows, and has its readers read no others than before."""
    whole, uses = type_of(value), _uses(value)
    rows, odd = whole.shape[0], value in graph.outputs.values()
    assert isinstance(rows, int) and not odd, f"{value.name} is a result"
    value.meta["type"] = Type(whole.dtype, (size, *whole.shape[1:]))
    for node, i in uses:
        b = Builder.at(graph, node)
        if not _takes(node, i):
            node.replace_input_with(i, b.slice(value, 0, 0, rows))
        elif node.op_type == "Cast":
            _pad(graph, node.outputs[0], size)
        elif node.op_type == _HEAD:
            _hide(b, node, rows, size)
        elif i == 0:
            ids, wraps = node.inputs[1], int(node.op_type == "Gather")
            assert ids is not None
            ids = within(b, ids, rows, "index", {}, wraps=wraps)
            node.replace_input_with(1, ids)
            if not wraps:
                continue
            kind = type_of(ids).dtype.numpy()  # -1 is the last row of the table
            behind = b.Add(ids, np.array(rows, kind))
            node.replace_input_with(1, b.Where(b.Less(ids, np.array(0, kind)), behind, ids))


def _hide(b: Builder, node: Node, rows: int, size: int) -> None:
    """Gives the classes of a head from `rows` on the bias -inf, and refuses them as labels."""
    labels, ignored = node.inputs[3], ignored_label(attributes(node))
    assert labels is not None
    node.replace_input_with(3, within(b, labels, rows, "label", {}, ignored=ignored))
    given = [*node.inputs, None, None][:4]
    w, bias = given[1], given[2]
    assert w is not None
    dtype = (type_of(w).accumulated if bias is None else type_of(bias)).dtype.numpy()
    hidden = np.full(size - rows, -np.inf, dtype)
    if bias is None:
        made = b.const(np.concatenate([np.zeros(rows, dtype), hidden]))
    else:
        made = b.Concat(bias, b.const(hidden), axis=0)
    node.replace_input_with(2, made)


__all__ = ["paddable", "padded", "padded_size", "rows_padded"]
