# SPDX-License-Identifier: Apache-2.0
"""Tiny but real checkpoints with MTP layers whose right output is known.

``counting`` says how they work; each family of models has a module of its own.
"""

from benchmarks.checkpoints.counting import CountingModel
from benchmarks.checkpoints.glm import write_glm4_moe, write_glm4_moe_lite
from benchmarks.checkpoints.qwen3_5 import write_qwen3_5

__all__ = [
    "CountingModel",
    "write_glm4_moe",
    "write_glm4_moe_lite",
    "write_qwen3_5",
]
