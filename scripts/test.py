#!/usr/bin/env python3
"""Run the whole suite. Further arguments go to pytest; ``--python`` only prints the interpreter it runs on.

Needs Python 3.11 or newer, git and the package registries. Everything else is prepared: the environment ``.venv`` from its
lock and, when the selected tests want them, the real ACP agents and the real LangBot host.
"""

import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        "This needs Python 3.11 or newer, and %s is %d.%d. Start it with a newer one, for example: python3.12 scripts/test.py\n"
        % (sys.executable or "this", sys.version_info[0], sys.version_info[1])
    )
    sys.exit(2)

import os

from tooling import ROOT, SetupError, venv


def main(arguments):
    """Prepare and hand over to pytest; only returns when something is missing, with exit code 2."""
    try:
        python = venv.development()
    except SetupError as exc:
        sys.stderr.write("%s\n" % exc)
        return 2
    if arguments == ["--python"]:
        print(python)
        return 0
    os.environ["SUITE_PREPARE"] = "1"
    os.chdir(str(ROOT))
    sys.stdout.flush()
    os.execv(str(python), [str(python), "-m", "pytest"] + arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
