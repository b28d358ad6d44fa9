# SPDX-License-Identifier: Apache-2.0
"""Ray as the executor: two nodes of one machine, one of them without this package.

vLLM refuses Ray on its CPU platform. A platform from elsewhere, which differs from that
one only in what Ray calls its devices, isn't refused.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import write_qwen3_5
from benchmarks.engine import EngineRun, run_engine
from benchmarks.logs import not_allocated_mib
from benchmarks.process import SWITCHES, Environment, environment
from vllm_lean_vocab import versions
from vllm_lean_vocab.doctor import PACKAGE

from . import installed
from .conftest import Result
from .test_doctor import section

PLATFORM = """
from vllm.platforms.cpu import CpuPlatform
class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"
"""
RAY = "-m", "ray.scripts.scripts"
STARTED = "Ray runtime started."
# Of Ray's own: no token is made in the user's home, and nothing is reported.
SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the platform, as if installed."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "ray_cpu.py").write_text(PLATFORM)
    (folder / "ray_cpu_plugin.py").write_text(
        "def register():\n    return 'ray_cpu.RayCpuPlatform'\n"
    )
    info = folder / "ray_cpu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_cpu = ray_cpu_plugin:register\n"
    )
    return folder


@pytest.fixture(scope="module")
def without_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has all that this one has, but not this package."""
    root = tmp_path_factory.mktemp("without")
    venv.create(root, symlinks=True)
    [site_packages] = root.glob("lib/python*/site-packages")
    for entry in installed.root().iterdir():
        if "lean_vocab" not in entry.name:
            (site_packages / entry.name).symlink_to(entry)
    return root / "bin" / "python"


@pytest.fixture(scope="module")
def cluster(site: Path, without_package: Path) -> Iterator[str]:
    """Address of a Ray cluster: this Python's node, and one without the package."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        # Paths of sockets are short.
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        head = ["--head", f"--port={port}", "--include-dashboard=false"]
        head.append(f"--temp-dir={folder}")
        stack.enter_context(node(sys.executable, site, folder / "head.log", *head))
        log = folder / "other.log"
        other = f"--address={address}"
        stack.enter_context(node(str(without_package), site, log, other))
        yield address


@contextlib.contextmanager
def node(python: str, site: Path, log: Path, *options: str) -> Iterator[None]:
    """Run a node with one device."""
    command = [python, *RAY, "start", "--block", "--num-gpus=1", "--num-cpus=1"]
    command += ["--object-store-memory=100000000", *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environment({**SETTINGS, "PYTHONPATH": str(site)}),
            cwd="/",  # where no `vllm_lean_vocab` lies
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while STARTED not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, (
                log.read_text()
            )
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def run(
    cluster: str,
    site: Path,
    warm_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """Serve a counting Qwen3.5, with a rank on each node."""
    # Ray has every node look for modules here.
    monkeypatch.chdir(tmp_path)
    model = write_qwen3_5(tmp_path / "model", vocab_size=32_768)

    def run_model(switch: Environment) -> EngineRun:
        name = "stock" if switch is SWITCHES["stock"] else "patched"
        result = run_engine(
            model.path,
            prompts=model.prompts(4),
            max_tokens=16,
            log=tmp_path / f"{name}.log",
            timeout=400,
            env={
                **SETTINGS,
                **switch,
                "PYTHONPATH": str(site),
                "RAY_ADDRESS": cluster,
                "VLLM_CACHE_ROOT": str(warm_cache),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            tensor_parallel_size=2,
            distributed_executor_backend="ray",
        )
        assert result.token_ids == model.continuations(4, 16)
        assert 0 < result.accepted_tokens < result.draft_tokens
        return result

    return run_model


@pytest.mark.engine
def test_a_worker_without_the_package_is_stock(run: Any) -> None:
    log = run(SWITCHES["patched"]).log
    [rank] = set(ranks_that_tell(log))
    assert rank == "Worker_TP0" and not_allocated_mib(log)


@pytest.mark.engine
@pytest.mark.full
def test_as_on_stock(run: Any) -> None:
    stock, patched = run(SWITCHES["stock"]), run(SWITCHES["patched"])
    assert not list(ranks_that_tell(stock.log))
    assert patched.drafts == stock.drafts
    assert patched.accepted_tokens == stock.accepted_tokens


def ranks_that_tell(log: Path) -> Iterator[str]:
    """Yield the names of workers that say what they don't allocate."""
    for line in log.read_text().splitlines():
        if "MiB not allocated on this rank" in line:
            yield re.findall(r"Worker_\w+", line)[0]


def test_doctor_names_the_node(
    cluster: str, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    result = command("doctor", "--ray", cluster)
    assert result.code == 1
    nodes = dict(line.split("): ") for line in section(result.out, "Ray's nodes"))
    missing = f"{PACKAGE} is not installed"
    version = versions.of(PACKAGE)
    assert sorted(nodes.values()) == sorted([f"{PACKAGE} {version}", missing])
    [place] = [place for place, said in nodes.items() if said == missing]
    [remedy] = section(result.out, "What to do")
    assert remedy.startswith(f"vLLM's workers on {place}) are stock: install {PACKAGE}")


def test_doctor_says_why_no_node_can_be_asked(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray.py").write_text(
        "raise ModuleNotFoundError('No module', name='ray')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = command("doctor", "--ray")
    assert result.code == 1
    [remedy] = section(result.out, "What to do")
    assert remedy == "Ray's nodes can't be asked: Ray is not installed for this Python"


def test_doctor_without_a_cluster(
    command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    result = command("doctor", "--ray", f"127.0.0.1:{free_port()}")
    assert result.code == 1
    [remedy] = section(result.out, "What to do")
    assert remedy.startswith("Ray's nodes can't be asked: ")
