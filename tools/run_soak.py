"""The endurance run behind ./tools/soak: many clients, one route of two workers, all on loopback.

Clients ask in every dialect, streaming or not; some hang up in the middle. At the end it is judged
whether anybody got an error or half an answer, whether all were served alike, whether a question
that is asked again is found in the cache, and whether coordinator and workers have given back their
connections, threads and memory. Exits with 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.run_demo import free_port, process, wait_ready

WORDS = ("whale", "river", "copper", "seven", "violin", "moss", "engine", "orbit", "lantern")
HANG_UP = 0.1  # share of the streams that their client leaves in the middle
FAIR = 0.5  # least share of the median that any client must have been served
ROUNDS = 4
MAX_GROWTH = 64 << 20  # bytes of memory that a process may gain after the first round
MORE = 2  # threads and files alike: a connection that is just being closed


class Dialect(NamedTuple):
    """How one path is asked, and how its answers look."""

    question: str  # the member that holds it
    ends: tuple[bytes, ...]  # any of these tells that a stream is whole
    cached: tuple[str, ...]  # where usage tells how much of the prompt was in the cache


_DONE = (b"data: [DONE]",)
_DETAILS = ("prompt_tokens_details", "cached_tokens")
DIALECTS = {
    "/v1/chat/completions": Dialect("messages", _DONE, _DETAILS),
    "/v1/completions": Dialect("prompt", _DONE, _DETAILS),
    "/v1/messages": Dialect("messages", (b"event: message_stop",), ("cache_read_input_tokens",)),
    "/v1/responses": Dialect(
        "input",
        (b'"type":"response.completed"', b'"type":"response.incomplete"'),
        ("input_tokens_details", "cached_tokens"),
    ),
}


@dataclass
class Outcome:
    """What the clients saw.

    Attributes:
        served: Answers by client.
        kinds: Requests by path and manner.
        seconds: How long each answer took, from the question to its end.
        refused: Requests that found the queue full and were told when to come again.
        cached: By path, tokens of a question that were found in the cache when it was asked again.
        errors: Whatever should not have been.
    """

    served: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def body(path: str, *, stream: bool, chance: random.Random) -> dict[str, Any]:
    """A short question in the dialect of a path."""
    member = DIALECTS[path].question
    question: Any = "Say something about " + " and ".join(chance.sample(WORDS, 3)) + "."
    if member == "messages":
        question = [{"role": "user", "content": question}]
    return {member: question, "max_tokens": 12, "stream": stream, "temperature": 0}


def fault(path: str, received: bytes, *, stream: bool) -> str:
    """Say what is wrong with an answer of status 200; empty if nothing is."""
    tail = repr(received[-300:])
    if b'"error"' in received.replace(b'"error":null', b""):
        return f"an error inside: {tail}"
    if stream:
        whole = any(end in received for end in DIALECTS[path].ends)
        return "" if whole else f"a stream without its end: {tail}"
    try:
        json.loads(received)
    except ValueError:
        return f"half an answer: {tail}"
    return ""


def refused_well(headers: httpx.Headers, received: bytes) -> bool:
    """Tell whether a full queue said why, and when to come again."""
    return headers.get("retry-after", "").isdecimal() and b'"message":"' in received


async def ask(http: httpx.AsyncClient, client: int, chance: random.Random, seen: Outcome) -> None:
    """One request, and what came of it."""
    path, stream = chance.choice(list(DIALECTS)), chance.random() < 0.7
    hang_up = stream and chance.random() < HANG_UP
    content, begun = body(path, stream=stream, chance=chance), time.monotonic()
    async with http.stream("POST", path, json=content) as response:
        received = b""
        async for part in response.aiter_bytes():
            received += part
            if hang_up and response.status_code == 200 and len(received) > 300:
                seen.kinds["left in the middle"] += 1
                return
    if response.status_code == 429 and refused_well(response.headers, received):
        seen.refused += 1
        await asyncio.sleep(float(response.headers["retry-after"]))
    elif response.status_code != 200:
        seen.errors.append(f"{path}: status {response.status_code}: {received[:200]!r}")
    elif wrong := fault(path, received, stream=stream):
        seen.errors.append(f"{path}: {wrong}")
    else:
        seen.served[client] += 1
        seen.seconds.append(time.monotonic() - begun)
        seen.kinds[f"{path} {'stream' if stream else 'whole'}"] += 1


async def crowd(url: str, n_clients: int, seconds: float, seen: Outcome, *, seed: int = 0) -> None:
    """All clients at once until the time is up; each finishes what it has begun."""
    end = time.monotonic() + seconds

    async def one(client: int) -> None:
        chance = random.Random(seed * n_clients + client)
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            while time.monotonic() < end:
                try:
                    await ask(http, client, chance, seen)
                except httpx.HTTPError as error:
                    seen.errors.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(one(client) for client in range(n_clients)))


def ask_again(url: str, seen: Outcome) -> None:
    """Ask a question twice in every dialect and note what the second answer had from the cache."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        for path, dialect in DIALECTS.items():
            question = body(path, stream=False, chance=random.Random(path))
            http.post(path, json=question).raise_for_status()
            usage = http.post(path, json=question).raise_for_status().json()["usage"]
            for member in dialect.cached:
                usage = usage[member]
            seen.cached[path] = usage


class Footprint(NamedTuple):
    """What a process holds."""

    memory: int  # bytes
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Footprint | None:
        """What a process holds now; None if it has ended."""
        try:
            found = psutil.Process(pid)
            if found.status() == psutil.STATUS_ZOMBIE:
                return None
            return cls(found.memory_info().rss, found.num_threads(), found.num_fds())
        except psutil.NoSuchProcess:
            return None


Footprints = Mapping[str, Footprint | None]


def verdicts(
    seen: Outcome, n_clients: int, before: Footprints, after: Footprints
) -> dict[str, bool]:
    """What was promised, and whether it was kept."""
    counts = [seen.served[client] for client in range(n_clients)]
    least, middle = min(counts), statistics.median(counts)
    fair = least >= FAIR * middle > 0
    if seen.refused:  # then others come first by chance: nobody promises more than answers
        fair = middle > 0
    judged = {
        f"no error ({len(seen.errors)})": not seen.errors,
        f"fair: least served {least}, median {middle:g}": fair,
        f"asked again, tokens from the cache: {list(seen.cached.values())}": (
            seen.cached.keys() == DIALECTS.keys() and all(seen.cached.values())
        ),
    }
    for name, now in after.items():
        judged |= _kept(name, before[name], now)
    return judged


def _kept(name: str, was: Footprint | None, now: Footprint | None) -> dict[str, bool]:
    """What one process was to give back."""
    if was is None or now is None:
        return {f"{name}: runs to the end": False}
    megabytes = f"{was.memory / 1e6:.0f} -> {now.memory / 1e6:.0f} MB"
    return {
        f"{name}: threads {was.threads} -> {now.threads}": now.threads <= was.threads + MORE,
        f"{name}: open files {was.files} -> {now.files}": now.files <= was.files + MORE,
        f"{name}: memory {megabytes}": now.memory <= was.memory + MAX_GROWTH,
    }


@contextmanager
def cluster(folder: Path, max_queue: int) -> Iterator[tuple[str, dict[str, int]]]:
    """A coordinator and two workers; yields its URL, and all process ids by name."""
    here, first, second = (f"127.0.0.1:{free_port()}" for _ in range(3))
    with ExitStack() as stack:

        def start(name: str, role: str, listen: str, *more: str) -> int:
            roles = ("--ctx", "512", "--dist-role", role, "--dist-listen", listen)
            return stack.enter_context(process(name, folder, *roles, *more)).pid

        queue = ("--max-queue", str(max_queue))
        pids = {
            "worker1": start("worker1", "worker", first, "--dist-layers", "0-14"),
            "worker2": start("worker2", "worker", second, "--dist-layers", "15-29"),
            "coordinator": start(
                *("coordinator", "coordinator", here, "--dist-route", f"{first},{second}", *queue)
            ),
        }
        with httpx.Client(base_url=f"http://{here}", timeout=10, trust_env=False) as client:
            wait_ready(client, folder)
        yield f"http://{here}", pids


def wait_idle(url: str) -> None:
    """Wait until nothing runs; what hung up may take a moment to stop."""
    requests = None
    for _ in range(100):
        requests = httpx.get(f"{url}/health", trust_env=False).json()["requests"]
        if requests == {"running": 0, "waiting": 0}:
            return
        time.sleep(0.1)
    sys.exit(f"requests are left: {requests}")


def run(
    url: str, pids: Mapping[str, int], n_clients: int, seconds: float
) -> tuple[Outcome, dict[str, bool]]:
    """The rounds, of which the first warms caches and pools up; what was seen and judged."""
    seen, before = Outcome(), dict[str, Footprint | None]()
    for turn in track(range(ROUNDS), description=f"{n_clients} clients"):
        asyncio.run(crowd(url, n_clients, seconds / ROUNDS, seen, seed=turn))
        wait_idle(url)
        before = before or {name: Footprint.of(pid) for name, pid in pids.items()}
    ask_again(url, seen)
    wait_idle(url)
    after = {name: Footprint.of(pid) for name, pid in pids.items()}
    return seen, verdicts(seen, n_clients, before, after)


def show(seen: Outcome, judged: Mapping[str, bool]) -> None:
    """Print both."""
    table, console = Table("promise", "kept"), Console()
    for promise, kept in judged.items():
        table.add_row(promise, "yes" if kept else "NO")
    console.print(table)
    console.print(dict(sorted(seen.kinds.items())))
    slow = f"median {statistics.median(seen.seconds or [0]):.2f} s, longest"
    console.print(f"{len(seen.seconds)} answers, {slow} {max(seen.seconds, default=0):.2f} s")
    console.print(f"refused and told when to come again: {seen.refused}")
    for error in seen.errors[:5]:
        console.print(error, style="red", markup=False)


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-queue", type=int, default=256, help="of the coordinator")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, cluster(Path(home), args.max_queue) as (url, pids):
        seen, judged = run(url, pids, args.clients, args.seconds)
    show(seen, judged)
    return 0 if all(judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
