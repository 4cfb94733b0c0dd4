"""Break lines of ds4py one by one and see whether a test fails: the program behind ./tools/mutate.

The faults are in `tools/mutations.py`. Each is made in a temporary copy of the tree, in which the
tests run that ought to see it, after they passed there without it. A test that hangs has seen it
too. It ends with status 1 if a fault survived or could not be made.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
PYTEST = ("-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "addopts=")
IMPORTS = ("--import-mode=importlib", "-m", "not bench and not cuda and not slow")
SECONDS = 150.0


class StaleError(Exception):
    """The text of a fault is not where it is said to be."""


# --- faults ---------------------------------------------------------------------------------------


def mutated(root: Path, mutation: Mutation) -> tuple[Path, str]:
    """Return the file of a fault, and its text with the fault.

    Raises:
        StaleError: No scope of that name holds the text once.
    """
    package = root / "ds4py"
    first = package / mutation.file
    others = (path for path in sorted(package.rglob("*.py")) if path != first)
    for path in (first, *others):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            found = [
                at for span in scopes(text, mutation.scope) for at in _places(text, span, mutation)
            ]
            if len(found) == 1:
                start, end = found[0]
                return path, text[:start] + mutation.new + text[end:]
            if found:
                break
    raise StaleError(f"{mutation.name}: {mutation.scope} does not hold its text once")


def scopes(text: str, wanted: str) -> Iterator[tuple[int, int]]:
    """Yield where functions and classes of a dotted name begin and end in a text."""
    if wanted.rpartition(".")[2] not in text:
        return
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = (*names, child.name)
                if ".".join(inner) == wanted:
                    assert child.end_lineno is not None
                    yield starts[child.lineno - 1], starts[child.end_lineno]
                yield from visit(child, inner)
            else:
                yield from visit(child, names)

    yield from visit(ast.parse(text), ())


def _places(text: str, span: tuple[int, int], mutation: Mutation) -> Iterator[tuple[int, int]]:
    words = r"\s+".join(re.escape(word) for word in mutation.old.split())
    for match in re.compile(words).finditer(text, *span):
        yield match.span()


# --- runs -----------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy what git knows, and lend the models."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)
    if (ROOT / "models").exists() and not (target / "models").exists():
        (target / "models").symlink_to((ROOT / "models").resolve())


def failure(tree: Path, tests: Sequence[str], seconds: float) -> str:
    """Run tests; return the first that fails, or what else went wrong; empty if all pass."""
    shutil.rmtree(tree / "build", ignore_errors=True)  # verdicts about kernels of another fault
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",  # two faults in a second would share compiled code
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "ci",  # as many examples as the whole suite has, the same each time
    }
    command = [sys.executable, "-m", "pytest", *PYTEST, *IMPORTS, *(f"tests/{t}" for t in tests)]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"nothing ended within {seconds:.0f} s"
    finally:
        process.kill()
        process.communicate()
    if process.returncode == 0:
        return ""
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return str(named[0]).partition("[")[0] if named else f"pytest ended with {process.returncode}"


def judge(
    tree: Path, mutation: Mutation, sound: set[tuple[str, ...]], seconds: float
) -> tuple[str, str]:
    """Return what became of one fault, and who saw it."""
    try:
        path, text = mutated(tree, mutation)
    except StaleError as e:
        return "stale", str(e)
    if mutation.tests not in sound:
        wrong = failure(tree, mutation.tests, seconds)
        if wrong:
            return "stale", f"fails without the fault: {wrong}"
        sound.add(mutation.tests)
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        seen = failure(tree, mutation.tests, seconds)
    finally:
        path.write_text(before, encoding="utf-8")
    return ("killed", seen) if seen else ("survived", ", ".join(mutation.tests))


def chosen(patterns: Sequence[str]) -> list[Mutation]:
    """Return the faults whose room or name fits one of some patterns; all if there is none."""
    return [
        m
        for m in MUTATIONS
        if not patterns or any(p == m.room or fnmatch.fnmatch(m.name, p) for p in patterns)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/mutate", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rooms, names, globs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one run of tests")
    flags = parser.parse_args(arguments)
    faults = chosen(flags.only)
    if not faults:
        parser.error(f"--only {' '.join(flags.only)}: no such fault; see --list")
    if flags.list:
        for m in faults:
            print(f"{m.name:45} {m.file}: {m.scope}")
        return 0
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="ds4py-mutate-") as folder:
        tree, sound = Path(folder), set[tuple[str, ...]]()
        copy_tree(tree)
        for number, mutation in enumerate(faults, 1):
            start = time.monotonic()
            print(f"[{number:2}/{len(faults)}] {mutation.name:45} ", end="", flush=True)
            outcome, who = judge(tree, mutation, sound, flags.seconds)
            outcomes[outcome] += 1
            print(f"{outcome:8} {time.monotonic() - start:5.1f} s  {who}", flush=True)
    told = ", ".join(f"{outcomes[word]} {word}" for word in ("killed", "survived", "stale"))
    print(f"{len(faults)} faults: {told}")
    return 0 if outcomes["killed"] == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
