#!/usr/bin/env python3
"""Bring the form fields that all three packages share from ``ACPAgentRunner`` into its two siblings.

A shared field (one that ``pkg/settings.py`` defines) is edited only in ``ACPAgentRunner``: in
``components/runner/default.yaml`` and, for the plugin form, in ``manifest.yaml``. A sibling keeps its own fields where they
are, before or after the shared ones, and its own default of ``daemon-port``. With ``--check`` nothing is written: every file
that is not up to date is named, and the exit code is 1 when there is one.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - said readably where an older Python would stop at a syntax error
    sys.exit(f"This needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}. Try: python3.12 {sys.argv[0]}")

import argparse
import importlib
from pathlib import Path
from typing import Any

from tooling import ROOT, SetupError, steps, venv

if __name__ == "__main__":
    try:
        venv.enter(__file__)
    except SetupError as exc:
        steps.say(str(exc))
        sys.exit(2)

import yaml

SOURCE = "ACPAgentRunner"
SIBLINGS = ("ClaudeCodeAgent", "CodexAgent")
FORMS = ("components/runner/default.yaml", "manifest.yaml")
OWN_DEFAULTS = frozenset({"daemon-port"})

Fields = list[dict[str, Any]]


class _Dumper(yaml.SafeDumper):
    """Block style without aliases, lists indented, lines unbroken: what a person would write."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def dump(document: Any) -> str:
    """The one style of every form file."""
    return yaml.dump(document, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=1000)


def shared_names(root: Path) -> frozenset[str]:
    """The form names of every field that ``pkg/settings.py`` defines."""
    sys.path.insert(0, str(root / SOURCE))
    try:
        settings = importlib.import_module("pkg.settings")
    finally:
        sys.path.pop(0)
    return frozenset(
        name.replace("_", "-") for model in (settings.RunnerSettings, settings.PluginSettings) for name in model.model_fields
    )


def merged(source: Fields, target: Fields, shared: frozenset[str]) -> Fields:
    """The sibling's fields with every shared one as in the source, in the source's order."""
    common = [field for field in source if field["name"] in shared]
    old = {field["name"]: field for field in target}
    for index, field in enumerate(common):
        if field["name"] in OWN_DEFAULTS and field["name"] in old:
            common[index] = {**field, "default": old[field["name"]]["default"]}
    first = next((index for index, field in enumerate(target) if field["name"] in shared), len(target))
    own_before = [field for field in target[:first] if field["name"] not in shared]
    own_after = [field for field in target[first:] if field["name"] not in shared]
    return [*own_before, *common, *own_after]


def pending(root: Path = ROOT) -> dict[Path, str]:
    """Every sibling's form file that is not up to date, with the text it should have."""
    shared = shared_names(root)
    out: dict[Path, str] = {}
    for form in FORMS:
        source = yaml.safe_load((root / SOURCE / form).read_text(encoding="utf-8"))["spec"]["config"]
        for sibling in SIBLINGS:
            path = root / sibling / form
            text = path.read_text(encoding="utf-8")
            document = yaml.safe_load(text)
            document["spec"]["config"] = merged(source, document["spec"]["config"], shared)
            if dump(document) != text:
                out[path] = dump(document)
    return out


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(description="Copy the shared form fields into ClaudeCodeAgent and CodexAgent.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="another copy of this repository than the script's own")
    arguments = parser.parse_args()
    found = pending(arguments.root)
    for path, text in found.items():
        if arguments.check:
            print(f"not up to date: {path.relative_to(arguments.root)}")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path.relative_to(arguments.root)}")
    if not found:
        print(f"{', '.join(SIBLINGS)}: shared form fields identical to {SOURCE}")
    return 1 if arguments.check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
