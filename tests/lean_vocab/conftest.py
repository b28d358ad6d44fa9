# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the tooling."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import Processes


@pytest.fixture(scope="session")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root shared by engines: vLLM inspects each model class once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes that have not loaded vLLM's plugins yet."""
    with Processes(tmp_path_factory.mktemp("processes")) as running:
        yield running
