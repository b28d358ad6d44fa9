# SPDX-License-Identifier: Apache-2.0
"""The engine's side of ``benchmarks.engine``: serves prompts, writes a JSON file.

It is run as a file, so it imports nothing of this package.
"""

import json
import sys
from pathlib import Path
from typing import Any


def serve(options: dict[str, Any]) -> dict[str, Any]:
    """Build an engine and send it prompts one at a time, at temperature zero.

    Args:
        options: ``model`` (a path), ``prompts`` (lists of token ids),
            ``max_tokens``, ``engine_args`` (for ``vllm.LLM``) and ``lora`` (a path or
            None).

    Returns:
        ``token_ids`` and ``texts`` per prompt, the counters ``drafts``,
        ``draft_tokens`` and ``accepted_tokens``, ``vllm`` (its version),
        ``settled``: each worker's process id and what its memory settled at, in
        bytes, before the first prompt, ``device``: what each worker measured of its
        GPU, and ``runner``: the kind of model runner.
    """
    import vllm

    llm = vllm.LLM(options["model"], **options["engine_args"])
    settled = llm.collective_rpc("settled_memory")
    device = llm.collective_rpc("draft_device_memory")
    runner, *_ = llm.collective_rpc("runner_name")
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=options["max_tokens"], ignore_eos=True
    )
    adapter = None
    if options["lora"]:
        from vllm.lora.request import LoRARequest

        adapter = LoRARequest("adapter", 1, options["lora"])
    outputs = []
    for prompt in options["prompts"]:
        # Batched, the number of drafts depends on when requests arrive.
        request = {"prompt_token_ids": prompt}
        outputs += llm.generate(
            [request], sampling, use_tqdm=False, lora_request=adapter
        )
    counters = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if hasattr(metric, "value")
    }
    prefix = "vllm:spec_decode_num_"
    return {
        "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
        "drafts": int(counters.get(f"{prefix}drafts", 0)),
        "draft_tokens": int(counters.get(f"{prefix}draft_tokens", 0)),
        "accepted_tokens": int(counters.get(f"{prefix}accepted_tokens", 0)),
        "vllm": vllm.__version__,
        "settled": settled,
        "device": [figures for figures in device if figures is not None],
        "runner": runner,
    }


def main() -> None:
    """Read options from the file named first, write results to that named second."""
    options = json.loads(Path(sys.argv[1]).read_text())
    result = serve(options)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
