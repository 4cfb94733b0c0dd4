"""One model process per lock file, for those who set `DS4_LOCK_FILE`.

Owns: the lock (docs/spec/wire-protocol.md#environment). Refuses to know: what is loaded. Invariant:
the lock ends with the process, however that ends; without the variable nothing is locked, since one
machine may hold several slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds4py.errors import ConfigError


@contextmanager
def exclusive(path: Path | None) -> Iterator[None]:
    """Hold the lock file while the context lasts.

    Raises:
        ConfigError: Another process holds it, it cannot be opened, or this system has no locks.
    """
    if path is None:
        yield
        return
    try:
        import fcntl
    except ImportError as e:
        raise ConfigError("DS4_LOCK_FILE: this system has no file locks; unset it") from e
    try:
        file = path.open("a")
    except OSError as e:
        raise ConfigError(f"DS4_LOCK_FILE={path}: {e.strerror}; name a file we may write") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConfigError(
                f"DS4_LOCK_FILE={path}: another process holds it; stop that one or use another file"
            ) from e
        yield
