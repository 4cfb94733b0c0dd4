"""The commands that people type, as real programs: ours and ds4's spellings, statuses, Ctrl+C."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ds4py.cli.client import client as cli_command
from ds4py.cli.server import server as server_command
from ds4py.config import Address
from tests.e2e.support import (
    Alone,
    LocalServer,
    chat,
    command,
    coordinator,
    evaluated,
    route,
    wait_idle,
    worker,
)
from tests.support import golden
from tests.support.golden_compare import prompts
from tests.support.processes import (
    Answer,
    Launcher,
    Server,
    environment,
    free_port,
    run,
    stage_sums,
    wait_for,
)

QUESTION = "hello the world and the world"
GREEDY = ("--temp", 0)
EXACT = ("--precision", "f32")
"""What a prompt was cut into, and so what was cached, changes roundings: only f32 hides that."""


@dataclass
class Guide:
    """The cluster of ds4's guide: a coordinator without layers dials two workers."""

    launch: Launcher
    model: Path
    ports: list[int]
    server: Server

    @property
    def route(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def restart_coordinator(self) -> None:
        """End the coordinator and start it again."""
        assert self.server.program.stop() == 0
        self.server = start_coordinator(self.launch, self.model, self.route)

    def ask(self, *args: object, stdin: bytes | None = None) -> Answer:
        """Ask the server through the client."""
        return run("ds4py-cli", "--host", self.server.address, *args, stdin=stdin)


def start_coordinator(launch: Launcher, model: Path, route: str) -> Server:
    """Start the coordinator with the very words of the guide."""
    return launch.server(
        *("--dist-role", "coordinator", "--dist-listen", "127.0.0.1:0"),
        *("--model", model, "--dist-route", route, "--dist-prefill-chunk", 2048),
        *EXACT,
    )


@pytest.fixture(scope="module")
def guide(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guide]:
    """The coordinator is started first and finds its workers later, the last layers first."""
    with Launcher(tmp_path_factory.mktemp("guide")) as launch:
        ports = [free_port(), free_port()]
        route = ",".join(f"127.0.0.1:{port}" for port in ports)
        server = start_coordinator(launch, toy, route)
        server.program.wait_log("nobody serves layers 0-5 and the output head")
        for port, layers in ((ports[1], "3-5"), (ports[0], "0-2")):
            launch.worker(
                *("--dist-role", "worker", "--dist-listen", f"127.0.0.1:{port}"),
                *("--model", toy, "--dist-layers", layers, "--sessions", 8),
                *EXACT,
            )
        server.wait_ready()
        yield Guide(launch, toy, ports, server)


@pytest.fixture(scope="module")
def local(toy: Path) -> Answer:
    """What one program with the whole model answers."""
    return run("ds4py-cli", "-m", toy, "-p", QUESTION, "-n", 40, "-t", 1, *EXACT, *GREEDY)


@pytest.fixture(scope="module")
def local_ids(toy: Path) -> list[int]:
    """The same for raw token ids."""
    asked = ("--prompt-ids", "5,80,3,41,9,77", "--print-ids", "-n", 20)
    answer = run("ds4py-cli", "-m", toy, *asked, "-t", 1, *EXACT, *GREEDY)
    assert answer.status == 0, answer.err
    return answer.ids


# --- the guide ------------------------------------------------------------------------------


def test_the_commands_of_the_guide_answer_as_one_process(guide: Guide, local: Answer) -> None:
    answer = guide.ask("--prompt", QUESTION, "--max-tokens", 40, *GREEDY)
    assert (answer.status, local.status) == (0, 0), answer.err + local.err
    assert answer.text == local.text
    assert len(answer.text) > 20
    assert "answer: 40 tokens" in answer.err


def test_without_a_temperature_the_answer_is_sampled(guide: Guide) -> None:
    answer = guide.ask("--prompt", "Explain the architecture", "--max-tokens", 12)
    assert answer.status == 0, answer.err
    assert "answer: " in answer.err
    assert answer.text


def test_a_coordinator_started_last_finds_its_workers(guide: Guide, local: Answer) -> None:
    guide.server.wait_ready()
    guide.restart_coordinator()
    guide.server.wait_ready()
    guide.server.program.wait_log("ready: the whole model is reachable")
    assert guide.ask("-p", QUESTION, "-n", 40, *GREEDY).text == local.text


def test_a_prompt_may_come_from_a_file(guide: Guide, local: Answer, tmp_path: Path) -> None:
    path = tmp_path / "question.txt"
    path.write_text(QUESTION)
    assert guide.ask("--prompt-file", path, "-n", 40, *GREEDY).text == local.text


def test_a_prompt_may_come_from_stdin(guide: Guide, local: Answer) -> None:
    assert guide.ask("-n", 40, *GREEDY, stdin=QUESTION.encode()).text == local.text


def test_raw_text_is_continued_without_a_template(guide: Guide, local: Answer, toy: Path) -> None:
    raw = ("--raw", "-p", f"<|im_start|>user\n{QUESTION}", "-n", 20, *GREEDY)
    answer = guide.ask(*raw)
    assert answer.text == run("ds4py-cli", "-m", toy, *raw, "-t", 1, *EXACT).text
    assert answer.text != local.text[: len(answer.text)]


def test_token_ids_go_in_and_come_out(guide: Guide, local_ids: list[int]) -> None:
    asked = ("--prompt-ids", "5,80,3,41,9,77", "--print-ids", "-n", 20, *GREEDY)
    answer = guide.ask(*asked)
    assert answer.status == 0, answer.err
    assert answer.ids == local_ids
    assert len(local_ids) == 20


def test_the_client_may_coordinate_the_workers_itself(guide: Guide, local_ids: list[int]) -> None:
    answer = run(
        *("ds4py-cli", "-m", guide.model, "--dist-route", guide.route, "-t", 1, *EXACT),
        *("--prompt-ids", "5,80,3,41,9,77", "--print-ids", "-n", 20, *GREEDY),
    )
    assert answer.status == 0, answer.err
    assert answer.ids == local_ids


def test_ctrl_c_at_a_remote_answer_stops_the_work_and_not_the_server(
    guide: Guide, local: Answer
) -> None:
    before = evaluated(wait_idle(guide.server))
    asked = ("-p", f"{QUESTION}!", "-n", 3900, *GREEDY)
    program = guide.launch.start("ds4py-cli", "--host", guide.server.address, *asked)
    program.wait_output(8)
    program.interrupt()
    assert program.wait_exit() == 130
    after = evaluated(wait_idle(guide.server))
    assert after - before < 2 * 3900  # two stages, and each has left out a good part
    assert guide.ask("-p", QUESTION, "-n", 40, *GREEDY).text == local.text
    assert evaluated(wait_idle(guide.server)) - after < 2 * 80


def test_a_prompt_beyond_the_context_is_status_1_and_both_numbers(guide: Guide) -> None:
    answer = guide.ask("--prompt-ids", ",".join(["5"] * 5000))
    assert answer.status == 1
    assert answer.err.count("\n") == 1
    assert "Prompt has 5000 tokens, but the configured context size is 4096 tokens" in answer.err


def test_a_prompt_is_told_line_by_line_where_there_is_no_terminal(
    guide: Guide, local: Answer
) -> None:
    """C68: the answer alone is on stdout."""
    for answer in (guide.ask("-p", "a question of its own", "-n", 40, *GREEDY), local):
        *progress, counted, rates = answer.err.splitlines()
        n_prompt = counted.removeprefix("prompt: ").split()[0]
        assert progress[-1] == f"processing {n_prompt} input tokens: {n_prompt}/{n_prompt} (100%)"
        assert rates.startswith("prefill: ")
        assert " t/s, generation: " in rates
        assert b"t/s" not in answer.out


def test_an_unreachable_server_is_status_1_and_one_sentence() -> None:
    answer = run("ds4py-cli", "--host", f"127.0.0.1:{free_port()}", "-p", QUESTION)
    assert answer.status == 1
    assert answer.err.count("\n") == 1
    assert "no server answers" in answer.err


# --- own layers, workers that dial in, ds4's spellings ---------------------------------------


@pytest.fixture(scope="module")
def mixed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Own layers, one worker that dials in, one that is dialled; everything in ds4's spelling."""
    with Launcher(tmp_path_factory.mktemp("mixed")) as launch:
        last = launch.worker(
            *("--role", "worker", "--layers", "4:output", "--listen", "127.0.0.1", 0),
            *("-m", toy, "-c", 512, *EXACT),
        )
        server = launch.server(
            *("--role", "coordinator", "--layers", "0:1", "--listen", "127.0.0.1", 0),
            *("-m", toy, "-c", 512, *EXACT, "--dist-route", f"{last.address}=4:output", "-n", 32),
            *("--temp", 0),
        )
        host, port = server.address.split(":")
        launch.worker(
            *("--role", "worker", "--layers", "2:3", "--listen", "127.0.0.1", 0),
            *("--coordinator", host, port, "-m", toy, "-c", 512, *EXACT),
        )
        server.wait_ready()
        yield server


def test_workers_of_both_kinds_and_own_layers_make_one_model(mixed: Server, local: Answer) -> None:
    answer = run("ds4py-cli", "--host", mixed.address, "-p", QUESTION, "-n", 40, *GREEDY)
    assert answer.text == local.text


def test_the_route_is_shown_stage_by_stage(mixed: Server) -> None:
    stages = mixed.health()["stages"]
    assert isinstance(stages, list)
    assert [stage["layers"] for stage in stages] == ["0-1", "2-3", "4-5"]
    assert [stage["has_output"] for stage in stages] == [False, False, True]


def test_defaults_of_the_server_are_its_flags(mixed: Server, local: Answer) -> None:
    answer = run("ds4py-cli", "--host", mixed.address, "-p", QUESTION)
    assert "answer: 32 tokens" in answer.err
    assert local.text.startswith(answer.text.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_seed_gives_the_same_sample_here_and_there(mixed: Server, toy: Path) -> None:
    sampled = ("--temp", 0.8, "--top-p", 0.9, "--min-p", 0.01, "--seed", 7)
    asked = ("-p", QUESTION, "-n", 24, *sampled)
    there = run("ds4py-cli", "--host", mixed.address, *asked)
    here = run("ds4py-cli", "-m", toy, "-c", 512, "-t", 1, *EXACT, *asked)
    assert there.status == here.status == 0, there.err + here.err
    assert there.text == here.text


def test_one_worker_serves_one_shot_coordinators_that_come_and_go(
    toy: Path, tmp_path: Path, local_ids: list[int]
) -> None:
    """The worker is started first and dials until somebody is there, again and again."""
    with Launcher(tmp_path) as launch:
        port = free_port()
        launch.worker(
            *("--dist-role", "worker", "--dist-coordinator", f"127.0.0.1:{port}"),
            *("--dist-listen", "127.0.0.1:0", "-m", toy, "--dist-layers", "1-5"),
            *EXACT,
        )
        for _ in range(2):
            answer = run(
                *(
                    "ds4py-cli",
                    "-m",
                    toy,
                    "-t",
                    1,
                    "--role",
                    "coordinator",
                    "--layers",
                    "0:0",
                    *EXACT,
                ),
                *("--listen", "127.0.0.1", port, "-n", 20, *GREEDY),
                *("--prompt-ids", "5,80,3,41,9,77", "--print-ids"),
            )
            assert answer.status == 0, answer.err
            assert answer.ids == local_ids


@pytest.mark.parametrize("order", list(itertools.permutations(["coordinator", "first", "second"])))
def test_any_order_of_starting_works(order: tuple[str, ...], toy: Path, alone: Alone) -> None:
    ports = {"first": free_port(), "second": free_port()}
    layers = {"first": "0-2", "second": "3-5"}
    addresses = [f"127.0.0.1:{port}" for port in ports.values()]
    with ExitStack() as stack:
        server: LocalServer | None = None
        for name in order:
            if name == "coordinator":
                server = stack.enter_context(coordinator(toy, route=route(*addresses)))
            else:
                listen = Address("127.0.0.1", ports[name])
                stack.enter_context(worker(toy, layers[name], listen=listen))
        assert server is not None
        server.wait_ready()
        messages = [{"role": "user", "content": QUESTION}]
        assert chat(server, messages, 12) == alone.chat(messages, 12)


# --- statuses ---------------------------------------------------------------------------------


def test_ctrl_c_at_a_local_answer_is_130_and_keeps_what_was_said(
    toy: Path, tmp_path: Path, local: Answer
) -> None:
    with Launcher(tmp_path) as launch:
        asked = ("-m", toy, "-p", QUESTION, "-n", 3900, "-t", 1, *EXACT, *GREEDY)
        program = launch.start("ds4py-cli", *asked)
        program.wait_output(len(local.out))
        program.interrupt()
        assert program.wait_exit() == 130
        assert program.output.decode(errors="replace").startswith(local.text[:20])
        assert "Traceback" not in program.log


def test_ctrl_c_while_waiting_for_workers_is_130(toy: Path, tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        nobody = f"127.0.0.1:{free_port()}"
        program = launch.start("ds4py-cli", "-m", toy, "--dist-route", nobody, "-p", "a", "-t", 1)
        program.wait_log("waiting for workers: nobody serves layers 0-5 and the output head")
        program.interrupt()
        assert program.wait_exit() == 130
        assert "Traceback" not in program.log


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "127.0.0.1:1", "-m", "m.gguf", "-p", "a"), "--host asks a server"),
        (("--host", "127.0.0.1", "-p", "a"), "expected HOST:PORT"),
        (("-p", "a"), "no model"),
        (("-m", "m.gguf", "-p", "a", "--prompt-ids", "1"), "give one of --prompt"),
        (("-m", "m.gguf", "--prompt-ids", "1,x"), "expected token ids"),
        (("-m", "m.gguf", "--prompt-file", "nowhere"), "nowhere"),
        (("-m", "m.gguf", "-p", "a", "-n", "0"), "expected at least 1"),
        (("-m", "m.gguf", "-p", "a", "--temp", "-1"), "expected 0 to 100"),
        (("-m", "m.gguf", "-p", "a", "--nonsense"), "No such option"),
        (("-m", "m.gguf", "-p", "a", "--dist-layers", "0-2"), "needs a role"),
        (("-m", "m.gguf", "-p", "a", "--role", "worker", "--layers", "0:2"), "ds4py-server"),
    ],
)
def test_bad_usage_of_the_client_is_status_2_and_one_sentence(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(cli_command, "ds4py-cli", *args) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_model_that_is_not_there_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    """C67: even if it is only looked at."""
    for args in (("-p", "a"), ("--inspect",), ("-p", "a", "--dump-tokens")):
        assert command(cli_command, "ds4py-cli", "-m", "/no/such.gguf", *args) == 1
        assert "/no/such.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "no model"),
        (("-m", "m", "--role", "worker", "--listen", "127.0.0.1", "0"), "needs its layers"),
        (("-m", "m", "--role", "worker", "--layers", "0:2"), "nobody could reach it"),
        (("-m", "m", "--role", "coordinator"), "needs workers"),
        (("-m", "m", "--role", "coordinator", "--layers", "3:4", "--listen", "h", "1"), "start at"),
        (("-m", "m", "--dist-route", "127.0.0.1:1,127.0.0.1:1"), "twice"),
        (("-m", "m", "--dist-route", "0.0.0.0:1"), "can be dialled"),
        (("-m", "m", "--http", "h:1", "--port", "2"), "say the same"),
        (("-m", "m", "--dist-prefill-chunk", "0", "--dist-route", "h:1"), "at least 1"),
        (("-m", "m", "-c", "0"), "at least 1"),
    ],
)
def test_bad_usage_of_the_server_is_status_2_and_one_sentence(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(server_command, "ds4py-server", *args) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "name"),
    [("server", "server"), ("client", "client"), ("main", "ds4py")],
)
def test_help_imports_nothing_heavy(module: str, name: str) -> None:
    code = (
        "import sys\n"
        f"from ds4py.cli.{module} import {name} as command\n"
        "try:\n"
        "    command.main(['--help'])\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'starlette', 'tokenizers', 'gguf'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Usage:" in done.stdout


def test_installed_programs_say_their_version() -> None:
    for name in ("ds4py", "ds4py-cli", "ds4py-server"):
        answer = run(name, "--version")
        assert (answer.status, answer.err) == (0, "")
        assert answer.text.startswith(f"{name}, version ")


def test_ctrl_c_stops_a_server_with_status_0(toy: Path, tmp_path: Path) -> None:
    with Launcher(tmp_path) as launch:
        server = launch.server("-m", toy, "--host", "127.0.0.1", "--port", 0, "-c", 256)
        wait_for(lambda: server.health()["status"] == "ok", "a server with all layers is ready")
        assert stage_sums(server.health(), "decode_tokens") == 0
        server.program.interrupt()
        assert server.program.wait_exit() == 0
        assert "Traceback" not in server.program.log


# --- what is shown of a model ---------------------------------------------------------------------

TINY = ("--precision", "f32", "-c", 256, "-t", 1)


def test_reading_a_file_needs_no_lock_and_answers_do(toy: Path, tmp_path: Path) -> None:
    lock = {"DS4_LOCK_FILE": str(tmp_path / "lock")}
    with Launcher(tmp_path / "run") as launch:
        launch.server("-m", toy, "--http", "127.0.0.1:0", env=lock)
        inspected = run("ds4py-cli", "-m", toy, "--inspect", env=lock)
        tokens = run("ds4py-cli", "-m", toy, "--dump-tokens", "-p", "hello the world", env=lock)
        refused = run("ds4py-cli", "-m", toy, "-p", "a", env=lock)
    assert inspected.out == run("ds4py", "inspect", toy).out
    assert (inspected.status, tokens.status, refused.status) == (0, 0, 2)
    assert "another process holds it" in refused.err
    first, *rest = tokens.text.splitlines()
    assert [int(line[:6]) for line in rest] == json.loads(first)
    assert "".join(line[8:] for line in rest) == "hello the world"


@pytest.mark.parametrize("variant", ["a", "b"])
def test_dumped_logits_are_the_engines_within_its_own_spread(variant: str, tmp_path: Path) -> None:
    prompt, path = prompts(variant)["len40"], tmp_path / "logits.json"
    ids = ",".join(map(str, prompt.tokens))
    given = ("-m", golden.path(f"tiny-{variant}.gguf"), *TINY, "--cpu", "--prompt-ids", ids)
    answer = run("ds4py-cli", *given, "--dump-logits", path)
    assert (answer.status, answer.out) == (0, b""), answer.err
    told = json.loads(path.read_text())
    logits = np.array(told["logits"])
    error = np.sqrt(np.square(logits - prompt.logits).mean())
    assert error < 1.25 * prompt.noise_rms
    assert told["argmax_token"]["id"] == prompt.greedy[0] == int(logits.argmax())
    assert (told["prompt_tokens"], told["vocab"], told["backend"]) == (40, len(logits), "cpu")


def test_dumped_logprobs_begin_with_the_token_that_was_taken(tmp_path: Path) -> None:
    """C71."""
    prompt, path = prompts("a")["len40"], tmp_path / "logprobs.json"
    ids = ",".join(map(str, prompt.tokens))
    given = ("-m", golden.path("tiny-a.gguf"), *TINY, "--prompt-ids", ids, "-n", 4)
    answer = run("ds4py-cli", *given, "--dump-logprobs", path, "--logprobs-top-k", 500)
    assert answer.status == 0, answer.err
    told = json.loads(path.read_text())
    assert told["top_k"] == 128  # the most there is, as in ds4
    assert [step["selected"]["id"] for step in told["steps"]][:1] == prompt.greedy[:1]
    for step in told["steps"]:
        listed = step["top_logprobs"]
        assert listed[0]["token"] == step["selected"]
        assert len(listed) == 128
        assert all(entry["logprob"] <= 0 for entry in listed)


def test_a_cluster_scores_and_dumps_as_one_process(guide: Guide, toy: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello the world and the world in the world " * 4)
    looks = (("--perplexity-file", text), ("-p", QUESTION, "--dump-logits", tmp_path / "l.json"))
    told = []
    for where in ((), ("--dist-route", guide.route)):
        answers = [run("ds4py-cli", "-m", toy, "-t", 1, *EXACT, *where, *look) for look in looks]
        assert [answer.status for answer in answers] == [0, 0], answers
        told.append((answers[0].text, json.loads((tmp_path / "l.json").read_text())["logits"]))
    (alone_line, alone_logits), (line, logits) = told
    names = ["tokens", "scored", "nll", "avg_nll", "ppl"]
    assert [part.split("=")[0] for part in line.split()] == names
    assert [float(part.split("=")[1]) for part in line.split()] == pytest.approx(
        [float(part.split("=")[1]) for part in alone_line.split()], rel=1e-4
    )
    assert logits == pytest.approx(alone_logits, abs=1e-4)


def test_ctrl_c_at_a_dump_is_130_and_leaves_json(toy: Path, tmp_path: Path) -> None:
    path = tmp_path / "logprobs.json"
    with Launcher(tmp_path / "run") as launch:
        asked = ("-p", QUESTION, "--dump-logprobs", path, "-t", 1, *EXACT)
        program = launch.start("ds4py-cli", "-m", toy, *asked)
        program.wait(lambda: path.exists() and path.stat().st_size > 0, "the first steps")
        program.interrupt()
        assert program.wait_exit() == 130
    assert len(json.loads(path.read_text())["steps"]) > 0


def test_a_folder_a_default_model_and_flags_without_effect(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "ds4flash.gguf").symlink_to(toy)
    (tmp_path / "q.txt").write_text(QUESTION)
    answer = run(
        *("ds4py-cli", "--chdir", tmp_path, "--prompt-file", "q.txt", "--cpu", "-n", 3, "-t", 1),
        *("--quality", "--power", 50, "--warm-weights", "--temp", 0),
    )
    assert answer.status == 0, answer.err
    assert answer.err.count("has no effect") == 2
    assert "answer: 3 tokens" in answer.err
