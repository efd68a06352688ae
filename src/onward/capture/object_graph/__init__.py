"""The objects that a model and its loss function lead to: a walk that takes note of them, a sweep
that asks whether they are still there, a snapshot that puts them back.

The walk is slow and takes note of values; the sweep is fast and compares object identities.
"""

from onward.capture.object_graph.code import library, module_of
from onward.capture.object_graph.facts import Same
from onward.capture.object_graph.reads import Reads, reading
from onward.capture.object_graph.snapshot import Snapshot, traces_names
from onward.capture.object_graph.sweep import Sweep
from onward.capture.object_graph.walk import Walk

__all__ = [
    "Reads",
    "Same",
    "Snapshot",
    "Sweep",
    "Walk",
    "library",
    "module_of",
    "reading",
    "traces_names",
]
