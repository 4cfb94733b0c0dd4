"""llama.cpp through its Python package: times jobs like `child.py`, or serves as an RPC server.

A script for whichever interpreter has `llama_cpp`; it needs nothing else, not even ds4py.

Owns: how llama.cpp is asked, with one thread. Refuses to know: what the seconds are for. Invariant:
a job is over when its logits are there.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import llama_cpp

DECODE_CONTEXT = 128  # as in timers.py
CPU_DEVICE = 0  # of enum ggml_backend_dev_type
RPC = b"RPC"


class Model:
    """A model with one session.

    Args:
        path: GGUF file.
        n_ctx: Tokens of the session.
        servers: RPC servers `HOST:PORT` that hold its layers in equal parts; none: this process.
    """

    def __init__(self, path: str, n_ctx: int, servers: list[str]):
        for server in servers:
            add_server(server)
        self._llama: Any = llama_cpp.Llama(  # untyped
            path,
            n_ctx=n_ctx,
            n_batch=512,
            n_threads=1,
            n_threads_batch=1,
            n_gpu_layers=-1 if servers else 0,
            tensor_split=[1.0] * len(servers) or None,
            flash_attn=True,  # no slower in prefill, a little faster in decode
            verbose=False,
        )

    def run(self, what: str, n: int) -> float:
        """Do a job; return its seconds."""
        self._llama.reset()
        if what == "prefill":
            tokens = self._random(n)
            start = time.perf_counter()
            self._evaluate(tokens)
            return time.perf_counter() - start
        self._evaluate(self._random(DECODE_CONTEXT))
        tokens = self._random(n)
        start = time.perf_counter()
        for token in tokens:
            self._evaluate([token])
        return time.perf_counter() - start

    def _random(self, n: int) -> list[int]:
        return [random.randrange(10, self._llama.n_vocab()) for _ in range(n)]

    def _evaluate(self, tokens: list[int]) -> None:
        self._llama.eval(tokens)
        llama_cpp.llama_get_logits(self._llama.ctx)  # waits for what still runs elsewhere


# --- ggml's own functions, for RPC ----------------------------------------------------------------


def ggml_function(name: str, returns: Any, *takes: Any) -> Callable[..., Any]:
    """Return a C function of ggml: of the very copy that libllama is linked with."""
    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype, function.argtypes = returns, list(takes)
    return function  # type: ignore[no-any-return]


def rpc_function(name: bytes, returns: Any, *takes: Any) -> Callable[..., Any]:
    """Return a function of ggml's RPC backend."""
    pointer = ctypes.c_void_p
    registry = ggml_function("ggml_backend_reg_by_name", pointer, ctypes.c_char_p)(RPC)
    look_up = ggml_function("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(returns, *takes)(look_up(registry, name))


def add_server(address: str) -> None:
    """Make an RPC server's devices known to this process."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    found = rpc_function(b"ggml_backend_rpc_add_server", pointer, text)(address.encode())
    if not found:
        sys.exit(f"RPC server {address}: offers no device")
    ggml_function("ggml_backend_register", None, pointer)(found)


def serve(address: str) -> None:
    """Be an RPC server with one thread, for ever."""
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    find = ggml_function("ggml_backend_dev_by_type", pointer, ctypes.c_int)
    devices = (pointer * 1)(find(CPU_DEVICE))
    start = rpc_function(
        b"ggml_backend_rpc_start_server",
        *(None, text, text, size, size, pointer),
    )
    start(address.encode(), None, 1, 1, ctypes.cast(devices, pointer))


def main() -> None:
    """Serve jobs from stdin, or be an RPC server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--rpc", default="", help="HOST:PORT,...")
    parser.add_argument("--serve", help="HOST:PORT")
    parser.add_argument("--supports-rpc", action="store_true")
    options = parser.parse_args()
    if options.supports_rpc:
        say(llama_cpp.llama_supports_rpc())
        return
    if options.serve:
        serve(options.serve)
        return
    model = Model(options.model, options.ctx, [s for s in options.rpc.split(",") if s])
    say("ready")
    for line in sys.stdin:
        what, n = line.split()
        say(model.run(what, int(n)))


def say(answer: object) -> None:
    """Write one line."""
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
