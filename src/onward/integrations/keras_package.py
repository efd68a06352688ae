"""The packages of Keras and of its backends, as far as the integration uses them.

They are optional, and their modules are untyped here: none of them has to be installed where the
types of this package are checked.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from onward.errors import MissingExtraError


def package(name: str) -> Any:
    """Imports an optional package or one of its modules. Raises MissingExtraError where it is not
    installed."""
    if find_spec(name.partition(".")[0]) is None:
        raise MissingExtraError(name.partition(".")[0], "keras")
    return import_module(name)


keras: Any = package("keras")
tree: Any = keras.tree
unpack: Any = keras.utils.unpack_x_y_sample_weight
set_mask: Any = package("keras.src.backend").set_keras_mask

__all__ = ["keras", "package", "set_mask", "tree", "unpack"]
