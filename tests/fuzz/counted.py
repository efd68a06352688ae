"""How often a history may be captured: once for each state and shape that a step meets."""

from __future__ import annotations

import re

from fuzz.maker import Case

FLAG = re.compile(r"(.+)\.requires_grad_\((True|False)\)")
# lines after which a model is the same program, with other numbers
NUMBERS = re.compile(
    r"scheduler\.step\(\)|optimizer\.(param_groups\[-?\d\]\['(lr|weight_decay|betas)'\].*|zero_grad.*"
    r"|load_state_dict.*)|for p in model\.parameters.*|pass|model\.load_state_dict.*"
)
SETS = ("self._kept", "self.config", "self.n ", "self.table", "self.held", ".n = ", "self.kept")


def most_captures(case: Case) -> int:
    """The most captures that one run may need: the states (mode, trained parameters, anything that
    a line between two steps has changed) times the shapes that each meets."""
    epoch, flags = 0, dict[str, str]()
    met = set()
    for action in case["history"]:
        if action["do"] in ("train", "eval"):
            spec = case["batches"][action["batch"]]
            given = (action["do"], spec["size"], spec["length"], action.get("spoil"))
            met.add((epoch, tuple(sorted(flags.items())), *given, "alias" in action))
        elif action["do"] == "code" and (found := FLAG.fullmatch(action["code"])):
            flags[found[1]] = found[2]
        elif action["do"] == "rebirth" or (
            action["do"] == "code" and not NUMBERS.fullmatch(action["code"])
        ):
            epoch += 1
    # a forward that sets something meets what it has set the next time
    sets = any(text in s["code"] for s in case["body"] for text in SETS)
    return len(met) * (2 if sets else 1)
