"""The table of translations, ATen -> ONNX: one function for each op. Attention, normalisation,
losses and the like become one node each.

In: a node of an exported program, with its arguments as values (`AtenCall`). Out: nodes of a graph,
and the values of the results. Imports: `graph`, `regions`.

A new translation is a function, and its row in the table of a file in this folder.
"""

from onward.capture.aten.call import AtenCall, Translation
from onward.capture.aten.copies import stop_gradient
from onward.graph.registry import enter, files_of

TABLE: dict[str, Translation] = {}


def register(overload: str, translation: Translation) -> None:
    """Registers the translation of an ATen overload, `gelu.default`, or of another library's,
    `library.op.default`. Raises ValueError if it already has one, naming both places."""
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
