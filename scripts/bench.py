#!/usr/bin/env python3
"""Measure what the product costs, beside its goals. Run by hand on a quiet machine; Linux.

``python3 scripts/bench.py turn`` measures a turn, ``relay`` the way to an agent on another machine; ``--only`` picks phases,
``--repeats`` how often each is measured, ``turn --agent claude-code`` or ``codex`` takes the real program. The exit code is 1
when a number is worse than twice its goal. Needs Python 3.11 or newer, git and the package index.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
import asyncio

from tooling import ROOT, SetupError, steps, venv

VERDICT = (
    "Each line has its goal beside it. The exit code is 1 when a measure is worse than twice its goal; a missed goal is told."
)
"""What a measurement comes to."""


def main() -> int:
    """Prepare, measure, print; the exit code."""
    try:
        venv.enter(__file__)
    except SetupError as exc:
        steps.say(str(exc))
        return 2
    sys.path[:0] = [str(ROOT / "ACPAgentRunner"), str(ROOT / "shared")]
    from benches import claude, codex, phases, relay, table, turn

    own = {"claude-code": claude.PHASES, "codex": codex.PHASES}
    parser = argparse.ArgumentParser(description="Measure what the product costs, beside its goals.", epilog=VERDICT)
    commands = parser.add_subparsers(dest="command", required=True)
    benchmarks = {
        "turn": (turn.PHASES, turn.REPEATS, "one turn, many turns, many agents: time and memory"),
        "relay": (relay.PHASES, relay.REPEATS, "events of a remote agent: rate, latency, replay and memory"),
    }
    for name, (known, usual, text) in benchmarks.items():
        command = commands.add_parser(name, help=text, description=f"Measure {text}.", epilog=VERDICT)
        command.add_argument("--only", action="append", metavar="PHASE", help=f"only this; may be repeated: {', '.join(known)}")
        command.add_argument("--repeats", type=int, default=usual, help=f"repetitions of each (default {usual})")
        if name == "turn":
            command.add_argument("--agent", choices=["acp", *own], default="acp", help="which agent (default: acp)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    known = benchmarks[options.command][0]
    if options.command == "turn" and options.agent in own:
        known = own[options.agent]
    for phase in options.only or ():
        if phase not in known:
            parser.error(f"no phase {phase}; there are: {', '.join(known)}")
    rows = asyncio.run(phases.measure(known, options.only or list(known), options.repeats, steps.say))
    print(table.render(rows))
    return 0 if table.passed(rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
