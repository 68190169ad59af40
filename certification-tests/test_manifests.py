"""The three packages as LangBot meets them: manifests, forms, requirements, and what the official builder packs."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from langbot_plugin.api.entities.builtin.runner.manifest import RunnerManifest
from langbot_plugin.runtime.plugin.artifact import PluginArtifactStore
from langbot_plugin.runtime.plugin.dependency_environment import PluginDependencyEnvironmentStore
from langbot_plugin.runtime.plugin.runner_service import RunnerRuntimeService
from langbot_plugin.utils.discover.engine import ComponentDiscoveryEngine
from packaging.requirements import Requirement

from pkg import texts
from tooling import ROOT, packages

PORTS = {"ACPAgentRunner": 8766, "ClaudeCodeAgent": 8767, "CodexAgent": 8768}
FIELD_TYPES = {
    "boolean": {"boolean"},
    "number": {"integer", "float"},
    "select": {"select"},
    "text": {"string", "text", "select"},
    "secret": {"secret", "text"},
    "list": {"array[string]", "knowledge-base-multi-selector", "json"},
    "object": {"json", "text"},
}
"""Kind of a model's field to the field types of LangBot 4.11.2's web form that can hold it; others show as unknown there."""

MASKED = re.compile("(^|-)(secret|token|password|credentials?)(-|$)")
"""Names whose values LangBot 4.11.2 does not hand out again, by a word of the name; the plugin form only."""

JUNK = (
    ".env",
    ".venv/lib/site.py",
    ".mypy_cache/3.11/cache.json",
    ".ruff_cache/CACHEDIR.TAG",
    ".pytest_cache/README.md",
    ".hypothesis/x",
    "__pycache__/main.cpython-311.pyc",
    "pkg/__pycache__/limits.cpython-311.pyc",
    "agent/.mypy_cache/x.json",
    "data/temp/lbp/x",
    "dist/langbot-team-old-0.0.1.lbpkg",
    "old.lbpkg",
    "debug.log",
)
"""What a developer's directory collects and no package may hold."""

pytestmark = pytest.mark.parametrize("name", packages.NAMES)


# ------------------------------------------------------------------ the packages, staged once


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, frozenset[str]]]:
    """Each package in a directory of its own, with the files it is made of as they were at that moment."""
    base = tmp_path_factory.mktemp("staged")
    return {name: (base / name, packages.export(name, base / name)) for name in packages.NAMES}


@pytest.fixture(scope="module")
def staged(exported: dict[str, tuple[Path, frozenset[str]]]) -> dict[str, Path]:
    """Each package complete in a directory of its own, with a developer's junk in it."""
    out = {}
    for name, (target, _) in exported.items():
        out[name] = target
        for path in JUNK:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text("junk", encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def built(staged: dict[str, Path]) -> dict[str, Path]:
    """What ``lbp build`` makes of each, run as a developer runs it."""
    lbp = Path(sys.executable).with_name("lbp")
    out = {}
    for name, directory in staged.items():
        done = subprocess.run(
            [lbp, "build", "--output", "built"],
            cwd=directory,
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        found = list((directory / "built").glob("*.lbpkg"))
        assert len(found) == 1, done.stdout + done.stderr
        out[name] = found[0]
    return out


class Probes(dict[str, dict[str, Any]]):
    """What each package says of itself in a process of its own, asked on first use."""

    def __init__(self, staged: dict[str, Path]) -> None:
        super().__init__()
        self._staged = staged

    def __missing__(self, name: str) -> dict[str, Any]:
        found = self[name] = _probe(name, self._staged[name])
        return found


@pytest.fixture(scope="module")
def probes(staged: dict[str, Path]) -> Probes:
    """See :class:`Probes`."""
    return Probes(staged)


def _probe(name: str, directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-B", ROOT / "shared" / "testkit" / "package_probe.py"],
        cwd=directory,
        env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    # A module that was not added to git yet is in the working copy but in no package.
    assert done.returncode == 0, f"{done.stderr}\nNot in the package because git does not know them: {packages.forgotten(name)}"
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def manifest_of(name: str) -> dict[str, Any]:
    """The plugin manifest in the working copy."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / name / "manifest.yaml").read_text(encoding="utf-8"))
    return loaded


def component_of(name: str) -> dict[str, Any]:
    """The runner component in the working copy."""
    text = (ROOT / name / "components" / "runner" / "default.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def forms(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of both forms, with the name of its form."""
    for field in component_of(name)["spec"]["config"]:
        yield "runner", field
    for field in manifest_of(name)["spec"]["config"]:
        yield "plugin", field


# ------------------------------------------------------------------ what the host reads


def test_the_plugin_is_what_it_is_called(name: str) -> None:
    """Ids, shared placement and the stateless model are promises that operators build on."""
    manifest = manifest_of(name)
    assert (manifest["metadata"]["author"], manifest["metadata"]["name"]) == ("langbot-team", name)
    assert manifest["metadata"]["version"] == "0.1.0"
    assert manifest["execution"]["sharedRuntime"] == "shared-runtime-v1"
    assert manifest["execution"]["componentModel"] == "stateless-v1"
    assert (ROOT / name / manifest["metadata"]["icon"]).read_text(encoding="utf-8").startswith("<svg")


def test_the_runtime_lists_the_runner(name: str, staged: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK drops a runner with a misspelt capability or permission silently: here its own code says that ours is whole."""
    monkeypatch.chdir(staged[name])
    engine = ComponentDiscoveryEngine()  # type: ignore[no-untyped-call]
    plugin = engine.load_component_manifest("manifest.yaml", owner="test", no_save=True)
    runner = engine.load_component_manifest("components/runner/default.yaml", owner="test", no_save=True)
    assert plugin is not None
    assert runner is not None
    entry = RunnerRuntimeService._build_runner_entry(
        None,  # type: ignore[arg-type]
        types.SimpleNamespace(manifest=plugin),  # type: ignore[arg-type]
        types.SimpleNamespace(manifest=runner, component_instance=None),  # type: ignore[arg-type]
    )
    assert entry is not None
    listed = RunnerManifest.model_validate(entry["manifest"])
    assert listed.id == f"plugin:langbot-team/{name}/default"
    assert listed.usages == ["agent"]
    # Without these a runner cannot say a word on an agent bot.
    assert listed.capabilities.tool_calling
    assert set(listed.permissions.tools) == {"detail", "call"}
    assert [each.name for each in listed.config_schema] == [each["name"] for each in component_of(name)["spec"]["config"]]


def test_capabilities_and_permissions_belong_together(name: str) -> None:
    """A permission nobody uses is asked of the operator for nothing; a capability without its permission does not work."""
    spec = component_of(name)["spec"]
    capabilities, permissions = spec["capabilities"], spec["permissions"]
    assert bool(capabilities.get("knowledge_retrieval")) == ("knowledge_bases" in permissions)
    assert bool(capabilities.get("interactions")) == ("interactions" in permissions)
    # What the host drops of a running turn is recovered from events and history.
    assert bool(capabilities.get("steering")) == ({"history", "events"} <= set(permissions))


# ------------------------------------------------------------------ the forms


def test_every_text_of_the_form_is_there_in_every_language(name: str) -> None:
    """Labels of fields and options, and descriptions, in the eight languages; descriptions are translated, not copied."""
    for document in (manifest_of(name), component_of(name)):
        for what in ("label", "description"):
            assert set(document["metadata"][what]) == set(texts.LANGUAGES)
    for form, field in forms(name):
        where = f"{form} form, {field['name']}"
        for what in ("label", "description"):
            assert list(field[what]) == list(texts.LANGUAGES), where
            assert all(text.strip() == text and text for text in field[what].values()), where
        assert len(set(field["description"].values())) == len(texts.LANGUAGES), f"{where}: a description is copied"
        for option in field.get("options", []):
            assert list(option["label"]) == list(texts.LANGUAGES), where
            assert all(option["label"].values()), where


def test_forms_use_only_what_the_web_form_knows(name: str, probes: Probes) -> None:
    """LangBot 4.11.2 shows a field of any other type as unknown."""
    for form, field in forms(name):
        described = probes[name][form].get(field["name"])
        assert described is not None, f"{form} form: {field['name']} has no setting"
        assert field["type"] in FIELD_TYPES[described["kind"]], field["name"]
        assert set(field) <= {"name", "type", "label", "description", "required", "default", "options", "show_if"}


def test_every_setting_has_its_field(name: str, probes: Probes) -> None:
    """Both ways: no field without a setting, no setting that nobody can reach."""
    for form in ("runner", "plugin"):
        fields = [field["name"] for each, field in forms(name) if each == form]
        assert len(fields) == len(set(fields))
        assert set(fields) == set(probes[name][form])


def test_the_form_and_the_model_agree_on_every_default(name: str, probes: Probes) -> None:
    """A form that was opened and saved means the same as one that never was."""
    asked = {f"{form}: {field}": is_ for form in ("runner", "plugin") for field, is_ in probes[name][form].items()}
    disagreeing = [field for field, is_ in asked.items() if not is_["default_agrees"]]
    assert disagreeing == []


def test_selects_offer_exactly_what_the_model_takes(name: str, probes: Probes) -> None:
    """No option that is refused when it is chosen, none that is missing."""
    for form, field in forms(name):
        if field["type"] != "select":
            assert "options" not in field
            continue
        offered = [option["name"] for option in field["options"]]
        if field["name"] == "provider":
            assert sorted(offered) == sorted(probes[name]["presets"])
        elif field["name"] == "approval-policy":
            assert offered == probes[name]["policies"][: len(offered)] == ["ask", "allow-edits", "allow-all", "deny"]
        else:
            assert offered == probes[name][form][field["name"]]["options"]
        assert field["default"] in offered


def test_conditions_refer_to_what_is_there(name: str) -> None:
    """A condition on a missing field or value hides its field for good."""
    for wanted in ("runner", "plugin"):
        by_name = {field["name"]: field for form, field in forms(name) if form == wanted}
        order = list(by_name)
        for field in by_name.values():
            condition = field.get("show_if")
            if condition is None:
                continue
            assert set(condition) == {"field", "operator", "value"}
            assert condition["operator"] == "eq", "no other is needed"
            other = by_name[condition["field"]]
            assert order.index(other["name"]) < order.index(field["name"]), "a field follows what shows it"
            if other["type"] == "boolean":
                assert condition["value"] is True
            else:
                assert condition["value"] in [option["name"] for option in other["options"]]


def test_secrets_have_masked_names_and_stay_out_of_the_runner_form(name: str, probes: Probes) -> None:
    """LangBot masks plugin values by name and runner values not at all."""
    assert [field for field, is_ in probes[name]["runner"].items() if is_["kind"] == "secret"] == []
    secret = [field for field, is_ in probes[name]["plugin"].items() if is_["kind"] == "secret"]
    assert secret == ["daemon-token", "ssh-private-key-secret"]
    assert all(MASKED.search(field) for field in (*secret, "agent-secret-values"))


def test_each_package_has_a_port_of_its_own(name: str) -> None:
    """Three hubs on one machine do not collide."""
    (port,) = (field["default"] for form, field in forms(name) if field["name"] == "daemon-port")
    assert port == PORTS[name]


def test_shared_fields_are_alike_in_all_packages(name: str, tmp_path: Path) -> None:
    """One form to learn: the copies are up to date, and a changed one is named and mended."""
    for each in packages.NAMES:
        for path in ("manifest.yaml", "components/runner/default.yaml"):
            (tmp_path / each / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / each / path, tmp_path / each / path)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ACPAgentRunner" / "pkg", tmp_path / "ACPAgentRunner" / "pkg", ignore=ignored)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-B", str(ROOT / "scripts" / "sync_forms.py"), "--root", str(tmp_path), *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)

    assert run("--check").stdout == "ClaudeCodeAgent, CodexAgent: shared form fields identical to ACPAgentRunner\n"
    sibling = "CodexAgent" if name == "ACPAgentRunner" else name
    form = tmp_path / sibling / "components" / "runner" / "default.yaml"
    whole = form.read_text(encoding="utf-8")
    form.write_text(whole.replace("default: 1800", "default: 1801"), encoding="utf-8")
    checked = run("--check")
    assert checked.returncode == 1
    assert f"{sibling}/components/runner/default.yaml" in checked.stdout
    assert run().returncode == 0
    assert form.read_text(encoding="utf-8") == whole


# ------------------------------------------------------------------ requirements


def requirements_of(name: str) -> list[Requirement]:
    """What ``requirements.txt`` asks for, without comments."""
    lines = (ROOT / name / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def test_the_runtime_accepts_the_requirements(name: str, staged: dict[str, Path]) -> None:
    """The SDK's own reader refuses options, hashes, inline comments and an SDK it is not."""
    artifact = types.SimpleNamespace(code_path=staged[name])
    accepted, _ = PluginDependencyEnvironmentStore._read_requirements(artifact)  # type: ignore[arg-type]
    wanted = [str(each) for each in requirements_of(name) if each.name != "langbot-plugin"]
    assert list(accepted) == wanted


def test_requirements_are_ranges_that_fit_what_was_tested(name: str) -> None:
    """A pin would fight the host's own versions; a range without an end promises the unknown. Host 4.11.2 has SDK 0.7.16."""
    for each in requirements_of(name):
        assert {spec.operator for spec in each.specifier} == {">=", "<"}, each
        assert each.specifier.contains(importlib.metadata.version(each.name)), each
    (sdk,) = (each for each in requirements_of(name) if each.name == "langbot-plugin")
    assert all(sdk.specifier.contains(version) for version in ("0.7.4", "0.7.16", "0.7.18"))


def test_everything_imported_is_required(name: str, staged: dict[str, Path]) -> None:
    """A worker has the requirements and the standard library, nothing else; and nothing is required in vain."""
    ours = {"pkg", "agent", "components", "main", "daemon"}
    imported = set()
    for path in staged[name].rglob("*.py"):
        if ".venv" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            imported |= {module.split(".")[0] for module in modules}
    foreign = imported - ours - sys.stdlib_module_names
    # pydantic brings these two along as its own requirements.
    foreign -= {"pydantic_core", "annotated_types"}
    distributions = {"acp": "agent-client-protocol", "langbot_plugin": "langbot-plugin"}
    assert {distributions.get(module, module) for module in foreign} == {each.name for each in requirements_of(name)}


# ------------------------------------------------------------------ the built package


def test_the_builder_packs_every_source_and_no_junk(
    name: str, built: dict[str, Path], exported: dict[str, tuple[Path, frozenset[str]]]
) -> None:
    """Exactly the files git knows, the shared core and its catalogues among them."""
    with zipfile.ZipFile(built[name]) as archive:
        packed = set(archive.namelist())
    assert packed == exported[name][1]
    assert {f"pkg/locales/{language}.json" for language in texts.LANGUAGES} <= packed
    assert {"main.py", "manifest.yaml", "requirements.txt", "README.md", "SHARED_RUNTIME.md"} <= packed
    assert {f"readme/README_{language}.md" for language in texts.LANGUAGES if language != "en_US"} <= packed


def test_the_runtime_admits_the_package(name: str, built: dict[str, Path], tmp_path: Path) -> None:
    """Sizes, paths and the manifest pass the SDK's own admission; what it extracts still loads, read-only."""
    package = built[name].read_bytes()
    store = PluginArtifactStore(tmp_path)
    try:
        artifact = store.install_package(package, hashlib.sha256(package).hexdigest())
        assert (artifact.plugin_author, artifact.plugin_name, artifact.plugin_version) == ("langbot-team", name, "0.1.0")
        probe = _probe(name, artifact.code_path)
        assert probe["plugin_class"] == manifest_of(name)["execution"]["python"]["attr"]
        assert probe["runner_class"] == component_of(name)["execution"]["python"]["attr"]
    finally:
        for path in tmp_path.rglob("*"):
            if path.is_dir():
                path.chmod(0o700)


def test_the_package_exports_the_approval_policies_of_its_form(name: str, probes: Probes) -> None:
    """``agent.POLICIES`` is what a daemon's policy file may name: everything that the form takes, the vendor's own included."""
    assert probes[name]["exported_policies"] == probes[name]["policies"]
    assert probes[name]["policies"][:4] == ["ask", "allow-edits", "allow-all", "deny"]
    assert ("untrusted" in probes[name]["exported_policies"]) == (name == "CodexAgent")


def test_the_package_exports_its_drivers(name: str, probes: Probes) -> None:
    """``agent.DRIVERS`` is the one entry of a daemon."""
    drivers = probes[name]["drivers"]
    (driver,) = drivers
    assert driver == {"ACPAgentRunner": "acp", "ClaudeCodeAgent": "claude-code", "CodexAgent": "codex"}[name]
    assert drivers[driver] == driver
