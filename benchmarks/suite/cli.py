"""The one command line that the scripts share."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from suite.progress import Clock, say
from suite.report import Writer

RESULTS = Path(__file__).resolve().parents[1] / "results"
# A quick run's numbers say nothing, so that they stay out of the committed results.
QUICK_RESULTS = Path(tempfile.gettempdir()) / "onward-benchmarks"


class CommandLine(argparse.ArgumentParser):
    """A script's options: the shared ones here, its own by `add_argument`.

    about: the script's docstring, whose first line is shown by --help. budget: seconds after which
    nothing new starts, by default; None where a script takes no budget. cases: whether it has
    cases to choose from; precision: in fp32 or in bf16. threads: whether the number of torch's
    threads can be chosen. engines: the names that it has to choose from; chosen: those by
    default, "": all. rounds: their turns, by default, of which --quick takes 2.
    """

    def __init__(
        self,
        about: str | None,
        *,
        budget: float | None = None,
        cases: bool = False,
        precision: bool = False,
        threads: bool = False,
        engines: Collection[str] = (),
        chosen: str = "",
        rounds: int = 0,
        quick: str = "a tiny model, to try the script",
    ) -> None:
        super().__init__(description=(about or "").partition("\n")[0])
        self.add_argument("--quick", action="store_true", help=quick)
        self.add_argument(
            "--out", type=Path, help="folder to write to; default: benchmarks/results, and with "
            "--quick a temporary one",
        )  # fmt: skip
        if budget is not None:
            self.add_argument(
                "--budget", type=float, default=budget,
                help="seconds; then nothing starts; default: %(default)s",
            )  # fmt: skip
        if cases:
            self.add_argument(
                "--cases", default="", help="only cases whose name contains this, or one of these"
            )
        if precision:
            self.add_argument(
                "--precision", choices=["fp32", "bf16"], default="",
                help="of every engine, peers under autocast; default: as the cases say",
            )  # fmt: skip
        if threads:
            self.add_argument(
                "--threads", type=int, default=0, help="torch threads; default: torch's"
            )
        self._engines, self._rounds = engines, rounds
        if engines:
            self.add_argument(
                "--steps",
                type=int,
                default=0,
                help="timed steps per round and engine; default: the script's own number",
            )
            self.add_argument(
                "--rounds", type=int, default=0, help=f"turns of each engine; default: {rounds}"
            )
            self.add_argument(
                "--engines", default=chosen,
                help=f"comma-separated, of {', '.join(engines)}; default: {chosen or 'all'}",
            )  # fmt: skip

    def read(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The options, with `out` and `rounds` filled in and `engines` as names. Exits with status
        2 for what cannot be meant."""
        options = self.parse_args(arguments)
        options.out = options.out or (QUICK_RESULTS if options.quick else RESULTS)
        if self._engines:
            options.rounds = options.rounds or (2 if options.quick else self._rounds)
            options.engines = self.names("engine", options.engines, self._engines)
        return options

    def names(self, kind: str, given: str, there: Collection[str]) -> list[str]:
        """Comma-separated names, all where none is given; exits for one that is not there."""
        asked = given.split(",") if given else list(there)
        if unknown := sorted(set(asked) - set(there)):
            self.error(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(there)}")
        return asked


def writer(options: argparse.Namespace, name: str) -> Writer:
    """Where a script's results go."""
    low = getattr(options, "precision", "")
    named = f"{name}-{low}" if low in ("bf16", "fp16") else name
    return Writer(options.out, named, options.quick)


def finished(text: str, path: Path, clock: Clock) -> None:
    """The table, where it was written, and how long that took."""
    say(f"\n{text}\nwritten: {path}, {clock.spent():.0f} s")


def refused(why: str) -> int:
    """Exit status 2, with one line for a machine that cannot run this."""
    print(why, file=sys.stderr)
    return 2
