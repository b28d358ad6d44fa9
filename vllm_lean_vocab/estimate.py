# SPDX-License-Identifier: Apache-2.0
"""What a model's draft allocates for vocabulary tables, and what of it is saved.

The draft is built twice by the vLLM that is installed, without weights: as it is, and
with the pull requests that are on (`build_draft`).
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lean_vocab.build_draft import Request
from vllm_lean_vocab.child import Child, NoAnswer
from vllm_lean_vocab.plugin import VARIABLE

MTP: Mapping[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
MIB = 2**20


class CantEstimate(Exception):
    """There is no estimate; says why in one sentence, and where to read more."""


class Table(NamedTuple):
    """A vocabulary table of the draft.

    Attributes:
        name: Path of the module in the draft.
        shape: Rows and columns, over all ranks.
        dtype: Of its elements, as torch names it.
        mib_per_rank: MiB that vLLM allocates for it on each rank without this package.
        deferred: Whether it isn't allocated with the pull requests that are on.
        reason: Why it is allocated all the same; empty if it is deferred.
        tensors: Names of the draft's tensors in the checkpoint that look like it.

    """

    name: str
    shape: Sequence[int]
    dtype: str
    mib_per_rank: float
    deferred: bool
    reason: str
    tensors: Sequence[str]

    @property
    def outcome(self) -> str:
        """What becomes of it, for people."""
        if not self.deferred:
            return f"allocated: {self.reason}"
        if self.tensors:
            return f"deferred; {', '.join(self.tensors)} is not used"
        return "deferred"


class Estimate(NamedTuple):
    """What is known of a model's draft before it is served.

    Attributes:
        model: The model as it was named.
        draft: Class of the draft.
        vllm: vLLM's version.
        runner: The model runner that would load it, `legacy` or `v2`.
        tensor_parallel_size: Number of ranks that share each table.
        pipeline_parallel_size: Number of stages.
        pull_requests: Ids of those that are on.
        checkpoint: Whether there are weights that say which tables the draft brings.
        tables: The draft's vocabulary tables.

    """

    model: str
    draft: str
    vllm: str
    runner: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pull_requests: Sequence[str]
    checkpoint: bool
    tables: Sequence[Table]

    @property
    def not_allocated_mib(self) -> float:
        """MiB per rank that are not allocated while the draft loads."""
        return sum(table.mib_per_rank for table in self.tables if table.deferred)

    @property
    def stock_mib(self) -> float:
        """MiB per rank that vLLM allocates for the tables without this package."""
        return sum(table.mib_per_rank for table in self.tables)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, ready for `json.dump`."""
        return {
            **self._asdict(),
            "tables": [table._asdict() for table in self.tables],
            "not_allocated_mib": self.not_allocated_mib,
            "stock_mib": self.stock_mib,
        }

    def __str__(self) -> str:
        """Return the same for people."""
        parallel = f"tensor parallel {self.tensor_parallel_size}"
        if self.pipeline_parallel_size > 1:
            parallel += f", pipeline parallel {self.pipeline_parallel_size}"
        lines = [
            f"{self.model}: the draft is {self.draft} (vLLM {self.vllm}, {parallel})"
        ]
        rows = [("table", "shape", "dtype", "MiB per rank", "")]
        for table in self.tables:
            shape = " x ".join(f"{size:,}" for size in table.shape)
            mib = f"{table.mib_per_rank:,.1f}"
            rows.append((table.name, shape, table.dtype, mib, table.outcome))
        lines += _aligned(rows)
        lines.append(
            f"Not allocated while the draft loads: {self.not_allocated_mib:,.1f} of "
            f"{self.stock_mib:,.1f} MiB on each rank."
        )
        if not self.checkpoint:
            lines.append("No weights are here that tell which tables the draft brings.")
        elif not any(table.tensors for table in self.tables):
            lines.append("The draft's part of the checkpoint has no vocabulary tables.")
        on = ", ".join(self.pull_requests) or "none"
        lines.append(f"Pull requests that are on: {on}")
        return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, shape, dtype, mib, outcome in rows:
        cells = (
            name.ljust(widths[0]),
            shape.ljust(widths[1]),
            dtype.ljust(widths[2]),
            mib.rjust(widths[3]),
            outcome,
        )
        lines.append("  " + "  ".join(cells).rstrip())
    return lines


def estimate(
    model: str,
    speculative_config: Mapping[str, Any] = MTP,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    trust_remote_code: bool = False,
) -> Estimate:
    """Say what the draft of a model allocates, and what of it is saved.

    Nothing is downloaded, no weight is read, and no GPU is used.

    Args:
        model: Directory of the target, its `config.json`, or the id of one in the local
            Hugging Face cache.
        speculative_config: As for `vllm serve`; its `model` may be any of the same.
        tensor_parallel_size: As for `vllm serve`.
        pipeline_parallel_size: As for `vllm serve`.
        trust_remote_code: As for `vllm serve`.

    Raises:
        CantEstimate: Something is missing or broken, or vLLM can't build such a draft.

    """
    with ExitStack() as stack:
        found = dict(speculative_config)
        if draft := found.get("model"):
            found["model"] = str(_directory(str(draft), stack))
        request = Request(
            str(_directory(model, stack)),
            found,
            tensor_parallel_size,
            pipeline_parallel_size,
            trust_remote_code,
        )
        stock, patched = _build_both(request, model)
    tables = [
        Table(
            name,
            table["shape"],
            table["dtype"],
            table["bytes"] / MIB,
            patched["tables"][name]["deferred"],
            _why_allocated(name, stock, patched, pipeline_parallel_size),
            table["tensors"],
        )
        for name, table in stock["tables"].items()
    ]
    return Estimate(
        model,
        stock["draft"],
        stock["vllm"],
        stock["runner"],
        tensor_parallel_size,
        pipeline_parallel_size,
        patched["pull_requests"],
        stock["checkpoint"],
        tables,
    )


def _why_allocated(
    name: str,
    stock: Mapping[str, Any],
    patched: Mapping[str, Any],
    pipeline_parallel_size: int,
) -> str:
    """Return why a table is allocated with the pull requests that are on, if it is."""
    table = patched["tables"][name]
    if table["deferred"]:
        return ""
    if not patched["pull_requests"]:
        return "no pull request is on (vllm-lean-vocab doctor says why)"
    if pipeline_parallel_size > 1:
        return "with pipeline parallelism, drafts load as without this package"
    if table["own"]:
        return "the draft keeps its own"
    if table["shape"] != stock["target_shape"]:
        rows, columns = stock["target_shape"]
        return f"the target's are {rows:,} x {columns:,}"
    if table["own"] is False and table["tensors"]:
        return f"the checkpoint has the draft's own, {table['tensors'][0]}"
    if table["own"] is False and not stock["checkpoint"]:
        return "whether the draft has its own depends on weights that aren't here"
    return f"no pull request that is on covers it in {patched['draft']}"


def _directory(model: str, stack: ExitStack) -> Path:
    """Return a directory that holds the model's `config.json`, which is sound.

    Args:
        model: A directory, a file, or an id.
        stack: What is made for it ends with this.

    Raises:
        CantEstimate: There is none.

    """
    path = Path(model)
    if path.is_dir():
        directory = path
    elif path.is_file():
        directory = path.parent
        if path.name != "config.json":
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (directory / "config.json").write_bytes(path.read_bytes())
    else:
        directory = _cached(model)
    file = directory / "config.json"
    shown = path if path.is_file() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CantEstimate(f"{model}: no config.json there") from None
    except (OSError, ValueError) as error:
        raise CantEstimate(f"{shown}: can't be read as JSON: {error}") from None
    if not isinstance(config, dict) or not config.get("architectures"):
        raise CantEstimate(f"{shown}: names no architectures, so it is no model's")
    return directory.absolute()


def _cached(model: str) -> Path:
    """Return the snapshot of a model in the local Hugging Face cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise CantEstimate(f"{model}: no such directory or file") from None
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        raise CantEstimate(
            f"{model}: no such directory or file, and no such model in the local "
            "Hugging Face cache (nothing is downloaded; `hf download ID config.json` "
            "does that)"
        ) from None


def _build_both(
    request: Request, model: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Build the draft as on stock, and as it is served; return both descriptions.

    Raises:
        CantEstimate: One can't be built.

    """
    with tempfile.TemporaryDirectory() as name:
        builds = [
            Child(
                "vllm_lean_vocab.build_draft",
                request._asdict(),
                Path(name, kind),
                environment,
            )
            for kind, environment in (("stock", {VARIABLE: "0"}), ("patched", {}))
        ]
        try:
            stock, patched = (build.answer() for build in builds)
        except NoAnswer as error:
            raise CantEstimate(f"{model}: vLLM was to build it: {error}") from error
        finally:
            for build in builds:
                build.end()
    for found in (stock, patched):
        if "error" in found:
            raise CantEstimate(f"{model}: {found['error']}")
    return stock, patched
