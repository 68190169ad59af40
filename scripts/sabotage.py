#!/usr/bin/env python3
"""Break the sources one line at a time, each in a copy, and see that the suite notices: every line has a test that must fail.

``python3 scripts/sabotage.py`` tries all of them, names try only those, ``--list`` says what there is. One line for each tells
which test caught it and how. The exit code is 0 when all were caught, 1 when one stayed green or its test came to no verdict, 2
when the table does not fit the sources, or something is missing. The working copy itself is never changed.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
import functools
import signal

from tooling import SetupError, steps, trials, venv
from tooling.sabotages import SABOTAGES


def main(arguments: list[str]) -> int:
    """Try what the command line names."""
    parser = argparse.ArgumentParser(description="Break the sources one line at a time and see that the suite notices.")
    parser.add_argument("name", nargs="*", help="sabotages to try; all by default")
    parser.add_argument("--list", action="store_true", help="say what there is, with the line and its tests, and try nothing")
    options = parser.parse_args(arguments)
    known = {each.name: each for each in SABOTAGES}
    if unknown := [name for name in options.name if name not in known]:
        parser.error(f"no such sabotage: {', '.join(unknown)}")
    table = [known[name] for name in dict.fromkeys(options.name)] or list(SABOTAGES)
    if options.list:
        for each in table:
            print(f"{each.name}\n    {each.file}\n    - {each.old}\n    + {each.new}\n    {', '.join(each.tests)}")
        return 0
    steps.say(f"{len(table)} sabotage{'' if len(table) == 1 else 's'}; first their tests on untouched copies ...")
    try:
        with trials.Runner(venv.development()) as runner:
            return trials.run(table, runner, say=functools.partial(print, flush=True))
    except (trials.Stale, trials.Ended, SetupError) as exc:
        steps.say(str(exc))
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
