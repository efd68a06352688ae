"""The state of a user's model: what it leads to, what of it was read, and what is set on it.

In: a module and its loss function. Out: facts by path, sweeps that compare identities, snapshots
that put values back, refusals, patches for a while. Imports: `graph`, `errors`.

A walk (`Walk`) is slow and takes note of values; a `Sweep` is fast and compares object identities.
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
