# SPDX-License-Identifier: Apache-2.0
"""Runs the tests against the patched modules, served as vLLM's plugins are."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # VLLM_LEAN_VOCAB=0 gives the stock modules.
    from vllm.plugins import load_general_plugins

    load_general_plugins()
