"""The three ordered lists of passes, each line with its reason, and the names that switch passes
off.

A pass has one file, and one line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.environment import environment
from onward.errors import check_names
from onward.graph.graph import Graph
from onward.graph.registry import meeting
from onward.rewrite.activation_again import activation_again
from onward.rewrite.add_layer_norm import add_layer_norm
from onward.rewrite.bias_activation import bias_activation
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination
from onward.rewrite.constant_folding import constant_folding
from onward.rewrite.cross_entropy import cross_entropy
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.flash_attention import flash_attention
from onward.rewrite.fuse_attention import fuse_attention
from onward.rewrite.fuse_composites import fuse_composites
from onward.rewrite.gated_activation import gated_activation
from onward.rewrite.gemm_add import gemm_add
from onward.rewrite.gemm_bias import gemm_bias
from onward.rewrite.grouped_keys import grouped_keys
from onward.rewrite.kept_biases import kept_biases
from onward.rewrite.known_conditions import known_conditions
from onward.rewrite.layer_norm import layer_norm
from onward.rewrite.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_ahead,
    linear_cross_entropy_step,
)
from onward.rewrite.noop import noop
from onward.rewrite.patch_convolution import patch_convolution
from onward.rewrite.precision import (
    Policy,
    cancel_casts,
    cast_again,
    fold_casts,
    low_attention,
    move_casts,
    write_casts,
)
from onward.rewrite.reshape_through_transpose import reshape_through_transpose
from onward.rewrite.rms_norm import rms_norm
from onward.rewrite.rotary import rotary
from onward.rewrite.run import AnyPass, FusionPass, Pass
from onward.rewrite.scatter_into import scatter_into
from onward.rewrite.slices_to_split import slices_to_split
from onward.rewrite.split_first import split_first
from onward.rewrite.wide_sum import wide_sum

_FORWARD: Sequence[AnyPass] = (
    Pass(known_conditions),  # first: masks are read by the next passes
    # spellings written out by hand, before anything moves their ops
    Pass(fuse_composites, exact=False),
    Pass(fuse_attention, exact=False),
    Pass(gemm_bias, exact=False),
    Pass(constant_folding),  # first: later passes see literals
    Pass(noop),  # identities would hide equal expressions from the next pass
    # before differentiation, so that each gradient is derived once
    Pass(common_subexpression_elimination),
    # before Reshapes move: needs those that turn a convolution's result into rows next to it
    Pass(patch_convolution, exact=False),
    # before Slices become Splits and move: needs a rotation's halves next to its sum
    FusionPass(rotary, exact=False),
    Pass(grouped_keys, exact=False),  # before Reshapes move, too
    # before add_layer_norm, which fuses the norm with the sum before it
    Pass(layer_norm, exact=False),
    FusionPass(rms_norm, exact=False),
    Pass(slices_to_split),  # equal slices are merged by now; the gradient of a Split is one Concat
    Pass(split_first),  # split a packed projection in the layout that its product wrote
    Pass(reshape_through_transpose),  # after Splits have moved: heads become strides on products
    # before differentiation, which would take attention apart into ops that keep its scores
    FusionPass(flash_attention, exact=False),
    Pass(cross_entropy, exact=False),  # before the next one, which takes the logits away from it
    # before differentiation, like every fusion: the gradient then never reads whole logits
    FusionPass(linear_cross_entropy, exact=False),
    # sum, dropout and norm in one pass over memory, forward and backward
    FusionPass(add_layer_norm),
    Pass(dead_code_elimination),  # removes what the other passes and capture have left
    # after dead nodes, which would count as readers; gates first, since they save more than biases
    FusionPass(gated_activation, exact=False),
    FusionPass(bias_activation, exact=False),
)

# for graphs with the casts of a policy
_PRECISION: Sequence[AnyPass] = (
    Pass(move_casts),  # next to the values that views show, so that equal casts merge
    Pass(dead_code_elimination),  # the views that it left would count as readers
    FusionPass(low_attention),  # while its operands are still cast up, and its result down
    Pass(cancel_casts),
    Pass(common_subexpression_elimination),  # cast a weight once that is read twice
    FusionPass(fold_casts),  # casts have their final readers by now
    Pass(dead_code_elimination),
)

_STEP: Sequence[AnyPass] = (
    Pass(constant_folding),
    Pass(noop),  # reshapes of reshapes, written by gradient rules
    Pass(common_subexpression_elimination),  # masks and shapes that forward and backward share
    Pass(cancel_casts),  # a gradient's cast up and the next product's cast down
    # before scatter_into: makes the producer of the head's dW
    FusionPass(linear_cross_entropy_step),
    Pass(gemm_add, exact=False),  # sums of gradients are in their final form by now
    Pass(scatter_into, exact=False),  # likewise; adds an embedding's rows to the head's gradient
    FusionPass(fold_casts),  # gradients have their final readers by now
    Pass(dead_code_elimination),
    FusionPass(wide_sum),  # after dead nodes, which would count as readers of a sum
    # after the passes that merge equal nodes; dead nodes would count as readers
    Pass(activation_again),
    Pass(cast_again),  # includes biases that recomputed activations read
)

FORWARD: list[AnyPass] = []
PRECISION: list[AnyPass] = []
STEP: list[AnyPass] = []
_LISTS = {"forward": FORWARD, "precision": PRECISION, "step": STEP}
ROW_DEMAND = "row_demand"  # in no list, but switched off like one of their passes


def register(item: AnyPass, stage: str, before: str = "", after: str = "") -> None:
    """Adds a pass to the list of a stage: before or after the pass of that name, else at the end.

    Registering the same pass again changes nothing. Raises ValueError for an unknown stage or
    neighbour, and for a name that another pass has, with both places.
    """
    passes = _LISTS.get(stage)
    if passes is None:
        raise ValueError(f"there is no list of passes {stage!r}; fix: {' or '.join(_LISTS)}")
    if any(held is item for held in passes):
        return
    others = [held for held in (*FORWARD, *PRECISION, *STEP) if held.name == item.name]
    for held in others:
        if held.apply is not item.apply:
            raise meeting(f"the pass {item.name}", held.apply, item.apply)
    if item.name == ROW_DEMAND:
        raise ValueError(f"the name {ROW_DEMAND} is reserved; fix: another name for the pass")
    names = [held.name for held in passes]
    if not before and not after:
        passes.append(item)
        return
    if (before and after) or (before or after) not in names:
        raise ValueError(
            f"the pass {item.name} needs either before= or after= with a pass of the list "
            f"{stage!r}; fix: one of {', '.join(names)}"
        )
    passes.insert(names.index(before) if before else names.index(after) + 1, item)


for _stage, _items in (("forward", _FORWARD), ("precision", _PRECISION), ("step", _STEP)):
    for _item in _items:
        register(_item, _stage)


def in_precision(policy: Policy) -> list[AnyPass]:
    """The pass that writes the policy's casts, then the passes of PRECISION."""

    def written(graph: Graph) -> int:
        return write_casts(graph, policy)

    written.__name__ = write_casts.__name__
    return [Pass(written, exact=False), *PRECISION]


def without_fusions(passes: Iterable[AnyPass]) -> list[AnyPass]:
    """The given passes except those that write own ops for kernels."""
    return [item for item in passes if isinstance(item, Pass)]


def halves() -> list[AnyPass]:
    """The passes of STEP for a graph that runs in two halves."""
    ahead = FusionPass(linear_cross_entropy_ahead)
    passes = [ahead if item.apply is linear_cross_entropy_step else item for item in STEP]
    return [*passes, Pass(kept_biases)]  # last, since other passes would remove the copies


def switches() -> tuple[str, ...]:
    """The names of all passes, each once."""
    return tuple(
        dict.fromkeys([*(p.name for p in (*FORWARD, *PRECISION, *STEP, *halves())), ROW_DEMAND])
    )


def switched_off(disable: Iterable[str]) -> set[str]:
    """The names of passes switched off by `disable` and by the environment. Raises OnwardError for
    a name that no pass has."""
    names = environment().disable
    check_names("disable", "pass", disable, switches())
    check_names("ONWARD_DISABLE", "pass", names, switches())
    return {*disable, *names}
