"""Tensor parallelism (Megatron-LM, arXiv 1909.08053), found from the graph of a step.

In:  a step's graph, or forward and gradients, and a mesh with the axis `tp`
Out: the graph that this rank runs, and by name how each parameter is cut

`sharding` has what ranks may have of a value, `ways` and the table `rules` how ops run on parts,
`conversions` how one sharding becomes another, `solve` chooses, `write` writes what is chosen.
`sequence` splits positions between the products whose weights are cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from onward.distribute.collectives import Collectives
from onward.distribute.lengths import split_lengths
from onward.distribute.mesh import Mesh
from onward.distribute.tensor import rules
from onward.distribute.tensor.conversions import Costs, DeviceRates
from onward.distribute.tensor.padding import paddable, padded, rows_padded
from onward.distribute.tensor.sequence import SequenceSharding
from onward.distribute.tensor.sharding import Sharding, TensorCut
from onward.distribute.tensor.solve import StepSharding
from onward.distribute.tensor.ways import RankPlace
from onward.distribute.tensor.write import write_rank
from onward.errors import OnwardError
from onward.graph.graph import Graph, Role, Value, attributes, role_of, type_of
from onward.graph.names import user_name
from onward.graph.registry import files_of

files_of(rules.__name__, rules.__path__)  # importing them fills the table of ways
AXIS = "tp"


def tensor_parallel(
    graph: Graph,
    mesh: Mesh,
    rates: DeviceRates | None = None,
    sizes: Mapping[str, int] | None = None,
    cuts: Mapping[str, Sharding] | None = None,
    sequence: bool = False,
) -> tuple[Graph, dict[str, TensorCut]]:
    """Returns the graph of this rank of a mesh, and by parameter how it is cut along `tp`.

    The graph's inputs and outputs keep their names. Parameters that are cut, their optimizer state,
    and sums of their gradients are parts, and so are their next values and gradients; all else is
    whole. Ranks along `tp` take the same batch.

    rates: of the devices and of the links between them, by which the sharding is chosen. sizes: of
    a batch, by symbol, such as `{"B": 8, "T": 512}`. cuts: the shardings of all parameters that are
    to be cut, in the place of a choice: an evaluation takes those of the step beside it. sequence:
    whether ranks also have parts of the positions (`sequence.py`), which takes cuts. Raises
    OnwardError for a step with code that runs in PyTorch or an update outside of the graph, and for
    a cut that does not fit.
    """
    ranks = mesh.size(AXIS)
    if ranks == 1:
        return graph, {}
    region = next((node for node in graph if node.op_type == "Region"), None)
    if region is not None:
        raise OnwardError(
            f"a step on {mesh} cannot be distributed: {attributes(region)['path']} runs in "
            "PyTorch; fix: strict=True says why, so that it can be captured"
        )
    if graph.signature.left_gradients:
        raise OnwardError(
            f"a step on {mesh} cannot be distributed: its optimizer updates outside of the graph, "
            "and would be given parts; fix: an optimizer with an update in it"
        )
    if sequence and graph.inputs_with(Role.BATCH):  # not an update alone, which has no positions
        assert cuts is not None, "positions are split between weights that are cut"
        lengths = split_lengths(graph, AXIS, ranks)
        lengths.require_parts(AXIS, ranks)
        graph = lengths.graph
        search: StepSharding = SequenceSharding(lengths, ranks)
    else:
        search = StepSharding(graph, Costs(rates or DeviceRates(), ranks, dict(sizes or {})))
    solution = search.solve() if cuts is None else search.solution(_given(graph, cuts, ranks))
    made = Graph(graph.name)
    place = RankPlace(AXIS, ranks, mesh.coordinate(AXIS), Collectives(made, mesh), {})
    made = write_rank(graph, solution, made, place)
    return made, {
        value.name or "": TensorCut(AXIS, ranks, place.at, sharding)
        for value, sharding in solution.inputs.items()
        if role_of(value) is Role.PARAM
    }


def chosen_cuts(
    graph: Graph, mesh: Mesh, rates: DeviceRates, sizes: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Chooses how parameters are cut along `tp`: by name, the dim and its groups. Arguments as of
    `tensor_parallel`."""
    costs = Costs(rates, mesh.size(AXIS), dict(sizes))
    solution = StepSharding(graph, costs).solve()
    return {
        value.name or "": (sharding.dim, sharding.pieces)
        for value, sharding in solution.inputs.items()
        if role_of(value) is Role.PARAM and sharding.dim is not None
    }


def link_rates(device: str, flops_per_second: float, bytes_per_second: float) -> DeviceRates:
    """The rates of a device with links that are usual for it."""
    if device == "cuda":
        return DeviceRates(flops_per_second, bytes_per_second)
    return DeviceRates(flops_per_second, bytes_per_second, 2e-6, 2e9, 1e-4)


def _given(graph: Graph, cuts: Mapping[str, Sharding], ranks: int) -> dict[Value, Sharding]:
    """The shardings by graph input, which fit."""
    found: dict[Value, Sharding] = {}
    for name, sharding in cuts.items():
        value = graph.find_input(name)
        if sharding.dim is None or not sharding.fits(type_of(value), ranks):
            raise OnwardError(
                f"{user_name(name)} {type_of(value)} cannot be {sharding} over {ranks} ranks; "
                "fix: a dim whose size they divide"
            )
        found[value] = sharding
    return found


__all__ = ["AXIS", "DeviceRates", "Sharding", "TensorCut", "chosen_cuts", "link_rates", "paddable",
           "padded", "rows_padded", "tensor_parallel"]  # fmt: skip
