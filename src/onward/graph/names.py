"""Names of a graph's inputs and outputs: the user's and ours never meet.

What the user has named stands behind a word of ours, so that no module path, keyword or output
name, whatever its characters, can be one of the names that a step itself needs:

    param.<path>   buffer.<path>   batch.<leaf>          inputs
    output.<name>                                        outputs of the model
    loss   grad.<input>   next.<input>   grad_norm       outputs of the step
    cotangent.<output>   seed   lr.<group>   exp_avg.<input>   inputs of the step
"""

from __future__ import annotations

from collections.abc import Collection

PARAM, BUFFER, BATCH, OUTPUT = "param.", "buffer.", "batch.", "output."
_USER = (PARAM, BUFFER, BATCH, OUTPUT)


def parameter_name(path: str) -> str:
    """The input that is the model's parameter."""
    return PARAM + path


def output_name(name: str) -> str:
    """The output that is the model's own of this name."""
    return OUTPUT + name


def gradient_name(name: str) -> str:
    """The output that is the gradient by the input of this name."""
    return f"grad.{name}"


def cotangent_name(name: str) -> str:
    """The input that weighs the output of this name in the gradients."""
    return f"cotangent.{name}"


def user_name(name: str) -> str:
    """What the user calls an input or output: `w` for `param.w`; names of ours stay."""
    return next((name[len(p) :] for p in _USER if name.startswith(p)), name)


def distinct(name: str, taken: Collection[str]) -> str:
    """The name, with a number behind it where it is taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    return found
