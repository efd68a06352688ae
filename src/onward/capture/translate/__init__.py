"""Translates an exported program into a graph.

In: torch's exported program. Out: the nodes of a `Graph`, and which parameters, leaves and regions
autograd reaches from each result. Imports: `aten`, `regions`, `trace`.
"""
