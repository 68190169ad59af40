#!/usr/bin/env python3
"""Build, check and freeze a release candidate of all packages, so that a reviewer can sign the exact bytes.

``--evidence DIR`` (absolute, not there yet, outside of the repository) needs a clean tree. ``--check DIR`` looks at evidence
again, offline. Exit codes: 0 it holds and is complete; 1 something does not hold, the reason is on stderr; 2 nothing was begun;
3 it holds and is incomplete, so that it can never pass for a release.

``--check`` runs on any Python 3.11 or newer with nothing installed.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
import json
import os
import signal
from pathlib import Path

if not sys.flags.isolated:
    # Nobody's PYTHONPATH, sitecustomize of an account or compiled file decides what is run here.
    os.execv(sys.executable, [sys.executable, "-I", *sys.argv])
sys.dont_write_bytecode, sys.pycache_prefix = True, os.devnull

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "shared")]

from evidence import Failed, Refused, recheck  # noqa: E402
from tooling import SetupError, steps, venv  # noqa: E402

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build, check and freeze a release candidate.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--evidence", metavar="DIR", help="make the evidence of the commit the tree is at")
    what.add_argument("--check", metavar="DIR", help="look at evidence again, offline")
    parser.add_argument(
        "--suites", choices=("all", "none"), default="all", help="none: the rest only, which is never complete (exit code 3)"
    )
    options = parser.parse_args()
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _end)
    try:
        if options.check is not None:
            found = recheck.check(Path(options.check))
            print(json.dumps(found, indent=1), flush=True)
            return 0 if found["complete"] else 3
        venv.enter(__file__)
        return _make(options.evidence, options.suites)
    except (Refused, SetupError) as exc:
        steps.say(str(exc))
        return 2
    except Failed as exc:
        steps.say(str(exc))
        return 1
    except OSError as exc:
        # What was found out could not be told.
        steps.say(f"nothing can be written there: {exc.strerror or exc}")
        return 1


def _end(number: int, _: object) -> None:
    """End once, and in order: what was started ends first, then the directories of this run are gone."""
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _make(given: str, which: str) -> int:
    for name in [each for each in os.environ if each.startswith("PYTHON")]:
        del os.environ[name]
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=os.devnull)
    from evidence import candidate

    directory, complete = candidate.make(given, which=which)
    print(directory, flush=True)
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
