"""Every bound and default of the core, with its unit and its reason. Nothing else in ``pkg`` writes such a number."""

from __future__ import annotations

from typing import Final

# ---- agent streams

AGENT_LINE_BYTES: Final = 64 * 1024 * 1024
"""Bytes of one line on an agent's stdout; agents embed whole files. (asyncio's own 64 KiB limit breaks real agents.)"""

STDERR_TAIL_BYTES: Final = 64 * 1024
"""Bytes of an agent's stderr kept for error messages; the rest is read and dropped so that it never blocks."""

EVENT_BUFFER_BYTES: Final = 1024 * 1024
"""Bytes of events a session holds for its consumer before it stops reading the agent's pipe."""

AGENT_PIPE_BYTES: Final = 256 * 1024
"""Bytes an agent's stdout pipe holds: an agent goes on writing while the worker is busy for a moment (at 2 MB/s for 0.13 s; the
usual 64 KiB are full after 0.03 s). 120 runs of it stay below half of what Linux grants one account (64 MiB)."""

EVENT_JOINED_CHARS: Final = 16 * 1024
"""Characters up to which waiting pieces of text are joined into one event; a few hundred pieces, and small for any frame."""

# ---- ending a process tree (seconds); together well inside the relay's 10 s

CANCEL_GRACE: Final = 3.0
"""Seconds an agent gets to answer a protocol-level cancel before its stdin is closed."""

EOF_GRACE: Final = 2.0
"""Seconds an agent gets to leave after its stdin was closed."""

TERM_GRACE: Final = 2.0
"""Seconds the tree gets after SIGTERM before SIGKILL."""

KILL_GRACE: Final = 2.0
"""Seconds the kernel gets to make a killed tree disappear before the cleanup counts as unconfirmed."""

# ---- a run

RUNS_PER_PROCESS: Final = 120
"""Active runs of one worker process before it says "busy": the host allows 128 actions in flight on its one connection."""

RUNS_PER_INSTALLATION: Final = 40
"""Of these, the most of one installation where a process serves several: two that want everything leave room for others."""

LOOP_TICK: Final = 0.1
"""Seconds between two looks of the run loop at its clocks while the agent is silent."""

SOFT_END_MARGIN: Final = 15.0
"""Seconds before the absolute limit at which a turn is ended softly, so that its end can still be delivered."""

WAIT_NOTICE: Final = 1.0
"""Seconds a run waits for another one of its session before the person is told; a cancelled turn ends sooner."""

DAEMON_WAIT_NOTICE: Final = 2.0
"""Seconds a run waits for its daemon before the person is told; a short interruption is over by then."""

STEERING_INTERVAL: Final = 1.0
"""Seconds between two pulls of messages that arrived during a run; each run starts at another fraction of it."""

STEERING_LINGER: Final = 0.3
"""Seconds a run waits after its last message for one more; measured: the host claims messages 0.09 to 0.3 s longer."""

STEERING_RECOVERY_AGE: Final = 900.0
"""Seconds a message dropped by the host's closing window is worth recovering when no earlier run left a cursor."""

STEERING_RECOVERY_COUNT: Final = 20
"""Dropped messages recovered by one run at most."""

STEERING_QUEUE: Final = 100
"""Messages waiting for their turn in one run; the host's own queue holds as many."""

CLOSE_WAIT: Final = 10.0
"""Seconds a run waits for a session it ends; the ending goes on under its owner when it takes longer."""

EVENT_CHANNEL: Final = 256
"""Events between a session's reader and the run that consumes them; a full channel holds the agent back."""

ACTION_CHARS: Final = 300
"""Characters of a denied action repeated in the chat."""

# ---- sessions kept alive

WARM_SESSIONS: Final = 16
"""Sessions one installation keeps alive between messages; the least recently used is ended beyond it."""

# ---- attachments

ATTACHMENT_BYTES: Final = 10 * 1024 * 1024
"""Bytes of one attachment; the host's own message limit (16 MiB of JSON with base64) admits no more anyway."""

ATTACHMENTS_BYTES: Final = 16 * 1024 * 1024
"""Bytes of all attachments of one message together."""

ATTACHMENTS_MAX: Final = 20
"""Attachments of one message."""

ATTACHMENT_NAME_CHARS: Final = 128
"""Characters of an attachment's name that are kept."""

# ---- what a person sees (lengths in the unit the constant names; JSON is counted ASCII-escaped, as the host sends it)

RESULT_JSON_BYTES: Final = 600 * 1024
"""Bytes of one result's JSON: the host's frame limit is 1 MiB and a frame carries more than the result."""

RESULT_ENVELOPE_BYTES: Final = 512
"""Bytes of a message result's JSON that are not its text: run id, type, role, nulls (measured: about 360)."""

DELTA_INTERVAL: Final = 0.25
"""Seconds between two deltas of a run: the host handles about 15 results per second for everybody, so 4 is a fair share."""

TELEGRAM_DELTA_INTERVAL: Final = 1.0
"""Seconds between two deltas on Telegram: each is an edit, a chat takes about one per second, and a refused final edit is
answered by the host with a second message."""

MESSAGE_BYTES_FACTOR: Final = 12
"""Bytes sent for one message, all its deltas included, per byte of its final text."""

MESSAGE_BYTES_FREE: Final = 256 * 1024
"""Bytes one message may cost however short it is; deltas repeat the whole text, so cost grows with its square."""

MESSAGE_BYTES_RESERVE: Final = 32 * 1024
"""Bytes of ``MESSAGE_BYTES_FREE`` that deltas leave for the completed message."""

TELEGRAM_TEXT_UNITS: Final = 4000
"""UTF-16 units of one Telegram message (the service takes 4,096 after parsing; the host cuts streamed text at 4,000)."""

TELEGRAM_GROUP_DELTA_INTERVAL: Final = 3.0
"""Seconds between two deltas in a Telegram group, which takes about 20 messages and edits per minute from a bot."""

STATUS_INTERVAL: Final = 2.0
"""Seconds between two deltas that differ only in their progress line, and before progress alone opens another bubble."""

DISCORD_TEXT_UNITS: Final = 1900
"""UTF-16 units of one Discord message: 2,000 less room for the mention the host may put before a group answer."""

UNKNOWN_TEXT_UNITS: Final = 3500
"""UTF-16 units of one message where nobody says the limit."""

STATUS_CHARS: Final = 80
"""Characters of one progress line."""

PROGRESS_LINES: Final = 6
"""Progress lines shown at once with ``show-progress: tools``."""

HEARTBEAT_SILENCE: Final = 15.0
"""Seconds without any result after which a heartbeat is logged: the host notices a cancel only at the next result and gives
up after 300 s of silence."""

NOTICE_HOLD: Final = 2.0
"""Seconds a notice waits for a paragraph end in the answer being streamed before it interrupts it."""

NOTICES_PER_RUN: Final = 20
"""Different notices shown in one run; more are only logged."""

NOTICE_CHARS: Final = 3000
"""Characters of one notice or error text."""

LOG_CHARS: Final = 16 * 1024
"""Characters of one log result; the host refuses, and fails the run, above 65,536."""

REPLY_STREAMS_PER_RUN: Final = 16
"""Live replies the host allows one run on an agent bot; later ones are plain replies."""

REPLY_STREAM_CHARS: Final = 200_000
"""Characters of one live reply the host accepts."""

TELEMETRY_PER_SECOND: Final = 5.0
"""Tool results recorded per second in the long run; the rest is counted and named in one log line."""

TELEMETRY_BURST: Final = 40
"""Tool results recorded at once before ``TELEMETRY_PER_SECOND`` holds."""

TELEMETRY_OPEN_CALLS: Final = 512
"""Recorded tool calls of a run that are still running; the oldest beyond it never get their end recorded."""

TELEMETRY_VALUE_BYTES: Final = 8 * 1024
"""Bytes of JSON of a tool call's parameters or result in telemetry."""

TELEMETRY_STRING_CHARS: Final = 2000
"""Characters of one string inside a tool call's parameters or result in telemetry."""

ESCAPE_CHARS: Final = 2048
"""Characters of one terminal escape sequence before it counts as unterminated and its rest as text."""

# ---- the forms (defaults and bounds of fields; seconds unless said)

TURN_SECONDS: Final = 1800.0
"""Default of ``timeout``: a coding turn takes minutes, half an hour is rare. (The host takes 300 s when none is stored.)"""

TURN_SECONDS_MIN: Final = 10.0
"""Least ``timeout``: below it no agent gets through its own start."""

TURN_SECONDS_MAX: Final = 86_400.0
"""Greatest ``timeout``, and what zero or less ("no limit" to the host) means here: a run that nobody waits for must end."""

STARTUP_SECONDS: Final = 120.0
"""Default of ``startup-timeout``: a package runner may have to fetch several 100 MB once."""

INITIALIZE_SECONDS: Final = 60.0
"""Default of ``initialize-timeout``: slow agents take about 15 s for handshake and session."""

START_SECONDS_MAX: Final = 900.0
"""Greatest ``startup-timeout`` and ``initialize-timeout``."""

IDLE_SECONDS: Final = 900.0
"""Default of ``idle-timeout``: model calls are silent for minutes, a quarter of an hour is a hang."""

IDLE_SECONDS_MAX: Final = 86_400.0
"""Greatest ``idle-timeout``; zero switches the watchdog off."""

KEEP_WARM_SECONDS: Final = 300.0
"""Default of ``keep-warm``: the usual pause between two messages of one person."""

KEEP_WARM_SECONDS_MAX: Final = 86_400.0
"""Greatest ``keep-warm``; zero never keeps a process."""

SSH_CONNECT_SECONDS: Final = 15.0
"""Default of ``ssh-connect-timeout``."""

DAEMON_ACTOR_CHARS: Final = 128
"""Characters of the name of whoever a job is for: ``lb_`` and a digest is 67, a plain id of a chat platform is shorter."""

DAEMON_CONNECT_SECONDS: Final = 20.0
"""Default of ``daemon-connect-timeout``: longer than a daemon's slowest reconnect while the hub restarts."""

CONNECT_SECONDS_MAX: Final = 300.0
"""Greatest of both connect timeouts: a person is waiting."""

FORM_TEXT_CHARS: Final = 65_536
"""Characters of one text field of a form; what is longer was pasted by mistake."""

FORM_JSON_BYTES: Final = 262_144
"""Bytes of one JSON field of a form."""

FORM_LIST_ITEMS: Final = 1_000
"""Entries of one list field of a form."""

MCP_SERVERS_MAX: Final = 32
"""MCP servers one runner form may add; agents connect to each of them at every session start."""

# ---- LangBot's tools for the agent (one loopback MCP listener per worker)

MCP_BEARER_BYTES: Final = 32
"""Random bytes of a bearer: 256 bits, beyond guessing."""

MCP_PATH_BYTES: Final = 12
"""Random bytes of an endpoint's path; it only keeps addresses apart, the bearer is what opens one."""

MCP_BODY_BYTES: Final = 1024 * 1024
"""Bytes of one request body. Arguments of tools are small; this keeps a runaway client from filling the worker."""

MCP_BODY_SECONDS: Final = 20.0
"""Seconds a client gets to send the body it announced."""

MCP_CONNECTIONS: Final = 512
"""Open connections to the listener; each is a descriptor of the worker, and agents keep one to four."""

MCP_CONNECTIONS_PER_INSTALLATION: Final = 64
"""Those that one installation's bearers opened: four times the calls it may have at the host, an eighth of all."""

MCP_CONNECTIONS_PER_ENDPOINT: Final = 32
"""Those that one bearer opened: an agent with many calls at once, half of its installation's."""

MCP_UNPROVEN: Final = 256
"""Those that have not presented a valid bearer: twice what one turn of the loop accepts, so that its own last arrivals stay."""

MCP_UNPROVEN_SECONDS: Final = 5.0
"""Seconds a connection may stay without having presented a valid bearer; any local user can open one, clients ask at once."""

MCP_KEEPALIVE_SECONDS: Final = 75.0
"""Seconds an idle connection of an agent is kept."""

MCP_STOP_SECONDS: Final = 1.0
"""Seconds answers in flight get to leave when their endpoint or the listener closes."""

MCP_BATCH: Final = 32
"""Messages in one JSON-RPC batch; real clients send one."""

MCP_CALLS_AT_ONCE: Final = 8
"""Tool calls of one run that reach the host at once."""

MCP_CALLS_PER_INSTALLATION: Final = 16
"""Those of one installation's runs: a quarter of all, however many runs it has."""

MCP_CALLS_PER_PROCESS: Final = 64
"""Those of every run: half of the 128 actions of the worker's connection, the rest is for storing, steering and stopping."""

MCP_CALLS_WAITING: Final = 64
"""Tool calls of one run that may wait behind those; one more is told to try again later."""

HOST_CANCELLATIONS: Final = 3
"""Calls to the host that are cancelled at the same time: the SDK takes 4, and one is left for what it cancels itself."""

MCP_CALL_WAIT: Final = 60.0
"""Seconds a tool call waits to reach the host before the agent is told to try again; MCP clients allow that at least."""

MCP_RESULT_CHARS: Final = 200_000
"""Characters of one tool result; models take about a tenth of that, and the rest would only cost memory."""

MCP_INLINE_CHARS: Final = 2_000
"""Characters of one attachment body in the current event; files reach the agent as files, not as base64 text."""

# ---- the ACP driver

ACP_READ_BYTES: Final = 64 * 1024
"""Bytes asked of an agent's stdout at once; they are held until they are handed on, by as many sessions as are in a turn."""

ACP_NOISE_LINES: Final = 50
"""Lines on stdout that are no protocol messages and are kept for diagnosis; the rest is only counted."""

ACP_NOISE_CHARS: Final = 500
"""Characters kept of one such line."""

ACP_PEEK_BYTES: Final = 4096
"""Bytes kept of both ends of a line over ``AGENT_LINE_BYTES``, enough to find which request it answered."""

ACP_JSON_DEPTH: Final = 100
"""Containers in containers of one message; real ones have fewer than 20, and every walk over a message must end well."""

ACP_UNREAD_BYTES: Final = 32 * 1024 * 1024
"""Bytes of answers an agent may leave unread before it is not read either; a request of 60 bytes may ask for 10 MiB."""

ACP_HELD_TOOL_BYTES: Final = 32 * 1024 * 1024
"""Bytes that the unfinished tool calls of one session keep; the oldest beyond it end without what they carried."""

ACP_ID_CHARS: Final = 256
"""Characters of a tool call's id that are kept as they are; a longer one is known by its digest."""

ACP_OPEN_REQUESTS: Final = 256
"""Requests of one agent that may be open here at once; one more is refused."""

ACP_EARLY_UPDATES: Final = 256
"""Updates kept from before the session's id is known; agents send about three."""

ACP_EXIT_DRAIN: Final = 1.0
"""Seconds an ended agent's output is still read, and a closed output waits for the exit code."""

ACP_CLOSE_SECONDS: Final = 2.0
"""Seconds for ``session/close`` before the process is ended anyway."""

ACP_RELOAD_PAUSE: Final = 61.0
"""Seconds between two openings of a session for agents that destroy a session loaded within the minute of the last one."""

ACP_RELOAD_MEMORY: Final = 1024
"""Recently opened sessions whose time is remembered for that pause."""

ACP_LIST_PAGES: Final = 20
"""Pages of ``session/list`` read to prove that a session is gone."""

ACP_ERROR_CHARS: Final = 2000
"""Characters of an agent's own error text."""

ACP_STDERR_LINES: Final = 12
"""Last lines of stderr shown when an agent ends unexpectedly."""

ACP_NOTICE_CHARS: Final = 4000
"""Characters of JSON kept of an update whose kind is unknown."""

ACP_TOOL_INPUT_BYTES: Final = 16 * 1024
"""Bytes of JSON of a tool call's input in an event."""

ACP_TOOL_OUTPUT_CHARS: Final = 64 * 1024
"""Characters of a tool call's output in an event."""

ACP_TOOL_CALLS: Final = 1000
"""Tool calls of one session that are remembered, so that late updates of ended ones are known; long turns have hundreds."""

ACP_DIFF_CHARS: Final = 256 * 1024
"""Characters of one side of a diff in an event."""

ACP_DIFFS: Final = 64
"""Diffs of one tool call in an event."""

ACP_COMMAND_CHARS: Final = 64 * 1024
"""Characters of a command offered for approval; a longer one is not offered as complete."""

ACP_PLAN_ENTRIES: Final = 200
"""Lines of one plan."""

ACP_QUESTION_FIELDS: Final = 50
"""Fields of one question, and options of one field."""

ACP_HELD_TEXT_CHARS: Final = 16 * 1024
"""Characters of answer text held back while it looks like an error message that the turn's end will repeat."""

ACP_FILE_BYTES: Final = 10 * 1024 * 1024
"""Bytes of a file an agent reads or writes through the client; source files are far smaller."""

ACP_EMBED_CHARS: Final = 256 * 1024
"""Characters of a text attachment put into the prompt itself; a larger one becomes a file in the workspace."""

ACP_TERMINALS: Final = 16
"""Terminals of one session at once."""

ACP_TERMINAL_BYTES: Final = 1024 * 1024
"""Bytes of a terminal's output kept when the agent names no limit, and the most it may ask for."""

# ---- the Claude Code driver

CLAUDE_CONTROL_SECONDS: Final = 20.0
"""Seconds for one control request to a running program; it answers in milliseconds, or connects to tool servers meanwhile."""

CLAUDE_END_SECONDS: Final = 1.0
"""Seconds for ``end_session`` before the program is ended anyway; with background work it takes 0.2."""

CLAUDE_INSTRUCTIONS_CHARS: Final = 40_000
"""Characters of a workspace's instructions that are passed on; the program itself warns above this size."""

CLAUDE_INSTRUCTIONS_SECONDS: Final = 15.0
"""Seconds for reading a workspace's instructions in another place before the session goes on without them."""

CLAUDE_IMAGE_BYTES: Final = 5 * 1024 * 1024
"""Bytes of one picture that the model service takes; a larger one becomes a file."""

# ---- SSH (seconds and bytes)

SSH_ALIVE_INTERVAL: Final = 10.0
"""Seconds between two keepalives, in both directions, above the ones of SSH itself."""

SSH_ALIVE_TIMEOUT: Final = 60.0
"""Seconds without a keepalive after which the remote side ends its tree by itself and this side gives the machine up."""

SSH_SERVER_ALIVE_COUNT: Final = 3
"""Unanswered keepalives of SSH itself, ``SSH_ALIVE_INTERVAL`` apart, after which its client gives up."""

SSH_LOGIN_MARGIN: Final = 30.0
"""Seconds above the connect timeout for key exchange, login and the account's shell start-up files."""

SSH_START_SECONDS: Final = 30.0
"""Seconds the remote side gets to answer whether it started the command."""

SSH_CONFIRM_MARGIN: Final = 3.0
"""Seconds above all graces the remote side's confirmation may take before the cleanup counts as unconfirmed."""

SSH_FRAME_BYTES: Final = 64 * 1024
"""Bytes of one frame's payload; larger only a start order (environment and the supervisor's program)."""

SSH_ORDER_BYTES: Final = 2 * 1024 * 1024
"""Bytes of the largest control frame; what claims to be larger is not our protocol."""

SSH_WINDOW_BYTES: Final = 1024 * 1024
"""Bytes of stdin, and of stdout, under way unacknowledged; so a stalled stream never holds back the control channel."""

SSH_GREETING_BYTES: Final = 64 * 1024
"""Bytes of noise (start-up files that print) skipped before the remote side's greeting."""

SSH_TUNNEL_ATTEMPTS: Final = 4
"""Remote ports tried for a tunnel before giving up."""

SSH_TUNNEL_PORTS: Final = range(20_000, 32_768)
"""Remote ports a tunnel may take: below the range from which Linux gives out ports by itself."""

SSH_OPTIONS_MAX: Final = 64
"""Extra options of one form; nobody types more."""

SSH_KEY_BYTES: Final = 64 * 1024
"""Bytes of a private key; the largest real ones have 4 KiB."""

SSH_FILE_BYTES: Final = 1024 * 1024
"""Bytes of a key or a list of host keys that a form names by its path; OpenSSH takes no larger key file either."""

SSH_DETAIL_CHARS: Final = 200
"""Characters of the SSH client's own words repeated when their meaning is not known."""

SSH_PLACES_SHOWN: Final = 12
"""Directories named when a command is not found on the remote machine."""

# ---- processes on this machine (seconds, bytes)

SETTLE_GRACE: Final = 0.15
"""Seconds the rest of a tree gets to follow its agent before SIGTERM, and between two looks at it."""

STOP_MARGIN: Final = 1.5
"""Seconds above all graces a supervisor gets to report before it is taken for hung and its tree is swept."""

SWEEP_TERM_GRACE: Final = 0.5
"""Seconds of SIGTERM in the sweep after a lost supervisor; with the next one and all graces still below 10 s."""

SWEEP_KILL_GRACE: Final = 1.0
"""Seconds of SIGKILL in the sweep after a lost supervisor."""

SUPERVISOR_START: Final = 20.0
"""Seconds until a supervisor must have started its agent; it takes 20 ms, and a second on a machine in trouble."""

SUPERVISOR_EXIT: Final = 2.0
"""Seconds between a supervisor closing its channel and its end."""

ORPHAN_AGE: Final = 1.0
"""Seconds a re-parented zombie must have been one before it is taken from whoever might wait for it."""

PIPE_WRITE_BYTES: Final = 65536
"""Bytes of one write or read on an agent's pipe; what a pipe holds."""

PIPE_REST_BYTES: Final = 1024 * 1024
"""Bytes of stdout kept for the reader after the end; the most an unprivileged pipe holds."""

PIPE_BURST: Final = 16
"""Reads in a row without waiting before other work of the loop gets its turn."""

SECRET_CHARS: Final = 7
"""Characters from which on a value of the environment is hidden in stderr; shorter ones (1, true, debug) are no secrets."""

SECRET_LINE_CHARS: Final = 16
"""Characters from which on a single line of a secret with several lines (a key file) is hidden, too."""

LAST_WORDS_LINES: Final = 12
"""Lines of stderr shown when an agent died."""

LAST_WORDS_CHARS: Final = 1500
"""Characters of stderr shown when an agent died."""

SESSION_ID_CHARS: Final = 512
"""Characters of an agent's own name for a session; vendors use at most a hundred, and the host keeps it for good."""

SESSION_GUARD_WAIT: Final = 5.0
"""Seconds to wait for a session another writer is just letting go of."""

SESSION_GUARD_POLL: Final = 0.05
"""Seconds between two tries for a session's lock; the kernel tells nobody."""

SESSION_GUARD_SWEEP: Final = 64
"""Lock files beside one's own that each new lock looks at, to remove those of killed processes; each costs microseconds."""

# ---- results of a run on their way to the host

OUTBOX: Final = 64
"""Results between the run loop and the SDK's own queue; a full one holds the loop, and with it the agent, back."""

RECOVERY_WAIT: Final = 3.0
"""Seconds the first prompt waits for messages dropped by the host to be recovered."""

DETACHED_SEND_WAIT: Final = 15.0
"""Seconds for a message sent outside the run; the runtime gives platform calls no longer."""

STATE_DIRECTORY: Final = ".local/state/langbot-coding-agents"
"""Where this project keeps what must outlive a process, below the home of the account whose agents it runs."""

WORKTREE_SECONDS: Final = 120.0
"""Seconds for git to check out a worktree; large repositories take a minute."""

WORKTREE_PATH_BYTES: Final = 64 * 1024
"""Bytes kept of what the program that makes a worktree says; a path is far shorter."""

# ---- the relay between a hub and its daemons (bytes of encoded JSON, seconds)

RELAY_FRAME_BYTES: Final = 1024 * 1024
"""Bytes of one WebSocket message: the default bound of common WebSocket libraries."""

RELAY_FRAME_TARGET: Final = 256 * 1024
"""Bytes from which on nothing more is added to a frame, so that a cancel never waits behind a megabyte."""

RELAY_FRAME_MARGIN: Final = 4096
"""Bytes of a frame that are not records: its seal, names and job ids."""

RELAY_BATCH: Final = 64
"""Records of one frame; more gain nothing and only delay the other jobs."""

RELAY_RECORD_BYTES: Final = 512 * 1024
"""Bytes of one record; a larger message travels in parts. Half a frame, so that two jobs share one."""

RELAY_PART_CHARS: Final = 200 * 1024
"""Characters of a large message's text in one part; quotes in it double when they are escaped."""

RELAY_MESSAGE_BYTES: Final = 32 * 1024 * 1024
"""Bytes of one message in parts; prompts with pictures reach some 20 MiB."""

RELAY_ASSEMBLY_BYTES: Final = 64 * 1024 * 1024
"""Bytes of half-received messages of one daemon at a hub: two of the largest at once."""

RELAY_WINDOW_BYTES: Final = 2 * 1024 * 1024
"""Bytes of one job under way unacknowledged: what a hub holds for a slow consumer, and a fast link's worth."""

RELAY_JOURNAL_MEMORY: Final = 16 * 1024 * 1024
"""Bytes of unacknowledged stream of one job in memory; minutes of any agent's text."""

RELAY_JOURNAL_DISK: Final = 64 * 1024 * 1024
"""Bytes of unacknowledged stream of one job on disk, before the agent is held back."""

RELAY_ACK_RECORDS: Final = 64
"""Consumed records after which an acknowledgement goes out at once."""

RELAY_ACK_BYTES: Final = 256 * 1024
"""Consumed bytes after which an acknowledgement goes out at once."""

RELAY_ACK_DELAY: Final = 0.2
"""Seconds an acknowledgement may wait for a frame to travel in; it only frees memory at the other side."""

RELAY_LEASE: Final = 120.0
"""Seconds a job outlives its connection: a train tunnel, a restarted router, a hub's restart."""

RELAY_HEARTBEAT: Final = 20.0
"""Seconds between a daemon's pings; below the idle limits of proxies and NAT."""

RELAY_DEAD: Final = 90.0
"""Seconds of silence after which a connection counts as lost."""

RELAY_HANDSHAKE: Final = 10.0
"""Seconds for each step of the handshake."""

RELAY_PROBE: Final = 5.0
"""Seconds an old connection gets to show that it lives when a second one claims its daemon id."""

RELAY_CANCEL: Final = 10.0
"""Seconds a daemon gets to acknowledge that a cancelled job is quiet; its own ending of a tree stays well inside."""

RELAY_DAEMONS: Final = 128
"""Daemons of one installation connected at once."""

RELAY_CONNECTIONS: Final = RELAY_DAEMONS + 16
"""Proven connections of one installation: its daemons, and those that still say which jobs they have, or whom they replace."""

RELAY_PARAMETERS: Final = 16
"""Parameters of a failure that a daemon tells of; no text has more than a few."""

RELAY_PARAMETER_CHARS: Final = 512
"""Characters of one of them."""

REMOTE_NAME_CHARS: Final = 4096
"""Characters of a session's id and directory on a daemon's machine: the longest path of a system."""

RELAY_KNOWN_DAEMONS: Final = 2 * RELAY_DAEMONS
"""Daemons of one installation that are connected, or away with jobs or fences: each may have named ``RELAY_TABLE`` jobs."""

RELAY_JOBS: Final = 128
"""Jobs of one installation at once, and of one daemon; a worker runs no more."""

RELAY_HELLO_BYTES: Final = 4096
"""Bytes of each message before the proof; also what a parked connection may cost."""

RELAY_PARKED: Final = 256
"""Unproven connections kept at once, and as many that are still in their handshake."""

RELAY_PARKED_PER_ADDRESS: Final = 4
"""Parked connections of one address."""

RELAY_TABLE: Final = 1024
"""Ended jobs a daemon keeps reporting until their hub has taken note; the oldest go first."""

RELAY_CONTROLS: Final = 4096
"""Messages besides streams that may wait for one connection; honest ones never have a tenth of it."""

RELAY_COMMANDS: Final = 64
"""Commands of one job that may be unanswered at once."""

RELAY_COMMAND_JOURNAL: Final = 40 * 1024 * 1024
"""Bytes of unacknowledged commands of one job: one largest prompt and some small ones."""

RELAY_MCP_OPEN: Final = 72
"""Tool calls of one job that may be open at once: those at work and those waiting behind them."""

RELAY_MCP_REQUEST_BYTES: Final = 1024 * 1024
"""Bytes of one tool call's request, the same as over HTTP."""

RELAY_MCP_RESPONSE_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one tool call's response; a tool result has at most 200,000 characters."""

RELAY_BACKOFF: Final = 0.5
"""Seconds of the first pause before connecting again."""

RELAY_BACKOFF_REFUSED: Final = 5.0
"""Longest pause while the hub is merely not there: a worker restarts with every change of its settings."""

RELAY_BACKOFF_NETWORK: Final = 30.0
"""Longest pause while names or certificates fail: that takes a person."""

RELAY_REASON_BYTES: Final = 123
"""Bytes of a close reason (RFC 6455, 5.5)."""

# ---- the relay's shells: sockets, tasks and files around the protocol (bytes, seconds)

RELAY_SOCKET_BYTES: Final = RELAY_FRAME_BYTES
"""Bytes of a WebSocket message that is taken from the wire at all."""

RELAY_UNPROVEN_BYTES: Final = 16 * 1024
"""The same before a daemon is proven: a hello of 4 KiB, and one that is somewhat too long is still told why."""

RELAY_OPENING: Final = 128
"""Connections in their WebSocket handshake at once: it takes two trips, and a stranger's takes a descriptor of the worker."""

RELAY_DESCRIPTORS_SHARE: Final = 2
"""Which part of the files a worker may have open connections of daemons take at most: agents and tools need the rest."""

RELAY_LEAVING: Final = 64
"""Refused connections whose answer to the close frame is waited for at once."""

RELAY_SOCKET_QUEUE: Final = 4
"""Messages a connection reads ahead; the protocol's own windows are the real bound."""

RELAY_SOCKET_BUFFER: Final = 256 * 1024
"""Bytes a connection may have written and the kernel not taken, before nothing more is packed for it."""

RELAY_CLOSE: Final = 3.0
"""Seconds the other side gets to answer a close frame before its connection is cut."""

RELAY_BACKLOG: Final = 512
"""Connections the kernel keeps for a listener that is busy; a crowd of strangers must not keep a daemon out."""

RELAY_CLOSE_SHARE: Final = 30
"""How much sooner than a silent connection counts as lost one is cut that does not answer a close frame."""

RELAY_CLOCK_STEP: Final = 5.0
"""Longest pause between two looks at the clock: timers stand still while a laptop sleeps, the relay's clock does not."""

RELAY_JOB_QUEUE: Final = 1024
"""Batches of events of one job that may wait for its consumer; the protocol's window ends it far earlier."""

RELAY_SEGMENT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one file of a job's disk journal; each is given back when all of it is acknowledged."""

RELAY_NOTES: Final = 2 * RELAY_DAEMONS
"""Lines at once in the worker's log about one installation's daemons: all of them leave and come back."""

RELAY_NOTES_PER_SECOND: Final = 0.2
"""The same in the long run, whatever its daemons do."""

RELAY_STOP: Final = 12.0
"""Seconds a hub that stops waits for its daemons' proofs: a cancel's time and some for the way."""

RELAY_DRAIN: Final = 2.0
"""Seconds a daemon that stops gets to tell its hub how its jobs ended."""

RELAY_MCP_SECONDS: Final = 180.0
"""Seconds a tool call over the relay may take; LangBot's own limits end it before."""

# ---- how fast a chat takes messages and edits (each counts as one call)

TELEGRAM_BURST: Final = 5
"""Calls in one Telegram chat at once: its bot FAQ allows "short bursts"; a short answer takes three, a follow-up two more."""

TELEGRAM_PER_SECOND: Final = 1.0
"""Calls per second in a private Telegram chat (bot FAQ: "avoid sending more than one message per second")."""

TELEGRAM_GROUP_PER_SECOND: Final = 0.3
"""Calls per second in a Telegram group: 18 a minute (bot FAQ: 20 messages per minute), which leaves something for the burst
and still brings a megabyte (520 calls) in less than the half hour of ``TURN_SECONDS``."""

DISCORD_BURST: Final = 5
"""Calls in one Discord channel at once: the service's own buckets hold 5 in 5 s."""

DISCORD_PER_SECOND: Final = 1.0
"""Calls per second in one Discord channel."""

LARK_BURST: Final = 5
"""Calls in one Lark chat at once."""

LARK_PER_SECOND: Final = 4.0
"""Calls per second in one Lark chat (its documentation: 5 per second and chat)."""

WECOM_BURST: Final = 5
"""Calls in one WeCom or DingTalk chat at once."""

WECOM_PER_SECOND: Final = 0.3
"""Calls per second in one WeCom or DingTalk chat: 18 a minute (both document 20 a minute for robots in groups)."""

UNKNOWN_BURST: Final = 5
"""Calls at once in a chat of a service that is not known."""

UNKNOWN_PER_SECOND: Final = 1.0
"""Calls per second in a chat of a service that is not known; Slack documents the same."""

PACED_CHATS: Final = 4096
"""Chats of one installation whose pace is remembered; one that rested for a minute needs no memory."""

MESSAGES_PER_RUN: Final = 600
"""Messages of one run in a paced chat before the rest goes into a file, where that can be: a megabyte takes 260 on Telegram
and 530 on Discord, and nobody reads more."""

FINISH_MARGIN: Final = 5.0
"""Seconds before the absolute limit at which the last message is on its way: the host still has to bring it to the service."""

STOP_BACKLOG: Final = 10.0
"""Seconds of waiting messages that are still sent after a stop; a longer rest goes into a file."""

REPLY_RETRIES: Final = 5
"""Times one message is tried again that the service refused for coming too fast."""

REPLY_RETRY_SECONDS: Final = 5.0
"""Seconds before such a message is tried again when the service names no pause."""

REPLY_RETRY_MAX: Final = 120.0
"""Seconds of the longest pause taken at a service's word."""

# ---- the daemon program on a user's machine

DAEMON_POLICY_BYTES: Final = 256 * 1024
"""Bytes of a policy file; real ones have a few kilobytes."""

DAEMON_SECRET_BYTES: Final = 4096
"""Bytes of a file with a key or a token."""

DAEMON_TABLE_BYTES: Final = 8 * 1024 * 1024
"""Bytes of a job table; a full one (``RELAY_TABLE`` jobs with all their processes) has less than 4 MiB."""

DAEMON_JOB_PROCESSES: Final = 32
"""Processes of one job remembered by pid, newest first to stay; the marker finds the others."""

DAEMON_PROOFS: Final = 4
"""Jobs a crashed daemon left that are ended at the same time; each looks through all processes."""

DAEMON_ORPHAN_RETRY: Final = 5.0
"""Seconds before the end of a job that a crashed daemon left is tried again."""

DAEMON_STARTUP_MAX: Final = 600.0
"""Seconds a hub may grant an agent for its start; more is taken for a mistake and becomes this."""

DAEMON_AUDIT_BYTES: Final = 2 * 1024 * 1024
"""Bytes of the daemon's audit file before it is set aside: some 4,000 jobs."""

DAEMON_AUDIT_FILES: Final = 4
"""Audit files set aside that are kept; the oldest goes."""

DAEMON_AUDIT_CHARS: Final = 512
"""Characters of one value in an audit line, so that a hub cannot fill the file with names; real directories are shorter."""

# ---- the Codex driver

CODEX_EARLY: Final = 64
"""Notifications kept for a thread whose id is not known yet; a thread start sends about four."""

CODEX_EARLY_THREADS: Final = 16
"""Threads for which such notifications are kept; Codex starts threads of its own beside ours."""

CODEX_CHILD_THREADS: Final = 256
"""Threads that Codex started for one of ours and that are remembered, so that their questions reach the right person."""

CODEX_OLD_TURNS: Final = 64
"""Ended turns of a thread that are remembered, so that what comes late of them is not taken for the next one's."""

CODEX_ITEMS: Final = 1000
"""Items of one thread that are remembered; long turns have hundreds."""

CODEX_ITEM_OUTPUT_CHARS: Final = 64 * 1024
"""Characters kept of one command's output; Codex itself keeps about 1 MiB."""

CODEX_REQUESTS: Final = 256
"""Questions of the app-server that may be open in one thread; one more is refused."""

CODEX_CLEAN_SECONDS: Final = 2.0
"""Seconds Codex gets to end the commands that outlived their turn; then the process is ended."""

CODEX_INTERRUPT_SECONDS: Final = 3.0
"""Seconds between an interrupt and the end of its turn; measured 0.01. Beyond it the process is ended."""

CODEX_RETRY_SECONDS: Final = 120.0
"""Seconds Codex may go on reconnecting without any other sign of life; with its own bound on retries it gives up after 25."""

CODEX_PROBE_SECONDS: Final = 20.0
"""Seconds the check of the sandbox may take; measured 0.12 on an idle machine."""

CODEX_PROBED_MACHINES: Final = 256
"""Machines whose sandbox is known to work; a machine forgotten is checked again."""

CODEX_TOOLS: Final = 128
"""Tools of LangBot offered to a thread over the app-server's own connection."""

CODEX_TOOL_SECONDS: Final = 600.0
"""Seconds one of these tools may take; the host's own limits are shorter."""

CODEX_FILE_SECONDS: Final = 15.0
"""Seconds for writing an attachment through the app-server, and for reaching LangBot's tools; a person is waiting."""

# ---- parked turns

PARKED_TURNS: Final = 64
"""Turns of one installation that may wait for a person at once; each is a live agent with its memory."""

PARKED_EVENT_BYTES: Final = 1024 * 1024
"""JSON bytes of what an agent says while its turn is parked that are kept for the next run; then a gap is told."""

PARKED_REQUEST_BYTES: Final = 8 * 1024 * 1024
"""JSON bytes of the requests that wait behind the one that is shown; an agent that asks for more has its turn cancelled."""

PARKED_OUTCOMES: Final = 256
"""Ends of parked turns that are remembered until their next run; the oldest goes."""

SETTLED_REQUESTS: Final = 1024
"""Answered requests of one installation that are remembered, so that an answer which crosses the first one finds nothing."""

PARKED_TOOL_WAIT: Final = 60.0
"""Seconds a call of LangBot's tools waits for the next run while its turn is parked; MCP clients allow minutes."""

PARKED_CALLS_END: Final = 5.0
"""Seconds that calls of LangBot's tools get to end when their turn is parked; then the chat is not kept waiting."""

SESSION_GRANTS: Final = 256
"""Actions that are remembered as allowed for a live session; the oldest goes and is asked again."""

# ---- what people are asked

INTERACTION_TITLE_CHARS: Final = 1000
"""Characters of a request's title that the host takes (SDK 0.7.18)."""

INTERACTION_DESCRIPTION_CHARS: Final = 10_000
"""Characters of a request's description that the host takes (SDK 0.7.18)."""

INTERACTION_TEXT_CHARS: Final = 20_000
"""Characters of a request's text for surfaces without buttons that the host takes (SDK 0.7.18)."""

INTERACTION_JSON_BYTES: Final = 256 * 1024
"""Bytes of a request's text in escaped JSON: it travels twice in one result, and 600 KiB is the most a result may have."""

INTERACTION_LABEL_CHARS: Final = 64
"""Characters of a button's label: what Telegram shows on one line of a phone is less, what it takes is more."""

INTERACTION_BUTTONS: Final = 18
"""Options shown as buttons: the host takes 20 actions, and two are for leaving out and for not answering."""

INTERACTION_REASON_CHARS: Final = 1000
"""Characters of the agent's own reason shown beside an action; the action has the room first."""

INTERACTION_REASON_SHORT_CHARS: Final = 200
"""Characters of the agent's own words where the action leaves little room."""

INTERACTION_NAME_CHARS: Final = 120
"""Characters of the line that says what is asked, of a machine's and of a directory's name where nothing depends on them."""

INTERACTION_QUESTION_CHARS: Final = (8000, 2000, 600, 200)
"""Characters of a question's own text, the first that fits with its options; a question is no action and may be cut."""

INTERACTION_OPTION_CHARS: Final = (400, 120, 40)
"""Characters of one option's label in the text, the first that fits."""

INTERACTION_WORD_CHARS: Final = 200
"""Characters of the longest message that is looked at as a number or a word."""

INTERACTION_NUMBER_CHARS: Final = 40
"""Characters of a typed number; doubles have 17 digits."""

INTERACTION_FORM_FIELDS: Final = 50
"""Fields of one form that the host takes (SDK 0.7.18)."""

INTERACTION_FORM_OPTIONS: Final = 100
"""Options of one field of a form that the host takes (SDK 0.7.18)."""

INTERACTION_FIELD_CHARS: Final = 512
"""Characters of a field's label, of an option's label and of its value that the host takes (SDK 0.7.18)."""

INTERACTION_FIELD_ID_CHARS: Final = 128
"""Characters of a field's id that the host takes (SDK 0.7.18)."""

INTERACTION_FORM_BYTES: Final = 64 * 1024
"""Bytes of a form's fields in escaped JSON: with its texts, the host takes 256 KiB (LangBot 4.11.2)."""

INTERACTION_SECONDS: Final = 99_999 * 60
"""The most time that is told, as minutes: 69 days, so that the greatest length of the text is known beforehand."""

INTERACTION_SOON: Final = 120
"""Time below so many seconds is told in seconds: rounded up to minutes it would be told up to twice as long as it is."""

ACTION_FENCE_CHARS: Final = 32
"""Marks of the longest code fence that text is cut at correctly (``text_split``)."""

ACTION_MARKS: Final = 3
"""Combining marks on one letter that are drawn; more could paint over what stands beside it. Vietnamese and Thai need two."""

ACTION_GAP_CHARS: Final = 24
"""Blanks inside a line that are counted instead of drawn: they push what follows beyond the edge of a code block."""

ACTION_INDENT_CHARS: Final = 65
"""The same at the beginning of a line, where programs are indented."""

ACTION_EMPTY_LINES: Final = 9
"""Empty lines in a row that are counted instead of drawn: they push what follows below the edge of a screen."""

ACTION_DIFF_LINES: Final = 1000
"""Lines of the differing middle of a file that are compared with each other; a larger one hardly fits into a message anyway."""

ACTION_DIFF_CHARS: Final = 2 * 1024 * 1024
"""Characters of all files of one action that are compared: 0.2 s, in which nothing else goes on."""

ACTION_DIFF_CONTEXT: Final = 3
"""Unchanged lines shown around a change, as everywhere."""

# ---- approvals by rule, and what is written down of them

APPROVAL_RULES: Final = 200
"""Rules of one form: each is tried on every part of a request."""

APPROVAL_RULE_CHARS: Final = 500
"""Characters of one rule; real ones have a fifth of it."""

COMMAND_CHARS: Final = 64 * 1024
"""Characters of a command line that is taken apart; a longer one is not understood."""

COMMAND_WORDS: Final = 2000
"""Words of a command line that are compared with rules; what comes behind them is not understood."""

COMMAND_DEPTH: Final = 5
"""Programs inside programs (``sh -c``, ``env``) that are looked through in a command line; people write one or two."""

APPROVAL_SECONDS: Final = 600
"""Default of ``approval-timeout``: long enough to come back from another room, and nothing waits for ever."""

APPROVAL_SECONDS_MIN: Final = 30
"""Least ``approval-timeout``: nobody reads and answers a request in less."""

APPROVAL_SECONDS_MAX: Final = 86_400
"""Greatest ``approval-timeout``: a process waits as long."""

DECISION_BYTES: Final = 2 * 1024 * 1024
"""Bytes of the file of decisions before it is set aside: some 4,000 of them."""

DECISION_FILES: Final = 4
"""Files of decisions set aside that are kept; the oldest goes."""

DECISION_CHARS: Final = 512
"""Characters of one value of a decision's line; what an action is called is cut, its digest tells it apart."""

DAEMON_ASKED: Final = 256
"""Requests of one turn that a daemon remembers for its record of what was answered; turns have a few."""

# ---- what one agent's texts may take of everybody's worker

TEXT_SLICE_CHARS: Final = 4 * 1024
"""Characters of an answer worked on at once, before other runs take their steps: some 10 ms for the worst of texts."""

QUESTION_FIELDS: Final = 50
"""Fields of a question that people are asked; the host's forms have as many (SDK 0.7.18)."""

QUESTION_OPTIONS: Final = 99
"""Options of one field that people are offered; the numbers they type have two digits."""

QUESTION_TEXT_CHARS: Final = 16 * 1024
"""Characters of each text of a question; a message shows 8,000."""

CODEC_PLACES: Final = 8
"""Invalid places of one value that an error names; a value made by a mistake has one or two."""

CODEC_PLACE_CHARS: Final = 64
"""Characters of each part of such a place; it may be a key of the agent's own."""
