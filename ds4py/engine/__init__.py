"""One machine as a `ModelRunner`: device, weights, caches, evaluation.

Owns: the way from a file and a span to answers. Refuses to know: sockets, tokens' text, what a
layer computes. Invariant: everything that touches tensors after loading happens on the thread that
calls the runner.
"""

from ds4py.engine.open import open_runner
from ds4py.engine.runner import LocalRunner

__all__ = ["LocalRunner", "open_runner"]
