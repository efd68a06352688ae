"""The user's own loop: calls of a module run as a graph, and their gradients come through autograd.

In: a module and its calls. Out: the outputs, on autograd's tape; reports and explanations. Imports:
prepare and explanation, and all that stands before them.
"""

from onward.capture import eager
from onward.module.accelerate import accelerate, accelerated
from onward.module.explain import explain
from onward.module.wrapper import Module

__all__ = ["Module", "accelerate", "accelerated", "eager", "explain"]
