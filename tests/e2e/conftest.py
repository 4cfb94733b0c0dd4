"""Models and references of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.support import Alone, endless_toy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep these tests on one of several test processes: each starts programs of its own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("e2e"))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 6 layers that answers for as long as it is let."""
    return endless_toy(tmp_path_factory.mktemp("models") / "toy.gguf")


@pytest.fixture(scope="session")
def alone(toy: Path) -> Iterator[Alone]:
    """The toy in one process: what every cluster must say too."""
    reference = Alone(toy)
    yield reference
    reference.close()
