"""The second half of ./tools/gpu_check: one model on the GPU beside the CPU.

Prints, in one run: how far the GPU's logits are from the CPU's float32 ones, whether greedy tokens
agree, and prefill and decode speed in both precisions. The last line is one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ds4py.config import EngineConfig
from ds4py.contracts import SessionId, SliceOutput, SliceWork, Want
from ds4py.engine.open import open_runner
from ds4py.engine.runner import LocalRunner

MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = 512
DECODE = 64
SESSION = SessionId(1)


def span(runner: LocalRunner, tokens: list[int], pos0: int) -> np.ndarray:
    work = SliceWork(
        session=SESSION,
        tokens=tuple(tokens),
        pos0=pos0,
        hidden=None,
        reset=pos0 == 0,
        want=Want.LOGITS,
    )
    (output,) = runner.run([work])
    if not isinstance(output, SliceOutput):
        raise output
    return output.logits


def examine(name: str, config: EngineConfig, prompt: list[int]) -> dict[str, object]:
    runner = open_runner(config)
    span(runner, prompt, 0)  # first-use costs
    start = time.perf_counter()
    logits = span(runner, prompt, 0)
    prefill = time.perf_counter() - start
    greedy, position = [int(np.argmax(logits))], len(prompt)
    start = time.perf_counter()
    for _ in range(DECODE):
        greedy.append(int(np.argmax(span(runner, greedy[-1:], position))))
        position += 1
    decode = time.perf_counter() - start
    runner.close()
    return {
        "name": name,
        "logits": logits,
        "greedy": greedy,
        "prefill": PROMPT / prefill,
        "decode": DECODE / decode,
    }


def main() -> int:
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL
    prompt = random.Random(1).sample(range(1000, 30000), PROMPT)
    subjects = [
        examine(
            f"{device} {precision}",
            EngineConfig(model=model, device=device, precision=precision),
            prompt,
        )
        for device, precision in (("cpu", "f32"), ("cuda", "f32"), ("cuda", "bf16"))
    ]
    base = subjects[0]
    spread = float(np.ptp(base["logits"]))
    table = Table("device", "logit error", "greedy tokens equal", "prefill t/s", "decode t/s")
    rows = []
    for subject in subjects:
        error = float(np.abs(subject["logits"] - base["logits"]).max()) / spread
        pairs = zip(subject["greedy"], base["greedy"], strict=True)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), DECODE + 1)
        numbers = [
            f"{error:.1e}",
            f"{equal}",
            f"{subject['prefill']:.0f}",
            f"{subject['decode']:.1f}",
        ]
        table.add_row(subject["name"], *numbers)
        rows.append(
            {
                "name": subject["name"],
                "logit_error": error,
                "greedy_equal": equal,
                "prefill": round(subject["prefill"], 1),
                "decode": round(subject["decode"], 1),
            }
        )
    Console().print(table)
    print("logit error: largest difference to cpu f32, relative to the range of the logits")
    good = rows[1]["logit_error"] < 2e-3
    print(
        json.dumps(
            {"gpu": torch.cuda.get_device_name(), "model": model.name, "ok": good, "rows": rows}
        )
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
