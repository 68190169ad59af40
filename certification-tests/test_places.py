"""Where an agent lives: what of the form makes the way there another one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from pkg.agent_api import SessionSpec
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
