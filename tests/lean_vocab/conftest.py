# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the tests of the tooling."""

from collections.abc import Iterator

import pytest

from .processes import Processes


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Processes that have not loaded vLLM's plugins yet."""
    with Processes(tmp_path_factory.mktemp("processes")) as running:
        yield running
