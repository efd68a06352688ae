"""Statements of a forward that set something, or read what the last run of it has set."""

from __future__ import annotations

from fuzz.maker import HIDDEN, POSITIONS, Maker
from fuzz.regions import perhaps_a_region


def unusual(m: Maker) -> None:
    """Now and then a statement of a kind that few programs have."""
    if m.rarely(0.06):
        effects(m)
    if m.rarely(0.03):
        settings(m)
    perhaps_a_region(m)


def settings(m: Maker) -> str:
    """A configuration that the first forward completes, as a classifier's its kind of problem."""
    h, config = m.late([n for n, k in m.kinds.items() if k == HIDDEN]), m.attribute("config", {})
    return m.value(HIDDEN, m.late([
        f"if {config}.problem_type is None:\n    {config}.problem_type = 'a'\n"
        f"= {h} * (2.0 if {config}.problem_type == 'a' else 0.5)",
        f"{config}.problem_type = 'b'\n= {h} * (2.0 if {config}.problem_type == 'b' else 0.5)",
        f"if {config}.problem_type is None:\n    {config}.problem_type = {h}.shape[-1]\n"
        f"= {h} / {config}.problem_type",
    ]))  # fmt: skip


def effects(m: Maker) -> str:
    """A value that is set, as a matter of the forward's own or as something that the next run
    meets: the first half is refused, the second trains."""
    h = m.late([n for n, k in m.kinds.items() if k == HIDDEN])
    n, table, held = m.attribute("n", 1), m.attribute("table", {"n": 1}), m.attribute("held", [1])
    w = f"`{m.late(m.parameters)['path']}`" if m.parameters else "nn.Parameter(torch.ones(3))"
    kept, rows = m.attribute("_kept", None), f"torch.arange({POSITIONS})[:, None] * 0.1"
    return m.value(HIDDEN, m.late([
        f"{n} += 1\n= {h} * {n}", f"{table}['n'] += 1\n= {h} * {table}['n']",
        f"{held}.append(len({held}))\n= {h} + {held}[-1]", f"{n} = 3 - {n}\n= {h} * {n}",
        f"t, {kept} = {kept}, {h}.detach().mean()\n= {h} if t is None else {h} * t",
        f"{kept} = {h}\n= {h}", f"{kept} = {h}\n= {kept} * 0.5", f"{n} = 3\n= {h} * {n}",
        f"if self.training:\n    {n} = 2\n= {h} * {n}", f"{n} = {h}.shape[-1]\n= {h} / {n}",
        f"{held}[:] = [{h}.shape[-1]]\n= {h} / {held}[0]",
        f"if {kept} is None:\n    {kept} = {rows}\n= {h} + {kept}[:{h}.shape[1]]",
        f"{table}.setdefault('rows', {rows})\n= {h} + {table}['rows'][:{h}.shape[1]]",
        f"{table}['h'] = {h}\n= {table}.pop('h').tanh()",
        f"if {kept} is None:\n    {kept} = {w}.detach().tanh()\n= {h} * {kept}.mean()",
        f"if {kept} is None:\n    {kept} = torch.ones_like({h}).sum()\n= {h} / {kept}",
        f"{w}.n = getattr({w}, 'n', 0) + 1\n= {h} * {w}.n", f"{w}.n = 2\n= {h} * {w}.n",
    ]))  # fmt: skip
