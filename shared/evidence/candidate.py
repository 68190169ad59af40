"""One release candidate from a clean tree to frozen evidence: every proof in order, each recorded before the next begins."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from evidence import Failed, envelopes, gate, hashes, members, sbom, scan, sdk_record, store, suites, summary
from tooling import ROOT, jail, packages, steps

SUITES: Final = ("all", "none")
GATES: Final = (
    "independent review of the exact digests",
    "signature by the holder of the signing key",
    "acceptance with two live Workspaces",
    "network policy of the deployment",
    "accounts at vendors",
)
"""What no program can do; each is open until a person closes it."""
NOT_CLAIMED: Final = (
    "resistance to escapes through the kernel",
    "admission into production",
    "isolation between live Workspaces",
    "accounts at vendors",
)
OPEN: Final = "open"


class Candidate:
    """The evidence while it is made."""

    def __init__(self, directory: Path, commit: str, *, suites: str) -> None:
        """``directory`` is fresh; ``suites`` says whether the test suites run, without which nothing is complete."""
        self.directory = directory
        self.which = suites
        self.private = {**scan.private_texts(ROOT), "the evidence": str(directory)}
        self.inventory: dict[str, Any] = {
            "commit": commit,
            "complete": False,
            "python": platform.python_version(),
            "platform": {"system": platform.system(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())},
            "fixtures": "local protocol fixtures; no reply of a vendor is part of this",
            "egress_policy": "not provided",
            "signed": False,
            "not_claimed": list(NOT_CLAIMED),
            "gates": dict.fromkeys(GATES, OPEN),
            "packages": {},
            "steps": [],
        }

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Do one proof and record that it holds."""
        with steps.announced(name):
            result = work()
        self.inventory["steps"].append({"step": name, "result": "holds"})
        return result

    # ---- the proofs

    def sdk(self) -> None:
        """The installed SDK, file by file."""
        self.inventory["sdk"] = dataclasses.asdict(self.step("the installed SDK against its RECORD", sdk_record.verify))

    def package(self, name: str, scratch: Path) -> None:
        """One package: built, compared with the commit, rebuilt, extracted, unsigned."""
        exported = members.exported(ROOT, self.inventory["commit"], name)
        target = self.directory / "packages"
        built = self.step(
            f"{name}: built by the SDK's builder from the commit", lambda: self._built(name, exported, scratch, target)
        )
        listed = self.step(f"{name}: every member is the commit's", lambda: members.compare(built, exported))
        data = built.read_bytes()
        self.step(f"{name}: unsigned", lambda: envelopes.unsigned(data))
        rebuilt = self.step(
            f"{name}: rebuilt twice, the same bytes and members", lambda: self._rebuilt(name, built, exported, scratch)
        )
        statuses = self.step(f"{name}: copies with every kind of envelope are told apart", lambda: envelopes.statuses(data))
        installed = self.step(
            f"{name}: installed through the SDK's stores with real dependencies, and read back",
            lambda: asyncio.run(store.install(built, listed, scratch / f"store-{name}")),
        )
        runner = self.step(f"{name}: its runner is listed", lambda: store.runner(installed.code, name))
        extraction = self.directory / "extracted" / name
        shutil.copytree(installed.code, extraction)
        for each in [extraction, *extraction.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)
        version = json.loads(json.dumps(members.manifest(exported)))["metadata"]["version"]
        bill = sbom.bill(name, version, installed.site_packages, (sdk_record.SDK, self.inventory["sdk"]["version"]))
        self._write(f"sbom/{name}.cdx.json", bill)
        self.inventory["packages"][name] = {
            "file": f"packages/{built.name}",
            "version": version,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "members": listed,
            "reproducible": rebuilt,
            "envelopes": statuses,
            "installed": dict(installed.facts),
            "runner": runner,
            "sbom": f"sbom/{name}.cdx.json",
        }

    def rpc(self, name: str) -> None:
        """The exact extraction over the SDK's real RPC."""
        program = ROOT / "certification-tests" / "coding_artifact_rpc_probe.py"
        extraction = self.directory / "extracted" / name
        found = self.step(
            f"{name}: real RPC with the extraction", lambda: suites.probe(program, extraction, ROOT, self.private)
        )
        self.inventory["packages"][name]["rpc"] = found

    def run_suites(self, scratch: Path) -> None:
        """The suites on the extraction, and the jailed workers of it."""
        environment = {"CODING_RUNNER_SOURCE_ROOT": str(self.directory / "extracted")}
        files = sorted(each for each in (ROOT / "certification-tests").rglob(suites.INSTALLED_SUITES))
        chosen = [each.relative_to(ROOT).as_posix() for each in files]
        ran = self.step("the suites on the extraction", lambda: self._green(chosen, scratch, environment))
        self.inventory["suites"] = ran
        if reason := jail.impossible():
            self.inventory["jails"] = {"ran": False, "reason": reason}
            return
        topology = scratch / "topology.json"
        ran = self.step(
            "jailed workers of the extraction",
            lambda: self._green(["-m", "nsjail"], scratch, {**environment, "CODING_TOPOLOGY_FILE": str(topology)}),
        )
        self.inventory["jails"] = {"ran": True, **ran}
        if not topology.is_file():
            raise Failed("the jailed workers left no account of what they are")
        shapes = json.loads(scan.public(topology.read_text(encoding="utf-8"), self.private))
        self._write("topology-reassessment.json", shapes)
        (self.directory / "topology-reassessment.md").write_text(summary.topology(shapes), encoding="utf-8")

    def freeze(self) -> str:
        """The last files, what is not in them, and the hashes over everything."""
        # Without the suites, or without jails, this is no evidence for a release.
        self.inventory["complete"] = self.which == "all" and bool(self.inventory.get("jails", {}).get("ran"))
        self._write("inventory.json", self.inventory)
        (self.directory / "SUMMARY.md").write_text(summary.human(self.inventory), encoding="utf-8")
        for cache in sorted(self.directory.rglob("__pycache__"), reverse=True):
            shutil.rmtree(cache)
        scan.scan(self.directory, self.private, self.directory / "extracted")
        return hashes.write(self.directory)

    # ---- their parts

    def _built(self, name: str, exported: dict[str, bytes], scratch: Path, target: Path) -> Path:
        staging = scratch / f"staging-{name}" / name
        members.stage(exported, staging)
        return packages.built_from(staging, target)

    def _rebuilt(self, name: str, official: Path, exported: dict[str, bytes], scratch: Path) -> dict[str, Any]:
        made: list[bytes] = []
        for attempt in ("first", "second"):
            staging = scratch / f"{attempt}-{name}" / name
            members.stage(exported, staging)
            package = packages.built_from(staging, scratch / f"{attempt}-{name}", reproducible=True)
            made.append(package.read_bytes())
        if made[0] != made[1]:
            raise Failed(f"{name}: two reproducible builds differ")
        if members.read(package) != members.read(official):
            raise Failed(f"{name}: the reproducible build has other members than the builder's")
        target = self.directory / "packages" / "reproducible" / package.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(made[0])
        return {
            "file": target.relative_to(self.directory).as_posix(),
            "sha256": hashlib.sha256(made[0]).hexdigest(),
            "builds_compared": len(made),
            "members_as_built_by_the_sdk": True,
        }

    def _green(self, selection: list[str], scratch: Path, environment: dict[str, str]) -> dict[str, Any]:
        ran = suites.tests(selection, ROOT, scratch, self.private, environment)
        if ran["exit_code"] != 0 or ran["failed"] or not ran["passed"]:
            named = ", ".join(each["test"] for each in ran["failed"][:5]) or "\n".join(ran["last_lines"])
            raise Failed(f"{' '.join(selection[-2:])}: {named}")
        return ran

    def _write(self, path: str, value: Any) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def make(given: str, *, which: str) -> tuple[Path, bool]:
    """The evidence of the commit the tree is at; its directory and whether it is complete.

    Raises :class:`evidence.Refused` before anything is written, :class:`evidence.Failed` for a proof that does not hold: the
    directory then lacks its hashes, and is no evidence.
    """
    commit = gate.commit(ROOT)
    directory = gate.fresh(ROOT, given)
    candidate = Candidate(directory, commit, suites=which)
    with tempfile.TemporaryDirectory(prefix="candidate-") as base:
        scratch = Path(base)
        candidate.sdk()
        for name in packages.NAMES:
            candidate.package(name, scratch)
        for name in packages.NAMES:
            candidate.rpc(name)
        if which == "all":
            candidate.run_suites(scratch)
        if gate.commit(ROOT) != commit:
            raise Failed("the tree is at another commit than in the beginning")
        digest = candidate.freeze()
        for entry in sorted(scratch.rglob("*")):
            # What the SDK has sealed can be removed again.
            if entry.is_dir() and not entry.is_symlink():
                entry.chmod(0o755)
    steps.say(f"{hashes.NAME}: sha256 {digest}")
    return directory, bool(candidate.inventory["complete"])
