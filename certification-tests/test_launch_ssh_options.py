"""What the SSH fields of a form may ask for, the frames both sides speak, and the one line a remote shell gets; no network."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pkg import (
    launch_ssh,
    limits,
    process_supervisor,
    runtime_support,
    ssh_errors,
    ssh_library,
    ssh_options,
    ssh_wrapper,
    texts,
)
from pkg.errors import SettingsError
from pkg.launch_ssh import REMOTE_LINE, SshLauncher, SshTarget
from pkg.ssh_options import check, normalise_key, normalise_known_hosts, text_of
from pkg.ssh_wrapper import BrokenFraming, Decoder, encode
from testkit.sshd import program

NAME = "OPENSSH PRIVATE KEY"
KEY = f"-----BEGIN {NAME}-----\nQUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=\nMTIzNDU2Nzg5MA==\n-----END {NAME}-----\n"
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKpS"


def checked(options: str, *, everything: bool = False) -> ssh_options.SshOptions:
    """The target with these extra options, checked."""
    return ssh_options.check(SshTarget("user@host", extra_options=options, allow_local_commands=everything))


# ------------------------------------------------------------------ options

RUNS_LOCAL_COMMANDS = [
    "-o ProxyCommand=evil",
    "-oProxyCommand=evil",
    "-oproxycommand=evil",
    "-o PROXYCOMMAND=evil",
    '-o "ProxyCommand evil"',
    '-o "  ProxyCommand   =  evil"',
    "-o 'ProxyCommand\tevil'",
    '-o "\\"ProxyCommand\\" evil"',
    "-4oProxyCommand=evil",
    "-4 -o ProxyCommand=evil",
    "-qCo ProxyCommand=evil",
    "-o LocalCommand=evil",
    "-o PermitLocalCommand=yes",
    "-o KnownHostsCommand=evil",
    "-o 'Match exec evil'",
    "-o 'Match=exec evil'",
    "-o Include=/tmp/evil",
    "-F /tmp/evil",
    "-F/tmp/evil",
    "-4F/tmp/evil",
    "-o PKCS11Provider=/tmp/evil.so",
    "-I /tmp/evil.so",
    "-I/tmp/evil.so",
    "-o SmartcardDevice=/tmp/evil.so",
    "-o SecurityKeyProvider=/tmp/evil.so",
    "-o ProxyUseFdpass=yes",
    "-o XAuthLocation=/tmp/evil",
    "-i pkcs11:?module-path=/tmp/evil.so",
    "-o 'IdentityFile pkcs11:?module-path=/tmp/evil.so'",
    "-o 'ProxyJump=-oProxyCommand=evil'",
    "-J -oProxyCommand=evil",
    "-J 'a;evil'",
    "-J '$(evil)@host'",
    "-o 'User=$(evil)'",
    "-l '`evil`'",
    "-o 'Port=22\nProxyCommand=evil'",
    "-o Port=22 -o ProxyCommand=evil",
]
CHANGES_WHAT_WE_RELY_ON = [
    "-o ControlPath=/tmp/x",
    "-S /tmp/x",
    "-M",
    "-o ControlMaster=auto",
    "-o StrictHostKeyChecking=no",
    "-o UpdateHostKeys=yes",
    "-o BatchMode=no",
    "-o PasswordAuthentication=yes",
    "-o ForwardAgent=yes",
    "-A",
    "-X",
    "-Y",
    "-L 1:localhost:2",
    "-R 1:localhost:2",
    "-D 1",
    "-W a:1",
    "-w 0",
    "-E /tmp/log",
    "-f",
    "-N",
    "-t",
    "-s",
    "-G",
    "-V",
    "-v",
    "-O exit",
    "-Q key",
    "-o SendEnv=SECRET",
    "-o SetEnv=A=b",
    "-o IdentityAgent=/tmp/x",
    "-o RemoteCommand=x",
    "-o Unheard=x",
    "-o",
    "-o =",
    "-o Port",
    "-p",
    "--",
    "-- other",
    "other",
    "-",
    "-?",
]


@pytest.mark.parametrize("options", RUNS_LOCAL_COMMANDS + CHANGES_WHAT_WE_RELY_ON)
def test_an_option_that_is_not_known_to_be_harmless_is_refused_without_repeating_its_value(options: str) -> None:
    """Our rule: an editor of the form runs no program beside the worker, whatever way ssh(1) offers to write it."""
    with pytest.raises(SettingsError) as caught:
        checked(options)
    assert caught.value.code in ("coding.ssh_option_forbidden", "coding.ssh_options_unparsable")
    assert caught.value.params["field"] == "ssh-extra-options"
    assert "evil" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ("", ()),
        ("   ", ()),
        ("-4 -C", ("-4", "-C")),
        ("-4C", ("-4", "-C")),
        ("-T -q -x -a -k -n", ()),
        ("-p 2222", ("-o", "Port=2222")),
        ("-p2222", ("-o", "Port=2222")),
        ("-4p2222", ("-4", "-o", "Port=2222")),
        ("-l bob -c aes256-ctr -m hmac-sha2-256", ("-o", "User=bob", "-o", "Ciphers=aes256-ctr", "-o", "MACs=hmac-sha2-256")),
        ("-o compression=yes", ("-o", "Compression=yes")),
        ("-oCompression=yes", ("-o", "Compression=yes")),
        ('-o "  HostKeyAlias =  box "', ("-o", "HostKeyAlias=box")),
        ("-o 'HostKeyAlias box'", ("-o", "HostKeyAlias=box")),
        ("-i '/keys/my key'", ("-o", 'IdentityFile="/keys/my key"')),
        ("-o BatchMode=yes -ostricthostkeychecking=yes -o 'PermitLocalCommand no'", ()),
        ("-J bob@jump:2222,other", ("-o", "ProxyJump=bob@jump:2222,other")),
    ],
)
def test_harmless_options_pass_rebuilt_from_their_parts(options: str, arguments: tuple[str, ...]) -> None:
    """Our rule: what the client reads is what was checked, whatever spelling it came in."""
    assert checked(options).extra == arguments


def test_the_switch_lets_every_option_through_but_those_that_break_the_connection() -> None:
    """Our rule: ``ssh-allow-local-commands`` is the explicit way to a ProxyCommand; one in the background stays refused."""
    assert checked("-o ProxyCommand=go -F /x -v", everything=True).extra == ("-o", "ProxyCommand=go", "-F", "/x", "-v")
    for options in ("-f", "-N", "-G", "-V", "-s", "-t", "-o", "host", "--"):
        with pytest.raises(SettingsError):
            checked(options, everything=True)


def test_the_library_refuses_what_only_the_switch_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: an option that the client at hand cannot have is an error, never silently without effect."""
    for options, everything in (("-o ProxyCommand=x", True), ("-J jump", False), ("-o Ciphers=aes256-ctr", False)):
        launcher = SshLauncher(
            SshTarget("u@h", extra_options=options, allow_local_commands=everything, private_key=KEY, client="library")
        )
        with pytest.raises(SettingsError) as caught:
            launcher._library(None)
        assert caught.value.code == "coding.ssh_option_unsupported"
    with pytest.raises(SettingsError) as caught:
        SshLauncher(SshTarget("h", private_key=KEY, client="library"))._library(None)
    assert caught.value.code == "coding.ssh_user_missing"


@pytest.mark.parametrize("options", ["-o 'unclosed", "-o \x00Port=1", "-4 " * 100])
def test_options_that_cannot_be_parsed_are_one_error(options: str) -> None:
    """Our rule: bad quoting, control characters and absurd lengths name the field."""
    with pytest.raises(SettingsError) as caught:
        checked(options)
    assert caught.value.code == "coding.ssh_options_unparsable"


@given(st.text(alphabet="-oOpPFiJ46 ='\"\\\tProxyCommandLCexecuty;$", max_size=40))
@settings(max_examples=400, deadline=None)
def test_no_text_of_options_becomes_an_argument_outside_the_harmless_ones(text: str) -> None:
    """Our rule as a property: every argument is a known flag or ``-o`` with a harmless name."""
    try:
        arguments = checked(text).extra
    except SettingsError:
        return
    words = iter(arguments)
    for word in words:
        if word == "-o":
            assert next(words).split("=")[0].lower() in ssh_options._HARMLESS
        else:
            assert word in ("-4", "-6", "-C")


@pytest.mark.ssh
@pytest.mark.parametrize(
    "options",
    [
        "",
        "-o BatchMode=yes",
        "-o 'Port=22 ProxyCommand=evil'",
        "-o 'HostKeyAlias=x # y'",
        "-o 'HostKeyAlias=x\\\\nProxyCommand evil'",
        "-o 'IdentityFile=/a b %h ${HOME}'",
        "-o 'IdentityFile=a -o ProxyCommand=evil'",
        "-o 'UserKnownHostsFile=/a /b'",
        "-o 'User=u' -l other",
        "-o ServerAliveInterval=9999 -o ConnectTimeout=9999",
        "-J jump -4 -C",
    ],
)
def test_the_real_client_reads_nothing_else_out_of_what_passed(options: str) -> None:
    """OpenSSH's own word (``ssh -G``): no local command, and what every connection is made with cannot be changed."""
    launcher = SshLauncher(SshTarget("me@host", port=77, extra_options=options))
    argv = launcher._openssh(None, launch_ssh._Memory())
    command = [program("ssh"), "-F", "none", "-G", *argv[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        assert "evil" in options and done.stdout == ""
        return
    read = [line.partition(" ") for line in done.stdout.lower().splitlines()]
    names = {name for name, _, _ in read}
    assert not {"proxycommand", "localcommand", "knownhostscommand", "pkcs11provider"} & names
    assert {("port", "77"), ("user", "me"), ("hostname", "host"), ("connecttimeout", "15"), ("serveraliveinterval", "10")} <= {
        (name, value) for name, _, value in read
    }
    said = {name: value for name, _, value in read}
    assert said["batchmode"] == "yes" and said["permitlocalcommand"] == "no" and said["exitonforwardfailure"] == "yes"
    assert said["stricthostkeychecking"] in ("true", "yes") and said["requesttty"] in ("false", "no")
    assert said["forwardagent"] == "no" and said["controlmaster"] in ("false", "no") and "controlpath" not in said


# ------------------------------------------------------------------ targets, keys, host keys


@pytest.mark.parametrize(
    "target",
    [
        *("", " ", "-oProxyCommand=evil", "-host", "user@-host", "@host", "user@", "host;evil", "$(evil)", "a b", "host\n"),
        *("user@host:22", "10.0.0.1:22", "ssh://user@host", "user@host/path", "a`b`@host", "[::1", "::g", "user'@host", "h%h"),
    ],
)
def test_a_target_that_is_no_name_is_refused(target: str) -> None:
    """Our rule: never an option, never a character that a shell (an account's own ProxyCommand) would read."""
    with pytest.raises(SettingsError) as caught:
        ssh_options.check(SshTarget(target))
    assert caught.value.code == "coding.ssh_target_invalid"
    assert caught.value.params["field"] == "ssh-target"


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        (SshTarget("user@host"), "user@host:22"),
        (SshTarget("alias"), "alias:22"),
        (SshTarget("user@host", port=2222), "user@host:2222"),
        (SshTarget("host", extra_options="-p 7 -l bob"), "bob@host:7"),
        (SshTarget("name@realm@host"), "name@realm@host:22"),
        (SshTarget("user@[::1]"), "user@[::1]:22"),
        (SshTarget("user@fe80::1"), "user@[fe80::1]:22"),
    ],
)
def test_a_machine_has_one_stable_name(target: SshTarget, machine: str) -> None:
    """Our rule: account, host and port make the name under which sessions are stored."""
    assert SshLauncher(target).machine == machine


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        KEY.replace("\n", " "),
        KEY.replace("\n", "\\n"),
        KEY.replace("\n", "\r\n"),
        "  " + KEY + "\n\n",
        KEY.rstrip("\n"),
    ],
)
def test_a_key_survives_what_a_form_field_does_to_it(text: str) -> None:
    """Our rule: line breaks lost or escaped by a one-line field are put back."""
    assert normalise_key(text) == KEY


@pytest.mark.parametrize("text", ["hello", KEY[:60], KEY + "more", "ssh-ed25519 AAAA", KEY.replace("QUJD", "Q" * 70000)])
def test_a_text_that_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    """Our rule: the error names the field and shows nothing of the value."""
    with pytest.raises(SettingsError) as caught:
        ssh_options.check(SshTarget("u@h", private_key=text))
    assert caught.value.params["field"] == "ssh-private-key-secret"
    assert text[:20] not in str(caught.value)


def test_a_key_stays_out_of_every_repr() -> None:
    """Our rule: values that hold secrets do not show them."""
    target = SshTarget("u@h", private_key=KEY, known_hosts=f"h {HOST_KEY}")
    assert "QUJD" not in repr(target) + repr(ssh_options.check(target))


def test_host_keys_are_taken_as_lines_joined_lines_or_a_path(tmp_path: Path) -> None:
    """Our rule: what ssh-keyscan prints may be pasted into a field with or without line breaks, or named as a file."""
    more = f"@cert-authority *.box {HOST_KEY}\n|1|a=|b= {HOST_KEY}\n"
    lines = f"# box:22 SSH-2.0\nbox {HOST_KEY}\n[box]:2222 {HOST_KEY} a comment\n{more}"
    clean = f"box {HOST_KEY}\n[box]:2222 {HOST_KEY}\n{more}"
    assert normalise_known_hosts(lines) == clean
    assert normalise_known_hosts(clean.replace("\n", " ")) == clean
    (tmp_path / "hosts").write_text(lines)
    assert normalise_known_hosts(str(tmp_path / "hosts")) == clean


@pytest.mark.parametrize("text", ["box", HOST_KEY, "/nowhere/known_hosts", "box ssh-ed25519", "# only a comment"])
def test_host_keys_that_are_none_are_refused(text: str) -> None:
    """Our rule: a field that would trust nobody is an error at once, not a failed connection later."""
    with pytest.raises(SettingsError) as caught:
        normalise_known_hosts(text)
    assert caught.value.params["field"] == "ssh-known-hosts"


def test_an_identity_file_must_be_there(tmp_path: Path) -> None:
    """Our rule: a missing key file is said as that, not as a refused login."""
    for path in ("/nowhere/key", str(tmp_path), "pkcs11:x", "-x", "~nobody-here/key"):
        with pytest.raises(SettingsError) as caught:
            ssh_options.check(SshTarget("u@h", identity_file=path))
        assert caught.value.code == "coding.ssh_identity_missing"


# ------------------------------------------------------------------ what a client's words mean


def test_an_unknown_failure_shows_one_bounded_line_without_paths_and_secrets() -> None:
    """Our rule: raw client output reaches nobody."""
    words = "first line\nsomething /root/.ssh/config new at ~/.x happened to hunter2hunter2 " + "x" * 500
    error = ssh_errors.classify(words, machine="u@h:22", secrets=["hunter2hunter2"])
    assert error.code == "coding.ssh_failed"
    assert "/root" not in str(error) and "hunter2" not in str(error) and "first line" not in str(error)
    assert len(error.detail) <= limits.SSH_DETAIL_CHARS


def test_every_code_has_a_text_that_needs_nothing_more_than_it_is_given() -> None:
    """Our rule: an error a person reads has words, in the catalogue, with its placeholders filled."""
    codes = {code for _, code in ssh_errors._MEANINGS} | ssh_errors._CODES | {"ssh_no_shell"}
    for code in codes:
        text = str(ssh_errors.error(code, "u@h:22"))
        assert not text.startswith("coding.") and "{" not in text
    for key, template in texts.catalogue("en_US").items():
        if key.startswith("coding.ssh_"):
            filled = texts.render(key, "en_US", dict.fromkeys(("machine", "field", "option", "name", "places"), "X"))
            assert "{" not in filled, template


# ------------------------------------------------------------------ frames

FRAMES = st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=300)), max_size=12)


@given(FRAMES, st.lists(st.integers(1, 400), max_size=40))
@settings(deadline=None)
def test_frames_survive_any_cutting(frames: list[tuple[int, bytes]], cuts: list[int]) -> None:
    """Our protocol: the decoder gives the frames that were encoded, wherever the stream is cut."""
    data = b"".join(encode(channel, payload) for channel, payload in frames)
    decoder = Decoder(1000)
    got: list[tuple[int, bytes]] = []
    for size in cuts:
        got += decoder.feed(data[:size])
        data = data[size:]
    got += decoder.feed(data)
    assert got == frames


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_garbage_gives_frames_or_one_error_and_nothing_else(data: bytes) -> None:
    """Our protocol: what is not a frame raises, again at every later call, and never more than one frame is held."""
    decoder = Decoder(100)
    try:
        for channel, payload in decoder.feed(data):
            assert channel <= 3 and len(payload) <= ssh_wrapper.CHUNK
    except BrokenFraming:
        with pytest.raises(BrokenFraming):
            decoder.feed(b"")


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come() -> None:
    """Our protocol: nobody makes the other side hold an unbounded frame."""
    for channel, size in ((0, 101), (2, ssh_wrapper.CHUNK + 1), (4, 0)):
        with pytest.raises(BrokenFraming):
            Decoder(100).feed(bytes((channel,)) + size.to_bytes(4, "big"))


@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
@settings(deadline=None)
def test_a_control_frame_is_a_named_message_or_an_error(payload: bytes) -> None:
    """Our protocol: scalars, arrays, broken JSON and nameless objects on the control channel are refused."""
    try:
        assert isinstance(ssh_wrapper.parse(payload)["t"], str)
    except BrokenFraming:
        return
    assert isinstance(json.loads(payload), dict)


# ------------------------------------------------------------------ what travels to the remote machine

SHELLS = ["sh", *filter(shutil.which, ("dash", "bash", "zsh", "fish", "tcsh", "busybox"))]
"""Login shells of this machine; every one that is installed counts."""


@pytest.mark.parametrize("module", [ssh_wrapper, process_supervisor])
def test_what_travels_runs_on_old_pythons(module: object) -> None:
    """Our promise: the remote Python may be 3.7, so the syntax of both programs is."""
    path = getattr(module, "__file__", "")
    ast.parse(Path(path).read_text(), feature_version=(3, 7))


def test_the_remote_line_means_the_same_to_every_shell() -> None:
    """Our rule: one single-quoted word without quote, newline, ``!`` or backslash-quote: sh, csh and fish pass it on alike."""
    head, _, rest = REMOTE_LINE.partition("'")
    assert head == "exec /bin/sh -c "
    assert rest.endswith("'") and "'" not in rest[:-1]
    assert not set("\n!") & set(REMOTE_LINE)
    assert "\\\\" not in REMOTE_LINE and "\\'" not in REMOTE_LINE


@pytest.mark.parametrize("shell", SHELLS)
def test_the_bootstrap_reads_exactly_its_program_and_leaves_the_rest(shell: str) -> None:
    """Our protocol: not a byte after the announced length is taken from stdin, in small pieces too."""
    found = shutil.which(shell) or shell
    program = b"import os\n" + b"#" * 70000 + b"\nos.write(1,b'<'+os.read(0,99)+b'>')\n"
    argv = [found, "sh", "-c", REMOTE_LINE] if shell == "busybox" else [found, "-c", REMOTE_LINE]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process:
        while (line := process.stdout.readline()) != b"coding-ssh-1 python3\n":
            assert line, "the shell ended without the greeting"
        data = b"%08d" % len(program) + program
        for start in range(0, len(data), 9000):
            process.stdin.write(data[start : start + 9000])
            process.stdin.flush()
        process.stdin.write(b"the rest")
        process.stdin.flush()
        assert process.stdout.read() == b"<the rest>"


def test_a_missing_library_is_said_by_the_child_program() -> None:
    """Our rule: where neither client is usable the error says so, with nothing but its one line."""
    argv = [sys.executable, "-I", "-S", ssh_library.__file__]
    order = ssh_library.order({"path": [], "command": "true", "tunnel": None})
    done = subprocess.run(argv, input=order, capture_output=True, timeout=30, check=False)
    assert done.returncode == 255 and done.stdout == b""
    assert ssh_errors.classify(done.stderr.decode(), machine="u@h:22").code == "coding.ssh_client_missing"
    assert b"Traceback" not in done.stderr


def test_the_bootstrap_ends_when_its_program_never_comes_whole() -> None:
    """Our protocol: a connection that dies before the program is complete leaves nothing running."""
    done = subprocess.run(
        ["sh", "-c", REMOTE_LINE], input=b"00001000import os", stdout=subprocess.PIPE, timeout=30, check=False
    )
    assert done.returncode == 1


def test_the_search_on_the_remote_machine_prefers_the_newest_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our rule: own PATH first, then the conventional directories that exist, version 22 before 9."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for version in ("v9.1.0", "v22.3.1", "v22.11.0"):
        (tmp_path / ".nvm/versions/node" / version / "bin").mkdir(parents=True)
    (tmp_path / ".local/bin").mkdir(parents=True)
    found = ssh_wrapper.search_path("/usr/bin:/bin", runtime_support.conventional_directories())
    ours = [place.removeprefix(str(tmp_path)) for place in found if place.startswith(str(tmp_path))]
    assert found[:2] == ["/usr/bin", "/bin"]
    assert ours[0] == "/.local/bin"
    assert [place.split("/")[-2] for place in ours[1:]] == ["v22.11.0", "v22.3.1", "v9.1.0"]


@pytest.mark.parametrize("place", ["fifo", "/dev/zero", "large", "."])
def test_a_path_in_a_form_is_read_only_where_reading_ends(tmp_path: Path, place: str) -> None:
    """Our rule: a pipe never begins and a device never ends, and both would hold or fill the worker."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"h " * limits.SSH_FILE_BYTES)
    path = str(tmp_path / place)
    with pytest.raises(SettingsError) as caught:
        normalise_known_hosts(path)
    assert caught.value.code == "coding.ssh_known_hosts_invalid"
    with pytest.raises(OSError, match=r"."):
        text_of(Path(path))


@pytest.mark.parametrize("option", ["-o UserKnownHostsFile={}", "-i {}", "-o 'GlobalKnownHostsFile /dev/null {}'"])
@pytest.mark.parametrize("place", ["fifo", "/dev/zero"])
def test_an_option_does_not_send_the_client_into_an_endless_file(tmp_path: Path, option: str, place: str) -> None:
    """Our rule: OpenSSH reads known hosts line by line without a bound; what has no end is not given to it."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError) as caught:
        check(SshTarget("u@h", extra_options=option.format(tmp_path / place)))
    assert caught.value.code == "coding.ssh_option_forbidden"
    assert check(SshTarget("u@h", extra_options=option.format("/dev/null" if "Global" in option else tmp_path / "absent")))


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("ssh-private-key-secret", {"private_key": ""}),
        ("ssh-identity-file", {"identity_file": "/etc/hostname"}),
        ("ssh-known-hosts", {"known_hosts": "/etc/ssh/ssh_known_hosts"}),
        ("ssh-allow-local-commands", {"allow_local_commands": True}),
        ("ssh-extra-options", {"extra_options": "-i /etc/hostname"}),
        ("ssh-extra-options", {"extra_options": "-o UserKnownHostsFile=/etc/hostname"}),
        ("ssh-extra-options", {"extra_options": "-J jump.example"}),
    ],
)
def test_a_worker_shared_with_others_gives_nothing_of_its_own(field: str, changed: dict[str, Any]) -> None:
    """Our rule: in the pool one installation's form reaches no file, key or program that is another's or the operator's."""
    target = SshTarget("user@host", private_key=KEY, extra_options="-C", shared_worker=True)
    assert ssh_options.check(target).shared_worker
    with pytest.raises(SettingsError) as caught:
        ssh_options.check(dataclasses.replace(target, **changed))
    assert caught.value.code == "coding.ssh_in_pool"
    assert caught.value.params["field"] == field
