"""Graphs: values with types, nodes, ops; building, printing, checking, evaluating and saving them.

In and out: a `Graph`, a program of ONNX nodes that knows neither torch nor a device. Imports:
errors, options and environment.
"""
