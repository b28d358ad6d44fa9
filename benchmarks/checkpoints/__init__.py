# SPDX-License-Identifier: Apache-2.0
"""Tiny but real checkpoints with MTP layers or an EAGLE draft.

Their right output is known, as ``counting`` says, except where ``write_*`` returns no
``CountingModel``: those are for loading alone. Each family of models has a module of
its own.
"""

from benchmarks.checkpoints.counting import CountingModel
from benchmarks.checkpoints.deepseek import write_deepseek_v3
from benchmarks.checkpoints.eagle import write_eagle, write_eagle3
from benchmarks.checkpoints.ernie import write_ernie4_5_moe
from benchmarks.checkpoints.exaone import write_exaone_moe
from benchmarks.checkpoints.glm import write_glm4_moe, write_glm4_moe_lite
from benchmarks.checkpoints.glm5next import write_glm5next
from benchmarks.checkpoints.glm_ocr import write_glm_ocr
from benchmarks.checkpoints.qwen3_5 import write_qwen3_5
from benchmarks.checkpoints.qwen3_next import write_qwen3_next

__all__ = [
    "CountingModel",
    "write_deepseek_v3",
    "write_eagle",
    "write_eagle3",
    "write_ernie4_5_moe",
    "write_exaone_moe",
    "write_glm4_moe",
    "write_glm4_moe_lite",
    "write_glm5next",
    "write_glm_ocr",
    "write_qwen3_5",
    "write_qwen3_next",
]
