"""The GPU check: every section runs, tiny and on the CPU, and none takes the others with it."""

import json
import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tools import gpu_kernels, gpu_measure
from tools.run_gpu_check import main, parse

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here")

MEASURED = {
    "ceiling",
    "check",
    "codec",
    "decode product",
    "prefill product",
    "decode experts",
    "prefill experts",
    "prefill attention",
    "transfer",
    "model",
    "slice",
}
NEED_TRITON = ("decode-attention", "sinkhorn")


def outcome(capsys, *arguments: str) -> tuple[int, str, dict]:
    code = main(["--dry-run", *arguments])
    table, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    return code, table, json.loads(last)


def test_every_section_of_a_dry_run_measures_something(capsys):
    code, table, found = outcome(capsys)
    without = [] if find_spec("triton") else [*NEED_TRITON]
    assert [failure["section"] for failure in found["failures"]] == without
    assert code == bool(without)
    assert all(row["ok"] for row in found["rows"] if "ok" in row)
    measured = {row["section"] for row in found["rows"]}
    wanted = MEASURED | (set() if without else {"decode attention"})
    assert wanted <= measured
    for row in found["rows"]:
        assert row["name"] in table
        assert all(value >= 0 for value in row["figures"].values())
        if row["section"].startswith(("decode product", "prefill product")):
            assert row["of"] > 0


def fail(bench):
    raise RuntimeError("no such kernel")


def test_a_section_that_fails_is_told_and_the_others_go_on(capsys, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "codec", fail)
    code, table, found = outcome(capsys, "--only", "codec", "transfers")
    assert code == 1
    assert found["failures"] == [{"section": "codec", "error": "RuntimeError: no such kernel"}]
    assert "FAILED" in table
    assert any(row["section"] == "transfer" for row in found["rows"])


def test_a_wrong_result_is_told(capsys, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "TOLERANCE", 0.0)
    code, table, found = outcome(capsys, "--only", "chunk-attention")
    assert (code, found["ok"]) == (1, False)
    assert "WRONG" in table


def test_sections_that_would_begin_too_late_are_left_out(capsys):
    code, _, found = outcome(capsys, "--only", "codec", "--seconds", "-1")
    assert code == 1
    expected = [
        {"section": name, "error": "left out: no time left"} for name in ("ceilings", "codec")
    ]
    assert found["failures"] == expected


def test_an_unknown_section_is_refused():
    with pytest.raises(SystemExit, match="no section speed; there are ceilings, products"):
        main(["--dry-run", "--only", "speed"])


def test_a_dry_run_is_on_the_cpu():
    assert parse(["--dry-run"]).device == "cpu"
    assert parse([]).device == "cuda:0"


def test_a_share_is_of_what_was_measured():
    bench = gpu_measure.Bench(torch.device("cpu"), tiny=True, copy=1e9, matmul=2e12)
    bench.memory_row("s", "m", 5e8, 1.0)
    bench.product_row("s", "p", 1e12, 2.0)
    assert [(row.of, row.figures) for row in bench.rows] == [
        (0.5, {"us": 1e6, "GB/s": 0.5}),
        (0.25, {"us": 2e6, "TFLOP/s": 0.5}),
    ]
