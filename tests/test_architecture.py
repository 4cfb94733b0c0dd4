"""The house rules: who imports whom, which library lives where, how big things may be.

The table of docs/design/overview.md is read from that document and checked over the syntax
tree of every module, so the document and the code cannot drift apart.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    (ROOT / "ds4py").rglob("*.py"), key=lambda path: str(path.relative_to(ROOT / "ds4py"))
)
DOCUMENT = (ROOT / "docs" / "design" / "overview.md").read_text(encoding="utf-8")

FREE = {"__init__", "__main__"}  # the version, and the door that only calls `cli`
LIBRARIES = {
    "torch": {"quant", "kernels", "layers", "models", "engine"},
    "triton": {"kernels"},
    "llvmlite": {"kernels"},
    "llguidance": {"generation"},
    "prometheus_client": {"server"},
    "socket": {"transport"},
    "threading": {
        *("transport", "peer", "stage", "coordinator", "worker", "tracing"),
        *("engine", "generation", "server"),
    },
    "asyncio": {"server"},
    "click": {"cli"},
    "pickle": set(),
    "_pickle": set(),
    "cPickle": set(),
    "dill": set(),
    "shelve": set(),
    "marshal": set(),
}
EXCEPTIONS = {("ds4py/cli/signals.py", "threading")}  # the event that a signal sets
# one formula or block family each: their folder's `formats` or caller says what they own
LEAVES = {
    *("layers/attention", "layers/norm", "layers/rope"),
    *(f"quant/{name}" for name in ("fp4", "iquants", "kquants", "legacy", "plain", "ternary")),
}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room(path: Path) -> str:
    """The first name below ds4py: a folder, or a module of the ground floor."""
    first = path.relative_to(ROOT / "ds4py").parts[0]
    return first.removesuffix(".py")


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def imported(node: ast.AST, *, typing: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported name with whether it is imported for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, typing) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            module = child.module or ""
            yield from ((f"{module}.{alias.name}", typing) for alias in child.names)
        else:
            yield from imported(
                child, typing=typing or only_for_types(node) or only_for_types(child)
            )


def rooms_of_table() -> dict[str, set[str]]:
    """Read "Who may import whom": room -> rooms that it may import besides itself."""
    section = DOCUMENT.partition("Who may import whom")[2].partition("\n\n## ")[0]
    rows = [line.strip("| \n").split("|") for line in section.splitlines() if line.startswith("| ")]
    allowed: dict[str, set[str]] = {}
    for left, right in rows[1:]:
        rooms = [name.strip() for name in left.split("·")]
        grants = [part.strip() for part in re.sub(r"\([^)]*\)", "", right).split("·")]
        if len(grants) == 1:
            grants *= len(rooms)
        for name, grant in zip(rooms, grants, strict=True):
            if grant.startswith("all of the above"):
                allowed[name] = set(allowed)
            else:
                allowed[name] = set() if grant == "nothing" else set(grant.split())
    return allowed


ALLOWED = rooms_of_table()


def test_the_table_of_the_document_names_every_room() -> None:
    built = {room(path) for path in MODULES} - FREE
    assert built <= set(ALLOWED)
    assert set.union(*ALLOWED.values()) <= set(ALLOWED)


def test_the_rules_find_what_they_forbid() -> None:
    """A test of the tests: imports in functions and for type checkers are seen and told apart."""
    code = ast.parse(
        "import a.b\n"
        "if TYPE_CHECKING:\n    from c import d\n"
        "def f():\n    from e import g\n    import pickle\n"
    )
    assert list(imported(code)) == [
        ("a.b", False),
        ("c.d", True),
        ("e.g", False),
        ("pickle", False),
    ]


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_module_imports_only_rooms_that_its_own_may_import(path: Path) -> None:
    """Imports for type checkers count inside a room only: they create no dependency at run time."""
    mine = room(path)
    if mine in FREE:
        return
    for name, for_types in imported(tree(path)):
        parts = name.split(".")
        if parts[0] != "ds4py" or for_types or parts[1] in {mine, "__version__"}:
            continue
        assert parts[1] in ALLOWED[mine], f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_a_library_is_imported_only_in_its_rooms(path: Path) -> None:
    for name, for_types in imported(tree(path)):
        library = name.split(".")[0]
        rooms = LIBRARIES.get(library)
        if rooms is None or for_types or (ids(path), library) in EXCEPTIONS:
            continue
        assert room(path) in rooms, f"{ids(path)} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_only_config_reads_the_environment(path: Path) -> None:
    if room(path) == "config":
        return
    for node in ast.walk(tree(path)):
        reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
        assert not reads, f"{ids(path)}:{node.lineno} reads the environment"  # type: ignore[attr-defined]
    names = {name for name, _ in imported(tree(path))}
    assert not names & {"os.environ", "os.environb", "os.getenv"}


# --- connections ---------------------------------------------------------------------------------

CONNECTOR, ACCEPTOR = "ds4py/transport/connector.py", "ds4py/transport/acceptor.py"
# what makes or touches a connection, and where that may be done
MADE_IN = {
    "import socket": {"ds4py/transport/sockets.py", "ds4py/transport/stream.py"},
    "Connection(": {CONNECTOR, ACCEPTOR},
    "PlainStream(": {CONNECTOR, ACCEPTOR},
    ".accept()": {ACCEPTOR, "ds4py/transport/sockets.py"},
    "sockets.connect": {
        CONNECTOR,
    },
    "create_connection": set[str](),
    "create_server": set(),
    "open_connection": set(),
    "start_server": set(),
    "socketpair": set(),
}


def ways_to_a_connection(module: ast.AST) -> Iterator[str]:
    """Every way to make or touch a connection that a module goes, named as in `MADE_IN`."""
    for name, for_types in imported(module):
        if name in {"socket", "_socket"} and not for_types:
            yield "import socket"
        if name == "ds4py.transport.sockets.connect":
            yield "sockets.connect"
    for node in ast.walk(module):
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in {"Connection", "PlainStream"}:
            yield f"{name}("
        if isinstance(node, ast.Call) and name == "accept" and not (node.args or node.keywords):
            yield ".accept()"
        if isinstance(node, (ast.Attribute, ast.Name)):
            used = node.attr if isinstance(node, ast.Attribute) else node.id
            if used in MADE_IN:
                yield used
        if ast.unparse(node) == "sockets.connect":
            yield "sockets.connect"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_only_connector_and_acceptor_make_connections(path: Path) -> None:
    """So that what comes before the first frame, such as encryption, is added in one place."""
    strange = {way for way in ways_to_a_connection(tree(path)) if ids(path) not in MADE_IN[way]}
    assert not strange, f"{ids(path)}: {strange}: ask a Connector or an Acceptor"


def test_every_way_to_a_connection_is_found() -> None:
    """A test of the test above, and of its exceptions: each is still needed."""
    code = ast.parse(
        "import socket\n"
        "from ds4py.transport.sockets import connect\n"
        "def f(listener, module):\n"
        "    module.Connection(PlainStream(listener.accept()))\n"
        "    module.create_connection(('', 1))\n"
        "    machine.accept(3)\n"
    )
    assert set(ways_to_a_connection(code)) == {
        *("import socket", "sockets.connect", "Connection(", "PlainStream("),
        *(".accept()", "create_connection"),
    }
    used = {(way, ids(path)) for path in MODULES for way in ways_to_a_connection(tree(path))}
    assert used == {(way, path) for way, paths in MADE_IN.items() for path in paths}


# names that wait, all of which tests/unit/test_waits.py tries on a busy machine, and others
LONGEST_CLASS = 250
LONG_CLASSES = {
    "LocalRunner": "the whole of one contract, which has nineteen members",
    "ClusterSession": "one timeline, and every way in which a stage may fail it",
    "DiskCache": "one folder, one lock, and every step that must hold it",
    "PipelinedRun": "one loop with its state, each step of it a method",
    "DataConnection": "one reader with everything that a frame may lead to",
}
"""Classes that may be longer, and why."""


def test_a_class_can_be_read_at_one_go() -> None:
    found = {
        node.name: node.end_lineno - node.lineno + 1
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None
    }
    long = {name: n for name, n in found.items() if n > LONGEST_CLASS}
    assert set(long) == set(LONG_CLASSES), long


def test_no_two_rooms_have_classes_of_one_name() -> None:
    rooms: dict[str, set[str]] = {}
    for path in MODULES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms.setdefault(node.name, set()).add(room(path))
    shared = {name: sorted(homes) for name, homes in rooms.items() if len(homes) > 1}
    assert not shared


POLICY = [path for path in MODULES if path.parent == ROOT / "ds4py" / "coordinator"]


@pytest.mark.parametrize("path", POLICY, ids=ids)
def test_the_policy_of_a_coordinator_knows_no_transport(path: Path) -> None:
    """A second transport implements `coordinator/pipeline.py` and edits nothing beside it."""
    for name, _ in imported(tree(path)):
        foreign = "coordinator.relay", "wire", "transport", "peer", "stage", "worker"
        if name.startswith(tuple(f"ds4py.{room}." for room in foreign)):
            assert name.startswith("ds4py.wire.prefix_hash."), f"{ids(path)} imports {name}"


MAY_USE = {
    "threading": {
        *("Lock", "Semaphore", "Event", "Condition", "Thread"),
        *("current_thread", "stack_size"),
        *("RLock", "Timer"),  # waited for without limit only; waits as an event does
    },
    "queue": {"Empty"},
    "concurrent.futures": {"Future", "ThreadPoolExecutor"},  # whose results are futures
    "asyncio": {
        *("timeout", "wait", "Event", "Semaphore", "Queue", "sleep"),
        *("to_thread", "TimerHandle", "Transport", "run", "run_coroutine_threadsafe"),
        *("create_task", "get_running_loop", "Task", "AbstractEventLoop", "CancelledError"),
    },
    "selectors": set(),
    "multiprocessing": set(),
    "sched": set(),
}


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_nothing_waits_in_a_way_that_was_not_tried(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module in MAY_USE:
            used = {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in MAY_USE:
            used = {(ast.unparse(node.value), node.attr)}
        else:
            continue
        strange = {name for name in used if name[1] not in MAY_USE[name[0]]}
        assert not strange, f"{ids(path)}: {strange}: try it in tests/unit/test_waits.py"


THE_DOOR = "ds4py/kernels/memory.py"


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_only_one_module_asks_a_tensor_for_its_address(path: Path) -> None:
    """Memory goes to compiled code through checks: see the module's own words."""
    asked = {
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in {"data_ptr", "untyped_storage", "__array_interface__", "ctypes"}
    }
    assert not asked or ids(path) == THE_DOOR, f"{ids(path)}:{min(asked)} takes an address"


def modules_that(path: Path) -> set[str]:
    """Modules of ds4py that a module imports, for type checkers too."""
    names = {_module(other) for other in MODULES}
    found = {name for name, _ in imported(tree(path))}
    return {
        next(part for part in (name, name.rpartition(".")[0], "") if part in names or not part)
        for name in found
        if name.startswith("ds4py.")
    } - {"", _module(path)}


def _module(path: Path) -> str:
    dotted = str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    return dotted.removesuffix(".__init__")


def test_no_module_imports_one_that_imports_it() -> None:
    """Neither at run time nor for types; the package's own door names its users for types only."""
    graph = {_module(path): modules_that(path) for path in MODULES if _module(path) != "ds4py"}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                visit(other, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def must_say(path: Path) -> bool:
    name = str(path.relative_to(ROOT / "ds4py")).removesuffix(".py")
    return path.stem not in FREE and name not in LEAVES


@pytest.mark.parametrize("path", [path for path in MODULES if must_say(path)], ids=ids)
def test_a_module_says_what_it_owns_and_what_it_refuses_to_know(path: Path) -> None:
    docstring = " ".join((ast.get_docstring(tree(path)) or "").split())
    assert "Owns:" in docstring
    assert "Refuses to know:" in docstring


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    folders = Counter(path.parent for path in MODULES if path.stem != "__init__")
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > 15}
    assert crowded == {}


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            size = node.end_lineno - node.lineno + 1
            assert size <= 70, f"{ids(path)}:{node.lineno} {node.name} has {size} lines"


# --- the pages about the design ------------------------------------------------------------------

DESIGN = sorted((ROOT / "docs" / "design").glob("*.md"))


@pytest.mark.parametrize("path", DESIGN, ids=ids)
def test_pages_about_the_design_can_be_read_in_a_terminal(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert len(line) < 120, f"{ids(path)}:{number} has {len(line)} columns"


@pytest.mark.parametrize("path", DESIGN, ids=ids)
def test_pages_about_the_design_name_files_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.py)`", text))
    roots = [ROOT, ROOT / "ds4py", ROOT / "ds4py" / "coordinator", ROOT / "ds4py" / "server"]
    gone = {name for name in named if not any((root / name).is_file() for root in roots)}
    assert not gone


def made_locks(path: Path) -> Iterator[str]:
    """Names to which a module gives a lock, a condition or a semaphore."""
    kinds = ("Lock", "RLock", "Condition", "Semaphore")
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            made = ast.unparse(node.value)
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if re.search(rf"(threading|asyncio)\.({'|'.join(kinds)})\b", made):
                yield ast.unparse(target).removeprefix("self.")


def test_the_table_of_locks_is_the_codes() -> None:
    text = (ROOT / "docs" / "design" / "threads.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([\w/]+\.py)` `(\w+)` \|", text, re.MULTILINE))
    made = {
        (str(path.relative_to(ROOT / "ds4py")), name)
        for path in MODULES
        for name in made_locks(path)
    }
    assert told == made


# --- tests talk to the public side ---------------------------------------------------------------

TESTS = sorted(path for path in (ROOT / "tests").rglob("*.py") if "golden" not in path.parts)
TOUCHED = ROOT / "tests" / "private_names.txt"
"""How many private names of the package each test module touches; the numbers may only fall."""


NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # public, whatever they look like


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLES


def defined(module: ast.Module) -> set[str]:
    """Names of functions, classes, attributes of self and variables that a module defines."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"self", "cls"}:
            names.add(node.attr)
    return names


@cache
def private_names() -> frozenset[str]:
    return frozenset(name for path in MODULES for name in defined(tree(path)) if is_private(name))


def touched(module: ast.Module) -> list[str]:
    """Private names of the package that a test reads, imports or replaces; not those of its own."""
    known = private_names() - defined(module)
    names: list[str] = []
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds4py"):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "object")):
            texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            names += [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
    return [name for name in names if name in known]


def test_no_test_touches_more_private_names_than_before() -> None:
    """Reach a private name through what the object promises, and take its number down here."""
    lines = (line.split() for line in TOUCHED.read_text(encoding="utf-8").splitlines())
    allowed = {path: int(count) for count, path in lines}
    found = {ids(path): len(touched(tree(path))) for path in TESTS}
    wrong = {path: (count, allowed.get(path, 0)) for path, count in found.items()}
    wrong = {path: (count, before) for path, (count, before) in wrong.items() if count != before}
    assert wrong == {}, f"{TOUCHED.name}: (found, allowed)"
    assert allowed.keys() <= found.keys()


def test_a_touched_name_is_seen() -> None:
    """Attributes, imports and replacements are counted; a class's own private names are not."""
    assert {"_registry", "_changed"} <= private_names()
    module = ast.parse(
        "from ds4py.a import _registry\nx._registry\nmonkeypatch.setattr('ds4py.a._changed', 1)\n"
        "class Own:\n    def f(self):\n        self._links = other._links\nx._no_such_name\n"
    )
    assert sorted(touched(module)) == ["_changed", "_registry", "_registry"]
