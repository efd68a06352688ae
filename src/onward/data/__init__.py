"""Data for runs that are stopped and resumed: one order, whatever the number of workers.

In: a dataset as `torch.utils.data` knows it. Out: batches, and a position that a checkpoint holds.
Imports: errors alone.
"""

from onward.data.resumable import ResumableDataLoader

__all__ = ["ResumableDataLoader"]
