# SPDX-License-Identifier: Apache-2.0
"""What a vLLM process makes of this package, and what to do about what is off.

Most of it is asked of a process that loads plugins as vLLM does (`report_process`):
files alone don't tell whether the plugin was loaded, or whether another one has put a
model of its own in place of a patched one.
"""

import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_lean_vocab import cache, plan, ray_nodes, versions
from vllm_lean_vocab.child import TIMEOUT, Child, NoAnswer
from vllm_lean_vocab.edits import PullRequest
from vllm_lean_vocab.importer import module_name
from vllm_lean_vocab.plugin import VARIABLE
from vllm_lean_vocab.series import SERIES

GROUP, NAME = "vllm.general_plugins", "lean_vocab"
PACKAGE = "vllm-lean-vocab"
# Those that decide what is loaded; no others are shown.
VARIABLES = (VARIABLE, "VLLM_PLUGINS", "VLLM_CACHE_ROOT", "VLLM_USE_V2_MODEL_RUNNER")


class Use(NamedTuple):
    """A pull request, and whether a process uses it.

    Attributes:
        id: The pull request.
        state: `applies`, `upstream` or `conflict`.
        in_use: Whether a process serves it.
        note: What limits that, or why it isn't so; may be empty.

    """

    id: str
    state: plan.State
    in_use: bool
    note: str


class Diagnosis(NamedTuple):
    """What is installed, what is in use, and what to do.

    Attributes:
        versions: By name, for a bug report.
        platform: Operating system, processor, and vLLM's class of platform.
        pull_requests: All of the series.
        variables: Those of `VARIABLES` that are set.
        plugins: vLLM's general plugins that are installed, with what brought them.
        cache: Path and state of the cache folder; None if no process told.
        warnings: What the process warned of.
        ray_nodes: What `ray_nodes.report` says of each node, if it was asked for.
        remedies: What to do; empty if all is well.

    """

    versions: Mapping[str, str]
    platform: str
    pull_requests: Sequence[Use]
    variables: Mapping[str, str]
    plugins: Mapping[str, str]
    cache: Mapping[str, Any] | None
    warnings: Sequence[str]
    ray_nodes: Sequence[Mapping[str, Any]] | None
    remedies: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, ready for `json.dump`."""
        rows = [use._asdict() for use in self.pull_requests]
        return {**self._asdict(), "pull_requests": rows}

    def __str__(self) -> str:
        """Return the same for people."""
        lines = [", ".join(f"{k} {v}" for k, v in self.versions.items()), self.platform]
        width = max(len(use.id) for use in self.pull_requests)
        for use in self.pull_requests:
            used = "in use" if use.in_use else "not in use"
            row = f"  {use.id:{width}}  {use.state:8}  {used:10}  {use.note}"
            lines.append(row.rstrip())
        variables = [f"{k}={v}" for k, v in self.variables.items()]
        lines += _section("Variables", variables or ["none that matters is set"])
        plugins = [f"{name} ({brought})" for name, brought in self.plugins.items()]
        lines += _section("vLLM's general plugins", plugins or ["none"])
        if self.cache is not None:
            lines += _section("Cache", [_cache_line(self.cache)])
        if self.warnings:
            lines += _section("A vLLM process warns", self.warnings)
        if self.ray_nodes is not None:
            nodes = [f"{_place(node)}: {_node(node)}" for node in self.ray_nodes]
            lines += _section("Ray's nodes", nodes or ["unknown"])
        lines += _section("What to do", self.remedies or ["Nothing to do."])
        return "\n".join(lines)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in lines)]


def _cache_line(found: Mapping[str, Any]) -> str:
    if found["problem"]:
        return str(found["problem"])
    if not found["exists"]:
        return f"{found['path']}: will be made"
    return (
        f"{found['path']}: owner and mode are right, "
        f"writable, {found['entries']} entries, {found['mib']:.1f} MiB"
    )


def _place(node: Mapping[str, Any]) -> str:
    return f"{node['address']} (node {node['id'][:8]})"


def _node(node: Mapping[str, Any]) -> str:
    if node["error"]:
        return str(node["error"])
    if node["version"] is None:
        return f"{PACKAGE} is not installed"
    return f"{PACKAGE} {node['version']}"


def diagnose(root: Path, ray: str | None = None) -> Diagnosis:
    """Examine this environment.

    Args:
        root: Folder that holds the folder `vllm`.
        ray: Address of a Ray cluster whose nodes are asked too.

    """
    made = plan.make_plan(plan.read_sources(root, SERIES), SERIES)
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    entries = importlib.metadata.entry_points(group=GROUP)
    plugins = {e.name: _brought_by(e) for e in entries}
    found = _ask()
    cluster = {} if ray is None else _ask_ray(ray)
    folder = state = None
    if "cache_root" in found:
        folder = Path(found["cache_root"]) / NAME
        state = cache.inspect(folder)
    uses = [
        _use(pull_request, status, found, variables.get(VARIABLE, ""))
        for pull_request, status in zip(SERIES, made.statuses, strict=True)
    ]
    warnings = [*found.get("warnings", []), *found.get("failed_plugins", [])]
    remedies = [
        *_about_process(found),
        *_about_plugin(variables, plugins),
        *_about_cache(state),
        *_about_pull_requests(uses, found.get("replaced", {})),
        *_about_ray(cluster),
    ]
    if warnings and not remedies:
        remedies.append("Read the warnings above: each names what helps.")
    return Diagnosis(
        _versions(root, found),
        f"{platform.system()} {platform.release()} {platform.machine()}, vLLM's "
        f"{found.get('platform', 'platform is unknown')}",
        uses,
        {name: _shown(value) for name, value in variables.items()},
        plugins,
        {"path": _shown(str(folder)), **_shown_state(state)} if state else None,
        [_shown(warning) for warning in warnings],
        None if ray is None else cluster.get("nodes", []),
        [_shown(remedy) for remedy in remedies],
    )


def _ask() -> dict[str, Any]:
    """Return what a vLLM process reports, or an `error`."""
    return _answer("vllm_lean_vocab.report_process", None, TIMEOUT)


def _ask_ray(address: str) -> dict[str, Any]:
    """Return what the nodes of a Ray cluster report, or an `error`."""
    return _answer("vllm_lean_vocab.ray_nodes", address, 2 * ray_nodes.TIMEOUT)


def _answer(module: str, question: Any, timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        child = Child(module, question, Path(name, "process"))
        try:
            return child.answer(timeout)
        except NoAnswer as error:
            return {"error": str(error)}
        finally:
            child.end()


def _brought_by(entry: importlib.metadata.EntryPoint) -> str:
    if entry.dist is None:
        return entry.value
    return f"{entry.dist.name} {entry.dist.version}"


def _versions(root: Path, found: Mapping[str, Any]) -> dict[str, str]:
    distribution = versions.of_vllm(root)
    vllm = found.get("vllm", "unknown")
    if distribution is not None:
        vllm = f"{distribution.version} (from {distribution.name})"
    return {
        PACKAGE: versions.of(PACKAGE) or "not installed",
        "vLLM": vllm,
        "torch": found.get("torch") or versions.of("torch") or "not installed",
        "Python": platform.python_version(),
        "LibCST": versions.of("libcst") or "not installed",
    }


def _use(
    pull_request: PullRequest,
    status: plan.Status,
    found: Mapping[str, Any],
    asked: str,
) -> Use:
    """Say whether a process uses a pull request."""
    in_use = status.id in found.get("in_use", ())
    note = status.reason or ("vLLM has it" if status.state == "upstream" else "")
    if in_use:
        modules = set(map(module_name, pull_request.edited_paths))
        elsewhere = {
            architecture: model["by"]
            for architecture, model in found["replaced"].items()
            if model["of"] in modules and not model["derives"]
        }
        note = "; ".join(f"not for {a}: it is {by}" for a, by in elsewhere.items())
    elif not note and found.get("in_use"):
        ids = {word.strip() for word in asked.split(",")}
        note = "" if pull_request.id in ids else "not asked for"
    return Use(status.id, status.state, in_use, note)


def _about_process(found: Mapping[str, Any]) -> list[str]:
    if "error" not in found:
        return []
    return [f"vLLM does not start here, repair it first: {found['error']}"]


def _about_plugin(
    variables: Mapping[str, str], plugins: Mapping[str, str]
) -> list[str]:
    """Say what keeps the plugin from being loaded, or from doing all it can."""
    remedies = []
    if NAME not in plugins:
        remedies.append(
            f"vLLM doesn't find the plugin: install {PACKAGE} into the environment of "
            "this Python, with pip."
        )
    allowed = variables.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        value = ",".join([*filter(None, allowed.split(",")), NAME])
        remedies.append(f"VLLM_PLUGINS lacks {NAME}: set VLLM_PLUGINS={value}")
    asked = variables.get(VARIABLE, "").strip()
    known = [pull_request.id for pull_request in SERIES]
    words = [word.strip() for word in asked.split(",") if word.strip()]
    if asked == "0":
        remedies.append(f"{VARIABLE}=0 turns it off: unset it to turn it on.")
    elif unknown := [word for word in words if word not in (*known, "1")]:
        remedies.append(
            f"{VARIABLE} has unknown ids, {', '.join(unknown)}: name some of "
            f"{', '.join(known)}"
        )
    return remedies


def _about_cache(state: cache.State | None) -> list[str]:
    if state is None or not state.problem:
        return []
    remedy = (
        f"The cache folder can't be used ({state.problem}): give it to uid "
        f"{os.geteuid()} (chown, chmod), or set VLLM_CACHE_ROOT to one of its own."
    )
    return [remedy]


def _about_pull_requests(
    uses: Sequence[Use], replaced: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Say what can be done where a pull request doesn't fit, or isn't what is used."""
    remedies = []
    if conflicts := [use.id for use in uses if use.state == "conflict"]:
        remedies.append(
            f"This vLLM's code is different for {', '.join(conflicts)}: use a vLLM "
            f"that README.md names, or a newer {PACKAGE}."
        )
    remedies += [
        f"{architecture} comes from another plugin, {model['by']}, and not from the "
        f"patched {model['of']}: leave that plugin out (VLLM_PLUGINS) to use this one."
        for architecture, model in replaced.items()
        if not model["derives"] and any(use.in_use for use in uses)
    ]
    return remedies


def _about_ray(cluster: Mapping[str, Any]) -> list[str]:
    """Say which nodes need the package, or why they can't be asked."""
    if "error" in cluster:
        return [f"Ray's nodes can't be asked: {cluster['error']}"]
    here = versions.of(PACKAGE)
    remedies = []
    for node in cluster.get("nodes", ()):
        if node["error"]:
            remedies.append(f"{_place(node)} can't be asked: {node['error']}")
        elif node["version"] is None:
            remedies.append(
                f"vLLM's workers on {_place(node)} are stock: install {PACKAGE} there, "
                "for the Python that runs Ray."
            )
        elif node["version"] != here:
            remedies.append(
                f"{_place(node)} has {PACKAGE} {node['version']}, and this is {here}: "
                "install the same on every node."
            )
    return remedies


def _shown_state(state: cache.State) -> dict[str, Any]:
    return {**state._asdict(), "problem": _shown(state.problem)}


def _shown(text: str) -> str:
    """Return a text without the name of the user's home."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if home.count(os.sep) > 1 else text
