"""C43 and C49: whole sessions of agents, as Codex CLI and Claude Code hold them.

Neither program can run in a test, so their requests are made as they send them (members, headers,
what comes back), the model is scripted, and what it asks for is really done. The programs
themselves run by hand: interop/clients.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.server.peer import (
    MESSAGES,
    RESPONSES,
    THINK_END,
    Event,
    block,
    call,
    connect,
    model,
    parse,
    post,
    posting,
    prompt_of,
    read_all,
    read_until,
    served,
    turns,
)
from tests.support.fakes import Gate

BROKEN = "def double(x):\n    return x + 1\n\nprint(double(21))\n"
MENDED = BROKEN.replace("x + 1", "x * 2")


def run(command: str, folder: Path) -> str:
    """What a shell says to a command that starts with `python`."""
    program, *arguments = command.split()
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout + done.stderr


# --- Codex ----------------------------------------------------------------------------------------

PATCH = (
    "*** Begin Patch\n*** Update File: a.py\n-    return x + 1\n+    return x * 2\n*** End Patch"
)
CODEX = (
    f"Run it first.{THINK_END}I run it."
    + "\n\n"
    + block(call("shell", command=('["python","a.py"]',), timeout_ms=("9000",))),
    f"It adds.{THINK_END}\n\n" + block(call("apply_patch", input=PATCH)),
    f"Once more.{THINK_END}\n\n"
    + block(call("shell", command=('["python","a.py"]',)), call("update_plan", plan=("[]",))),
    f"It works.{THINK_END}`double` doubles now: 42.",
)
CODEX_TOOLS = [
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a command",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits",
        "format": {"type": "grammar"},
    },
    {"type": "function", "name": "update_plan", "parameters": {"type": "object"}},
    {"type": "web_search"},
]


def codex_body(items: list[Any]) -> Any:
    return {
        "model": "gpt-5-codex",
        "instructions": "You are Codex, a coding agent.",
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198-c0de",
    }


def codex_does(item: Any, folder: Path) -> Any:
    """What Codex sends back for a call."""
    if item["type"] == "custom_tool_call":
        old, new = (line[1:] for line in item["input"].split("\n") if line[0] in "-+")
        path = folder / "a.py"
        path.write_text(path.read_text().replace(old, new))
        return {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "Done!"}
    arguments = json.loads(item["arguments"])
    said = (
        run(" ".join(arguments["command"]), folder) if item["name"] == "shell" else "Plan updated"
    )
    output = json.dumps({"output": said, "metadata": {"exit_code": 0}})
    return {"type": "function_call_output", "call_id": item["call_id"], "output": output}


def test_c43_a_session_of_codex(tmp_path: Path) -> None:
    """An agent runs, patches, runs again and plans, then answers.

    Weaker than asked: Codex itself runs by hand only (interop/clients). Here its requests are
    played over raw HTTP, on a scripted model, and what that asks for is really done.
    """
    (tmp_path / "a.py").write_text(BROKEN)
    fake = model(turns(*CODEX))
    question = [{"type": "input_text", "text": "Mend double() in a.py"}]
    items: list[Any] = [{"type": "message", "role": "user", "content": question}]
    cached = []
    with served(fake) as (_, port):
        for n_round in range(len(CODEX)):
            headers = {"Accept": "text/event-stream", "originator": "codex_cli_rs"}
            payloads = post(port, RESPONSES, codex_body(items), headers).payloads
            done = [p["item"] for p in payloads if p["type"] == "response.output_item.done"]
            assert payloads[-1]["type"] == "response.completed"
            cached.append(
                payloads[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"]
            )
            asked = [item for item in done if item["type"].endswith("_call")]
            assert bool(asked) == (n_round < len(CODEX) - 1)
            items += done + [codex_does(item, tmp_path) for item in asked]
    assert (tmp_path / "a.py").read_text() == MENDED
    assert done[-1]["content"][0]["text"] == "`double` doubles now: 42."
    outputs = [json.loads(item["output"])["output"] for item in items if _is_result(item)]
    assert outputs == ["22\n", "42\n", "Plan updated"]
    assert cached == sorted(cached)
    assert cached[1] > 0
    shown = prompt_of(fake)  # the last prompt has all that was said, as it was said
    for text in CODEX[:-1]:
        assert text in shown


# What Codex 0.171 sends: no `instructions`, ids on all items, groups of tools, nulls, and metadata.
SPAWN = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Other agents",
    "tools": [
        {"type": "function", "name": name, "strict": False, "parameters": {"type": "object"}}
        for name in ("spawn_agent", "wait_agent")
    ],
}


def recent_codex_body(*items: Any) -> Any:
    head = [
        {"type": "message", "id": "msg_1", "role": role, "content": texts}
        for role, texts in (
            ("developer", [{"type": "input_text", "text": "You write code."}]),
            ("developer", [{"type": "input_text", "text": text} for text in ("Skills", "May all")]),
            ("user", [{"type": "input_text", "text": "<environment_context/>"}]),
            ("user", [{"type": "input_text", "text": "Ask another agent for its name"}]),
        )
    ]
    return {
        "model": "deepseek-v4-flash",
        "stream": True,
        "input": [*head, *items],
        "tools": [*CODEX_TOOLS, SPAWN],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2-c0de",
        "client_metadata": {"turn_id": "01a2", "x-codex-window-id": "01a2:0"},
    }


def test_c43_an_agent_of_codex_is_called_by_its_group_and_answers() -> None:
    first = f"One agent.{THINK_END}\n\n" + block(
        call("multi_agent_v1spawn_agent", message="Your name?")
    )
    fake = model(turns(first, f"So.{THINK_END}It is Ada."))
    with served(fake) as (_, port):
        events = post(port, RESPONSES, recent_codex_body()).payloads
        reasoning, asked = (e["item"] for e in events if e["type"] == "response.output_item.done")
        assert (asked["namespace"], asked["name"]) == ("multi_agent_v1", "spawn_agent")
        reasoning = {
            "type": "reasoning",
            "id": reasoning["id"],
            "summary": reasoning["summary"],
            "content": None,
            "encrypted_content": None,
        }
        result = {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": asked["call_id"],
            "output": '{"agent_id":"01a2","nickname":"Ada"}',
        }
        final = post(port, RESPONSES, recent_codex_body(reasoning, asked, result)).payloads[-1]
    assert final["response"]["output"][-1]["content"][0]["text"] == "It is Ada."
    usage = final["response"]["usage"]["input_tokens_details"]
    assert usage["cached_tokens"] >= events[-1]["response"]["usage"]["input_tokens"]
    assert first in prompt_of(fake)


def test_c43_codex_sees_events_while_its_prompt_is_evaluated() -> None:
    """Its clock for silent streams is set back by events only: it gave up on comments."""
    gate = Gate()
    fake = model(f"So.{THINK_END}Hi", gate=gate)
    with served(fake, keepalive_seconds=0.01) as (_, port), connect(port) as sock:
        sock.sendall(posting(RESPONSES, recent_codex_body()))
        begun = read_until(sock, b'"type":"response.in_progress"', times=2)
        gate.open()
        kinds = [event["type"] for event in parse(begun + read_all(sock)).payloads]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"


def _is_result(item: Any) -> bool:
    return bool(item["type"] == "function_call_output")


# --- Claude Code ----------------------------------------------------------------------------------

CLAUDE = (
    f"Look at it.{THINK_END}I read the file.\n\n" + block(call("Read", file_path="a.py")),
    f"It adds.{THINK_END}\n\n"
    + block(call("Edit", file_path="a.py", old_string="x + 1", new_string="x * 2")),
    f"Run it.{THINK_END}\n\n" + block(call("Bash", command="python a.py", timeout=("9000",))),
    f"42.{THINK_END}`double` doubles now.",
)
CLAUDE_TOOLS = [
    {"name": name, "description": name, "input_schema": {"type": "object", "properties": {}}}
    for name in ("Bash", "Read", "Edit")
]
BETA = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-api-key": "sk-ant-any",
    "User-Agent": "claude-cli/2.0 (external, cli)",
}


def claude_body(messages: list[Any], n_round: int) -> Any:
    billing = f"x-anthropic-billing-header: cc_version=2.0; cch={n_round:05x};"
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": billing},
            {
                "type": "text",
                "text": "You are Claude Code.",
                "cache_control": {"type": "ephemeral"},
            },
        ],
        "messages": messages,
        "tools": CLAUDE_TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user_1"},
        "stream": True,
    }


def recent_claude_body(*messages: Any) -> Any:
    """What Claude Code 2.1.332 sends, which has system texts among the messages, too."""
    asked = [
        {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
        {"type": "text", "text": "Mend double()", "cache_control": {"type": "ephemeral"}},
    ]
    first = [
        {"role": "user", "content": asked},
        {"role": "system", "content": "Agents that you may call: none."},
    ]
    return claude_body([*first, *messages], 1) | {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }


def claude_does(use: Any, folder: Path) -> str:
    """What Claude Code finds out by a call."""
    given = use["input"]
    if use["name"] == "Bash":
        return run(given["command"], folder)
    path = folder / given["file_path"]
    if use["name"] == "Edit":
        path.write_text(path.read_text().replace(given["old_string"], given["new_string"]))
        return "The file was updated."
    return path.read_text()


def content_of(events: list[Event]) -> list[Any]:
    """The content that a client of Anthropic puts together."""
    content: list[Any] = []
    for event in events:
        if event.name == "content_block_start":
            content.append({**event.data["content_block"], "partial_json": ""})
        if event.name == "content_block_delta":
            for name, value in event.data["delta"].items():
                if name != "type":
                    content[-1][name] += value
    for one in content:
        written = one.pop("partial_json")
        if one["type"] == "tool_use":
            one["input"] = json.loads(written)
    return content


def test_c49_a_session_of_claude_code(tmp_path: Path) -> None:
    """An agent reads, edits and runs a file.

    Weaker than asked: Claude Code itself runs by hand only (interop/clients). Here its requests are
    played over raw HTTP, on a scripted model, and what that asks for is really done.
    """
    (tmp_path / "a.py").write_text(BROKEN)
    fake = model(turns(*CLAUDE))
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Mend double()"}]}]
    cached, results = [], []
    with served(fake) as (_, port):
        for n_round in range(len(CLAUDE)):
            body = claude_body(messages, n_round)
            counted = post(port, f"{MESSAGES}/count_tokens?beta=true", body, BETA).json
            events = post(port, f"{MESSAGES}?beta=true", body, BETA).events
            usage = events[0].data["message"]["usage"]
            cached.append(usage["cache_read_input_tokens"])
            assert cached[-1] + usage["cache_creation_input_tokens"] == counted["input_tokens"]
            content = content_of(events)
            uses = [one for one in content if one["type"] == "tool_use"]
            assert events[-2].data["delta"]["stop_reason"] == ("tool_use" if uses else "end_turn")
            found = [(use["id"], claude_does(use, tmp_path)) for use in uses]
            results += [text for _, text in found]
            blocks = [
                {"type": "tool_result", "tool_use_id": name, "content": text, "is_error": False}
                for name, text in found
            ]
            messages += [{"role": "assistant", "content": content}]
            messages += [{"role": "user", "content": blocks}] if blocks else []
    assert (tmp_path / "a.py").read_text() == MENDED
    assert results == [BROKEN, "The file was updated.", "42\n"]
    assert content[-1] == {"type": "text", "text": "`double` doubles now."}
    assert cached == sorted(set(cached))  # every round finds more than the one before
    assert "x-anthropic" not in prompt_of(fake)
    for text in CLAUDE[:-1]:
        assert text in prompt_of(fake)


def test_c49_claude_code_learns_that_its_prompt_does_not_fit() -> None:
    """It compacts when an error says so in Anthropic's words, and only then.

    Differs from ds4: its own sentence goes on with them.
    """
    long = {"role": "user", "content": [{"type": "text", "text": "a line of a file\n" * 400}]}
    with served(model("Hi", n_ctx=1024)) as (_, port):
        n_prompt = post(port, f"{MESSAGES}/count_tokens", recent_claude_body(long), BETA).json
        refused = post(port, f"{MESSAGES}?beta=true", recent_claude_body(long), BETA)
    assert refused.status == 400
    message = refused.json["error"]["message"]
    assert f"prompt is too long: {n_prompt['input_tokens']} tokens > 1023 maximum" in message


def test_c49_what_claude_code_remarks_on_its_way_costs_only_itself() -> None:
    """With `--system-in-place` a later system text leaves what is cached valid."""
    asked = {"role": "user", "content": [{"type": "text", "text": "And again"}]}
    remark = {"role": "system", "content": "The file a.py was changed by somebody else."}
    says = f"So.{THINK_END}It doubles."
    with served(model(says), system_in_place=True) as (_, port):
        first = post(port, MESSAGES, recent_claude_body(), BETA).events
        answer = {"role": "assistant", "content": content_of(first)}
        second = post(port, MESSAGES, recent_claude_body(answer, asked, remark), BETA).events
    whole = sum(first[0].data["message"]["usage"].values())
    assert second[0].data["message"]["usage"]["cache_read_input_tokens"] >= whole
