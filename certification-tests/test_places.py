"""Where an agent lives: what of the form makes the way there another one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from langbot_plugin.entities.io.context import InstallationBinding

from pkg import installations, relay_hub_shell
from pkg.agent_api import SessionSpec
from pkg.errors import Refused, SettingsError
from pkg.held_session import fingerprint
from pkg.identity import Authority
from pkg.launch import LocalLauncher
from pkg.places import Place, place_of
from pkg.settings import PluginSettings, RunnerSettings, parse

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY-----\n"
HOST_KEY = "host ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{}"


def opened_with(key: str = "b25l", **fields: Any) -> str:
    """What a session of this form is remembered by."""
    form = {"location": "remote-ssh", "ssh-target": "ann@host", "ssh-known-hosts": HOST_KEY.format("A"), **fields}
    stored = {"ssh-private-key-secret": KEY.format(key)}
    place = place_of(parse(RunnerSettings, form), parse(PluginSettings, stored), stored, Authority(None), "agent")
    return fingerprint(SessionSpec(("agent",), place.workspace), place, assets=True)


@pytest.mark.parametrize(
    "changed",
    [
        {"key": "dHdv"},
        {"ssh-port": 2222},
        {"ssh-known-hosts": HOST_KEY.format("B")},
        {"ssh-extra-options": "-C"},
        {"ssh-identity-file": "/etc/hostname"},
        {"ssh-connect-timeout": 7},
    ],
)
def test_another_way_to_the_machine_is_another_session(changed: dict[str, Any]) -> None:
    """Authority table: a kept process ends with a reconfiguration; another key or host key is one, on the same machine too."""
    assert opened_with() == opened_with()
    assert opened_with(**changed) != opened_with()
    assert "b25l" not in opened_with()


POOLED = Authority(
    InstallationBinding(
        instance_uuid="i",
        workspace_uuid="w",
        placement_generation=1,
        installation_uuid="a",
        runtime_revision=1,
        artifact_digest="0" * 64,
    ),
    pooled=True,
)


def test_the_pool_is_no_place_for_an_agent() -> None:
    """Our rule: a worker that serves several installations starts no agent beside itself, whatever its environment says."""
    settings = parse(RunnerSettings, {"location": "local", "workspace": "/tmp"})
    with pytest.raises(Refused) as caught:
        place_of(settings, parse(PluginSettings, {}), {}, POOLED, "agent")
    assert caught.value.code == "coding.local_in_pool"


def test_ssh_from_the_pool_uses_nothing_of_the_worker() -> None:
    """Our rule: no file of the worker that others share: what one installation's form names there is refused."""
    form = {"location": "remote-ssh", "ssh-target": "ann@host", "ssh-identity-file": "/etc/hostname"}
    settings, plugin = parse(RunnerSettings, form), parse(PluginSettings, {})
    assert place_of(settings, plugin, {}, Authority(POOLED.binding), "agent")
    with pytest.raises(SettingsError):
        place_of(settings, plugin, {}, POOLED, "agent")


def test_a_token_does_not_show_in_a_place() -> None:
    """Secrets: the token of the plugin's form is in no repr of the way to a daemon, nor in what a session is remembered by."""
    stored = {"daemon-enabled": True, "daemon-token": "canary-" + "t0" * 20}
    settings = parse(RunnerSettings, {"location": "daemon", "daemon-id": "laptop"})
    place = place_of(settings, parse(PluginSettings, stored), stored, Authority(None), "a product of this test")
    assert place.daemon is not None
    assert place.daemon.token == stored["daemon-token"]
    assert "canary" not in repr(place) + fingerprint(SessionSpec(("agent",), "/w"), place, assets=True)
    relay_hub_shell.revoke(installations.UNBOUND)


def test_a_kept_session_is_remembered_by_everything_it_was_opened_with() -> None:
    """Our rule: whatever of the form decides how a session is opened, and where, makes another session when it changes."""

    @dataclass
    class Elsewhere(LocalLauncher):
        machine: str = "machine"

    spec = SessionSpec(("agent",), "/w", env={"A": "1"})
    place = Place(Elsewhere(), "/w", may_keep=True, way="way", worktree="tree")
    others = [
        fingerprint(dataclasses.replace(spec, env={"A": "2"}), place, assets=True),
        fingerprint(spec, dataclasses.replace(place, launcher=Elsewhere("other")), assets=True),
        fingerprint(spec, dataclasses.replace(place, way="other"), assets=True),
        fingerprint(spec, dataclasses.replace(place, worktree="other"), assets=True),
        fingerprint(spec, place, assets=False),
    ]
    assert len({fingerprint(spec, place, assets=True), *others}) == len(others) + 1
