"""The forms as models: established configurations keep working, and a bad value is one clear error that shows no secret."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from agent.form import AcpPluginSettings, AcpSettings
from pkg import limits, texts
from pkg.errors import CodingError, SettingsError
from pkg.settings import RunnerSettings, parse, resolve_secrets, secret_names

CANARY = "canary-7c1f0e"
FORM_NAMES = [name.replace("_", "-") for name in AcpSettings.model_fields]
STORED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def refused(config: Mapping[str, Any], model: type[RunnerSettings] = AcpSettings) -> SettingsError:
    """The one error that ``config`` ends in."""
    with pytest.raises(SettingsError) as caught:
        parse(model, config)
    return caught.value


class TestLooselyTypedConfigurations:
    """Values as hosts have stored them over the years."""

    def test_an_empty_configuration_is_all_defaults(self) -> None:
        """Our rule: nothing has to be stored for a runner to work."""
        assert parse(AcpSettings, {}) == parse(AcpSettings, dict.fromkeys(["timeout", "streaming", "location", "env-json"]))

    @pytest.mark.parametrize("blank", ["", "   ", None])
    def test_null_and_blank_mean_the_default(self, blank: object) -> None:
        """Our rule: an emptied field of any type falls back to its default."""
        assert parse(AcpSettings, dict.fromkeys(FORM_NAMES, blank)) == parse(AcpSettings, {})

    def test_unknown_keys_are_ignored(self) -> None:
        """Our rule: fields of another version and the host's companion keys do not matter."""
        assert parse(AcpSettings, {"enable-all-tools": True, "mcp-resources": [], "old": object()}) == parse(AcpSettings, {})

    @pytest.mark.parametrize(("given_value", "expected"), [("60", 60), (60, 60), (60.5, 60.5), ("60.5", 60.5), (" 60 ", 60)])
    def test_numbers_may_be_text(self, given_value: object, expected: float) -> None:
        """Established configurations store numbers as text."""
        assert parse(AcpSettings, {"timeout": given_value}).timeout == expected

    @pytest.mark.parametrize("no_limit", [0, -1, "0"])
    def test_a_time_limit_of_zero_is_the_longest_we_allow(self, no_limit: object) -> None:
        """The host takes zero and less for "no limit"; here a run still ends some day."""
        assert parse(AcpSettings, {"timeout": no_limit}).timeout == limits.TURN_SECONDS_MAX

    @pytest.mark.parametrize("value", [True, "true", "True", "on", "yes", "1", 1])
    def test_switches_may_be_words_when_on(self, value: object) -> None:
        """Established configurations store switches as words."""
        assert parse(AcpSettings, {"advanced-settings": value}).advanced_settings is True

    @pytest.mark.parametrize("value", [False, "false", "FALSE", "off", "no", "0", 0])
    def test_switches_may_be_words_when_off(self, value: object) -> None:
        """Established configurations store switches as words."""
        assert parse(AcpSettings, {"streaming": value}).streaming is False

    @pytest.mark.parametrize(
        "value",
        ['{"A": "x", "B": 2}', {"A": "x", "B": 2}, types.MappingProxyType({"A": "x", "B": 2})],
    )
    def test_json_fields_may_be_text_or_objects_or_frozen(self, value: object) -> None:
        """The host hands JSON fields over as they were stored; its worker freezes nested values."""
        assert parse(AcpSettings, {"env-json": value}).env_json == {"A": "x", "B": "2"}

    @pytest.mark.parametrize(
        "value",
        [
            "7, 11\n12;13",
            ["7", 11, " 12 ", "13", "", None, "7"],
            ("7", "11", "12", "13"),
            '["7", "11", "12", "13"]',
            "7，11、12；13",
        ],
    )
    def test_lists_may_be_arrays_or_separated_text(self, value: object) -> None:
        """People paste ids in every shape; order is kept and repeats are dropped."""
        assert parse(AcpSettings, {"allowed-actors": value}).allowed_actors == ("7", "11", "12", "13")

    @pytest.mark.parametrize(
        ("value", "expected"), [(True, "status"), ("true", "status"), (False, "off"), ("tools", "tools"), ("off", "off")]
    )
    def test_a_progress_switch_means_the_status_line(self, value: object, expected: str) -> None:
        """A switch of an older configuration is understood beside the three words."""
        assert parse(AcpSettings, {"show-progress": value}).show_progress == expected

    def test_approval_rules_are_lines_or_a_list_of_lines(self) -> None:
        """The first wrong one is named by its number, and nothing of it is repeated."""
        rules = parse(AcpSettings, {"approval-rules": "deny edit(a)\n\nallow execute(ls *)"}).approval_rules
        assert [str(rule) for rule in rules] == ["rule 1: deny edit(a)", "rule 3: allow execute(ls *)"]
        assert parse(AcpSettings, {"approval-rules": ["deny edit(a)", "", "allow execute(ls *)"]}).approval_rules == rules
        assert parse(AcpSettings, {"approval-rules": None}).approval_rules == ()
        error = refused({"approval-rules": f"deny edit(a)\nallow {CANARY}"})
        assert (error.params["line"], error.params["field"]) == ("2", "approval-rules")
        assert CANARY not in str(error)

    def test_people_and_times_of_approvals(self) -> None:
        """Approvers as other lists of people; seconds with a default."""
        settings = parse(AcpSettings, {"approvers": "7, 8", "approval-timeout": "60"})
        assert (settings.approvers, settings.approval_timeout) == (("7", "8"), 60)
        assert parse(AcpSettings, {}).approval_timeout == 600

    def test_one_number_is_a_list_of_one(self) -> None:
        """An id that was stored as a bare number is still that id."""
        assert parse(AcpSettings, {"allowed-actors": 7}).allowed_actors == ("7",)


class TestOneErrorPerBadField:
    """``coding.setting_invalid`` names the field and the problem and shows nothing of the value."""

    @pytest.mark.parametrize(
        ("field", "value", "problem"),
        [
            ("location", "mars", "not_an_option"),
            ("workspace", ["/a"], "not_text"),
            ("workspace", "/a\x00b", "control_characters"),
            ("workspace", "/a\nb", "control_characters"),
            ("workspace", "x" * (limits.FORM_TEXT_CHARS + 1), "too_long"),
            ("ssh-port", "ssh", "not_a_number"),
            ("ssh-port", True, "not_a_number"),
            ("ssh-port", 22.5, "not_a_whole_number"),
            ("ssh-port", 65536, "out_of_range"),
            ("ssh-port", -1, "out_of_range"),
            ("daemon-id", "d" * 129, "too_long"),
            ("timeout", "nan", "not_a_number"),
            ("timeout", "inf", "not_a_number"),
            pytest.param("timeout", 10**400, "not_a_number", id="timeout-401-digits"),
            pytest.param("ssh-port", 10**400, "not_a_number", id="ssh-port-401-digits"),
            pytest.param("workspace", 10**5000, "unusable", id="workspace-5001-digits"),
            ("env-json", '{"A": ' + "9" * 5000 + "}", "unusable"),
            ("timeout", 9, "out_of_range"),
            ("timeout", 86_401, "out_of_range"),
            ("keep-warm", -1, "out_of_range"),
            ("idle-timeout", 10**9, "out_of_range"),
            ("startup-timeout", 0, "out_of_range"),
            ("streaming", "maybe", "not_a_switch"),
            ("streaming", 2, "not_a_switch"),
            ("approval-policy", "yolo", "not_an_option"),
            ("approval-rules", "allow read\npermit edit", "rule_shape"),
            ("approval-rules", "allow execute(ls; rm x)", "rule_command"),
            ("approval-rules", {"allow": "read"}, "not_text"),
            ("approval-rules", "allow read\x00", "control_characters"),
            ("approvers", list(range(1001)), "too_many"),
            ("approval-timeout", 29, "out_of_range"),
            ("approval-timeout", 86_401, "out_of_range"),
            ("approval-timeout", 60.5, "not_a_whole_number"),
            ("language", "tlh", "not_an_option"),
            ("allowed-actors", {"id": {"deep": 1}}, "not_text"),
            ("allowed-actors", [True], "not_text"),
            ("allowed-actors", list(range(1001)), "too_many"),
            ("env-json", "{", "not_json"),
            ("env-json", "[" * 200_000, "not_json"),
            ("env-json", '"' + "x" * limits.FORM_JSON_BYTES + '"', "too_long"),
            ("env-json", "[1]", "not_an_object"),
            ("env-json", {"A=B": "x"}, "bad_name"),
            ("env-json", {"1A": "x"}, "bad_name"),
            ("env-json", {"A": None}, "not_text_value"),
            ("env-json", {"A": {"b": 1}}, "not_text_value"),
            ("env-json", {"A": "x\x00y"}, "not_text_value"),
        ],
    )
    def test_a_bad_value_names_its_field_and_problem(self, field: str, value: object, problem: str) -> None:
        """Our rule, one row per way to be wrong."""
        error = refused({field: value})
        assert (error.code, error.params["field"], error.params["problem"]) == (
            "coding.setting_invalid",
            field,
            f"problem.{problem}",
        )
        for language in texts.LANGUAGES:
            assert field in error.text(language)
            assert "problem." not in error.text(language), "the problem is translated, not named"

    def test_the_first_bad_field_is_the_one_reported(self) -> None:
        """Our rule: one error at a time, in the order of the form."""
        assert refused({"timeout": "x", "ssh-port": "x", "location": "x"}).params["field"] == "location"

    def test_a_range_tells_both_ends(self) -> None:
        """A person can mend the value from the text alone."""
        assert "between 0 and 65535" in str(refused({"ssh-port": 70000}))

    def test_an_option_lists_what_there_is(self) -> None:
        """A person can mend the value from the text alone."""
        assert "local, remote-ssh, daemon" in str(refused({"location": "mars"}))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("location", CANARY),
            ("timeout", CANARY),
            ("streaming", CANARY),
            ("env-json", CANARY),
            ("env-json", {f"{CANARY}!": "x"}),
            ("env-json", {CANARY.replace("-", "_"): None}),
            ("env-json", {"A": [CANARY]}),
            ("mcp-servers-json", CANARY),
            ("mcp-servers-json", {"a": {"url": f"ftp://{CANARY}"}}),
            ("mcp-servers-json", {"a": {"url": f"https://u:{CANARY}@h/"}}),
            ("mcp-servers-json", {"a": {"command": CANARY, "args": 3}}),
            ("mcp-servers-json", {"a": {"url": "https://h", "headers": {"A": [CANARY]}}}),
            ("workspace", f"{CANARY}\x00"),
            ("approval-policy", CANARY),
        ],
    )
    def test_no_error_shows_the_value(self, field: str, value: object) -> None:
        """A secret pasted into the wrong place reaches neither chat nor log."""
        error = refused({field: value})
        shown = f"{error!r} {error} {error.params} {error.__cause__} {error.__context__}"
        assert CANARY not in shown
        assert CANARY.replace("-", "_") not in shown

    @given(st.dictionaries(st.sampled_from(FORM_NAMES), STORED))
    def test_any_json_either_parses_or_is_one_settings_error(self, config: dict[str, Any]) -> None:
        """No stored value whatever ends in another exception."""
        try:
            settings = parse(AcpSettings, config)
        except SettingsError as error:
            assert error.params["field"] in config
        else:
            assert limits.TURN_SECONDS_MIN <= settings.timeout <= limits.TURN_SECONDS_MAX


class TestMcpServers:
    """``mcp-servers-json`` in every shape in use."""

    @pytest.mark.parametrize(
        "value",
        [
            {
                "mcpServers": {
                    "a": {"url": "https://h:1/p", "headers": {"X": "1"}},
                    "b": {"command": "c", "args": ["d"], "env": {"E": "2"}},
                }
            },
            {
                "a": {"type": "http", "url": "https://h:1/p", "headers": {"X": "1"}},
                "b": {"command": ["c", "d"], "env": {"E": "2"}},
            },
            [
                {"name": "a", "type": "streamable-http", "url": "https://h:1/p", "headers": [{"name": "X", "value": "1"}]},
                {"name": "b", "type": "stdio", "command": "c", "args": ["d"], "env": [{"name": "E", "value": "2"}]},
            ],
        ],
    )
    def test_the_usual_shapes_mean_the_same(self, value: object) -> None:
        """Claude's file, a bare object, and ACP's own list."""
        a, b = parse(AcpSettings, {"mcp-servers-json": value}).mcp_servers({})
        assert (a.name, a.transport, a.url, dict(a.headers)) == ("a", "http", "https://h:1/p", {"X": "1"})
        assert (b.name, b.transport, b.command, dict(b.env)) == ("b", "stdio", ("c", "d"), {"E": "2"})

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            ("3", "mcp_shape"),
            ([{"url": "https://h"}], "mcp_names"),
            ([{"name": "a", "url": "https://h"}, {"name": " a ", "url": "https://h"}], "mcp_names"),
            ({"a": 1}, "mcp_entry"),
            ({"a": {}}, "mcp_entry"),
            ({"a": {"type": "carrier-pigeon", "url": "https://h"}}, "mcp_entry"),
            ({"a": {"url": "https://h", "headers": {"X": "1\r\nY: 2"}}}, "mcp_entry"),
            ({"a": {"url": "https://h", "headers": ["X"]}}, "mcp_entry"),
            ({"a": {"url": "h"}}, "mcp_url"),
            ({"a": {"url": "http://"}}, "mcp_url"),
            ({"a": {"url": "http://[bad"}}, "mcp_url"),
            ({"a": {"url": "http://h:99999"}}, "mcp_url"),
            ({"a": {"url": "http://h/ x"}}, "mcp_url"),
            ({"a": {"url": "https://user:pw@h/"}}, "secret_place"),
            ({"a": {"url": "https://h/${secret:T}"}}, "secret_place"),
            ({"a": {"command": "c", "args": ["--token=${secret:T}"]}}, "secret_place"),
            ({f"s{n}": {"command": "c"} for n in range(33)}, "too_many"),
        ],
    )
    def test_a_bad_server_is_refused_by_name(self, value: object, problem: str) -> None:
        """Our rule, one row per way to be wrong; secrets belong into headers and environments only."""
        assert refused({"mcp-servers-json": value}).params["problem"] == f"problem.{problem}"

    @pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "10.0.0.1", "192.168.1.1", "169.254.169.254"])
    def test_a_private_address_is_an_address(self, host: str) -> None:
        """Known gap: only the form is checked; where a deployment's workers may go is for its own network to say."""
        (server,) = parse(AcpSettings, {"mcp-servers-json": {"a": {"url": f"http://{host}:9/p"}}}).mcp_servers({})
        assert server.url == f"http://{host}:9/p"


class TestSecrets:
    """``${secret:NAME}`` and what is never shown."""

    def test_references_are_filled_from_the_plugin_form(self) -> None:
        """Our rule: the value stands in the plugin form only, which the host masks."""
        plugin = parse(AcpPluginSettings, {"agent-secret-values": f'{{"KEY": "{CANARY}"}}'})
        runner = parse(
            AcpSettings,
            {
                "env-json": {"API": "${secret:KEY}", "PLAIN": "${HOME}"},
                "mcp-servers-json": {"a": {"url": "https://h", "headers": {"Authorization": "Bearer ${secret:KEY}"}}},
            },
        )
        assert runner.environment(plugin.secrets) == {"API": CANARY, "PLAIN": "${HOME}"}
        assert runner.mcp_servers(plugin.secrets)[0].headers["Authorization"] == f"Bearer {CANARY}"

    def test_secrets_stored_under_the_fields_former_name_still_count(self) -> None:
        """Both are read; where both have a name, the field that the form shows and the host masks wins."""
        plugin = parse(
            AcpPluginSettings,
            {"agent-secrets": '{"OLD": "1", "BOTH": "former"}', "agent-secret-values": {"NEW": "2", "BOTH": "now"}},
        )
        values = {name: value.get_secret_value() for name, value in plugin.secrets.items()}
        assert values == {"OLD": "1", "NEW": "2", "BOTH": "now"}
        assert parse(AcpPluginSettings, {"agent-secrets": {"OLD": "1"}}).secrets.keys() == {"OLD"}

    def test_a_missing_secret_is_named_with_its_field(self) -> None:
        """Our rule: a person learns which name to add and where."""
        runner = parse(AcpSettings, {"env-json": {"API": "${secret:KEY}"}})
        with pytest.raises(CodingError) as caught:
            runner.environment({})
        assert caught.value.params["field"] == "env-json"
        assert '"KEY"' in str(caught.value)

    def test_a_secret_pasted_instead_of_its_name_is_not_shown(self) -> None:
        """What stands where a name belongs may be the secret itself."""
        with pytest.raises(SettingsError) as caught:
            resolve_secrets("${secret:" + CANARY + "/+=}", {}, field="env-json")
        assert CANARY not in str(caught.value)

    def test_a_filled_secret_is_not_looked_at_again(self) -> None:
        """A secret that looks like a reference stays what it is."""
        secrets = {"A": SecretStr("${secret:B}"), "B": SecretStr("x")}
        assert resolve_secrets("${secret:A}", secrets) == "${secret:B}"
        assert secret_names(["${secret:A} ${secret:B}", "${A}"]) == {"A", "B"}

    def test_no_repr_shows_a_secret(self) -> None:
        """Neither form's repr, nor that of anything in it, can leak into a log."""
        plugin = parse(
            AcpPluginSettings,
            {"daemon-token": CANARY, "ssh-private-key-secret": f"-----BEGIN\n{CANARY}\n", "agent-secret-values": {"A": CANARY}},
        )
        runner = parse(
            AcpSettings,
            {"env-json": {"A": CANARY}, "mcp-servers-json": {"a": {"url": "https://h", "headers": {"X": CANARY}}}},
        )
        assert CANARY not in f"{plugin!r} {plugin} {runner!r} {runner} {runner.mcp_servers_json!r} {plugin.secrets!r}"

    def test_tokens_and_keys_stay_as_they_were_stored(self) -> None:
        """A surrounding space decides whether a token is acceptable, and a key ends with its line break."""
        plugin = parse(AcpPluginSettings, {"daemon-token": " t ", "ssh-private-key-secret": "k\n"})
        assert plugin.daemon_token.get_secret_value() == " t "
        assert plugin.ssh_private_key_secret.get_secret_value() == "k\n"

    @pytest.mark.parametrize("value", [CANARY, "[1]", {"a b": "x"}, {"A": {"B": CANARY}}, {"A": None}])
    def test_bad_secrets_are_refused_without_being_shown(self, value: object) -> None:
        """Our rule: the error names the field, never an entry's text."""
        with pytest.raises(SettingsError) as caught:
            parse(AcpPluginSettings, {"agent-secret-values": value})
        assert caught.value.params["field"] == "agent-secret-values"
        assert CANARY not in str(caught.value)


def test_settings_cannot_be_changed() -> None:
    """Our rule: what a run was started with holds to its end."""
    with pytest.raises(ValueError, match="frozen"):
        parse(AcpSettings, {}).timeout = 1
