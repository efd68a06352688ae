"""The three ordered lists of passes, each line with its reason, and the names that switch them off.

A pass is in one file, and in one line here.
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
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.flash_attention import flash_attention
from onward.rewrite.fuse_attention import fuse_attention
from onward.rewrite.fuse_composites import fuse_composites
from onward.rewrite.gated_activation import gated_activation
from onward.rewrite.gemm_add import gemm_add
from onward.rewrite.grouped_keys import grouped_keys
from onward.rewrite.kept_biases import kept_biases
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

_FORWARD: Sequence[AnyPass] = (
    # what models write out by hand, before anything moves the ops it is written with
    Pass(fuse_composites, exact=False),
    Pass(fuse_attention, exact=False),
    Pass(constant_folding),  # constants first: everything after sees literals
    Pass(noop),  # identities hide equal expressions from the next
    # before differentiation, so that a gradient is derived once
    Pass(common_subexpression_elimination),
    # before Reshapes move: what turns a convolution's result into rows meets what undoes it
    Pass(patch_convolution, exact=False),
    # before Slices become Splits and move: a turn's halves lie beside the sum that they go into
    FusionPass(rotary, exact=False),
    Pass(grouped_keys, exact=False),  # before Reshapes move too
    FusionPass(rms_norm, exact=False),  # before the sum before it is joined to it
    Pass(slices_to_split),  # equal slices are one; a Split's gradient is one Concat
    Pass(split_first),  # a packed projection is split as its product wrote it
    Pass(reshape_through_transpose),  # after the Splits moved: heads become strides on products
    # sums a row in blocks; before differentiation, which would take attention apart
    FusionPass(flash_attention, exact=False),
    # before differentiation, as every fusion: the gradient then never reads whole logits
    FusionPass(linear_cross_entropy, exact=False),
    # the sum, its dropout and its norm in one pass over memory, here and in the backward
    FusionPass(add_layer_norm),
    Pass(dead_code_elimination),  # sweeps what the others and capture left
    # dead nodes would count as readers; neither leaves any. A gate takes more than a bias saves
    FusionPass(gated_activation, exact=False),
    FusionPass(bias_activation, exact=False),
)

# for a graph into which a cast policy is written
_PRECISION: Sequence[AnyPass] = (
    Pass(move_casts),  # to what views show, so that equal casts meet
    Pass(cancel_casts),
    Pass(common_subexpression_elimination),  # a weight that is read twice is cast once
    FusionPass(fold_casts),  # casts have their last readers now
    Pass(dead_code_elimination),
)

_STEP: Sequence[AnyPass] = (
    Pass(constant_folding),
    Pass(noop),  # reshapes of reshapes that rules wrote
    Pass(common_subexpression_elimination),  # masks and shape reads that forward and backward share
    Pass(cancel_casts),  # a gradient's up and the next product's down
    # before scatter_into: the head's dW gets its producer
    FusionPass(linear_cross_entropy_step),
    Pass(gemm_add, exact=False),  # sums of gradients have their final form now
    Pass(scatter_into, exact=False),  # likewise: sums an embedding's rows into the head's gradient
    FusionPass(fold_casts),  # gradients have their last readers
    Pass(dead_code_elimination),
    # after all that makes one of equal nodes; dead nodes would count as readers
    Pass(activation_again),
    Pass(cast_again),  # of biases that activations read again too
)

FORWARD: list[AnyPass] = []
PRECISION: list[AnyPass] = []
STEP: list[AnyPass] = []
_LISTS = {"forward": FORWARD, "precision": PRECISION, "step": STEP}
ROW_DEMAND = "row_demand"  # in no list, but switched off like one that is


def register(item: AnyPass, stage: str, before: str = "", after: str = "") -> None:
    """Puts a pass into the list of a stage: before or after another by name, else at the end.

    The very same again changes nothing. Raises ValueError for a stage or a neighbour that is not
    there, and where the name is another pass's, with both places.
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
    """The passes of PRECISION, behind the one that writes the policy's casts."""

    def written(graph: Graph) -> int:
        return write_casts(graph, policy)

    written.__name__ = write_casts.__name__
    return [Pass(written, exact=False), *PRECISION]


def without_fusions(passes: Iterable[AnyPass]) -> list[AnyPass]:
    """The passes among these that write no own ops on account of kernels."""
    return [item for item in passes if isinstance(item, Pass)]


def halves() -> list[AnyPass]:
    """The passes of STEP for a graph whose forward runs before the cotangents are known."""
    ahead = FusionPass(linear_cross_entropy_ahead)
    passes = [ahead if item.apply is linear_cross_entropy_step else item for item in STEP]
    return [*passes, Pass(kept_biases)]  # last: nothing else would keep a copy


def switches() -> tuple[str, ...]:
    """The names of all passes, each once."""
    return tuple(
        dict.fromkeys([*(p.name for p in (*FORWARD, *PRECISION, *STEP, *halves())), ROW_DEMAND])
    )


def switched_off(disable: Iterable[str]) -> set[str]:
    """The passes to leave out, by option and by environment. Raises OnwardError for a name that
    none has."""
    names = environment().disable
    check_names("disable", "pass", disable, switches())
    check_names("ONWARD_DISABLE", "pass", names, switches())
    return {*disable, *names}
