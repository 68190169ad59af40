"""Evidence looked at again, offline: every file is as it was frozen, and what it says of itself is still so.

Standard library only: neither a network nor the SDK nor the sources that the evidence was made of are needed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from evidence import Failed, Refused, archives, hashes, summary

PACKAGES = ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent")
TOPOLOGY = "topology-reassessment"
JAILED = ("jail", "jailed_pool")
"""Both shapes of worker that a jail has."""
FACTS = frozenset({"argv", "environment", "gid", "limits", "mounts", "network", "pid", "uid"})
"""What is told of each."""
CELLS = tuple((transport, shape) for transport in ("stdio", "websocket") for shape in ("dedicated", "pool"))
"""How an extraction is spoken to, all of which must go well."""
STATUSES = (
    "valid",
    "absent",
    "malformed",
    "unsupported_schema",
    "digest_mismatch",
    "manifest_mismatch",
    "unknown_key",
    "signature_invalid",
)
"""What the SDK can say of an archive's envelope."""


def check(directory: Path) -> dict[str, Any]:
    """Counts of what was checked; raises :class:`evidence.Failed` with the first thing that does not hold."""
    if not directory.is_dir():
        raise Refused(f"there is no directory {directory}")
    try:
        files = hashes.check(directory)
        return {"files": files, f"{hashes.NAME}_sha256": hashes.own(directory), **_agrees(directory)}
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as exc:
        raise Failed(f"the evidence does not say what it must: {type(exc).__name__}: {exc}") from None


def problems(inventory: dict[str, Any]) -> list[str]:
    """What is missing for a release, each a thing that did not run or was left out."""
    found = []
    if not (ran := inventory.get("suites")):
        found.append("the test suites did not run on the extraction")
    else:
        found += [f"no test of {suite} passed on the extraction" for suite in ran["suites"] if not _passed(ran, suite)]
    if not (jails := inventory.get("jails", {"ran": False, "reason": "the suites did not run"}))["ran"]:
        found.append(f"no worker was jailed: {jails['reason']}")
    return found


def spoken_to(rpc: Any) -> bool:
    """Whether a probe's report has every transport with every shape, and all went well."""
    cells = {(each["transport"], each["shape"]): each["ok"] for each in rpc["cells"]}
    return rpc["ok"] is True and len(rpc["cells"]) == len(CELLS) and cells == dict.fromkeys(CELLS, True)


def jailed(topology: dict[str, Any]) -> bool:
    """Whether both shapes of jailed worker are there, each with everything that is told of one."""
    return set(topology["shapes"]) == set(JAILED) and all(each.keys() >= FACTS for each in topology["shapes"].values())


def _passed(ran: dict[str, Any], suite: str) -> bool:
    """Whether any test of a file passed, which the report names with dots."""
    module = suite.removesuffix(".py").replace("/", ".")
    return any(test.startswith((f"{module}::", f"{module}.")) for test in ran["passed"])


def _agrees(directory: Path) -> dict[str, Any]:
    inventory = _json(directory / "inventory.json")
    if sorted(inventory["packages"]) != list(PACKAGES):
        raise Failed(f"the inventory is not about {', '.join(PACKAGES)}")
    if inventory["signed"] is not False or inventory["egress_policy"] != "not provided":
        raise Failed("the inventory claims a signature or a network policy")
    if inventory["complete"] is not (not problems(inventory)) or inventory["gaps"] != problems(inventory):
        raise Failed("the inventory claims to be complete and is not")
    for run in (inventory.get("suites"), inventory.get("jails")):
        if run and run.get("ran") is not False:
            _ran(run)
    expected = {"inventory.json", "SUMMARY.md", f"{TOPOLOGY}.json", f"{TOPOLOGY}.md"}
    counted = 0
    for name, entry in inventory["packages"].items():
        members = _package(directory, name, entry)
        expected |= {
            entry["file"],
            entry["reproducible"]["file"],
            entry["sbom"],
            *(f"extracted/{name}/{member}" for member in members),
        }
        counted += len(members)
    found = {each.relative_to(directory).as_posix() for each in directory.rglob("*") if each.is_file()} - {hashes.NAME}
    if wrong := sorted(found ^ expected):
        raise Failed(f"{wrong[0]} is {'missing' if wrong[0] in expected else 'in no inventory'}")
    if (directory / "SUMMARY.md").read_bytes() != summary.human(inventory).encode():
        raise Failed("SUMMARY.md says something else than the inventory")
    topology = _json(directory / f"{TOPOLOGY}.json")
    if (directory / f"{TOPOLOGY}.md").read_bytes() != summary.topology(topology).encode():
        raise Failed(f"{TOPOLOGY}.md says something else than {TOPOLOGY}.json")
    if bool(topology["shapes"]) is not inventory["jails"]["ran"]:
        raise Failed(f"{TOPOLOGY}.json and the inventory differ about jailed workers")
    if inventory["jails"]["ran"] and not jailed(topology):
        raise Failed(f"{TOPOLOGY}.json does not tell everything of {' and '.join(JAILED)}")
    return {
        "members": counted,
        "commit": inventory["commit"],
        "complete": inventory["complete"],
        "gaps": inventory["gaps"],
        "packages": {name: entry["sha256"] for name, entry in inventory["packages"].items()},
    }


def _package(directory: Path, name: str, entry: dict[str, Any]) -> set[str]:
    """The members of one package, which its extraction, rebuild and bill of materials agree with."""
    official, rebuilt = entry["file"], entry["reproducible"]["file"]
    for path, digest in ((official, entry["sha256"]), (rebuilt, entry["reproducible"]["sha256"])):
        data = (directory / path).read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise Failed(f"{path} is not the one of the inventory")
        if archives.comment(data):
            raise Failed(f"{path} is signed, or has another comment")
    if (directory / official).stat().st_size != entry["size"] or entry["installed"]["artifact_digest"] != entry["sha256"]:
        raise Failed(f"{official} is not what was installed")
    if entry["envelopes"]["statuses"] != {status: status for status in STATUSES}:
        raise Failed(f"{name}: the inventory does not have every status of an envelope")
    if not spoken_to(entry["rpc"]):
        raise Failed(f"{name}: the inventory does not have every way to speak to it")
    found = archives.read(directory / official)
    listed = {member: (each["sha256"], each["size"]) for member, each in entry["members"].items()}
    if {member: (hashlib.sha256(content).hexdigest(), len(content)) for member, content in found.items()} != listed:
        raise Failed(f"{official} has other members than the inventory")
    if archives.read(directory / rebuilt) != found:
        raise Failed(f"{rebuilt} has other members than {official}")
    place = directory / "extracted" / name
    extracted = {each.relative_to(place).as_posix(): each.read_bytes() for each in place.rglob("*") if each.is_file()}
    if extracted != found:
        raise Failed(f"extracted/{name} is not what the package holds")
    bill = _json(directory / entry["sbom"])
    installed = {each["name"]: each["version"] for each in bill["components"] if each.get("scope") != "excluded"}
    if installed != entry["installed"]["dependencies"]:
        raise Failed(f"{entry['sbom']} lists other packages than were installed")
    return set(found)


def _ran(run: dict[str, Any]) -> None:
    """Counts and lists of a test run agree, and nothing failed."""
    if (
        run["exit_code"] != 0
        or run["failed"]
        or run["counts"] != {kind: len(run[kind]) for kind in ("passed", "failed", "skipped")}
    ):
        raise Failed("the inventory has a run of tests that does not hold")


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))
