"""What code keeps outside of the call it runs in, read from its syntax: module state, class state, what is process-wide.

:class:`Modules` knows the modules of one package; :meth:`Modules.kept` names what the functions of one of them write to:

- ``name``: something the module holds (a variable, a class, a function, an import) is assigned to, or changed by a method that
  changes things, directly, by another name, or as the argument of a function that is not known only to read;
- ``name.method()``: a method of an object that a module holds is given something, and nothing says that it only reads;
- ``@cache``, ``function(argument=[])``, ``Class.attribute``: what remembers, defaults and attributes that all calls share;
- ``os.putenv()``: a call that keeps what it is given for the whole process.

Names are resolved by scope, as the language does. What is not followed: a value that an own function returns, and what a called
function does with a parameter, but for what is passed from module state.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES: Final = (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)


def _words(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


MUTATORS: Final = _words(
    "append appendleft add update setdefault pop popleft popitem clear insert extend extendleft discard remove sort reverse",
    "rotate move_to_end subtract intersection_update difference_update symmetric_difference_update __setitem__ __setattr__",
    "__ior__ put put_nowait set set_result set_exception addFilter addHandler register",
)
"""Methods that change what they are called on, whatever it is."""
CONTAINERS: Final = _words(
    "list dict set bytearray deque defaultdict OrderedDict Counter ChainMap WeakKeyDictionary WeakValueDictionary WeakSet"
)
"""Calls that make something to be changed, of which all other methods read."""
FIXED_CALLS: Final = _words(
    "frozenset tuple compile MappingProxyType int float str bytes bool len range join encode object Path Struct timedelta",
    "TypeVar NewType ParamSpec namedtuple JSONDecoder JSONEncoder attrgetter itemgetter",
)
"""Calls that make a value which nothing can be kept in."""
LOGGERS: Final = _words("getLogger Logger")
LOGGING: Final = _words("debug info warning error exception critical log isEnabledFor")
"""What a logger hands on and forgets."""
READERS: Final = _words(
    "len sorted list tuple set frozenset dict isinstance issubclass any all min max sum str repr enumerate zip iter next",
    "reversed map filter bool callable id hash hasattr getattr type range join",
)
"""Calls that only read their arguments."""
INSIDE: Final = _words("get values items setdefault pop __getitem__")
"""Methods of containers that hand out what is inside."""
CACHES: Final = _words("cache lru_cache")
PROCESS_WIDE: Final = _words(
    "os.putenv os.unsetenv os.chdir os.umask os.register_at_fork atexit.register signal.signal weakref.finalize",
    "locale.setlocale sys.intern sys.settrace sys.setprofile sys.addaudithook threading.setprofile threading.settrace",
    "socket.setdefaulttimeout codecs.register copyreg.pickle linecache.lazycache warnings.filterwarnings warnings.simplefilter",
    "logging.addLevelName logging.basicConfig logging.setLoggerClass logging.setLogRecordFactory mimetypes.add_type",
)
"""Calls that keep what they are given for the rest of the process."""


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a node assigns to or deletes, with the value that comes there, or that it is taken from."""
    found: list[tuple[ast.expr, ast.expr | None]] = []
    match node:
        case ast.Assign():
            found = [(target, node.value) for target in node.targets]
        case ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr():
            found = [(node.target, node.value)]
        case ast.Delete():
            found = [(target, None) for target in node.targets]
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            found = [(node.target, node.iter)]
        case ast.With() | ast.AsyncWith():
            found = [(item.optional_vars, item.context_expr) for item in node.items if item.optional_vars is not None]
    for target, value in found:
        yield from _paired(target, value)


def _paired(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The single targets of one that may unpack, each with what comes there, as far as that can be told."""
    if not isinstance(target, ast.Tuple | ast.List):
        yield (target.value if isinstance(target, ast.Starred) else target), value
        return
    apart = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
    apart = apart and not any(isinstance(each, ast.Starred) for each in (*target.elts, *value.elts))  # type: ignore[union-attr]
    for number, each in enumerate(target.elts):
        yield from _paired(each, value.elts[number] if apart else value)  # type: ignore[union-attr]


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a node assigns to or deletes."""
    return (target for target, _ in bindings(node))


def last_name(called: ast.expr) -> str:
    """``c`` of ``a.b.c``."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def parameters(function: Function) -> list[ast.arg]:
    """All of them."""
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *(each for each in (given.vararg, given.kwarg) if each)]


def _inner(scope: ast.AST) -> list[ast.AST]:
    """The nodes that are evaluated inside a scope, at its top."""
    if isinstance(scope, ast.Lambda):
        return [scope.body]
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        return list(scope.body)
    return list(ast.iter_child_nodes(scope))


def _outer(scope: ast.AST) -> list[ast.AST]:
    """The nodes of a scope's beginning that are evaluated around it."""
    if isinstance(scope, FUNCTIONS):
        given = scope.args
        return [*getattr(scope, "decorator_list", ()), *given.defaults, *(each for each in given.kw_defaults if each)]
    if isinstance(scope, ast.ClassDef):
        return [*scope.decorator_list, *scope.bases, *scope.keywords]
    return []


def own(scope: ast.AST) -> Iterator[ast.AST]:
    """Every node of a scope; of a scope inside it only that node and what is evaluated around it."""
    waiting = _inner(scope)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += _outer(node) if isinstance(node, SCOPES) else ast.iter_child_nodes(node)


def _imported(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Name, module and attribute (``""`` = the module itself) of what a node imports."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else alias.name.partition(".")[0], ""
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield alias.asname or alias.name, node.module or "", alias.name


class Scope:
    """The names of a function, comprehension, class body or module, and where they come from."""

    def __init__(self, node: ast.AST, outer: Scope | None) -> None:
        self.node = node
        self.outer = outer
        self.declared: set[str] = set()
        self.values: dict[str, list[ast.expr]] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.defined: dict[str, ast.AST] = {}
        self.bound = {each.arg for each in parameters(node)} if isinstance(node, FUNCTIONS) else set()
        for each in own(node):
            if isinstance(each, ast.Global | ast.Nonlocal):
                self.declared.update(each.names)
            for target, value in bindings(each):
                if isinstance(target, ast.Name):
                    self.values.setdefault(target.id, []).extend([value] if value is not None else [])
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.defined[each.name] = each
            elif isinstance(each, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and each.name:
                self.bound.add(each.name)
            elif isinstance(each, ast.MatchMapping) and each.rest:
                self.bound.add(each.rest)
            self.imports |= {name: (module, attribute) for name, module, attribute in _imported(each)}
        self.bound |= {*self.values, *self.imports, *self.defined}
        self.bound -= self.declared

    def home(self, name: str) -> Scope | None:
        """The scope that a name means here; none for what is built in."""
        scope: Scope | None = self
        while scope is not None:
            visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if visible and name in scope.bound:
                return scope
            if (
                visible
                and name in scope.declared
                and any(isinstance(each, ast.Global) and name in each.names for each in own(scope.node))
            ):
                while scope.outer is not None:
                    scope = scope.outer
                return scope
            scope = scope.outer
        return None


class Modules:
    """The modules of one package, by file (``pkg/name.py``)."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        """Their syntax."""
        self._scopes = {name: Scope(tree, None) for name, tree in trees.items()}

    def kept(self, file: str) -> set[str]:
        """What the functions of a file keep outside of their call."""
        return _Reading(self, self._scopes[file]).found

    def kind(self, scope: Scope, name: str) -> str:
        """What a module's name is.

        ``fixed`` (nothing can be kept in it), ``table`` (a container that is made with fixed values), ``container``,
        ``logger``, ``module``, ``class``, ``function``, ``foreign`` (of another library) or ``object``.
        """
        if name in scope.defined:
            return "class" if isinstance(scope.defined[name], ast.ClassDef) else "function"
        if name in scope.imports:
            return self._kind_of_import(*scope.imports[name])
        found = {self.value(scope, value) for value in scope.values.get(name, ())} or {"object"}
        return found.pop() if len(found) == 1 else "object"

    def member(self, scope: Scope, module: str, name: str) -> str:
        """What an attribute of an imported module is."""
        found, attribute = scope.imports[module]
        return self._kind_of_import(f"{found}.{attribute}" if attribute else found, name)

    def _kind_of_import(self, module: str, attribute: str) -> str:
        if not attribute or self._scope_of(f"{module}.{attribute}") is not None:
            return "module"
        scope = self._scope_of(module)
        if scope is not None:
            return "fixed" if attribute.startswith("__") else self.kind(scope, attribute)
        if module in ("pkg", "agent"):
            return "module"
        return "object" if module.startswith(("pkg.", "agent.")) else "foreign"

    def _scope_of(self, module: str) -> Scope | None:
        path = module.replace(".", "/")
        return self._scopes.get(f"{path}.py") or self._scopes.get(f"{path}/__init__.py")

    def value(self, scope: Scope, value: ast.expr) -> str:
        """What an expression at a module's own level makes, see :meth:`kind`."""
        match value:
            case ast.Constant() | ast.JoinedStr() | ast.Compare() | ast.Lambda() | ast.UnaryOp():
                return "fixed"
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in scope.imports:
                return self.member(scope, name, attribute)
            case ast.Attribute():
                kind = self.value(scope, value.value)
                return (
                    kind if kind in ("fixed", "foreign") or not _enumeration(self.definition(scope, value.value)) else "fixed"
                )
            case ast.Tuple():
                kinds = {self.value(scope, each) for each in value.elts}
                return "fixed" if kinds <= {"fixed", "class", "function", "foreign"} else _loosest(kinds)
            case ast.BinOp():
                kinds = {self.value(scope, each) for each in (value.left, value.right)}
                return kinds.pop() if len(kinds) == 1 else "fixed" if kinds <= {"fixed", "foreign", "class"} else "container"
            case ast.Subscript():
                return "fixed" if self.value(scope, value.value) in ("class", "foreign", "fixed") else "object"
            case ast.List(elts=values) | ast.Dict(values=values) | ast.Set(elts=values) if values:
                kinds = {self.value(scope, each) for each in values}
                return "table" if kinds <= {"fixed", "table", "class", "function", "foreign"} else "container"
            case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
                return "container"
            case ast.IfExp():
                return _loosest(self.value(scope, each) for each in (value.body, value.orelse))
            case ast.Name():
                return self.kind(scope, value.id) if value.id in scope.bound else "fixed"
            case ast.Starred():
                return self.value(scope, value.value)
            case ast.Call():
                return self._kind_of_call(scope, value)
        return "object"

    def _kind_of_call(self, scope: Scope, value: ast.Call) -> str:
        name = last_name(value.func)
        if name in FIXED_CALLS:
            return "fixed"
        if name == "getattr":
            return self.value(scope, value.args[0])
        if name in CONTAINERS:
            return "container"
        if name in LOGGERS:
            return "logger"
        made = self.definition(scope, value.func)
        if isinstance(made, ast.ClassDef) and _frozen(made):
            return "fixed"
        return "object"

    def definition(self, scope: Scope, called: ast.expr) -> ast.AST | None:
        """The own class or function that is called."""
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in scope.imports:
            module, attribute = scope.imports[called.value.id]
            found = self._scope_of(f"{module}.{attribute}" if attribute else module)
            return found.defined.get(called.attr) if found is not None else None
        if isinstance(called, ast.Name) and called.id in scope.imports:
            module, attribute = scope.imports[called.id]
            found = self._scope_of(module)
            return found.defined.get(attribute) if found is not None else None
        return scope.defined.get(called.id) if isinstance(called, ast.Name) else None


def _frozen(kind: ast.ClassDef) -> bool:
    """Whether objects of a class cannot be written to."""
    frozen = any("frozen=True" in ast.unparse(each) for each in kind.decorator_list)
    return frozen or _enumeration(kind) or any(last_name(base) == "NamedTuple" for base in kind.bases)


def _enumeration(kind: ast.AST | None) -> bool:
    return isinstance(kind, ast.ClassDef) and any(
        last_name(base) in ("Enum", "StrEnum", "IntEnum", "Flag") for base in kind.bases
    )


class _Reading:
    """One file, read."""

    def __init__(self, modules: Modules, module: Scope) -> None:
        self._modules = modules
        self._module = module
        self.found: set[str] = set()
        self._scope(module, inside=False)

    # ---- what an expression leads to

    def _labels(self, scope: Scope, node: ast.expr | None, seen: frozenset[str] = frozenset()) -> set[str]:
        """The names of module state that a value is, or is inside of."""
        match node:
            case ast.Name():
                return self._labels_of_name(scope, node.id, seen)
            case ast.Attribute(attr="__class__"):
                return {"type()"}
            case ast.Attribute() | ast.Subscript() if self._kind(scope, node, seen) == "fixed":
                return set()
            case ast.Attribute(value=ast.Name(id=name)) if self._kind(scope, node.value, seen) == "module":
                return {f"{label}.{node.attr}" for label in self._labels_of_name(scope, name, seen)}
            case ast.Attribute() | ast.Subscript() | ast.Starred() | ast.Await() | ast.NamedExpr():
                return self._labels(scope, node.value, seen)
            case ast.IfExp():
                return self._labels(scope, node.body, seen) | self._labels(scope, node.orelse, seen)
            case ast.BoolOp(values=elements) | ast.Tuple(elts=elements) | ast.List(elts=elements):
                return {label for each in elements for label in self._labels(scope, each, seen)}
            case ast.Call(func=ast.Name(id="globals")):
                return {"globals()"}
            case ast.Call(func=ast.Name(id="type"), args=[_]):
                return {"type()"}
            case ast.Call(func=ast.Name(id="vars" | "getattr" | "iter" | "next" | "reversed" | "enumerate"), args=[first, *_]):
                return self._labels(scope, first, seen)
            case ast.Call(func=ast.Attribute(attr=method, value=value)) if method in INSIDE:
                return self._labels(scope, value, seen) if self._kind(scope, value, seen) in ("container", "object") else set()
        return set()

    def _labels_of_name(self, scope: Scope, name: str, seen: frozenset[str]) -> set[str]:
        home = scope.home(name)
        if home is None:
            return set()
        if home.outer is None or (name in home.imports and name not in home.values):
            return set() if self._modules.kind(home, name) == "fixed" else {name}
        if _class_of(home, name):
            return {"cls"}
        values = [] if name in seen else home.values.get(name, [])
        return {label for value in values for label in self._labels(home, value, seen | {name})}

    def _kind(self, scope: Scope, node: ast.expr, seen: frozenset[str] = frozenset()) -> str:
        """What a value is, where it is module state (see :meth:`Modules.kind`); what is reached through it is an object."""
        if isinstance(node, ast.Name):
            home = scope.home(node.id)
            if home is None:
                return "local"
            if home.outer is None or node.id in home.imports:
                return self._modules.kind(home, node.id)
            values = [] if node.id in seen else home.values.get(node.id, [])
            return _loosest(self._kind(home, value, seen | {node.id}) for value in values)
        if isinstance(node, ast.IfExp):
            return _loosest(self._kind(scope, each, seen) for each in (node.body, node.orelse))
        if isinstance(node, ast.BoolOp):
            return _loosest(self._kind(scope, each, seen) for each in node.values)
        if isinstance(node, ast.Tuple | ast.List):
            return _loosest(self._kind(scope, each, seen) for each in node.elts)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            home = scope.home(node.value.id)
            if (
                home is not None
                and node.value.id in home.imports
                and self._kind(scope, node.value, seen) in ("module", "foreign")
            ):
                return self._modules.member(home, node.value.id, node.attr)
            if home is not None and _enumeration(self._modules.definition(home, node.value)):
                return "fixed"
        if isinstance(node, ast.Attribute | ast.Subscript):
            kind = self._kind(scope, node.value, seen)
            return "fixed" if kind == "table" else kind if kind in ("foreign", "local", "fixed") else "object"
        if isinstance(node, ast.Call) and last_name(node.func) == "getattr" and node.args:
            return self._kind(scope, node.args[0])
        return "object" if self._labels(scope, node, seen) else "local"

    # ---- what a scope does

    def _scope(self, scope: Scope, *, inside: bool) -> None:
        """``inside``: of a function, not what runs once at import."""
        for node in own(scope.node):
            if inside:
                self._node(scope, node)
            if isinstance(node, FUNCTIONS):
                self._signature(node)
            if isinstance(node, ast.ClassDef):
                self._class(node)
            if isinstance(node, SCOPES):
                self._scope(Scope(node, scope), inside=inside or isinstance(node, FUNCTIONS))

    def _signature(self, function: Function) -> None:
        name = getattr(function, "name", "lambda")
        for decorator in getattr(function, "decorator_list", ()):
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if last_name(called) in CACHES:
                self.found.add(f"@{ast.unparse(called)}")
        given = function.args
        positional = [*given.posonlyargs, *given.args]
        defaults = [
            *zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True),
            *((argument, value) for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value),
        ]
        for argument, value in defaults:
            kind = self._modules.value(self._module, value)
            if kind in ("container", "table") or (kind == "object" and isinstance(value, ast.Call)):
                self.found.add(f"{name}({argument.arg}={ast.unparse(value)})")

    def _class(self, kind: ast.ClassDef) -> None:
        for node in kind.body:
            for target, value in bindings(node):
                if value is not None and self._modules.value(self._module, value) in ("container", "table"):
                    self.found.add(f"{kind.name}.{ast.unparse(target)}")

    def _node(self, scope: Scope, node: ast.AST) -> None:
        if isinstance(node, ast.Global):
            self.found.update(node.names)
        for target in targets(node):
            if not isinstance(target, ast.Name):
                self.found |= self._labels(scope, target) | _shared_object(target)
        if isinstance(node, ast.Call):
            self._call(scope, node)

    def _call(self, scope: Scope, node: ast.Call) -> None:
        called = node.func
        given = [*node.args, *(each.value for each in node.keywords)]
        full = self._full_name(scope, called)
        if full in PROCESS_WIDE:
            self.found.add(f"{full}()")
        if full in ("setattr", "delattr", "object.__setattr__", "type.__setattr__") and node.args:
            self.found |= self._labels(scope, node.args[0]) | _shared_object(ast.Attribute(node.args[0], "set", ast.Store()))
            return
        if isinstance(called, ast.Attribute):
            self._method(scope, called, given)
        elif isinstance(called, ast.Name) and given and self._kind(scope, called) == "object":
            self.found |= {f"{label}()" for label in self._labels(scope, called)}
        if last_name(called) in READERS:
            return
        for each in given:
            if self._kind(scope, each) in ("container", "table", "object") and not isinstance(each, ast.Call):
                self.found |= self._labels(scope, each) - {"cls", "type()"}

    def _method(self, scope: Scope, called: ast.Attribute, given: list[ast.expr]) -> None:
        labels = self._labels(scope, called.value)
        kind = self._kind(scope, called.value)
        if called.attr in MUTATORS:
            self.found |= _shared_object(called)
        if not labels or (kind in ("module", "class", "function") and isinstance(called.value, ast.Name)):
            return
        if labels == {"cls"} and isinstance(called.value, ast.Name):
            return
        if called.attr in MUTATORS:
            self.found |= labels
        elif given and (kind == "object" or (kind == "logger" and called.attr not in LOGGING)):
            self.found |= {f"{label}.{called.attr}()" for label in labels}

    def _full_name(self, scope: Scope, called: ast.expr) -> str:
        """``os.putenv`` of what was imported from there, by whatever name."""
        if isinstance(called, ast.Attribute):
            return f"{self._full_name(scope, called.value)}.{called.attr}"
        if not isinstance(called, ast.Name):
            return ""
        home = scope.home(called.id)
        if home is None or called.id not in home.imports:
            return called.id
        return ".".join(part for part in home.imports[called.id] if part)


LOOSEST_FIRST: Final = ("object", "container", "table", "logger", "module", "class", "function", "foreign", "fixed")


def _loosest(kinds: Iterable[str]) -> str:
    """Of several kinds the one that most can be kept in."""
    found = set(kinds)
    return next((kind for kind in LOOSEST_FIRST if kind in found), "local")


def _class_of(home: Scope, name: str) -> bool:
    """Whether a name is a class method's class."""
    function = home.node
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = parameters(function)
    marked = any(last_name(each) == "classmethod" for each in function.decorator_list)
    return bool(given) and given[0].arg == name and (marked or name in ("cls", "mcs"))


def _shared_object(target: ast.expr) -> set[str]:
    """The SDK's object that serves every installation, where something is written through it."""
    node = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr in ("runner", "plugin"):
            return {node.attr}
        node = node.value
    return {node.id} & {"runner", "plugin"} if isinstance(node, ast.Name) else set()


# ------------------------------------------------------------------ objects that serve everybody

HANDED_ON: Final = frozenset({"run_loop.run"})
"""What the SDK's object may be given to; it keeps it for the run, and nothing in it: ``runner`` and ``plugin`` above."""


def kept_on_objects(tree: ast.Module) -> set[str]:
    """What classes that the SDK makes once per process (plugin, runner) might keep on themselves.

    They have no state, so that their methods need not even name their object, but to hand it on.
    """
    found: set[str] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        found |= {f"{kind.name}.{ast.unparse(each)}" for node in kind.body for each in targets(node)}
        for node in ast.walk(kind):
            found |= {f"{kind.name}: {ast.unparse(each)}" for each in targets(node) if not isinstance(each, ast.Name)}
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "setattr",
                "object.__setattr__",
                "vars",
                "super",
                "locals",
            ):
                found.add(f"{kind.name}: {ast.unparse(node)}")
        for method in kind.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = {ast.unparse(each) for each in method.decorator_list}
                found |= {f"{kind.name}: @{each}" for each in decorators if each != "staticmethod"}
                if parameters(method) and _named(method, parameters(method)[0].arg):
                    found.add(f"{kind.name}.{method.name}: {parameters(method)[0].arg}")
    return found


def _named(method: ast.AST, name: str) -> bool:
    """Whether a method names its object in another way than by handing it on."""
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call) and ast.unparse(node.func) in HANDED_ON]
    handed_on = {id(argument) for call in calls for argument in call.args}
    return any(isinstance(node, ast.Name) and node.id == name and id(node) not in handed_on for node in ast.walk(method))
