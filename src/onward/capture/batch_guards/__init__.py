"""Guards of a capture on the numbers and the memory of a batch.

In: a program, the first batch. Out: facts that say of a later batch whether they hold.
Imports: `trace`, `translate`.
"""
