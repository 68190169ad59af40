#!/usr/bin/env python3
"""Run the whole suite. Further arguments go to pytest; ``--python`` only prints the interpreter it runs on.

Without arguments the suite runs as several processes side by side, with all compatibility lanes, see :mod:`tooling.lanes`;
``--compat`` runs those lanes alone, ``--compat sdk-0.7.5 ...`` some of them, ``--compat --list`` names them.

Needs Python 3.11 or newer, git and the package registries. Everything else is prepared: the environment ``.venv`` from its
lock and, when the selected tests want them, the real ACP agents and the real LangBot host.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import os

from tooling import ROOT, SetupError, lanes, steps, venv


def main(arguments: list[str]) -> int:
    """Prepare and run, or with arguments become, pytest; the exit code, 2 when something is missing."""
    try:
        python = venv.development()
    except SetupError as exc:
        steps.say(str(exc))
        return 2
    if arguments == ["--python"]:
        print(python)
        return 0
    os.environ["SUITE_PREPARE"] = "1"
    os.chdir(ROOT)
    if not arguments:
        return lanes.run(lanes.whole(python), places=lanes.places())
    if arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\nWhat follows is pytest's own help.\n", flush=True)
    if arguments[0] == "--compat":
        return lanes.compat_only(python, arguments[1:])
    return os.execv(python, [str(python), "-m", "pytest", *arguments])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
