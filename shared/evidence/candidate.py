"""One release candidate from a clean tree to frozen evidence: every proof in order, each recorded before the next begins."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from evidence import (
    Failed,
    Refused,
    archives,
    envelopes,
    gate,
    hashes,
    members,
    recheck,
    sbom,
    scan,
    sdk_record,
    store,
    suites,
    summary,
)
from tooling import ROOT, SetupError, jail, packages, steps, venv

SUITES: Final = ("all", "none")
BUILDER: Final = "langbot_plugin.cli.commands.buildplugin.build_plugin_process"
BUILT_WITHIN: Final = 600.0
"""Seconds a build may take; a package is built in a few."""
SHOWN: Final = 5
"""Failed tests that are named."""


class Candidate:
    """The evidence while it is made."""

    def __init__(self, directory: Path, commit: str, *, suites: str, private: Mapping[str, str]) -> None:
        """``directory`` is fresh; ``suites`` says whether the test suites run, without which nothing is complete.

        ``private`` are the texts of the builder that no file of it may hold.
        """
        self.directory = directory
        self.which = suites
        self.private = {**private, "the evidence": str(directory)}
        self.traces: set[bytes] = set()
        self.topology: dict[str, Any] = {"shapes": {}, "reason": "the suites did not run"}
        self.inventory: dict[str, Any] = {
            "commit": commit,
            "complete": False,
            "command": f"python3 certification-tests/verify_coding_candidates.py --evidence <evidence> --suites {suites}",
            "lock_sha256": hashlib.sha256(venv.DEV_LOCK.read_bytes()).hexdigest(),
            "python": platform.python_version(),
            "platform": {"system": platform.system(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())},
            "fixtures": recheck.FIXTURES,
            "egress_policy": "not provided",
            "signed": False,
            "not_claimed": list(recheck.NOT_CLAIMED),
            "gates": dict.fromkeys(recheck.GATES, recheck.OPEN),
            "packages": {},
            "steps": [],
            "jails": {"ran": False, "reason": "the suites did not run"},
        }

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Do one proof and record that it holds; raises :class:`evidence.Failed` for whatever is in its way."""
        try:
            with steps.announced(name):
                result = work()
        except Failed:
            raise
        except (Refused, SetupError) as exc:
            raise Failed(f"{name}: {exc}") from None
        except Exception as exc:
            raise Failed(f"{name}: {type(exc).__name__}: {exc}") from exc
        self.inventory["steps"].append({"step": name, "result": "holds"})
        return result

    # ---- the proofs

    def sdk(self) -> None:
        """The installed SDK, file by file."""
        self.inventory["sdk"] = dataclasses.asdict(self.step(recheck.SDK_STEP, sdk_record.verify))

    def package(self, name: str, scratch: Path) -> None:
        """One package: built, compared with the commit, rebuilt, extracted, unsigned."""
        said = {key: f"{name}: {text}" for key, text in recheck.PACKAGE_STEPS.items()}
        exported = self.step(said["export"], lambda: members.export(ROOT, self.inventory["commit"], name))
        target = self.directory / "packages"
        built = self.step(said["build"], lambda: self._built(name, exported, scratch, target))
        listed = self.step(said["members"], lambda: members.compare(built, exported))
        data = built.read_bytes()
        self.step(said["unsigned"], lambda: envelopes.unsigned(data))
        rebuilt = self.step(said["rebuild"], lambda: self._rebuilt(name, built, exported, scratch))
        trial = self.step(said["envelopes"], lambda: envelopes.trial(data))
        self.traces |= trial.traces
        installed = self.step(
            said["install"],
            lambda: asyncio.run(store.install(built, listed, scratch / f"store-{name}")),
        )
        runner = self.step(said["runner"], lambda: store.runner(installed.code, name))
        extraction = self.directory / "extracted" / name
        shutil.copytree(installed.code, extraction)
        for each in [extraction, *extraction.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)
        version = str(members.manifest(exported)["metadata"]["version"])
        bill = sbom.bill(name, version, installed.site_packages, (recheck.SDK, self.inventory["sdk"]["version"]))
        self._write(f"sbom/{name}.cdx.json", bill)
        self.inventory["packages"][name] = {
            "file": f"packages/{built.name}",
            "version": version,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
            "built_by": BUILDER,
            "members": listed,
            "reproducible": rebuilt,
            "envelopes": {"key": f"{envelopes.ALGORITHM}, thrown away", "statuses": dict(trial.statuses)},
            "installed": dict(installed.facts),
            "runner": runner,
            "sbom": f"sbom/{name}.cdx.json",
        }

    def rpc(self) -> None:
        """The exact extractions over the SDK's real RPC."""
        program = ROOT / "certification-tests" / "coding_artifact_rpc_probe.py"
        extractions = {name: self.directory / "extracted" / name for name in packages.NAMES}
        found = self.step(recheck.RPC_STEP, lambda: suites.probes(program, extractions, ROOT, self.private))
        for name, each in found.items():
            self.inventory["packages"][name]["rpc"] = each

    def run_suites(self, scratch: Path) -> None:
        """The suites on the extraction, and the jailed workers of it."""
        more = {"CODING_RUNNER_SOURCE_ROOT": str(self.directory / "extracted")}
        chosen = suites.chosen(ROOT)
        ran = self.step(recheck.SUITES_STEP, lambda: self._green(chosen, scratch, more))
        self.inventory["suites"] = {"suites": chosen, **ran}
        if reason := jail.impossible():
            reason = scan.public(reason, self.private)
            self.inventory["jails"] = {"ran": False, "reason": reason}
            self.topology = {"shapes": {}, "reason": reason}
            return
        topology = scratch / "topology.json"
        more |= {"CODING_TOPOLOGY_FILE": str(topology), "REQUIRE_NSJAIL": "1"}
        ran = self.step(recheck.JAILS_STEPS[0], lambda: self._green(["-m", "nsjail"], scratch, more))
        inside = [str(jail.site_packages())]
        sdk = self.step(recheck.JAILS_STEPS[1], lambda: sdk_record.verify(path=inside))
        self.inventory["jails"] = {"ran": True, "sdk": dataclasses.asdict(sdk), **ran}
        if not topology.is_file():
            raise Failed("the jailed workers left no account of what they are")
        self.topology = scan.public_value(json.loads(topology.read_text(encoding="utf-8")), self.private)
        if not recheck.jailed(self.topology):
            raise Failed("the jailed workers' account of what they are lacks one of them, or something of one")

    def freeze(self) -> str:
        """The last files, what must not be in them, the hashes over everything, and a reviewer's look; the list's own hash."""
        # Without the suites, or without jails, this is no evidence for a release.
        self.inventory["gaps"] = recheck.problems(self.inventory)
        self.inventory["complete"] = not self.inventory["gaps"]
        self._write(f"{recheck.TOPOLOGY}.json", self.topology)
        self._text(f"{recheck.TOPOLOGY}.md", summary.topology(json.loads(json.dumps(self.topology, sort_keys=True))))
        self._write("inventory.json", self.inventory)
        said = json.loads((self.directory / "inventory.json").read_text(encoding="utf-8"))
        self._text("SUMMARY.md", summary.human(said))
        for cache in sorted(self.directory.rglob("__pycache__"), reverse=True):
            shutil.rmtree(cache)
        scan.scan(self.directory, self.private, self.directory / "extracted", self.traces)
        digest = hashes.write(self.directory)
        try:
            recheck.check(self.directory)
        except BaseException:
            (self.directory / hashes.NAME).unlink()
            raise
        return digest

    # ---- their parts

    def _built(self, name: str, exported: dict[str, bytes], scratch: Path, target: Path) -> Path:
        staging = scratch / f"staging-{name}" / name
        members.stage(exported, staging)
        return packages.built_from(staging, target)

    def _rebuilt(self, name: str, official: Path, exported: dict[str, bytes], scratch: Path) -> dict[str, Any]:
        staging = scratch / f"again-{name}" / name
        members.stage(exported, staging)
        package = packages.built_from(staging, scratch / f"again-{name}", reproducible=True)
        output = scratch / f"command-{name}"
        command = [sys.executable, str(ROOT / "scripts" / "build.py"), "--reproducible", "--output", str(output), name]
        ((code, _, complaint),) = suites.run_all([command], ROOT, {"TMPDIR": str(scratch)}, BUILT_WITHIN)
        if code != 0:
            raise Failed(scan.public(complaint.strip(), self.private))
        made = package.read_bytes()
        if (output / package.name).read_bytes() != made:
            raise Failed(f"{name}: two reproducible builds differ")
        envelopes.unsigned(made)
        if archives.read(package) != archives.read(official):
            raise Failed(f"{name}: the reproducible build has other members than the builder's")
        target = self.directory / "packages" / "reproducible" / package.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(made)
        return {
            "file": target.relative_to(self.directory).as_posix(),
            "sha256": hashlib.sha256(made).hexdigest(),
            "builds_compared": [
                "from the export of the commit",
                suites.shown(command, {**self.private, "the output": str(output)}),
            ],
            "members_as_built_by_the_sdk": True,
        }

    def _green(self, selection: list[str], scratch: Path, more: dict[str, str]) -> dict[str, Any]:
        ran = suites.tests(selection, ROOT, scratch, self.private, more)
        if ran["exit_code"] != 0 or ran["failed"] or not ran["passed"]:
            named = ", ".join(each["test"] for each in ran["failed"][:SHOWN]) or "\n".join(ran["last_lines"])
            raise Failed(f"{' '.join(selection[-2:])}: {named}")
        return ran

    def _write(self, path: str, value: Any) -> None:
        self._text(path, recheck.canonical(value))

    def _text(self, path: str, text: str) -> None:
        file = self.directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())


def make(given: str, *, which: str) -> tuple[Path, bool]:
    """The evidence of the commit the tree is at; its directory and whether it is complete.

    Raises :class:`evidence.Refused` before anything is written, :class:`evidence.Failed` for a proof that does not hold: the
    directory then lacks its hashes, and is no evidence.
    """
    commit = gate.commit(ROOT)
    private = scan.private_texts(ROOT)
    directory = gate.fresh(ROOT, given)
    candidate = Candidate(directory, commit, suites=which, private=private)
    try:
        with _scratch() as scratch:
            digest = _proven(candidate, commit, scratch)
    except OSError as exc:
        (directory / hashes.NAME).unlink(missing_ok=True)
        raise Failed(f"the evidence could not be written: {exc.strerror or exc}") from exc
    steps.say(f"{hashes.NAME}: sha256 {digest}")
    return directory, bool(candidate.inventory["complete"])


def _proven(candidate: Candidate, commit: str, scratch: Path) -> str:
    """Every proof, and the hash over the frozen evidence."""
    candidate.sdk()
    for name in packages.NAMES:
        candidate.package(name, scratch)
    candidate.rpc()
    if candidate.which == "all":
        candidate.run_suites(scratch)
    if candidate.step(recheck.TREE_STEP, lambda: gate.commit(ROOT)) != commit:
        raise Failed("the tree is at another commit than in the beginning")
    return candidate.freeze()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A directory that is gone afterwards, also what the SDK has sealed in it."""
    with tempfile.TemporaryDirectory(prefix="candidate-") as base:
        try:
            yield Path(base)
        finally:
            for entry in sorted(Path(base).rglob("*")):
                if entry.is_dir() and not entry.is_symlink():
                    entry.chmod(0o755)
