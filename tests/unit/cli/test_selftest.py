"""`ds4py selftest`: lines, JSON, exit status."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ds4py import runtime
from ds4py.cli.main import ds4py
from ds4py.engine.selftest import ComparedKernel

GOOD = ComparedKernel("norm", error=1e-4, limit=1e-3, is_right=True, seconds=0.03)
BAD = ComparedKernel("products with Q4_1", error=0.7, limit=2e-3, is_right=False, seconds=0.4)


@pytest.fixture
def run(monkeypatch):
    def with_kernels(*kernels: ComparedKernel, flags: tuple[str, ...] = ()):
        monkeypatch.setattr(runtime, "run_selftest", lambda: ("znver5", iter(kernels)))
        return CliRunner().invoke(ds4py, ["selftest", *flags])

    return with_kernels


def test_all_is_well(run):
    result = run(GOOD)
    assert result.exit_code == 0
    assert "ok      norm: off by 1.0e-04, at most 1e-03 (0.03 s)\n" in result.output
    assert result.output.endswith("all 1 kernels compute as torch does\n")


def test_a_kernel_that_differs_is_named_and_the_status_tells(run):
    result = run(GOOD, BAD)
    assert result.exit_code == 1
    assert "DIFFERS products with Q4_1: off by 7.0e-01, at most 2e-03 (0.40 s)\n" in result.output
    assert "1 of 2 kernels are left out; please report these lines" in result.output


def test_json_holds_the_same(run):
    result = run(GOOD, BAD, flags=("--json",))
    found = json.loads(result.output)
    assert result.exit_code == 1
    assert found["left_out"] == ["products with Q4_1"]
    assert "on znver5" in found["where"]
    assert [kernel["name"] for kernel in found["kernels"]] == ["norm", "products with Q4_1"]
