"""The user's own loop: a model that runs as a graph where it is called, and autograd after it."""

from onward.capture import eager
from onward.module.accelerate import accelerate, accelerated
from onward.module.explain import explain
from onward.module.wrapper import Module

__all__ = ["Module", "accelerate", "accelerated", "eager", "explain"]
