"""Sequence parallelism of whole steps: ranks along `tp` that also have parts of the positions make
the update of one rank, dropout on; by the lockstep evaluator. What is exchanged and kept, by
formulae."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import sharded_steps as steps
from fuzz.meshes.judge import judged
from test_grids import grid_case, meshes

from onward import TrainerOptions
from onward.distribute import Mesh, length_parts
from onward.errors import OnwardError
from onward.graph.graph import Graph, type_of
from onward.graph.ops.collective import STARTS
from onward.graph.types import Type
from onward.rewrite import prune

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("gpt2", "bert", "t5", "llama")
Sizes = Mapping[str, int]


def both(
    kind: str, sizes: Sizes, windows: Sequence[int] = (4,), length: int = 8, **more: Any
) -> None:
    """Compares what ranks make with what one makes."""
    model = steps.made(kind, heads=4)
    more |= {"accumulate": len(windows) > 1}
    alone = steps.step_of(model, steps.recipe_of(model, **more))
    [want] = steps.run(model, alone, [Mesh()], windows, (), length)
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    joint = sizes.get("dp_replicate", 1) > 1
    graph = steps.step_of(model, steps.recipe_of(model, joint=joint, **more))
    found = steps.run(model, graph, meshes(sizes), windows, (), length, sequence=True)
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want)


@pytest.mark.sample(4)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_the_update_of_one(kind: str, ranks: int) -> None:
    both(kind, {"tp": ranks})


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_windows_of_replicas(kind: str) -> None:
    both(kind, {"dp_replicate": 2, "tp": 2}, (4, 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_beside_rows_of_state(kind: str, zero: int) -> None:
    case = grid_case({"dp_shard": 2, "tp": 2}, zero, kind, 2, sequence=True)
    found = judged(case)
    assert found.kind == "ok", found


# ---- what is exchanged and kept


def rank_graph(kind: str, layers: int, sequence: bool, ranks: int = 2) -> Graph:
    """The graph of a rank with what an update needs alone."""
    model = steps.made(kind, layers=layers, heads=8)
    graph = steps.step_of(model, steps.recipe_of(model))
    first = meshes({"tp": ranks})[:1]
    [own], _ = steps.ranks_graphs(graph, first, rewritten=False, sequence=sequence)
    return prune(own, own.signature.requested((), True))


def of_activations(own: Graph, width: int = 32) -> Counter[tuple[str, bool]]:
    """The exchanges of rows of features: op, and whether it is in backward."""
    return Counter(
        (node.op_type, bool(node.meta.get("backward")))
        for node in own
        if node.op_type in STARTS and has_rows(type_of(node.inputs[0]), width)
    )


def has_rows(kind: Type, width: int) -> bool:
    """Says whether a tensor holds a row of features for each position of each sample."""
    return kind.is_floating and kind.shape[-1:] == (width,) and "B" in str(kind)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exchanges_of_a_layer(kind: str) -> None:
    """The two all-reduces of a layer's forward become reduce-scatters and all-gathers, and so those
    of its backward, which also gathers the rows again that two products have read. A
    reduce-scatter and an all-gather together pass the bytes of an all-reduce."""

    def of_a_layer(sequence: bool) -> Counter[tuple[str, bool]]:
        two, one = (rank_graph(kind, layers, sequence) for layers in (2, 1))
        return of_activations(two) - of_activations(one)

    of_sums, of_parts = of_a_layer(False), of_a_layer(True)
    assert of_sums == {("AllReduceStart", False): 2, ("AllReduceStart", True): 2}
    assert of_parts == {
        ("ReduceScatterStart", False): 2, ("AllGatherStart", False): 2,
        ("ReduceScatterStart", True): 2, ("AllGatherStart", True): 4,
    }  # fmt: skip


def test_lengths_that_are_numbers() -> None:
    """A graph that holds for one length exchanges what one for all lengths does."""
    model = steps.made("gpt2", heads=8)
    graph = steps.step_of(model, steps.recipe_of(model))
    first = meshes({"tp": 2})[:1]
    (whole,), (part,) = (
        steps.ranks_graphs(each, first, rewritten=False, sequence=True)[0]
        for each in (graph, graph.clone({"T": 8}))
    )
    assert of_activations(whole) == of_activations(part)
    with pytest.raises(OnwardError, match="a length of 9 positions cannot be split over 2 ranks"):
        steps.ranks_graphs(graph.clone({"T": 9}), first, sequence=True)


def test_a_length_that_ranks_do_not_divide() -> None:
    said = r"over 2 ranks along tp; fix: pad batches to .*, or sequence_parallel=False"
    with pytest.raises(OnwardError, match=said):
        length_parts(["T_tp2"], {"T": 9})
    assert length_parts(["T_tp2", "T_cp4"], {"T": 8}) == {"T_tp2": 4, "T_cp4": 2}


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (None, "splits positions along tp, of which mesh has one rank; fix: mesh="),
        ({"dp_replicate": 2}, "splits positions along tp, of which mesh has one rank"),
        ({"cp": 2, "tp": 2}, "a mesh with cp would split positions in two ways, which is not"),
    ],
)
def test_meshes_without_it(mesh: Any, said: str) -> None:
    with pytest.raises(OnwardError, match=said):
        TrainerOptions(mesh=mesh, sequence_parallel=True)
    assert TrainerOptions(mesh="auto", sequence_parallel=True).sequence_parallel


def kept(own: Graph, width: int = 32) -> Counter[str]:
    """The shapes of rows of features that forward leaves for backward."""
    found: Counter[str] = Counter()
    for node in own:
        if node.meta.get("backward") or node.op_type in STARTS:
            continue
        for y in node.outputs:
            late = any(n.meta.get("backward") for n in y.consumers())
            if late and has_rows(type_of(y), width):
                found[str(type_of(y))] += 1
    return found


@pytest.mark.parametrize(
    ("kind", "ranks", "most"), [("gpt2", 2, 1), ("bert", 4, 1), ("t5", 4, 1), ("llama", 4, 2)]
)
def test_rows_of_features_are_kept_in_parts(kind: str, ranks: int, most: int) -> None:
    """What norms, dropout, residuals and products of whole rows leave for backward: of the rank's
    positions, but for the rows that the head reads, and those that the first norm makes of a table
    that is not cut. Of as many ranks as leave the inner features another number."""
    parts = kept(rank_graph(kind, 2, True, ranks))
    whole = {n: k for n, k in parts.items() if f"{ranks}*B*T_tp" in n or f"{ranks}*T_tp" in n}
    assert sum(whole.values()) <= most and sum(parts.values()) >= 6, parts
