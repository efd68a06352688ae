"""The state of a user's model: all objects reachable from it, their reads and changes.

In: a module and its loss function. Out: facts by path (`Walk`), whether they still hold (`Sweep`),
copies to restore (`Snapshot`), attributes read (`Reads`), refusals, temporary patches.
Imports: `errors`, `environment`.

A `Walk` is slow and records values; a `Sweep` is fast and compares object identities.
"""

from onward.model_state.code import library, module_of
from onward.model_state.facts import Same
from onward.model_state.reads import Reads, reading
from onward.model_state.snapshot import Snapshot, traces_names
from onward.model_state.sweep import Sweep
from onward.model_state.walk import Walk

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
