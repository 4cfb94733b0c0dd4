"""What ships is what is proven: every choice of flags, every size of a batch, every place for it.

See docs/numerics.md, which `python -m tests.numerics.table` makes of the same runs.
"""

from __future__ import annotations

import pytest
import torch

from ds4py.config import EngineConfig
from ds4py.engine import open_runner
from tests.numerics import table
from tests.numerics.measure import measure
from tests.numerics.modes import MODES, choices, defaults, row_of
from tests.numerics.truths import FILES, path_of

pytestmark = pytest.mark.xdist_group("numerics")  # the references are computed once per process


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_mode_is_as_near_to_float32_as_it_says(mode):
    assert measure(mode).faults == []


@pytest.mark.parametrize("choice", [*choices()], ids=str)
def test_every_choice_of_flags_has_a_row(choice):
    assert row_of(choice) is not None, "give the new choice a row in tests/numerics/modes.py"


@pytest.mark.parametrize("choice", defaults(), ids=lambda choice: choice.architecture)
def test_what_a_user_gets_without_flags_has_a_row(choice):
    mode = row_of(choice)
    assert mode is not None
    assert mode.precision == "bf16"
    assert FILES[choice.architecture], "and files that prove it"


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_row_is_what_the_engine_computes_with(mode):
    """The flags of a row lead to its types: of products, of caches, and to its rounding."""
    path = path_of(FILES[mode.architecture][0])
    runner = open_runner(mode.config(model=path, n_slots=1))
    types = {part.dtype for part in runner.cache_layout}
    wanted = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    if mode.kv == "q8_0":
        assert types == {torch.int8, torch.float32}
    elif mode.kv != "own":
        assert types == {wanted[mode.kv]}
    runner.close()


def test_a_users_config_is_the_default_row():
    """`EngineConfig` with a model and nothing else, as `ds4py-server -m M.gguf` makes it."""
    plain = EngineConfig(model=path_of("Q4_1"))
    (llama,) = (one for one in defaults() if one.architecture == "llama")
    flags = (llama.precision, llama.act_quant, llama.kv_type)
    assert (plain.precision, plain.act_quant, plain.kv_type) == flags


def test_the_committed_table_has_exactly_these_rows_and_tolerances():
    committed = table.TABLE.read_text(encoding="utf-8")
    assert table.without_measurements(committed) == table.without_measurements(
        table.render(None)
    ), "run python -m tests.numerics.table"


def test_the_committed_table_was_made_by_a_run_in_which_all_was_near_enough():
    pairs = table.measured(table.TABLE.read_text(encoding="utf-8"))
    assert len(pairs) == 3 * len(MODES) + sum(bool(mode.tolerance.golden) for mode in MODES)
    assert all(0 < found <= limit for found, limit in pairs)
