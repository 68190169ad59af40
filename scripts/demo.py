#!/usr/bin/env python3
"""Talk to a coding agent through the real plugin, in this terminal.

Needs Python 3.11 or newer, git and the package index; everything else is prepared in ``.venv``. Without options a small agent
of the project's own works in a new directory, without any language model. ``--help`` lists the options.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

from tooling import ROOT, SetupError, steps, venv


def main() -> int:
    """Prepare, then chat under the development interpreter."""
    try:
        venv.enter(__file__)
    except SetupError as exc:
        steps.say(str(exc))
        return 2
    sys.path[:0] = [str(ROOT / "ACPAgentRunner"), str(ROOT / "shared")]
    from demo_chat import chat

    return chat.main(sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
