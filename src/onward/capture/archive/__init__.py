"""Captures as bytes, and all that surrounds a capture as a key.

In: a `CapturedModule`, a model. Out: JSON and the graph's bytes; the same read again.
Imports: the rooms of capture before it.
"""
