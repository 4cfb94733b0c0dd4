"""What the server tells about itself: `/health` and `/v1/models`.

Owns: the JSON of both. Refuses to know: HTTP, where the numbers come from. Invariant: pure
functions; `/health` says "ok" only when the whole route can be reached.
"""

from __future__ import annotations

from ds4py import __version__
from ds4py.config import ServerConfig
from ds4py.contracts import Backend, Health, ModelCard, StageStatus
from ds4py.server.api.reply import Json, rate

_CREATED = 1767225600  # a constant, as in ds4
_DS4_IDS = {0: "deepseek-v4-flash", 1: "deepseek-v4-pro"}
_SUPPORTED = [
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream"),
    *("tools", "tool_choice", "reasoning_effort"),
]


def served_name(card: ModelCard, config: ServerConfig) -> str:
    """Return the model name that clients see."""
    own = _DS4_IDS.get(card.model_id)
    return config.model_alias or own or card.name or card.architecture


def _listed_names(card: ModelCard, config: ServerConfig) -> list[str]:
    """Return the ids that answer: as in ds4 both of its models' whichever is served, or one."""
    if config.model_alias is None and card.model_id in _DS4_IDS:
        return list(_DS4_IDS.values())
    return [served_name(card, config)]


def health_object(
    backend: Backend, config: ServerConfig, health: Health, load: tuple[int, int]
) -> Json:
    """Return the body of `/health`.

    Args:
        backend: The served model.
        config: For its name.
        health: Readiness and the route.
        load: Requests that run and requests that wait.
    """
    state: Json = {"status": "ok"}
    if not health.ready:
        state = {"status": "route incomplete", "missing": health.missing}
    running, waiting = load
    return state | {
        "model": served_name(backend.card, config),
        "n_ctx": backend.n_ctx,
        "version": __version__,
        "requests": {"running": running, "waiting": waiting},
        "stages": [_stage(stage) for stage in health.stages],
    }


def _stage(stage: StageStatus) -> Json:
    layers = stage.layers
    return {
        "name": stage.name,
        "layers": None if layers is None else f"{layers.start}-{layers.end}",
        "has_output": layers is not None and layers.has_output,
        "weight_bytes": stage.weight_bytes,
        "prefill_tokens": stage.prefill_tokens,
        "prefill_per_second": rate(stage.prefill_tokens, stage.prefill_usec / 1e6),
        "decode_tokens": stage.decode_tokens,
        "decode_per_second": rate(stage.decode_tokens, stage.decode_usec / 1e6),
        "decode_hop_usec": _mean(stage.decode_hop_usec, stage.decode_tokens),
    }


def _mean(total: int, count: int) -> float:
    return round(total / count, 1) if count else 0.0


def model_objects(backend: Backend, config: ServerConfig) -> list[Json]:
    """Return the entries of `/v1/models` (docs/spec/server-and-cli.md#endpoints)."""
    display = backend.card.name or served_name(backend.card, config)
    most = min(config.max_tokens, backend.n_ctx)
    return [
        {
            "id": name,
            "object": "model",
            "created": _CREATED,
            "owned_by": "ds4.c",
            "name": display,
            "context_length": backend.n_ctx,
            "top_provider": {
                "context_length": backend.n_ctx,
                "max_completion_tokens": most,
                "is_moderated": False,
            },
            "supported_parameters": _SUPPORTED,
        }
        for name in _listed_names(backend.card, config)
    ]
