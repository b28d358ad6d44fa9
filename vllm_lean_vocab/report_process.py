# SPDX-License-Identifier: Apache-2.0
"""Loads plugins as each vLLM process does, and says what came of this one.

`python -m vllm_lean_vocab.report_process ANSWER` writes to the file `ANSWER` what
`report` returns, or `{"error": SENTENCE}` where vLLM would not start.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_lean_vocab import plugin
from vllm_lean_vocab.child import respond
from vllm_lean_vocab.importer import module_name
from vllm_lean_vocab.plan import source_paths
from vllm_lean_vocab.series import SERIES


def report() -> dict[str, Any]:
    """Load vLLM's plugins, and describe this process.

    Relies on `vllm.plugins.load_general_plugins`, and on what is registered in
    `ModelRegistry.models`: `module_name` and `class_name`, or `model_cls`.

    Returns:
        Ready for `json.dump`: `vllm` and `torch` (versions), `platform` (vLLM's class
        of it), `cache_root`, `in_use` (ids of pull requests), `warnings` (what this
        package warns of), `failed_plugins` (what vLLM says of them), and `replaced`:
        by architecture the patched module `of` it, the class `by` which another plugin
        replaced it, and whether that `derives` from the patched one.

    """
    import torch

    import vllm

    # As a server does before it loads plugins.
    import vllm.engine.arg_utils  # noqa: F401
    from vllm import envs
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    stock = dict(ModelRegistry.models)
    with (
        _heard(plugin.logger.name, logging.WARNING) as warnings,
        _heard("vllm.plugins", logging.ERROR) as failures,
    ):
        load_general_plugins()
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "platform": type(current_platform).__name__,
        "cache_root": str(envs.VLLM_CACHE_ROOT),
        "in_use": list(plugin.in_use()),
        "warnings": warnings,
        "failed_plugins": failures,
        "replaced": _replaced(stock, ModelRegistry.models),
    }


@contextlib.contextmanager
def _heard(name: str, level: int) -> Iterator[list[str]]:
    """Collect what a logger is told, whatever vLLM's logging is set to."""
    texts: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + (f": {error}" if error else "")
        texts.append(" ".join(text.split()))

    handler = logging.Handler(level)
    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _replaced(
    stock: Mapping[str, Any], registered: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return which architectures of patched modules come from elsewhere now."""
    patched = {module_name(path) for path in source_paths(SERIES)}
    found = {}
    for architecture, model in stock.items():
        module, current = _place(model)[0], registered.get(architecture)
        if module in patched and _place(current) != _place(model):
            found[architecture] = {
                "of": module,
                "by": ":".join(_place(current)),
                "derives": _derives(current, module),
            }
    return found


def _place(model: Any) -> tuple[str, str]:
    """Return the module and the name of a registered class."""
    if (cls := getattr(model, "model_cls", None)) is not None:
        return cls.__module__, cls.__qualname__
    return getattr(model, "module_name", ""), getattr(model, "class_name", "")


def _derives(model: Any, module: str) -> bool:
    """Return whether a class has one of a module among its bases."""
    try:
        bases = model.load_model_cls().__mro__
    except Exception:  # a model of others
        return False
    return any(base.__module__ == module for base in bases)


def main() -> None:
    """Answer."""
    respond(report, lambda error: f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
