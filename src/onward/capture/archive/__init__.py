"""Serializes captures, and describes the process and installation around a capture for a key.

In: a `CapturedModule`, or its bytes and a model's tensors. Out: bytes (JSON and the graph), or a
`CapturedModule`; a description as JSON (`surroundings`). Imports: the rooms of capture before it.
"""
