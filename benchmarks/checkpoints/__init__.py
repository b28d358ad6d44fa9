# SPDX-License-Identifier: Apache-2.0
"""Tiny but real checkpoints with MTP layers.

Their right output is known, as ``counting`` says, except where ``write_*`` returns no
``CountingModel``: those are for loading alone. Each family of models has a module of
its own.
"""

from benchmarks.checkpoints.counting import CountingModel
from benchmarks.checkpoints.glm import write_glm4_moe, write_glm4_moe_lite
from benchmarks.checkpoints.glm5next import write_glm5next
from benchmarks.checkpoints.glm_ocr import write_glm_ocr
from benchmarks.checkpoints.qwen3_5 import write_qwen3_5

__all__ = [
    "CountingModel",
    "write_glm4_moe",
    "write_glm4_moe_lite",
    "write_glm5next",
    "write_glm_ocr",
    "write_qwen3_5",
]
