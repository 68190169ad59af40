#!/usr/bin/env python3
"""Build the plugin packages with the SDK's own builder, from a clean export: only files git tracks, and the shared core.

``python3 scripts/build.py`` builds all three into ``dist/``; name packages to build only those, ``--output DIR`` to build
elsewhere. The path of each package is printed on stdout. ``--reproducible`` leaves out times and order, which the builder
puts in: the same sources then make the same bytes.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
from pathlib import Path

from tooling import ROOT, SetupError, packages, steps, venv


def main() -> int:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description="Build the plugin packages with the SDK's own builder.")
    parser.add_argument("package", nargs="*", help=f"what to build, of {', '.join(packages.NAMES)}; all by default")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the packages go (default: dist)")
    parser.add_argument(
        "--reproducible", action="store_true", help="the same bytes from the same sources: fixed times and order"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.package if name not in packages.NAMES]:
        parser.error(f"no such package: {', '.join(unknown)}")
    try:
        venv.enter(__file__)
        for name in options.package or packages.NAMES:
            print(packages.build(name, options.output.resolve(), reproducible=options.reproducible))
    except SetupError as exc:
        steps.say(str(exc))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
