# SPDX-License-Identifier: Apache-2.0
"""Git, as far as `export` needs it.

Commits are made with a temporary index and branches with one transaction: no working
tree is touched, no hook runs, and what fails leaves nothing but unreachable objects.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# What git hands to its hooks would point it to another repository or index.
_KEPT = ("GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_CONFIG")


class GitFailed(Exception):
    """Git is missing, or a command failed; says which, and what git said."""


class Branch(NamedTuple):
    """A branch that is there.

    Attributes:
        commit: Where it points.
        worktree: The working tree that it is checked out in, or empty.

    """

    commit: str
    worktree: str


class Lines(NamedTuple):
    """What a commit changes in one file.

    Attributes:
        path: The file.
        added: Lines that are new.
        removed: Lines that are gone.

    """

    path: str
    added: int
    removed: int


class Repository:
    """A git repository.

    Attributes:
        root: Its top folder.

    """

    def __init__(self, folder: Path) -> None:
        """Find the repository that a folder belongs to.

        Raises:
            GitFailed: There is none, or none with a working tree.

        """
        self.root = folder
        self.root = Path(self.run("rev-parse", "--show-toplevel").strip())

    @classmethod
    def create(cls, folder: Path) -> "Repository":
        """Make a repository in a folder that is there.

        Raises:
            GitFailed: It can't be made.

        """
        _git(folder, "init", "--quiet")
        return cls(folder)

    def run(self, *arguments: str, text: str = "", index: str = "") -> str:
        """Return what a git command prints.

        Args:
            arguments: The command and its arguments.
            text: Its standard input.
            index: Index file to use instead of the repository's.

        Raises:
            GitFailed: It fails.

        """
        return _git(self.root, *arguments, text=text, index=index)

    def head(self) -> str:
        """Return the current commit.

        Raises:
            GitFailed: There is none.

        """
        return self.run("rev-parse", "--verify", "HEAD^{commit}").strip()

    def check_identity(self) -> None:
        """Check that git knows who commits.

        Raises:
            GitFailed: It doesn't.

        """
        for which in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
            self.run("var", which)

    def changes(self, paths: Sequence[str]) -> list[str]:
        """Return what is not committed: changed files, and new ones at some paths."""
        status = ("status", "--porcelain")
        changed = self.run(*status, "--untracked-files=no")
        new = self.run(*status, "--untracked-files=all", "--", *paths)
        return sorted({*changed.splitlines(), *new.splitlines()})

    def read(self, commit: str, path: str) -> str | None:
        """Return a file's text in a commit, None where it has no such file."""
        if not self.run("ls-tree", commit, "--", path):
            return None
        return self.run("cat-file", "blob", f"{commit}:{path}")

    def commit(self, parent: str | None, files: Mapping[str, str], message: str) -> str:
        """Make a commit, on no branch yet.

        Args:
            parent: The commit before it, if any.
            files: Text of each file that it changes or adds.
            message: Its message.

        Returns:
            Its name.

        """
        with tempfile.TemporaryDirectory() as folder:
            index = str(Path(folder, "index"))
            if parent:
                self.run("read-tree", parent, index=index)
            for path, text in files.items():
                blob = self.run("hash-object", "-w", "--stdin", text=text).strip()
                entry = self.run("ls-tree", parent, "--", path) if parent else ""
                mode = entry.split(" ")[0] or "100644"
                cacheinfo = f"{mode},{blob},{path}"
                self.run("update-index", "--add", "--cacheinfo", cacheinfo, index=index)
            tree = self.run("write-tree", index=index).strip()
        parents = ("-p", parent) if parent else ()
        return self.run("commit-tree", tree, *parents, "-F", "-", text=message).strip()

    def is_same(self, one: str, other: str) -> bool:
        """Return whether two commits differ in nothing but who made them, and when."""
        first, second = (
            self.run("log", "-1", "--format=%T %P%n%B", commit)
            for commit in (one, other)
        )
        return first == second

    def branches(self) -> dict[str, Branch]:
        """Return the branches that are there, by name."""
        listed = self.run(
            "for-each-ref",
            "--format=%(refname:lstrip=2)%09%(objectname)%09%(worktreepath)",
            "refs/heads",
        )
        rows = (line.split("\t") for line in listed.splitlines())
        return {name: Branch(commit, worktree) for name, commit, worktree in rows}

    def set_branches(
        self, commits: Mapping[str, str], old: Mapping[str, Branch], reason: str
    ) -> None:
        """Create or move branches, all or none.

        Args:
            commits: Where each is to point.
            old: The branches that are there: one of them that moved since then, or
                another one that came, is an error.
            reason: For the reflog.

        Raises:
            GitFailed: One can't be set.

        """
        none = "0" * len(next(iter(commits.values())))
        lines = []
        for name, commit in commits.items():
            expected = old[name].commit if name in old else none
            lines.append(f"update refs/heads/{name} {commit} {expected}\n")
        options = ("--create-reflog", "-m", reason, "--stdin")
        self.run("update-ref", *options, text="".join(lines))

    def changed_lines(self, parent: str, commit: str) -> list[Lines]:
        """Return what a commit changes, file by file."""
        numstat = self.run("diff", "--no-ext-diff", "--numstat", parent, commit)
        rows = (line.split("\t") for line in numstat.splitlines())
        return [Lines(path, int(added), int(removed)) for added, removed, path in rows]

    def format_patch(self, commit: str, folder: Path) -> Path:
        """Write a commit as a patch file, as `git format-patch` names it."""
        folder = folder.absolute()  # git runs elsewhere
        written = self.run(
            # Not as the user has it set: nothing is signed off here.
            *("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false"),
            *("format-patch", "--no-signoff", "--no-attach", "--no-thread"),
            *("--no-cover-letter", "--no-ext-diff", "--subject-prefix=PATCH"),
            *("--output-directory", str(folder), "-1", commit),
        )
        return folder / written.strip()


def _git(folder: Path, *arguments: str, text: str = "", index: str = "") -> str:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT)
    }
    env |= {"LC_ALL": "C"} | ({"GIT_INDEX_FILE": index} if index else {})
    try:
        # As bytes: line endings stay as they are.
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=env,
            input=text.encode(),
            capture_output=True,
        )
    except FileNotFoundError as error:
        if not folder.is_dir():
            raise GitFailed(f"{folder}: no such folder") from None
        raise GitFailed(f"git is needed, and can't be run: {error}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        command = next(word for word in arguments if not word.startswith("-"))
        raise GitFailed(f"{folder}: git {command} failed: {said}")
    return done.stdout.decode()
