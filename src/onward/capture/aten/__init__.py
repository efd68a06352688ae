"""The table ATen -> ONNX: one function an op, in the builder's language, composites kept whole.

In: one node of an exported program, its inputs as values. Out: nodes of a graph.
Imports: `graph`, `regions`.

A new translation is a function and its row in the table of one file here.
"""

from onward.capture.aten.call import AtenCall, Translation
from onward.capture.aten.copies import stop_gradient
from onward.graph.registry import enter, files_of

TABLE: dict[str, Translation] = {}


def register(overload: str, translation: Translation) -> None:
    """Enters the translation of an ATen overload, `gelu.default`, or of another library's,
    `library.op.default`. Raises ValueError, with both places, where it has another."""
    if overload.count(".") not in (1, 2):
        raise ValueError(
            f"{overload!r} is no overload; fix: `gelu.default`, or `library.op.default` of another "
            "library"
        )
    enter(TABLE, "translation of", overload, translation)


for _family in files_of(__name__, __path__):
    for _overload, _translation in getattr(_family, "TABLE", {}).items():
        register(_overload, _translation)

__all__ = ["TABLE", "AtenCall", "Translation", "register", "stop_gradient"]
