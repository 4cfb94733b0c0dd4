"""The self-test's verdicts: kept for the next process, read back only where they hold."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from ds4py.config import EngineConfig, cache_folder
from ds4py.contracts import ForwardRequest, OutputKind, SessionId
from ds4py.engine import open_runner, selftest
from ds4py.engine.selftest import VerdictFile, compare_all
from ds4py.kernels.cpu import attention
from ds4py.kernels.cpu.trust import TRUST
from tests.support.toys import toy_llama


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    torch.set_num_threads(1)
    monkeypatch.setattr(TRUST, "memory", None)
    TRUST.forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    TRUST.forget()


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "cache" / "ds4py" / "kernels.json"


def test_every_kernel_is_right_here_and_that_is_written_down(file):
    found = list(compare_all())
    assert len({kernel.name for kernel in found}) == len(found) >= 20
    assert all(kernel.is_right for kernel in found)
    (verdicts,) = json.loads(file.read_text()).values()
    assert verdicts == {kernel.name: True for kernel in found}


def test_comparing_takes_less_than_half_a_second_once_all_is_compiled():
    """What is timed is work of the processor; compiling was done by the run before."""
    list(compare_all())
    started = os.times()
    list(compare_all())
    ended = os.times()
    assert ended.user - started.user < 0.5


def test_what_a_process_finds_another_reads(file):
    VerdictFile(file, "this machine").put("norm", is_right=True)
    VerdictFile(file, "this machine").put("gate", is_right=False)
    VerdictFile(file, "another").put("norm", is_right=False)
    found = VerdictFile(file, "this machine")
    assert (found.get("norm"), found.get("gate"), found.get("Sinkhorn")) == (True, False, None)
    assert VerdictFile(file, "a third").get("norm") is None


def test_verdicts_of_the_latest_machines_are_kept(file):
    for number in range(30):
        VerdictFile(file, f"machine {number}").put("norm", is_right=True)
    assert len(json.loads(file.read_text())) == 8
    assert VerdictFile(file, "machine 29").get("norm")
    assert VerdictFile(file, "machine 3").get("norm") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[]", b"7", b'{"this": 3}', b'{"this": {"norm": "yes"}}', b"[" * 100_000],
    ids=range(7),
)
def test_a_file_that_is_none_of_ours_is_replaced(file, content):
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    found = VerdictFile(file, "this")
    assert found.get("norm") is None
    found.put("norm", is_right=True)
    assert VerdictFile(file, "this").get("norm")


def test_a_huge_file_is_not_read(file):
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"this": {"norm": True}}) + " " * (1 << 20))
    assert VerdictFile(file, "this").get("norm") is None


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    found = VerdictFile(tmp_path / "taken" / "kernels.json", "this")
    found.put("norm", is_right=True)
    assert found.get("norm")


def test_the_key_is_of_processor_versions_and_code(monkeypatch):
    before = selftest._this_machine()
    assert selftest.processor() in before
    assert torch.__version__ in before
    monkeypatch.setattr(selftest, "__version__", "9.9.9")
    assert selftest._this_machine() != before


def answer(path: Path) -> np.ndarray:
    runner = open_runner(EngineConfig(model=path, device="cpu", threads=1, n_slots=1))
    work = [
        ForwardRequest(
            session=SessionId(1),
            tokens=tokens,
            pos0=pos0,
            hidden=None,
            output_kind=OutputKind.LOGITS,
        )
        for tokens, pos0 in (((5, 9, 31), 0), ((7,), 3))
    ]
    outputs = [runner.run([one])[0] for one in work]
    runner.close()
    return np.stack([one.logits.reshape(-1) for one in outputs])


def test_a_model_serves_without_a_kernel_that_differs(tmp_path, monkeypatch, caplog):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2, quant="Q4_1")
    exact = answer(path)
    TRUST.forget()
    TRUST.memory = None
    real = attention.attend
    used = []

    def attend(heads, qkv, row, place, out, *weights) -> None:
        used.append(row)
        real(heads, qkv, row, place, out, *weights)
        out.tensor[row, 0] += 100

    monkeypatch.setattr(attention, "attend", attend)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    got = answer(path)
    assert used, "it was compared"
    n_compared = len(used)
    assert np.abs(got - exact).max() < 0.02 * np.ptp(exact)
    answer(path)
    assert len(used) == n_compared, "and never used, nor compared again"
    assert sum("is left out" in record.getMessage() for record in caplog.records) == 1


def test_a_model_serves_where_a_kernel_cannot_be_compiled(tmp_path, monkeypatch, caplog):
    path = toy_llama(tmp_path / "m.gguf", n_layers=2, quant="Q4_1")
    exact = answer(path)
    TRUST.forget()
    TRUST.memory = None

    def refuse(*args):
        raise RuntimeError("LLVM ERROR: no such instruction")

    monkeypatch.setattr(attention, "attention_kernel", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    for _ in range(2):  # found out, then remembered
        got = answer(path)
        assert np.abs(got - exact).max() < 0.02 * np.ptp(exact)
    assert "is left out" in caplog.text


def test_the_cache_folder_follows_the_xdg_specification():
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/ds4py")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/ds4py")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/ds4py")
