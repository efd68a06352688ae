"""Rules of tensor parallelism: every way of every rule, on ranks in lockstep, against the whole
call by onnx's reference evaluator; shardings of values and cuts of parameters by their formulae."""

from __future__ import annotations

import numpy as np
import pytest
import sharded_calls as sharded
from op_cases import OpCase

from onward.distribute.tensor import ways as table
from onward.distribute.tensor.rules.shape import reshaped
from onward.distribute.tensor.sharding import REPLICATED, Sharding, TensorCut, split
from onward.graph.ops import OPS
from onward.graph.types import Size, parse_type, product, symbol


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", sharded.calls(), ids=str)
def test_every_way_of_every_rule_is_the_whole_call(case: OpCase, ranks: int) -> None:
    for way in sharded.ways(sharded.node_of(case.graph()), ranks):
        if case.op.endswith("8Bit") and way.inputs[0] != split(0):
            continue  # parts along other dims are rounded in blocks of their own
        parts, every = sharded.run(case, way, ranks), sharded.wanted(case, way)
        for i, (made, s, want) in enumerate(zip(parts, way.outputs, every, strict=True)):
            found = sharded.joined(made, s, sharded.ends_of(case, way))
            if case.op == "FlashAttention" and i == 2:  # keys of a query that sees none: not read
                sees = np.any(every[0] != 0, axis=-1)
                found, want = found * sees, want * sees
            size = float(np.max(np.abs(want), initial=1.0, where=np.isfinite(want)))
            # moments of other parts, and of parts of a part, are rounded by other draws, up or down
            is_whole_rows = way.inputs[0] == split(0) and not case.attrs.get("first")
            is_drawn = case.op.endswith("Bf16") and i > 0 and not is_whole_rows
            rtol = 2.0**-7 if is_drawn else 2e-5
            np.testing.assert_allclose(
                found, want, rtol=rtol, atol=2e-5 * size, err_msg=f"{i} of {case} by {way}"
            )


def test_every_rule_has_ways_that_are_tried() -> None:
    """The table of calls leaves out no rule, no op that a rule names, and no elementwise op but
    those that no call of the table is of."""
    tried: dict[str, set[str]] = {}
    for case in sharded.calls():
        node = sharded.node_of(case.graph())
        for rule in table.rules_of(case.op):
            for way in sharded.ways(node, 2):
                call = table.ShardedCall(node, 2, way.inputs, way.method)
                if any(w.inputs == way.inputs for w in rule(call)):
                    tried.setdefault(f"{rule.__module__}.{rule.__name__}", set()).add(case.op)
    every = (*table.RULES.values(), *table._BY_TRAIT.values())
    named = {rule for rules in every for rule in rules if not of_exchanges(rule)}
    assert {f"{r.__module__}.{r.__name__}" for r in named} == set(tried)
    for op, rules in table.RULES.items():
        for rule in (each for each in rules if not of_exchanges(each)):
            assert op in tried[f"{rule.__module__}.{rule.__name__}"], f"{rule} of {op}"


def of_exchanges(rule: table.Rule) -> bool:
    """Whether a rule is one of collectives, which `test_exchanges_on_parts.py` tries."""
    return rule.__module__.endswith(".collective")


def test_an_op_without_a_rule_is_whole() -> None:
    for op in ("CumSum", "TopK", "GatherElements", "Conv", "RandomUniform"):
        assert op in OPS and op not in table.RULES, op


@pytest.mark.parametrize(
    ("have", "want", "found", "made"),
    [
        ("f32[B,T,96]", "f32[B*T,96]", split(2, 3), split(1, 3)),
        ("f32[B*T,96]", "f32[B,T,96]", split(1), split(2)),
        ("f32[B*T,96]", "f32[B,T,3,4,8]", split(1, 3), split(3)),
        ("f32[B*T,96]", "f32[B,T,3,4,8]", split(1), None),
        ("f32[B,T,3,4,8]", "f32[B*T,96]", split(3), split(1, 3)),
        ("f32[B,T,4,8]", "f32[B*T,32]", split(2), split(1)),
        ("f32[B,T,4,8]", "f32[B*T,32]", split(3), split(1, 4)),
        ("f32[8,B]", "f32[8*B]", split(0), split(0)),
        ("f32[B,8]", "f32[8*B]", split(1), split(0, symbol("B"))),
        ("f32[1,8,B]", "f32[8,B]", split(1), split(0)),
        ("f32[B,2*T,96]", "f32[B*2*T,96]", split(1), split(0, symbol("B"))),
        ("f32[B*2*T,96]", "f32[B,2*T,96]", split(0, symbol("B")), split(1)),
        ("f32[B*2*T,96]", "f32[B,2*T,96]", split(0), None),
        ("f32[B,2*T,4,8]", "f32[B*2*T,32]", split(1), split(0, symbol("B"))),
        ("f32[B,T,96]", "f32[B*T,96]", split(1), None),
    ],
)
def test_shardings_through_a_reshape(
    have: str, want: str, found: Sharding, made: Sharding | None
) -> None:
    """In the usual places of a transformer, over two ranks."""
    assert reshaped(_shape(have), _shape(want), found, 2) == made


def _shape(text: str) -> tuple[Size, ...]:
    """A shape whose sizes may be products."""
    sizes = [[parse_type(f"f32[{n}]").shape[0] for n in part.split("*")]
             for part in text[4:-1].split(",")]  # fmt: skip
    return tuple(map(product, sizes))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_cut_is_the_middle_of_three(dim: int, groups: int, ranks: int) -> None:
    size = groups * ranks * 5
    shape = (size, 2) if dim == 0 else (2, size)
    x = np.arange(2 * size).reshape(shape)
    cuts = [TensorCut("tp", ranks, at, split(dim, groups)) for at in range(ranks)]
    wide = np.moveaxis(x, dim, 0).reshape(groups, ranks, 5, 2)
    for at, cut in enumerate(cuts):
        want = np.moveaxis(wide[:, at].reshape(-1, 2), 0, dim)
        np.testing.assert_array_equal(cut.part(x), want)
        np.testing.assert_array_equal(cuts[0].part(x, at), want)
        runs = [x.take(range(*ends), dim) for ends in cut.ranges(size)]
        np.testing.assert_array_equal(np.concatenate(runs, dim), want)
    np.testing.assert_array_equal(cuts[0].joined([cut.part(x) for cut in cuts]), x)


def test_what_fits() -> None:
    kind = parse_type("f32[12,B,7]")
    assert [split(0).fits(kind, 4), split(0, 3).fits(kind, 4), split(0, 2).fits(kind, 4)] == [
        True, True, False,
    ]  # fmt: skip
    assert not split(1).fits(kind, 2) and not split(2).fits(kind, 2) and not split(3).fits(kind, 2)
    assert REPLICATED.fits(kind, 5)
    twice = kind.with_shape((12, 2 * symbol("B"), 7))
    assert split(1).fits(twice, 2) and not split(1).fits(twice, 4)
    assert split(1).local(twice, 2) == kind
    assert split(0, 3).local(kind, 2) == parse_type("f32[6,B,7]")
