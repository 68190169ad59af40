"""Every exception the core raises, as one tree.

::

    CodingError                       a failure a person can act on: a stable code, a text from the catalogue, no secrets
    ├── SettingsError                 a form field is wrong (names the field)
    ├── LaunchError                   the agent could not be started in its place
    │   └── CommandNotFound           its command is nowhere it was looked for (has the places, for logs)
    ├── AgentDied                     the agent's process or connection ended in the middle
    ├── AgentProtocolError            the agent spoke something that is not its protocol
    ├── SessionUnavailable            the vendor session could not be opened (the stored id is kept)
    └── Refused                       authority, policy or limits forbid it
    TurnInProgress                    a driver was prompted while a turn is open (a bug of the caller)
    ProcessCleanupUnconfirmed         (BaseException) processes may be left; never to be taken for success
    └── DaemonFenced                  they may be left on a daemon's machine, and its hub remembers it

Codes are ``coding.<snake_case>``, the same string is the key of the text in ``pkg/locales``. ``str(error)`` is the English
text. ``detail`` is shown after the text where given: bounded, without secrets, already redacted by whoever made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pkg import texts


class CodingError(Exception):
    """A failure with a stable code, parameters for its text, and whether trying again may help."""

    def __init__(
        self,
        code: str,
        *,
        detail: str = "",
        retryable: bool = False,
        params: Mapping[str, object] | None = None,
        **named: object,
    ) -> None:
        """``code`` is a key of the catalogue; ``named`` (or ``params``) fill its placeholders."""
        self.code = code
        self.detail = detail
        self.retryable = retryable
        self.params: dict[str, str] = {key: str(value) for key, value in {**(params or {}), **named}.items()}
        super().__init__(self.text(texts.DEFAULT_LANGUAGE))

    def text(self, language: str) -> str:
        """The text for people in ``language`` (one of :data:`pkg.texts.LANGUAGES`), with the detail below it."""
        text = texts.render(self.code, language, self.params)
        return f"{text}\n{self.detail}" if self.detail else text

    @property
    def for_log(self) -> str:
        """What a log says of it: the code, and what people in the chat do not need."""
        return self.code


def referenced(text: str, language: str, correlation_id: str) -> str:
    """An error's text for people, with the reference number under which log and ledger have it."""
    return f"{text}\n{texts.render('error.reference', language, {'id': correlation_id})}"


class SettingsError(CodingError):
    """A form field has a value that cannot be used; ``params["field"]`` names it."""


class LaunchError(CodingError):
    """The agent could not be started in its place."""


class CommandNotFound(LaunchError):
    """A command is nowhere it was looked for."""

    def __init__(self, name: str, places: Iterable[str], *, code: str = "coding.agent_not_found", **named: str) -> None:
        """``places`` are directories of the machine: for logs and its owner, and no parameter, since those go to the chat."""
        self.places = tuple(places)
        super().__init__(code, params={**named, "name": name})

    @property
    def for_log(self) -> str:
        """The code, and where it was looked for."""
        return f"{self.code} (looked for {self.params['name']} in {', '.join(self.places)})"


class AgentDied(CodingError):
    """The agent's process or connection ended while it was needed."""


class AgentProtocolError(CodingError):
    """The agent answered something its protocol does not allow, or refused a request it must serve."""


class SessionUnavailable(CodingError):
    """The vendor session could not be opened or resumed; a stored id is kept."""


class Refused(CodingError):
    """Authority, policy or a limit forbids it."""


class TurnInProgress(RuntimeError):
    """A session was prompted while its turn is still open."""


class ProcessCleanupUnconfirmed(BaseException):
    """Processes may still be running and nothing can prove otherwise; carries what is known of them.

    A ``BaseException`` so that no ``except Exception`` turns it into a success.
    """

    def __init__(self, reason: str, pids: tuple[int, ...] = ()) -> None:
        """``reason`` is for the log; ``pids`` are those last seen, in their own machine's numbering."""
        self.reason = reason
        self.pids = pids
        super().__init__(f"{reason} (pids: {', '.join(map(str, pids)) or 'unknown'})")


class DaemonFenced(ProcessCleanupUnconfirmed):
    """A daemon has not proven the end of a job: its hub remembers that, and gives it no other until it has."""

    def __init__(self, daemon: str) -> None:
        """``daemon`` is its id."""
        self.daemon = daemon
        super().__init__(f"the daemon {daemon!r} has not proven that a job's processes are gone")
