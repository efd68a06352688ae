"""The translation of an exported program into a graph.

In: torch's exported program. Out: a `Graph`, and which parameters reach which result.
Imports: `aten`, `regions`, `trace`.
"""
