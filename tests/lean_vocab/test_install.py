# SPDX-License-Identifier: Apache-2.0
"""The package as pip installs it: as a wheel, and editable, as it is tested here."""

import email
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from vllm_lean_vocab import plan
from vllm_lean_vocab.series import SERIES

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for pull_request in SERIES
    for path in (*pull_request.new_files, *pull_request.tests)
]

# Serves Qwen3.5's draft module, as any vLLM process does.
USE = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm_lean_vocab
from vllm.model_executor.models import qwen3_5_mtp
print(vllm_lean_vocab.__file__, qwen3_5_mtp.__file__, qwen3_5_mtp.draft_lm_head)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: building leaves files beside the sources.
    copy = folder / "copy"
    copy.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    pip += ["--no-build-isolation", "--wheel-dir", str(folder), str(copy)]
    subprocess.run(pip, check=True)
    [built] = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_the_files_for_vllm(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = email.message_from_bytes(archive.read(metadata))
        assert not [name for name in names if "tests/lean_vocab" in name]
        for path in FILES:
            shipped = archive.read(f"vllm_lean_vocab/repository/{path}")
            assert shipped == (ROOT / path).read_bytes()
    # Nothing may land in the folder of an installed vLLM, or beside it.
    tops = {name.split("/")[0] for name in names}
    assert tops == {"vllm_lean_vocab", metadata.split("/")[0]}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    needed = [r for r in described.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert [requirement.split(">")[0] for requirement in needed] == ["libcst"]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True)
    return folder


def test_wheel_exports(site: Path, tmp_path: Path) -> None:
    """With texts, tests and figures."""
    env = {**os.environ, "PYTHONPATH": str(site)}
    for who in ("AUTHOR", "COMMITTER"):
        env[f"GIT_{who}_NAME"] = "vllm-lean-vocab tests"
        env[f"GIT_{who}_EMAIL"] = "tests@example.invalid"
    script = "import sys; from vllm_lean_vocab.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", script, "export", "--out", "prs"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    for pull_request in SERIES:
        [patch] = (tmp_path / "prs" / pull_request.id).glob("*.patch")
        for path in (*pull_request.new_files, *pull_request.tests):
            assert f"+++ b/{path}\n" in patch.read_text()


def test_wheel_serves(site: Path, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(site),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", USE],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    package, module, _ = done.stdout.splitlines()[-1].split(maxsplit=2)
    assert Path(package).is_relative_to(site)
    assert Path(module).is_relative_to(tmp_path / "cache" / "lean_vocab")


def test_editable_install_reads_the_checkout() -> None:
    entry_points = distribution("vllm-lean-vocab").entry_points
    assert [e.value for e in entry_points if e.group == "vllm.general_plugins"] == [
        "vllm_lean_vocab.plugin:register"
    ]
    for path in FILES:
        assert plan.repository_file(path) == ROOT / path
