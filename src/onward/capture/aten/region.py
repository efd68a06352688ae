"""Translates regions, which run in PyTorch within a graph: modules' calls, and single operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.capture.aten.call import AtenCall, table
from onward.capture.regions.op import RESULTS
from onward.capture.regions.region import TENSOR, CapturedRegion, Form, operator_region
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.ops.region import spelled
from onward.graph.random_sites import seed_inputs
from onward.graph.types import Type, dtype_name


def _region(c: AtenCall, xs: list[Value], parameters: list[Value], site: int) -> list[Value]:
    part = c.t.regions.made[site]
    shapes, dtypes = RESULTS[site].spelled()
    return _written(c, part, site, [*xs, *parameters], len(xs), shapes, dtypes)


def _written(
    c: AtenCall,
    part: CapturedRegion,
    site: int,
    given: list[Value],
    count: int,
    shapes: str,
    dtypes: str,
) -> list[Value]:
    """Adds the node of a region, and returns its results. given: its inputs, of which the first
    `count` are no parameters. shapes, dtypes: attributes of the op (graph/ops/region.py)."""
    trained = [p.requires_grad for p in part.parameters()]
    wrt = [
        i
        for i, x in enumerate(given)
        if type_of(x).is_floating and (i < count or trained[i - count])
    ]
    drawn = list(seed_inputs(c.t.graph)) if part.draws else []
    made = c.b.node(
        "Region",
        [*given, *drawn],
        {
            "site": site, "path": part.path or "(top)", "reason": part.reason, "count": count,
            "draws": int(part.draws), "shapes": shapes, "dtypes": dtypes,
            "wrt": ",".join(map(str, wrt)),
        },
    )  # fmt: skip
    return [made] if isinstance(made, Value) else list(made)


def is_operator(node: Any) -> bool:
    """Returns whether a node is an operator that can be a region: it writes into nothing, and its
    results are real tensors with memory of their own."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace == "onward" or target._schema.is_mutable:
        return False
    if any(made.alias_info is not None for made in target._schema.returns):
        return False
    tensors = [n.meta.get("val") for n in node.all_input_nodes]
    made = node.meta.get("val")
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    if not results or not all(isinstance(y, torch.Tensor) for y in results):
        return False
    given = [x for t in tensors for x in (t if isinstance(t, (tuple, list)) else [t])]
    complex_numbers = any(
        isinstance(x, torch.Tensor) and x.is_complex() for x in (*given, *results)
    )
    return any(isinstance(x, torch.Tensor) for x in given) and not complex_numbers


def gives_sparse(node: Any, program: Any) -> bool:
    """Returns whether an operator's gradient is a sparse tensor, which no region can return: a
    lookup's with sparse=True, unless its table is a frozen parameter. program: that exported."""
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if not given.get("sparse"):
        return False
    path = program.graph_signature.inputs_to_parameters.get(node.all_input_nodes[0].name)
    weight = program.state_dict.get(path)
    return weight is None or weight.requires_grad


def operator_apart(c: AtenCall, why: str) -> Any:
    """Returns the results of an operator (`is_operator`) that runs as a region. why: the reason.
    Raises CaptureError where an argument is a symbolic size, or the results' sizes do not follow
    from its inputs' sizes."""
    node, target = c.node, c.node.target
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given: list[Value] = []
    fixed: list[Any] = []
    for leaf in leaves:
        made = c.t.env[leaf] if isinstance(leaf, torch.fx.Node) else leaf
        if isinstance(made, Value):
            given.append(made)
            fixed.append(TENSOR)
        elif isinstance(leaf, torch.fx.Node) and not isinstance(made, (int, float, bool)):
            raise CaptureError(
                f"{why}; it cannot run in PyTorch within the graph either, "
                "since one of its arguments is a size that varies"
            )
        else:
            fixed.append(made)
    val = node.meta["val"]
    many = isinstance(val, (tuple, list))
    types = [
        Type(c.t.dtype_of(y.dtype, node.name), tuple(c.t.size_of(s) for s in y.shape))
        for y in (val if many else [val])
    ]
    shapes = [spelled(t.shape, [type_of(x) for x in given]) for t in types]
    if None in shapes:
        raise CaptureError(
            f"{why}; it cannot run in PyTorch within the graph either, since "
            "its output shapes do not follow from its input shapes"
        )
    draws = torch.Tag.nondeterministic_seeded in target.tags
    path, name = c.b.module, f"{target.namespace}.{target._schema.name.partition('::')[2]}"
    form = Form(spec, tuple(fixed))
    part = operator_region(target, path, why, name, form, draws)
    site = len(c.t.regions.made)
    c.t.regions.made.append(part)
    texts = ";".join(map(str, shapes)), ";".join(dtype_name(t.dtype) for t in types)
    made = _written(c, part, site, given, len(given), *texts)
    return made if many else made[0]


TABLE = table({_region: "onward.region.default"})

__all__ = ["TABLE", "gives_sparse", "is_operator", "operator_apart"]
