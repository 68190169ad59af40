"""Where the sources may keep something: nothing of a run on plugin, runner or in a module, but for what is named here.

Read from the syntax of everything a worker loads, so that a new place to keep something in needs a line, with its reason, in a
table.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from testkit.kept_state import Modules, kept_on_objects
from tooling import packages

pytestmark = [pytest.mark.static, pytest.mark.shared_runtime]

ALLOWED: dict[str, str] = {
    "pkg/installations.py _installations": "the registry: by the full binding, emptied at revocation",
    "pkg/installations.py _revocations": "revocations in progress, by the full binding",
    "pkg/relay_hub_shell.py _hubs": "by package and full binding, emptied at revocation",
    "pkg/relay_hub_shell.py _listeners": "by address; what is an installation's is inside by its binding",
    "pkg/relay_hub_shell.py _starting": "a lock for each event loop",
    "pkg/relay_entrance.py _open": "open connections, to count them by their installation; each until it is lost",
    "pkg/tools_listener.py _LISTENERS": "a listener for each event loop; what is a run's is inside by its bearer",
    "pkg/supervised_process.py _OWNED": "process ids of our children",
    "pkg/decision_log.py _failing": "files that could not be written to, so that each is complained of once",
    "pkg/interaction_words.py @functools.cache": "patterns of our own words",
    "pkg/texts.py @functools.cache": "the catalogue of a language",
    "pkg/launch_ssh.py @functools.cache": "our own source, by its path",
    "pkg/langbot_tools.py _host.one()": "counts calls under a binding, only while one is on its way or waits",
    "pkg/host_calls.py _cancelling.one()": "the same for what tells the host of cancelled ones",
    "pkg/decision_log.py _REDACT()": "hides what looks like a credential; knows no secret and learns none",
    "pkg/relay_frames.py _encode()": "json's own encoder, without its memo",
    "pkg/supervised_process.py REAPER": "asked to look again; it holds pids and start times of zombies",
    "pkg/worktrees.py _ENVIRONMENT": "git's variables, which a command reads",
    "ClaudeCodeAgent/agent/session.py wire.HOOKS": "what is asked of every program, written as JSON",
    "pkg/process_supervisor.py os.chdir()": "in the supervisor's own process",
    "pkg/process_supervisor.py signal.signal()": "in the supervisor's own process",
    "pkg/ssh_library.py sys.path": "in a process of its own for one connection",
    "pkg/ssh_wrapper.py sys.argv": "on the other machine, in a process of its own for one agent",
    "pkg/ssh_wrapper.py signal.signal()": "on the other machine, in a process of its own for one agent",
    "pkg/mcp_stdio_shim.py os.environ": "in the agent's process for one server: what it was given is taken out",
    "pkg/daemon_command.py os.environ": "in the daemon's own process: its keys are taken out",
    "pkg/daemon_command.py logging.basicConfig()": "in the daemon's own process",
}
"""Module state that is written to, and what else is kept: file and name, and why that keeps nothing of a run.

What is ``agent/`` has its package before it.
"""

CALLED: dict[str, str] = {
    "pkg/interaction_words.py re.compile of what is made": "of our own words",
    "pkg/interaction_words.py re.fullmatch of what is made": "of our own words",
    "pkg/framed_text.py re.sub of what is made": "of the frame's name, which is ours",
    "pkg/daemon_program.py asyncio.timeout": "the daemon's own process",
    "pkg/relay_client.py asyncio.timeout": "a daemon's end of a connection; a worker only has its classes loaded",
    "pkg/mcp_stdio_shim.py urllib.parse.urlsplit": "in the agent's process for one server",
}
"""Calls that keep something, and why that is nothing of a run; the standard library remembers each pattern that is made."""

KEEPING_CALLS = {
    ("asyncio", "timeout"): "traceless.within",
    ("asyncio", "timeout_at"): "traceless.until",
    ("asyncio", "wait_for"): "traceless.within",
    ("urllib.parse", "urlsplit"): "traceless.split_url",
    ("urllib.parse", "urlparse"): "traceless.split_url",
}
"""What keeps its caller's context or its argument after it is done."""


def keeping_calls(tree: ast.Module) -> set[str]:
    """Calls that keep their caller's context, or what they are given, after they are done."""
    imported = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    found: set[str] = set()
    inside = [
        function for function in ast.walk(tree) if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    ]
    for call in (node for function in inside for node in ast.walk(function) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).startswith("re.") and call.args and isinstance(call.args[0], (ast.JoinedStr, ast.Call)):
            found.add(f"{ast.unparse(call.func)} of what is made")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        module, _, name = called.rpartition(".")
        if (module, name) in KEEPING_CALLS or imported.get(called) in KEEPING_CALLS:
            found.add(called)
        if (
            name in ("call_later", "call_at")
            and module != "traceless"
            and not any(each.arg == "context" for each in node.keywords)
        ):
            found.add(called)
    return found


def sources(package: Path, *rooms: str) -> dict[str, ast.Module]:
    """The package's files in these rooms, as syntax."""
    files = sorted(file for room in rooms for file in (package / room).rglob("*.py"))
    return {file.relative_to(package).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@pytest.fixture(params=packages.NAMES)
def package(request: pytest.FixtureRequest, package_root: Path) -> Path:
    """Each of the three packages."""
    return package_root if request.param == packages.SOURCE else package_root.parent / str(request.param)


def test_plugin_and_runner_keep_nothing(package: Path) -> None:
    """SDK fact: one plugin object and one runner object serve every installation; our rule: they have no state at all."""
    found = sources(package, "components") | {"main.py": ast.parse((package / "main.py").read_text(encoding="utf-8"))}
    assert len(found) >= 2
    modules = Modules(found | sources(package, "pkg", "agent"))
    assert {name: kept for name, tree in found.items() if (kept := kept_on_objects(tree) | modules.kept(name))} == {}


def test_modules_keep_nothing_but_what_is_named(package: Path) -> None:
    """Our rule: what a module remembers is in the table, and the table names nothing that is not there."""
    trees = sources(package, "pkg", "agent")
    modules = Modules(trees)
    found = {
        f"{name if name.startswith('pkg/') else f'{package.name}/{name}'} {kept}"
        for name in trees
        for kept in modules.kept(name)
    }
    named = {name for name in ALLOWED if name.startswith(("pkg/", f"{package.name}/"))}
    assert sorted(found - named) == []
    assert sorted(named - found) == []


def test_nothing_is_called_that_keeps_a_runs_context(package: Path) -> None:
    """Our rule: timers are made in an empty context, and no address or pattern of a run is cached: :mod:`pkg.traceless`."""
    found = {
        f"{name} {call}"
        for name, tree in sources(package, "pkg", "agent").items()
        if name != "pkg/traceless.py"
        for call in keeping_calls(tree)
    }
    assert sorted(found - CALLED.keys()) == []


BAD_MODULES = (
    "last = None\ndef f(x):\n    global last\n    last = x",
    "last = None\ndef f(x):\n    def g():\n        global last\n        last = x",
    "seen = {}\ndef f(x):\n    seen[x] = 1",
    "seen = {}\ndef f(x):\n    seen[x].at = 1",
    "seen = {}\ndef f(x):\n    seen.get(1).append(x)",
    "seen = []\ndef f(x):\n    seen.append(x)",
    "seen = []\nf = lambda x: seen.append(x)",
    "if 1:\n    seen = []\ndef f(x):\n    seen.append(x)",
    "seen, other = [], 1\ndef f(x):\n    seen.append(x)",
    "seen = []\ndef f(x):\n    s = seen\n    s.append(x)",
    "seen = []\ndef f(x):\n    s = t = seen\n    for u in (t, x):\n        u.append(x)",
    "seen = []\ndef f(x):\n    (s := seen).append(x)",
    "seen = []\ndef f(x):\n    s, t = seen, x\n    s.append(t)",
    "seen = []\ndef f(x):\n    with seen as s:\n        s.append(x)",
    "seen = []\ndef f(x):\n    s = x or seen\n    s.append(x)",
    "seen = [[]]\ndef f(x):\n    for s in seen:\n        s.append(x)",
    "seen = []\ndef f(x):\n    s = seen\n    def g():\n        s.append(x)",
    "seen = []\ndef f(x):\n    seen.append(x)\n    def g(seen):\n        return seen",
    "seen = []\ndef f(x):\n    y = [seen for seen in x]\n    seen.append(y)",
    "seen = []\ndef f(x):\n    return [seen.append(y) for y in x]",
    "seen = []\nclass K:\n    seen = 1\n    def f(self, x):\n        seen.append(x)",
    "seen = []\ndef f(x):\n    list.append(seen, x)",
    "import heapq\nH = []\ndef f(x):\n    heapq.heappush(H, x)",
    "from heapq import heappush\nH = [1]\ndef f(x):\n    heappush(H, x)",
    "from pkg import texts\nimport heapq\ndef f(x):\n    heapq.heappush(texts.H, x)",
    "import queue\nQ = queue.Queue()\ndef f(x):\n    Q.put_nowait(x)",
    "import contextvars\nV = contextvars.ContextVar('v')\ndef f(x):\n    V.set(x)",
    "class State: pass\nSTATE = State()\ndef f(x):\n    STATE.seen.append(x)",
    "class State: pass\nSTATE = State()\ndef f(x):\n    STATE.remember(x)",
    "class State: pass\nSTATE = State()\ndef f(x):\n    STATE.inner.remember(at=x)",
    "class State: pass\nSTATE = State()\ndef f(x):\n    s = STATE\n    s.remember(x)",
    "class State: pass\nSTATE = State()\ndef f(x):\n    STATE(x)",
    "class State: pass\nSTATE: State\ndef f(x):\n    STATE.remember(x)",
    "import os\ndef f(x):\n    os.environ['A'] = x",
    "from os import environ\ndef f(x):\n    environ.update(x)",
    "import os\ndef f(x):\n    os.putenv('A', x)",
    "from os import putenv as p\ndef f(x):\n    p('A', x)",
    "import atexit\ndef f(x):\n    atexit.register(x)",
    "import sys\ndef f(x):\n    sys.modules[__name__].last = x",
    "import sys\nloaded = sys.modules\ndef f(x):\n    loaded.update(x)",
    "from pkg import texts\nSEEN = texts.SEEN\ndef f(x):\n    SEEN.remember(x)",
    "seen = []\ndef f(x):\n    s, t = seen, x\n    s, t = t, s\n    t.append(x)",
    "def f(x):\n    globals()['a'] = x",
    "def f(x):\n    globals().update(a=x)",
    "def f(x):\n    g = globals()\n    g['a'] = x",
    "from pkg import texts\ndef f(x):\n    texts.last = x",
    "from pkg import texts\ndef f(x):\n    vars(texts)['last'] = x",
    "from pkg import texts\ndef f(x):\n    texts.__dict__['last'] = x",
    "from pkg import texts\ndef f(x):\n    texts.SEEN.append(x)",
    "from pkg import texts\ndef f(x):\n    texts.SEEN.remember(x)",
    "def f(x):\n    from pkg import texts\n    texts.SEEN.append(x)",
    "from pkg.texts import SEEN\ndef f(x):\n    SEEN.remember(x)",
    "class K: pass\ndef f(x):\n    K.last = x",
    "class K: pass\ndef f(x):\n    with x as K.last:\n        pass",
    "class K: pass\nasync def f(x):\n    async for K.last in x:\n        pass",
    "class K: pass\ndef f(x):\n    return [1 for K.last in x]",
    "class K:\n    @classmethod\n    def f(cls, x):\n        cls.last = x",
    "class K:\n    @classmethod\n    def f(cls, x):\n        cls.seen.append(x)",
    "class K:\n    def f(self, x):\n        type(self).last = x",
    "class K:\n    def f(self, x):\n        self.__class__.last = x",
    "class K:\n    seen = []\n    def f(self, x):\n        self.seen.append(x)",
    "import functools\n@functools.lru_cache(maxsize=3)\ndef f(x):\n    return x",
    "def f(x):\n    return x\ndef g(x):\n    f.last = x",
    "def f(x, seen=[]):\n    seen.append(x)",
    "def f(x, *, seen={}):\n    seen[x] = 1",
    "class State: pass\ndef f(x, seen=State()):\n    seen.last = x",
    "f = lambda x, seen=set(): seen.add(x)",
    "import os\ndef f(x):\n    setattr(os, 'a', x)",
    "import logging\nlog = logging.getLogger('a')\ndef f(x):\n    log.addFilter(lambda r: x)",
    "import logging\nlog = logging.getLogger('a')\ndef f(x):\n    log.manager.last = x",
    "class R:\n    def f(self, x):\n        self.runner.last = x",
    "def f(runner, x):\n    runner.plugin.seen.append(x)",
)
BAD_OBJECTS = (
    "class R:\n    async def run(self, ctx):\n        self.ctx = ctx",
    "class R:\n    def run(self, ctx):\n        self.seen[1] = ctx",
    "class R:\n    seen = []",
    "class R:\n    def run(self, ctx):\n        self.seen.append(ctx)",
    "class R:\n    def run(self, ctx):\n        setattr(self, 'a', ctx)",
    "class R:\n    def run(self, ctx):\n        type(self).a, b = ctx, 1",
    "class R:\n    async def run(self, ctx):\n        async with ctx as self.c:\n            pass",
    "class R:\n    def run(self, ctx):\n        s = self\n        s.seen.append(ctx)",
    "class R:\n    def run(this, ctx):\n        return [c for c in ctx if this.keep(c)]",
    "class R:\n    def run(self, ctx):\n        self.plugin.keep(ctx)",
    "class R:\n    def run(self, ctx):\n        self.q.put_nowait(ctx)",
    "class R:\n    def run(self, ctx):\n        keep(self, ctx)",
    "class R:\n    def run(self, ctx):\n        run_loop.run(self, ctx)\n        return lambda: self",
    "class R:\n    def run(self, ctx):\n        super().keep(ctx)",
    "class R:\n    @functools.cached_property\n    def last(self):\n        return 1",
    "class R:\n    @classmethod\n    def run(cls, ctx):\n        cls.keep(ctx)",
)
GOOD_MODULES = (
    "seen = []\ndef f(x, seen):\n    seen.append(x)",
    "seen = []\ndef f(x):\n    seen = []\n    seen.append(x)",
    "seen = {}\ndef f(x):\n    return seen.get(x), len(seen), [*seen]",
    "T = {'a': 'b'}\ndef f(x):\n    return g(T[x], T.get(x, ''))",
    "import re\nP = re.compile('a')\ndef f(x):\n    return P.match(x)",
    "import logging\nlog = logging.getLogger('a')\ndef f(x):\n    log.info('%s', x)",
    "from pkg import texts\ndef f(x):\n    return texts.render(x)",
    "class K:\n    def f(self, x):\n        self.seen.append(x)",
    "class K:\n    @classmethod\n    def f(cls, x):\n        return cls(x), cls.g(x)",
    "def f(x, y):\n    x, y = y, x\n    x.append(y)",
    "def f(x):\n    s = [x]\n    def g():\n        s.append(x)",
)
BAD_CALLS = (
    "import asyncio\nasyncio.timeout(3)",
    "from urllib.parse import urlsplit as cut\ncut(x)",
    "loop.call_later(3, f)",
    "import re\ndef f(x):\n    re.compile('|'.join(x))",
    "import re\ndef f(x):\n    re.search(f'{x}', '')",
)


def kept_in(text: str) -> set[str]:
    """What a module of this text keeps."""
    return Modules({"pkg/sample.py": ast.parse(text)}).kept("pkg/sample.py")


def test_each_way_to_keep_something_would_be_seen() -> None:
    """The other side of the tests above; and what keeps nothing is not taken for it."""
    assert [text for text in BAD_MODULES if not kept_in(text)] == []
    assert [text for text in BAD_OBJECTS if not kept_on_objects(ast.parse(text))] == []
    assert [text for text in BAD_CALLS if not keeping_calls(ast.parse(text))] == []
    assert [(text, kept) for text in GOOD_MODULES if (kept := kept_in(text))] == []
