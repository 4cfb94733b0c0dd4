"""The programs set up logging for their process; a test must not leave that behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    noisy = [logging.getLogger(name) for name in ("asyncio", "httpx", "httpcore", "uvicorn")]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *noisy)]
    yield
    root.handlers[:] = handlers
    for logger, level in zip((root, *noisy), levels, strict=True):
        logger.setLevel(level)
