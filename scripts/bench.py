#!/usr/bin/env python3
"""Measure what the product costs, beside its goals. Run by hand on a quiet machine; Linux.

``python3 scripts/bench.py turn`` measures a turn; ``--only`` picks phases, ``--repeats`` how often each is measured. The exit
code is 1 when a number is worse than twice its goal. Needs Python 3.11 or newer, git and the package index.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
import asyncio

from tooling import ROOT, SetupError, steps, venv


def main() -> int:
    """Prepare, measure, print; the exit code."""
    try:
        venv.enter(__file__)
    except SetupError as exc:
        steps.say(str(exc))
        return 2
    sys.path[:0] = [str(ROOT / "ACPAgentRunner"), str(ROOT / "shared")]
    from benches import table, turn

    parser = argparse.ArgumentParser(description="Measure what the product costs, beside its goals.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_turn = commands.add_parser("turn", help="one turn, many turns, many agents: time and memory")
    of_turn.add_argument("--only", action="append", choices=sorted(turn.PHASES), help="measure only this; may be repeated")
    of_turn.add_argument("--repeats", type=int, default=turn.REPEATS, help=f"repetitions of each (default {turn.REPEATS})")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    rows = asyncio.run(turn.measure(options.only or list(turn.PHASES), options.repeats, steps.say))
    print(table.render(rows))
    return 0 if table.passed(rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
