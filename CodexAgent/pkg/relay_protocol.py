"""The relay ``coding-relay-v1`` as a state machine without I/O: the two roles, and everything a shell needs around them.

Frames go in and come out as bytes, time is passed in, randomness is passed in. Nothing here opens a socket, reads a clock,
starts a task or touches a file; what must be durable goes through small interfaces that the shell implements.

::

    relay_frames      JSON in and out, the seal of a frame
    relay_auth        keys, the mutual proof, which installation a secret belongs to
    relay_streams     one direction of a job: sequence, acknowledgement, replay, parts, backpressure; frames out of many streams
    relay_events      what the roles tell their shells, the interfaces they need, the times they keep
    relay_table       what a daemon says about its jobs when it connects
    relay_admission   a hub's connections up to their proof: hello, challenge, parking
    relay_jobs        what a hub knows of one daemon and of one job
    relay_hub         the hub's role
    relay_daemon      the daemon's role
"""

from __future__ import annotations

from pkg.relay_auth import (
    PROTOCOL,
    TOKEN_COMMAND,
    Installation,
    daemon_key,
    format_key,
    parse_key,
    token_problem,
    valid_daemon_id,
)
from pkg.relay_daemon import DaemonProtocol
from pkg.relay_events import (
    Backoff,
    Command,
    CommandResult,
    Connected,
    DaemonEvent,
    DaemonGone,
    DaemonReady,
    EndJob,
    Fenced,
    FenceLifted,
    HubEvent,
    JobEvents,
    JobFinished,
    JobForgotten,
    JobLost,
    JobTable,
    JobUnconfirmed,
    McpRequest,
    McpResponse,
    NoMarkers,
    Outcome,
    Parked,
    PendingMarkers,
    Refused,
    RelayRefused,
    RelayTimes,
    StartJob,
    Verb,
    Writable,
)
from pkg.relay_hub import HubProtocol
from pkg.relay_streams import MessageTooLarge, Spill

__all__ = [
    "PROTOCOL",
    "TOKEN_COMMAND",
    "Backoff",
    "Command",
    "CommandResult",
    "Connected",
    "DaemonEvent",
    "DaemonGone",
    "DaemonProtocol",
    "DaemonReady",
    "EndJob",
    "FenceLifted",
    "Fenced",
    "HubEvent",
    "HubProtocol",
    "Installation",
    "JobEvents",
    "JobFinished",
    "JobForgotten",
    "JobLost",
    "JobTable",
    "JobUnconfirmed",
    "McpRequest",
    "McpResponse",
    "MessageTooLarge",
    "NoMarkers",
    "Outcome",
    "Parked",
    "PendingMarkers",
    "Refused",
    "RelayRefused",
    "RelayTimes",
    "Spill",
    "StartJob",
    "Verb",
    "Writable",
    "daemon_key",
    "format_key",
    "parse_key",
    "token_problem",
    "valid_daemon_id",
]
