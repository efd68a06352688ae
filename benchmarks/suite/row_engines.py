"""The engines of the padded benchmark, among them two that spare rows by hand."""

from __future__ import annotations

from dataclasses import replace

from suite import by_hand
from suite.engines import ENGINES, SEEDED, Engine, without_pass
from suite.passes import ROW_DEMAND

WITHOUT = "onward-without"


def engines() -> dict[str, Engine]:
    """All engines."""
    tuned = ENGINES["eager-tuned"]
    found = {name: engine for name, engine in ENGINES.items() if not engine.onward}
    for name, about, change in (
        ("eager-labels", "eager-tuned, head on labelled rows only", by_hand.labelled_rows),
        ("eager-unpad", "eager-tuned, no padding outside attention's scores", by_hand.real_rows),
    ):
        found[name] = replace(tuned, name=name, about=about, change=change)
    found["onward"] = SEEDED
    about = f"Onward without pass {ROW_DEMAND}"
    found[WITHOUT] = without_pass(ROW_DEMAND, WITHOUT, about)
    return found
