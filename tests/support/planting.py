"""Ways to plant a fault in memory: one entry of a table, one pass, or one kernel is replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import onward.rewrite
from onward.capture.aten import TABLE
from onward.differentiate.rule_table import RULES
from onward.graph.graph import Graph, attributes, make_attributes, type_of
from onward.kernels import KERNELS

Patch = pytest.MonkeyPatch


def translation(name: str, **changed: Any) -> Callable[[Patch], None]:
    """A capture fault: an ATen op is translated with other arguments than the model gives."""

    def plant(patch: Patch) -> None:
        plain = TABLE[name]

        def wrong(c: Any, *args: Any, **kwargs: Any) -> Any:
            named = plain.__code__.co_varnames[1 : plain.__code__.co_argcount]
            given = dict(zip(named, args, strict=False)) | kwargs
            for key, change in changed.items():
                given[key] = change(given.get(key))
            return plain(c, **given)

        patch.setitem(TABLE, name, wrong)

    return plant


def after(name: str, edit: Callable[[Graph], None], where: str = "FORWARD") -> Callable[..., None]:
    """A rewrite fault: a pass leaves the graph with this edit."""

    def plant(patch: Patch) -> None:
        def wrong(item: Any) -> Any:
            def apply(graph: Graph, *context: Any) -> int:
                edits = item.apply(graph, *context)
                edit(graph)
                return edits

            apply.__name__ = name
            return replace(item, apply=apply)

        passes = getattr(onward.rewrite, where)
        assert name in {p.name for p in passes}
        patch.setattr(
            onward.rewrite, where, tuple(wrong(p) if p.name == name else p for p in passes)
        )

    return plant


def attribute(op_type: str, name: str, value: Any) -> Callable[[Graph], None]:
    def edit(graph: Graph) -> None:
        for node in graph:
            if node.op_type == op_type:
                was = attributes(node).get(name)
                now = value(was) if callable(value) else value
                node.attributes[name] = make_attributes({name: now})[0]

    return edit


def bypass(op_type: str, keep: int, rank: int) -> Callable[[Graph], None]:
    """A rewrite fault: the first op of this type whose result has this rank returns one of its
    inputs."""

    def edit(graph: Graph) -> None:
        for node in list(graph):
            x = node.inputs[keep] if len(node.inputs) > keep else None
            same = x is not None and type_of(x) == type_of(node.outputs[0])
            if node.op_type == op_type and same and type_of(node.outputs[0]).rank == rank:
                graph.replace(node.outputs[0], x)  # type: ignore[arg-type]
                graph.remove([node])
                return

    return edit


def drop_addend(graph: Graph) -> None:
    """A rewrite fault: the first Gemm that adds a matrix loses that addend."""
    for node in graph:
        c = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        if c is not None and type_of(c).rank == 2:
            node.replace_input_with(2, None)
            return


def gradient(op_type: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """A gradient fault: a rule returns `change(builder, its gradients, its arguments)`."""

    def plant(patch: Patch) -> None:
        plain = RULES[op_type]

        def wrong(b: Any, dys: Any, ys: Any, xs: Any, attrs: Any) -> Any:
            return change(b, list(plain(b, dys, ys, xs, attrs)), dys, ys, xs, attrs)

        patch.setitem(RULES, op_type, wrong)

    return plant


def scaled(i: int, factor: float) -> Callable[..., Any]:
    def change(b: Any, dxs: list[Any], *_: Any) -> list[Any]:
        dxs[i] = b.Mul(dxs[i], factor)
        return dxs

    return change


def without_first(i: int) -> Callable[..., Any]:
    """A fault that replaces the first row of gradient `i` by zeros."""

    def change(b: Any, dxs: list[Any], *_: Any) -> list[Any]:
        size = type_of(dxs[i]).shape[0]
        rest = b.slice(dxs[i], 0, 1, size)
        dxs[i] = b.Concat(b.Mul(b.slice(dxs[i], 0, 0, 1), 0.0), rest, axis=0)
        return dxs

    return change


def kernel(op_type: str, change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """A kernel fault: `change(use)` runs after the launch."""

    def plant(patch: Patch) -> None:
        def wrong(plain: Any) -> Any:
            def bind(use: Any) -> Any:
                launch = plain.bind(use)

                def run() -> None:
                    launch()
                    change(use)

                return run

            return replace(plain, bind=bind)

        patch.setitem(KERNELS, op_type, tuple(wrong(k) for k in KERNELS[op_type]))

    return plant


def grown(output: int, factor: float = 1.001) -> Callable[[Any], Any]:
    return lambda use: use.outputs[output].mul_(factor)


def narrow_broadcast(b: Any, dx: Any, shape: Any) -> Any:
    """A gradient fault: a broadcast is undone by taking its first part instead of the sum."""
    have = type_of(dx).shape
    if have == shape:
        return dx
    for _ in range(len(have) - len(shape)):
        dx = b.squeeze(b.slice(dx, 0, 0, 1), [0])
    for i, size in enumerate(shape):
        dx = dx if size == type_of(dx).shape[i] else b.slice(dx, i, 0, 1)
    return dx
