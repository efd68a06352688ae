"""Forward graph -> step graph: gradients by reverse mode over ONNX ops, then optimizer updates.

In: a forward graph and a `Recipe`. Out: a graph with gradients, next parameters and next state.
Imports: graph.
"""

from onward.differentiate import rules
from onward.differentiate.label_inputs import label_inputs
from onward.differentiate.loss_sum import divisor_of_all, summed
from onward.differentiate.reverse import vjp
from onward.differentiate.update import Recipe, UpdateGroup, add_updates, settled, update_alone

__all__ = [
    "Recipe",
    "UpdateGroup",
    "add_updates",
    "divisor_of_all",
    "label_inputs",
    "rules",
    "settled",
    "summed",
    "update_alone",
    "vjp",
]
