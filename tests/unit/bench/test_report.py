"""What tables, JSON and pictures tell of frontiers."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ds4py.bench.context_sweep import Frontier, Row
from ds4py.bench.plot import draw
from ds4py.bench.report import json_object, logits_object, share_table
from ds4py.contracts import ModelCard
from ds4py.errors import ConfigError
from ds4py.tracing.events import Shares

CARD = ModelCard(
    model_id=1,
    name="toy",
    architecture="llama",
    n_layers=2,
    n_vocab=4,
    hidden_width=8,
    n_ctx_train=64,
    quant_bits=4,
)
BUSY = Shares(compute=0.75, wire=0.125, wait=0.0625, idle=0.0625)
IDLE = Shares(compute=0.1, wire=0.0, wait=0.0, idle=0.9)


def row(n: int, decode: float = 20.0) -> Row:
    return Row(
        ctx_tokens=n,
        prefill_tokens=2048,
        prefill_tps=900.0 - n / 100,
        gen_tokens=16,
        gen_tps=decode,
        kvcache_bytes=7,
    )


FRONTIER = Frontier(
    row=row(4096),
    logits=np.array([0.5, -1, 2.25, 0], np.float32),
    prefill={"coordinator": IDLE, "layers 0-1": BUSY},
    decode={"layers 0-1": IDLE},
)


def test_the_table_has_every_stage_in_prefill_and_decode() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(share_table(FRONTIER))
    lines = console.export_text().splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["prefill", "coordinator", "10.0", "0.0", "0.0", "90.0", "90.0"],
        ["prefill", "layers 0-1", "75.0", "12.5", "6.2", "6.2", "25.0"],
        ["decode", "layers 0-1", "10.0", "0.0", "0.0", "90.0", "90.0"],
    ]


def test_the_json_object_has_rows_and_stages() -> None:
    told = json.loads(json.dumps(json_object(CARD, [FRONTIER])))
    assert told["model"] == "toy"
    (frontier,) = told["frontiers"]
    assert frontier["ctx_tokens"] == 4096
    assert frontier["kvcache_bytes"] == 7
    assert frontier["stages"]["prefill"]["layers 0-1"]["compute"] == 0.75
    assert frontier["stages"]["decode"]["layers 0-1"]["bubble"] == 0.9


def test_logits_have_the_names_of_the_specification() -> None:
    told = logits_object(CARD, FRONTIER, n_prompt=9000, n_ctx=8192, device="cpu")
    assert json.loads(json.dumps(told)) == {
        "source": "ds4py-bench",
        "model": "toy",
        "backend": "cpu",
        "quality": False,
        "quant_bits": 4,
        "prompt_tokens": 9000,
        "frontier_tokens": 4096,
        "prefill_tokens": 2048,
        "ctx": 8192,
        "vocab": 4,
        "argmax_id": 2,
        "argmax_logit": 2.25,
        "logits": [0.5, -1, 2.25, 0],
    }


@pytest.mark.parametrize("n_rows", [1, 3, 60])
def test_a_picture_is_drawn_of_any_number_of_rows(tmp_path: Path, n_rows: int) -> None:
    path = tmp_path / "rates.png"
    draw(path, [row(2048 * (n + 1)) for n in range(n_rows)], "toy")
    raw = path.read_bytes()
    assert raw.startswith(b"\x89PNG")
    width, height = (int.from_bytes(raw[at : at + 4]) for at in (16, 20))
    assert (width, height) == (960, 720)


def test_a_picture_without_any_decode_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "rates.png", [row(2048, 0.0), row(4096, 0.0)], "toy")


def test_a_picture_that_can_not_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--png .*nowhere"):
        draw(tmp_path / "nowhere" / "rates.png", [row(2048)], "toy")
