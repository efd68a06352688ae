"""Guards on the numbers in a batch, which a capture presumes to hold.

In: an exported program, the first batch. Out: presumptions (`Pinned`, `Shown`, `Unchanged`) whose
`holds(tensors)` checks a later batch. Imports: `trace`, `translate`.
"""
