"""The same facts for people: one page of the candidate, one of the jails."""

from __future__ import annotations

from typing import Any


def human(inventory: dict[str, Any]) -> str:
    """What a reviewer reads first."""
    lines = ["# Release candidate", "", f"Commit `{inventory['commit']}`, plugin SDK {inventory['sdk']['version']}.", ""]
    if not inventory["complete"]:
        lines += ["**Incomplete: this is no evidence for a release.**", "", *(f"- {gap}" for gap in inventory["gaps"]), ""]
    lines += ["| package | version | SHA-256 of the archive | members | reproducible |", "|---|---|---|---|---|"]
    for name, each in inventory["packages"].items():
        cells = (name, each["version"], f"`{each['sha256']}`", str(len(each["members"])), f"`{each['reproducible']['sha256']}`")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What holds", "", *(f"- {each['step']}" for each in inventory["steps"]), "", "## Tests", ""]
    if ran := inventory.get("suites"):
        lines += [f"On the extraction: {_counts(ran)}.", ""]
        lines += [f"- skipped: `{each['test']}`: {each.get('reason', '')}" for each in ran["skipped"]]
    else:
        lines += ["The suites did not run.", ""]
    jails = inventory["jails"]
    lines += [
        "",
        f"Jailed workers: {_counts(jails) if jails['ran'] else 'none, ' + jails['reason']}.",
        "",
    ]
    if jails["ran"]:
        lines += [f"- skipped: `{each['test']}`: {each.get('reason', '')}" for each in jails["skipped"]]
    lines += ["", "## What does not", ""]
    lines += [f"Egress policy: {inventory['egress_policy']}.", "", "Nothing is claimed about:", ""]
    lines += [f"- {each}" for each in inventory["not_claimed"]]
    lines += ["", "Open, each for a person:", "", *(f"- {name}: {state}" for name, state in inventory["gates"].items()), ""]
    return "\n".join(lines)


def topology(reassessment: dict[str, Any]) -> str:
    """What the jailed workers are."""
    lines = ["# Jailed workers, as they ran", ""]
    if not reassessment["shapes"]:
        lines += [f"None ran: {reassessment['reason']}. What they are is an open gap.", ""]
    for name, shape in sorted(reassessment["shapes"].items()):
        lines += [f"## {name}", "", "| fact | value |", "|---|---|"]
        lines += [f"| {fact} | {_cell(value)} |" for fact, value in sorted(shape.items())]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "<br>".join(f"`{key}`: {_cell(each)}" for key, each in sorted(value.items()))
    if isinstance(value, list):
        return (
            "<br>".join(_cell(each) for each in value)
            if value and isinstance(value[0], dict)
            else " ".join(f"`{each}`" for each in value)
        )
    return str(value).replace("|", "\\|")


def _counts(ran: dict[str, Any]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in ran["counts"].items())
