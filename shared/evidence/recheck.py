"""Evidence looked at again, offline: every file is as it was frozen, and what it says of itself is still so.

Standard library only: neither a network nor the SDK nor the sources that the evidence was made of are needed.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from evidence import Failed, Refused, archives, hashes, summary
from tooling.packages import normalise

PACKAGES = ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent")
SDK = "langbot-plugin"
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

ESTABLISHED = frozenset(
    f"certification-tests/test_coding_{name}.py"
    for name in (
        "approvals",
        "artifacts",
        "default_permissions",
        "native_lifecycle",
        "relay_v1",
        "relay_v1_bounds",
        "relay_v1_trust",
        "relay_v1_wire",
    )
)
"""The suites without which nothing is complete; a commit may have more."""
GATES = (
    "independent review of the exact digests",
    "signature by the holder of the signing key",
    "acceptance with two live Workspaces",
    "network policy of the deployment",
    "accounts at vendors",
)
"""What no program can do; each is open until a person closes it, who records that elsewhere."""
OPEN = "open"
NOT_CLAIMED = (
    "resistance to escapes through the kernel",
    "admission into production",
    "isolation between live Workspaces",
    "accounts at vendors",
)
SDK_STEP = "the installed SDK against its RECORD"
PACKAGE_STEPS = {
    "export": "exported, and the export is the commit's",
    "build": "built by the SDK's builder from the commit",
    "members": "every member is the commit's",
    "unsigned": "unsigned",
    "rebuild": "rebuilt twice, the same bytes and members",
    "envelopes": "copies with every kind of envelope are told apart",
    "install": "installed through the SDK's stores with real dependencies, and read back",
    "runner": "its runner is listed",
}
RPC_STEP = "real RPC with every extraction"
SUITES_STEP = "the suites on the extraction"
JAILS_STEPS = ("jailed workers of the extraction", "the SDK of jailed workers against its RECORD")
TREE_STEP = "the tree is as it was"
INSTALLED = {
    "prepared_twice": "the same environment, nothing installed again",
    "read_back": "unchanged",
    "second_sdk": "none",
}
"""What is said of an installation that holds."""
FIXTURES = "local protocol fixtures; no reply of a vendor is part of this"


def canonical(value: Any) -> str:
    """The one way in which a fact is written down as JSON."""
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def check(directory: Path) -> dict[str, Any]:
    """Counts of what was checked; raises :class:`evidence.Failed` with the first thing that does not hold."""
    try:
        directory = directory.resolve(strict=True)
        if not directory.is_dir():
            raise Refused("that is no directory")
    except (OSError, RuntimeError, ValueError):  # a loop of links is any of them
        raise Refused("there is no such directory") from None
    try:
        files = hashes.check(directory)
        return {"files": files, f"{hashes.NAME}_sha256": hashes.own(directory), **_agrees(directory)}
    except (LookupError, TypeError, AttributeError, ValueError, OSError, RecursionError, MemoryError) as exc:
        raise Failed(f"the evidence does not say what it must: {type(exc).__name__}: {exc}") from None


def problems(inventory: dict[str, Any]) -> list[str]:
    """What is missing for a release, each a thing that did not run or was left out."""
    found = []
    if not (ran := inventory.get("suites")):
        found.append("the test suites did not run on the extraction")
    else:
        suites = sorted(ESTABLISHED | set(ran["suites"]))
        found += [f"no test of {suite} passed on the extraction" for suite in suites if not _passed(ran, suite)]
        found += [f"skipped on the extraction: {each['test']}" for each in ran["skipped"]]
    if not (jails := inventory.get("jails", {"ran": False, "reason": "the suites did not run"}))["ran"]:
        found.append(f"no worker was jailed: {jails['reason']}")
    elif not jails["passed"]:
        found.append("no test of a jailed worker passed")
    else:
        found += [f"skipped of the jailed workers: {each['test']}" for each in jails["skipped"]]
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


def _steps(inventory: dict[str, Any]) -> list[str]:
    """Every proof of an evidence that ran what this one says it ran, in order."""
    packages = [f"{name}: {each}" for name in PACKAGES for each in PACKAGE_STEPS.values()]
    suites = [SUITES_STEP] if "suites" in inventory else []
    jails = list(JAILS_STEPS) if inventory["jails"]["ran"] else []
    return [SDK_STEP, *packages, RPC_STEP, *suites, *jails, TREE_STEP]


def _agrees(directory: Path) -> dict[str, Any]:
    inventory = _json(directory / "inventory.json")
    if sorted(inventory["packages"]) != list(PACKAGES):
        raise Failed(f"the inventory is not about {', '.join(PACKAGES)}")
    if inventory["signed"] is not False or inventory["egress_policy"] != "not provided":
        raise Failed("the inventory claims a signature or a network policy")
    if inventory["gates"] != dict.fromkeys(GATES, OPEN) or inventory["not_claimed"] != list(NOT_CLAIMED):
        raise Failed("the inventory closes a gate, or claims what nobody has shown")
    if inventory["steps"] != [{"step": each, "result": "holds"} for each in _steps(inventory)]:
        raise Failed("the inventory does not have every proof")
    if inventory["fixtures"] != FIXTURES or not inventory["sdk"]["files"]:
        raise Failed("the inventory does not say what the packages were tried with")
    if inventory["complete"] is not (not problems(inventory)) or inventory["gaps"] != problems(inventory):
        raise Failed("the inventory claims to be complete and is not")
    for run in (inventory.get("suites"), inventory.get("jails")):
        if run and run.get("ran") is not False:
            _ran(run)
    expected = {"inventory.json", "SUMMARY.md", f"{TOPOLOGY}.json", f"{TOPOLOGY}.md"}
    counted = 0
    for name, entry in inventory["packages"].items():
        members = _package(directory, name, entry, inventory["sdk"]["version"])
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


def _package(directory: Path, name: str, entry: dict[str, Any], sdk: str) -> set[str]:
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
    if {key: entry["installed"][key] for key in INSTALLED} != INSTALLED:
        raise Failed(f"{name}: the inventory does not say that it was installed as it must be")
    if entry["envelopes"]["statuses"] != {status: status for status in STATUSES}:
        raise Failed(f"{name}: the inventory does not have every status of an envelope")
    if not spoken_to(entry["rpc"]):
        raise Failed(f"{name}: the inventory does not have every way to speak to it")
    rpc = entry["rpc"]
    if (rpc["package"], rpc["version"], rpc["sdk"]) != (name, entry["version"], sdk) or not entry["runner"]["id"].endswith(
        f"/{name}/default"
    ):
        raise Failed(f"{name}: something else was spoken to")
    found = archives.read(directory / official)
    listed = {member: (each["sha256"], each["size"]) for member, each in entry["members"].items()}
    if {member: (hashlib.sha256(content).hexdigest(), len(content)) for member, content in found.items()} != listed:
        raise Failed(f"{official} has other members than the inventory")
    if archives.read(directory / rebuilt) != found:
        raise Failed(f"{rebuilt} has other members than {official}")
    with tempfile.TemporaryDirectory(prefix="rebuilt-") as scratch:
        again = Path(scratch, "again")
        normalise(directory / official, again)
        if again.read_bytes() != (directory / rebuilt).read_bytes():
            raise Failed(f"{rebuilt} is not what its members make")
    place = directory / "extracted" / name
    extracted = {each.relative_to(place).as_posix(): each.read_bytes() for each in place.rglob("*") if each.is_file()}
    if extracted != found:
        raise Failed(f"extracted/{name} is not what the package holds")
    bill = _json(directory / entry["sbom"])
    listed_there = [(each["name"], each["version"], each.get("scope"), each["purl"]) for each in bill["components"]]
    wanted = [(library, version, None) for library, version in entry["installed"]["dependencies"].items()]
    if sorted(listed_there, key=str) != sorted(
        ((*each, purl(*each[:2])) for each in [*wanted, (SDK, sdk, "excluded")]), key=str
    ):
        raise Failed(f"{entry['sbom']} lists other packages than were installed")
    if bill["metadata"]["component"]["version"] != entry["version"]:
        raise Failed(f"{entry['sbom']} is another version's")
    return set(found)


def _ran(run: dict[str, Any]) -> None:
    """Counts and lists of a test run agree, and nothing failed."""
    if (
        run["exit_code"] != 0
        or run["failed"]
        or run["counts"] != {kind: len(run[kind]) for kind in ("passed", "failed", "skipped")}
    ):
        raise Failed("the inventory has a run of tests that does not hold")


def purl(name: str, version: str) -> str:
    """How a bill of materials names a package (PyPA's normalised name)."""
    return f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}@{version}"


def _json(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    value = json.loads(text)
    if canonical(value) != text:
        raise Failed(f"{file.name} is not written as facts are")
    return value
