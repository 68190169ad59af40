"""What people read: eight complete catalogues, and no code, notice or status without a text."""

from __future__ import annotations

import ast
import itertools
import json
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pkg import texts
from pkg.errors import Refused
from pkg.identity import Authority
from pkg.places import place_of
from pkg.settings import PluginSettings, RunnerSettings, parse
from tooling import packages

ROOT = Path(__file__).resolve().parent.parent
LOCALES = ROOT / "ACPAgentRunner" / "pkg" / "locales"
ENGLISH: dict[str, str] = json.loads((LOCALES / "en_US.json").read_text(encoding="utf-8"))
OTHERS = [language for language in texts.LANGUAGES if language != "en_US"]
ERRORS = frozenset(
    {
        "CodingError",
        "SettingsError",
        "LaunchError",
        "AgentDied",
        "AgentProtocolError",
        "SessionUnavailable",
        "Refused",
        "AgentError",
        "Notice",
    }
)
"""Whatever carries a catalogue key and its parameters; AgentError and Notice by ``params`` only."""


def catalogue_of(language: str) -> dict[str, str]:
    """The catalogue as it stands on disk."""
    loaded: dict[str, str] = json.loads((LOCALES / f"{language}.json").read_text(encoding="utf-8"))
    return loaded


def placeholders(text: str) -> set[str]:
    """The names in braces; raises ``ValueError`` for a text that cannot be formatted."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


def sources() -> Iterator[Path]:
    """Every module that a package ships, the vendored copies only once."""
    yield from sorted((ROOT / "ACPAgentRunner" / "pkg").glob("*.py"))
    for package in ("ACPAgentRunner", "ClaudeCodeAgent", "CodexAgent"):
        for part in ("agent", "components"):
            yield from sorted((ROOT / package / part).rglob("*.py"))


def trees() -> list[tuple[str, ast.Module]]:
    """Each module's relative path and syntax tree."""
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in sources()]


TREES = trees()


NOT_TEXTS = frozenset(
    {
        "coding.heartbeat",  # the name of a log record
        "coding.mcp",  # a key of the listener's own state
        "interaction.submitted",  # an event of the host
        "steering.dropped",  # an event of the host
    }
)
"""Strings that are written like keys and are none."""


def constants() -> Iterator[tuple[str, int, str]]:
    """Every string in the code that is written like a key of the catalogue, and in the settings ``_bad("x")``."""
    prefixes = {"coding", "problem", *(key.split(".")[0] for key in ENGLISH)}
    for path, tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_bad":
                if path.endswith("/settings.py") and isinstance(node.args[0], ast.Constant):
                    yield path, node.lineno, f"problem.{node.args[0].value!s}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in NOT_TEXTS:
                prefix, dot, rest = node.value.partition(".")
                if dot and prefix in prefixes and rest and set(rest) <= set(string.ascii_lowercase + string.digits + "_"):
                    yield path, node.lineno, node.value


def test_every_language_has_its_file_and_no_other() -> None:
    """The form offers exactly the languages there are."""
    assert {path.stem for path in LOCALES.iterdir()} == set(texts.LANGUAGES)


@pytest.mark.parametrize("language", OTHERS)
def test_every_text_is_in_every_language(language: str) -> None:
    """Our rule: nobody gets an English sentence in the middle of another language."""
    found = catalogue_of(language)
    assert sorted(set(ENGLISH) - set(found)) == [], "not translated"
    assert sorted(set(found) - set(ENGLISH)) == [], "translated but gone"


@pytest.mark.parametrize("language", OTHERS)
def test_translations_keep_the_placeholders(language: str) -> None:
    """Our rule: what the English text tells, every language tells."""
    found = catalogue_of(language)
    for key in ENGLISH.keys() & found.keys():
        assert placeholders(found[key]) == placeholders(ENGLISH[key]), key


@pytest.mark.parametrize("language", OTHERS)
def test_translations_are_translations(language: str) -> None:
    """A text copied from English is one nobody translated."""
    found = catalogue_of(language)
    same = [key for key in ENGLISH.keys() & found.keys() if found[key] == ENGLISH[key] and any(map(str.isalpha, ENGLISH[key]))]
    assert same == []


@pytest.mark.parametrize("language", texts.LANGUAGES)
def test_catalogues_are_sorted_and_trimmed(language: str) -> None:
    """Several people edit them: one order, no blank text, no stray space."""
    found = catalogue_of(language)
    assert list(found) == sorted(found)
    assert [key for key, text in found.items() if not text.strip() or text != text.strip()] == []


def test_every_key_in_the_code_has_a_text() -> None:
    """A misspelt or forgotten key would show itself to a person instead of a sentence."""
    missing = sorted({f"{path}:{line} {key}" for path, line, key in constants() if key not in ENGLISH})
    assert missing == []


def test_every_error_text_is_used() -> None:
    """An error text that no code raises is a promise nobody keeps."""
    used = {key for _, _, key in constants()}
    # Some modules keep their codes without the prefix they share.
    bare = {node.value for _, tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    errors = [key for key in ENGLISH if key.startswith(("coding.", "problem."))]
    dead = [key for key in errors if key not in used and key.partition(".")[2] not in bare]
    assert dead == []


def test_every_error_is_given_the_parameters_of_its_text() -> None:
    """Where the code names key and parameters in one place, nothing is left in braces for a person to read."""
    lacking: list[str] = []
    for path, tree in TREES:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            key = node.args[0].value
            if name not in ERRORS or key not in ENGLISH:
                continue
            known = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            params = next((keyword.value for keyword in node.keywords if keyword.arg == "params"), None)
            if len(node.args) > 1:  # Notice and AgentError take them by position, too
                params = params or node.args[-1]
            if any(keyword.arg is None for keyword in node.keywords) or (
                params is not None and not isinstance(params, ast.Dict)
            ):
                continue
            if isinstance(params, ast.Dict):
                if None in params.keys:
                    continue
                known |= {each.value for each in params.keys if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            if missing := placeholders(ENGLISH[key]) - known:
                lacking.append(f"{path}:{node.lineno} {key} lacks {sorted(missing)}")
    assert lacking == []


class TestRendering:
    """``render`` never fails and never hides anything."""

    def test_an_unknown_key_shows_itself_with_its_parameters(self) -> None:
        """A missing text is visible, not an exception."""
        assert texts.render("coding.nonsense", "en_US", {"a": 1}) == "coding.nonsense (a=1)"

    def test_an_unknown_language_is_english(self) -> None:
        """A form value of another version still gives a sentence."""
        assert texts.render("coding.busy", "tlh") == ENGLISH["coding.busy"]

    def test_a_missing_parameter_stays_in_braces(self) -> None:
        """Better a brace than an exception in the middle of an error."""
        assert "{problem}" in texts.render("coding.setting_invalid", "en_US", {"field": "x"})

    def test_braces_in_a_parameter_are_text(self) -> None:
        """What a person or an agent wrote is never a format."""
        assert "{0.__class__} {field}" in texts.render(
            "coding.setting_invalid", "en_US", {"field": "f", "problem": "{0.__class__} {field}"}
        )

    @pytest.mark.parametrize("language", texts.LANGUAGES)
    def test_a_problem_is_told_in_the_language_of_its_error(self, language: str) -> None:
        """One error, one language, reason included."""
        params = {"field": "ssh-port", "problem": "problem.out_of_range", "minimum": 0, "maximum": 65535}
        text = texts.render("coding.setting_invalid", language, params)
        assert "ssh-port" in text
        assert "65535" in text
        assert "problem." not in text

    @pytest.mark.parametrize(
        ("text", "language"),
        [
            ("list the files", "en_US"),
            ("列出这些文件", "zh_Hans"),
            ("請列出這些檔案", "zh_Hant"),
            ("ファイルを一覧", "ja_JP"),
            ("แสดงไฟล์", "th_TH"),
            ("liệt kê các tệp", "vi_VN"),
            ("¿qué archivos hay?", "es_ES"),
            ("покажи файлы", "ru_RU"),
            ("", "en_US"),
            ("12345 !?", "en_US"),
        ],
    )
    def test_a_form_on_auto_speaks_as_it_is_spoken_to(self, text: str, language: str) -> None:
        """Our rule: by script, English when nothing tells."""
        assert texts.guess_language(text) == language


@pytest.mark.parametrize("language", texts.LANGUAGES)
def test_every_setting_a_text_names_is_in_a_form(language: str) -> None:
    """Our rule: what people are told to change is there, by the name the host stores it under."""
    known = {"coding", *texts.LANGUAGES}
    for package, path in itertools.product(packages.NAMES, ("manifest.yaml", "components/runner/default.yaml")):
        for field in yaml.safe_load((ROOT / package / path).read_text(encoding="utf-8"))["spec"]["config"]:
            known |= {field["name"], *(option["name"] for option in field.get("options", []))}
    named = {
        (key, name)
        for key, text in catalogue_of(language).items()
        for name in re.findall(r'"([a-z]+(?:-[a-z]+)+|location|daemon|local)"', text)
    }
    assert len(named) > 20
    assert {(key, name) for key, name in named if name not in known} == set()


@pytest.mark.parametrize("language", texts.LANGUAGES)
def test_where_no_agent_can_run_both_other_places_are_named_as_they_are(language: str) -> None:
    """Our rule: the pool's refusal of a local agent names the two places that it has, both as ways that are open."""
    with pytest.raises(Refused) as caught:
        place_of(parse(RunnerSettings, {}), parse(PluginSettings, {}), {}, Authority(None, pooled=True), "agent")
    assert caught.value.code == "coding.local_in_pool"
    text = catalogue_of(language)[caught.value.code]
    advice = next(sentence for sentence in re.split("[.。]", text) if '"remote-ssh"' in sentence)
    assert '"location"' in advice
    assert '"daemon"' in advice


POLICY_KEYS = {
    "policy_approvals": "approvals",
    "policy_environment": "job_environment",
    "policy_jobs_full": "max_jobs",
    "policy_mcp_refused": "mcp_servers",
    "policy_option": "job_options",
    "policy_workspace_outside": "workspaces",
    "policy_worktree_outside": "workspaces",
    "policy_worktrees": "worktrees",
}
"""Refusals by a daemon's policy file that a key of it lifts."""
NO_KEY = frozenset({"agent_needed", "agent_unknown", "command_refused", "driver_other", "mcp_command", "workspace_missing"})
"""Those that none lifts."""


@pytest.mark.parametrize("language", texts.LANGUAGES)
def test_what_a_daemon_s_policy_file_refuses_names_the_key_that_would_allow_it(language: str) -> None:
    """DAEMON.md's promise, for every refusal there is."""
    found = catalogue_of(language)
    refusals = {key.removeprefix("coding.") for key in found if key.startswith("coding.policy_")}
    assert refusals == set(POLICY_KEYS) | {f"policy_{name}" for name in NO_KEY}
    assert [code for code, key in POLICY_KEYS.items() if not re.search(rf"\b{key}\b", found[f"coding.{code}"], re.ASCII)] == []


@pytest.mark.parametrize("language", texts.LANGUAGES)
def test_who_is_not_signed_in_is_told_what_is_right_in_every_place(language: str) -> None:
    """Our rule: the text cannot know the place, so it names the command, the daemon's key and the plugin's fields."""
    text = catalogue_of(language)["coding.agent_login_required"]
    assert placeholders(text) == {"command", "machine"}
    assert all(f'"{name}"' in text for name in ("environment", "env-json", "agent-secret-values"))


@pytest.mark.parametrize("language", texts.LANGUAGES)
def test_no_text_lists_directories_of_a_machine(language: str) -> None:
    """Our rule: what people read in the chat holds no path of the host; where a command was looked for is in the log."""
    assert [key for key, text in catalogue_of(language).items() if "places" in placeholders(text)] == []
