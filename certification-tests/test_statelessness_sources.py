"""Where the sources may keep something: nothing of a run on plugin, runner or in a module, but for what is named here.

Read from the syntax of everything a worker loads, so that a new place to keep something in needs a line, with its reason, in a
table.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
}
"""Module state that is written to, and functions that remember: file and name, and why that keeps nothing of a run."""

STANDALONE = (
    "process_supervisor.py",
    "ssh_library.py",
    "ssh_wrapper.py",
    "mcp_stdio_shim.py",
    "daemon_program.py",
    "daemon_command.py",
    "relay_client.py",
)
"""Run in processes of their own, or on the user's machine only."""

MADE: dict[str, str] = {
    "pkg/interaction_words.py re.compile of what is made": "of our own words",
    "pkg/interaction_words.py re.fullmatch of what is made": "of our own words",
    "agent/prompts.py re.sub of what is made": "of the frame's name, which is ours",
}
"""Patterns that functions make, and of what; the standard library remembers each."""

MUTATORS = frozenset(
    {"append", "appendleft", "add", "update", "setdefault", "pop", "popitem", "clear", "insert", "extend", "discard", "remove"}
)
CACHES = ("cache", "lru_cache")
KEEPING_CALLS = {
    ("asyncio", "timeout"): "traceless.within",
    ("asyncio", "timeout_at"): "traceless.until",
    ("asyncio", "wait_for"): "traceless.within",
    ("urllib.parse", "urlsplit"): "traceless.split_url",
    ("urllib.parse", "urlparse"): "traceless.split_url",
}
"""What keeps its caller's context or its argument after it is done."""


def base(node: ast.AST) -> str:
    """The name at the beginning of ``name.attribute[item]``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes."""
    found: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        found = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        found = [node.target]
    for each in found:
        yield from each.elts if isinstance(each, (ast.Tuple, ast.List)) else (each,)


def module_names(tree: ast.Module) -> set[str]:
    """Names bound at the module's own level: variables, classes, functions and imports."""
    names = {each.id for node in tree.body for each in targets(node) if isinstance(each, ast.Name)}
    names |= {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return names | {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def local_names(function: ast.AST) -> set[str]:
    """Names a function binds itself."""
    bound = {each.id for node in ast.walk(function) for each in targets(node) if isinstance(each, ast.Name)}
    return bound | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}


def kept_in_modules(tree: ast.Module) -> set[str]:
    """Module state that functions write to, and functions that remember what they were given."""
    names = module_names(tree)
    found: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        for decorator in getattr(function, "decorator_list", ()):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(called).rpartition(".")[2] in CACHES:
                found.add(f"@{ast.unparse(called)}")
        held = names - local_names(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found.update(node.names)
            found |= {base(each) for each in targets(node) if not isinstance(each, ast.Name) and base(each) in held}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                if isinstance(node.func.value, (ast.Name, ast.Subscript)) and base(node.func.value) in held:
                    found.add(base(node.func.value))
                elif ast.unparse(node.func.value) == "os.environ":
                    found.add("os.environ")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__") and node.args:
                found |= {base(node.args[0])} & held
    return found


def kept_on_objects(tree: ast.Module) -> set[str]:
    """What classes that the SDK makes once per process (plugin, runner) keep on themselves."""
    found: set[str] = set()
    for kind in ast.walk(tree):
        if not isinstance(kind, ast.ClassDef):
            continue
        found |= {f"{kind.name}.{ast.unparse(each)}" for node in kind.body for each in targets(node)}
        for node in ast.walk(kind):
            names = {ast.unparse(each) for each in targets(node) if isinstance(each, (ast.Attribute, ast.Subscript))}
            found |= {f"{kind.name}: {name}" for name in names}
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in ("setattr", "object.__setattr__", "vars") or (
                    called.startswith("self.") and called.rpartition(".")[2] in MUTATORS
                ):
                    found.add(f"{kind.name}: {ast.unparse(node)}")
    return found


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
    assert {name: kept for name, tree in found.items() if (kept := kept_on_objects(tree) | kept_in_modules(tree))} == {}


def test_modules_keep_nothing_but_what_is_named(package: Path) -> None:
    """Our rule: what a module remembers is in the table, and the table names nothing that is not there."""
    found = {
        f"{name} {kept}"
        for name, tree in sources(package, "pkg", "agent").items()
        if Path(name).name not in STANDALONE
        for kept in kept_in_modules(tree)
    }
    assert sorted(found - ALLOWED.keys()) == []
    assert sorted(ALLOWED.keys() - found) == []


def test_nothing_is_called_that_keeps_a_runs_context(package: Path) -> None:
    """Our rule: timers are made in an empty context, and no address or pattern of a run is cached: :mod:`pkg.traceless`."""
    found = {
        f"{name} {call}"
        for name, tree in sources(package, "pkg", "agent").items()
        if Path(name).name not in (*STANDALONE, "traceless.py")
        for call in keeping_calls(tree)
    }
    assert sorted(found - MADE.keys()) == []


BAD_MODULES = (
    "last = None\ndef f(x):\n    global last\n    last = x",
    "seen = {}\ndef f(x):\n    seen[x] = 1",
    "seen = []\ndef f(x):\n    seen.append(x)",
    "seen = []\nf = lambda x: seen.append(x)",
    "import os\ndef f(x):\n    os.environ['A'] = x",
    "from pkg import texts\ndef f(x):\n    texts.last = x",
    "class K: pass\ndef f(x):\n    K.last = x",
    "import functools\n@functools.lru_cache(maxsize=3)\ndef f(x):\n    return x",
    "def f(x):\n    return x\ndef g(x):\n    f.last = x",
    "import os\ndef f(x):\n    setattr(os, 'a', x)",
)
BAD_OBJECTS = (
    "class R:\n    async def run(self, ctx):\n        self.ctx = ctx",
    "class R:\n    def run(self, ctx):\n        self.seen[1] = ctx",
    "class R:\n    seen = []",
    "class R:\n    def run(self, ctx):\n        self.seen.append(ctx)",
    "class R:\n    def run(self, ctx):\n        setattr(self, 'a', ctx)",
    "class R:\n    def run(self, ctx):\n        type(self).a, b = ctx, 1",
)
BAD_CALLS = (
    "import asyncio\nasyncio.timeout(3)",
    "from urllib.parse import urlsplit as cut\ncut(x)",
    "loop.call_later(3, f)",
    "import re\ndef f(x):\n    re.compile('|'.join(x))",
    "import re\ndef f(x):\n    re.search(f'{x}', '')",
)


def test_each_way_to_keep_something_would_be_seen() -> None:
    """The other side of the tests above."""
    assert [text for text in BAD_MODULES if not kept_in_modules(ast.parse(text))] == []
    assert [text for text in BAD_OBJECTS if not kept_on_objects(ast.parse(text))] == []
    assert [text for text in BAD_CALLS if not keeping_calls(ast.parse(text))] == []
