# SPDX-License-Identifier: Apache-2.0
"""Ships what goes to vLLM, and the figures that its texts have, as package data.

New files and tests stand at vLLM's paths in this repository, outside the package. An
editable install reads them there.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# Tests of the tooling stay here.
FILES = ("vllm/**/*.py", "tests/[!l]*/**/*.py", "benchmarks/results/*.json")


class BuildWithRepositoryFiles(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source, target in self._repository_files():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        if not self.editable_mode:
            outputs += [str(target) for _, target in self._repository_files()]
        return outputs

    def _repository_files(self) -> list[tuple[Path, Path]]:
        into = Path(self.build_lib, "vllm_lean_vocab", "repository")
        found = (path for pattern in FILES for path in ROOT.glob(pattern))
        files = [path.relative_to(ROOT) for path in found]
        return [(ROOT / path, into / path) for path in files]


setup(cmdclass={"build_py": BuildWithRepositoryFiles})
