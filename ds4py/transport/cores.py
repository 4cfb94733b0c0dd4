"""Which cores of the machine a thread may use.

Owns: the calls into the system. Refuses to know: which thread does what, how cores are chosen.
Invariant: without cores to choose from nothing is changed, so it does nothing by default and on
systems other than Linux, where `ds4py.config` lets nobody choose any.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

log = logging.getLogger(__name__)


def run_on(cores: Collection[int]) -> None:
    """Let the calling thread, and those that it starts from now on, use these cores only.

    Args:
        cores: Their numbers; none changes nothing.
    """
    if not cores:
        return
    try:
        os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process
    except OSError as e:  # taken from us since the start, as in a container that was resized
        log.warning("a network thread is not kept on cores %s: %s", sorted(cores), e.strerror)


def keep_off(cores: Collection[int]) -> None:
    """Let the calling thread, and those that it starts from now on, use all cores but these.

    Args:
        cores: Their numbers; all that there are change nothing, since something must be left.
    """
    if cores:
        run_on(os.sched_getaffinity(0) - set(cores))
