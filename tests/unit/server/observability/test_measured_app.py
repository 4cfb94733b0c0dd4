"""The application counts what it does and tells it on `/metrics` and `/stats`."""

import asyncio

from ds4py.errors import ClusterError
from tests.unit.server.observability.measured import CHAT
from tests.unit.server.support import DEADLINE, USER, backend, client


def after(fake, *requests, **config):
    """`/metrics` as text and `/stats` as JSON, after some requests to a fresh application."""

    async def go():
        with client(fake, **config) as http:
            async with asyncio.timeout(DEADLINE):
                for fields in requests:
                    await http.post(CHAT, json={"messages": USER, "max_tokens": 3} | fields)
                return (await http.get("/metrics")).text, (await http.get("/stats")).json()

    return asyncio.run(go())


def ended(finish, status):
    return f'ds4_requests_total{{endpoint="{CHAT}",finish="{finish}",status="{status}"}}'


def test_whole_replies_and_streams_are_counted_alike():
    text, stats = after(backend("Hello"), {}, {"stream": True})
    assert f"{ended('length', 200)} 2.0" in text
    assert "ds4_completion_tokens_total 6.0" in text
    assert "ds4_time_to_first_token_seconds_count 2.0" in text
    assert "ds4_inter_token_seconds_count 4.0" in text
    assert "ds4_queue_wait_seconds_count 2.0" in text
    assert stats["requests"] == {
        "running": 0,
        "waiting": 0,
        "served": 2,
        "failed": 0,
        "cancelled": 0,
    }
    assert stats["tokens"]["completion"] == 6
    assert stats["tokens"]["prompt"] > stats["tokens"]["cached"] > 0
    assert stats["sessions"] == {"total": 1, "leased": 0}


def test_bad_and_failed_requests_are_told_apart():
    fake = backend("Hello", failures={0: ClusterError("a stage is lost")})
    text, stats = after(fake, {"messages": 7}, {}, {})
    assert f"{ended('refused', 400)} 1.0" in text
    assert f"{ended('error', 500)} 1.0" in text
    assert f"{ended('length', 200)} 1.0" in text
    assert (stats["requests"]["served"], stats["requests"]["failed"]) == (1, 1)
