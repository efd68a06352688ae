"""Forward graph -> step graph: gradients by reverse mode over ONNX ops, then optimizer updates."""

from onward.differentiate import rules
from onward.differentiate.partition import Halves, partition
from onward.differentiate.reverse import vjp
from onward.differentiate.update import Recipe, UpdateGroup, add_updates

__all__ = ["Halves", "Recipe", "UpdateGroup", "add_updates", "partition", "rules", "vjp"]
