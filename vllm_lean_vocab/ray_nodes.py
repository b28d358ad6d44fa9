# SPDX-License-Identifier: Apache-2.0
"""Asks each node of a Ray cluster for this package.

vLLM loads plugins in the environment of each worker's node: workers on a node without
this package are stock, and say nothing of it.

`python -m vllm_lean_vocab.ray_nodes ANSWER` reads the cluster's address as JSON from
standard input, and writes to the file `ANSWER` what `report` returns, or
`{"error": SENTENCE}`.
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from vllm_lean_vocab.child import respond

TIMEOUT = 60.0


def report(address: str) -> dict[str, Any]:
    """Ask all nodes that are alive, at the same time.

    Args:
        address: As `ray.init` takes it; `auto` is the cluster that this machine is of.

    Returns:
        Ready for `json.dump`: `nodes`, each with its `address`, `id` (of Ray), the
        `version` of the package there (None: not installed), and an `error`, which is
        empty if the node answered.

    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    host, _, port = address.rpartition(":")
    if host and "://" not in address:
        # Ray itself tries for minutes.
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    # Nodes are told to look for modules where this process is, e.g. in a checkout.
    os.chdir(os.sep)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    question = ray.remote(_question())
    asked = []
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            # No CPU is asked for: servers may hold all of them.
            task = question.options(
                num_cpus=0, max_retries=0, scheduling_strategy=there
            )
            asked.append((node, task.remote()))
    ray.wait([answer for _, answer in asked], num_returns=len(asked), timeout=TIMEOUT)
    nodes = []
    for node, answer in asked:
        version, error = None, ""
        try:
            version = ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            error = f"no answer within {TIMEOUT:.0f} s"
        except Exception as failure:  # a node that went away, or can't start a process
            error = _sentence(failure)
        place = {"address": node["NodeManagerAddress"], "id": node["NodeID"]}
        nodes.append({**place, "version": version, "error": error})
    return {"nodes": sorted(nodes, key=lambda node: (node["address"], node["id"]))}


def _question() -> Callable[[], str | None]:
    # A function within a function travels as a whole: the node can't import this file
    # if it lacks the package.
    def version_there() -> str | None:
        from importlib.metadata import entry_points

        for entry in entry_points(group="vllm.general_plugins", name="lean_vocab"):
            return entry.dist.version if entry.dist else None
        return None

    return version_there


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "ray":
        return "Ray is not installed for this Python"
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"


def main() -> None:
    """Answer."""
    address = json.load(sys.stdin)
    respond(lambda: report(address), _sentence)


if __name__ == "__main__":
    main()
