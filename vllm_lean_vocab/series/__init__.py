# SPDX-License-Identifier: Apache-2.0
"""The pull requests, in the order they apply.

To add one: write a module beside this one that defines `PULL_REQUEST`, and name it in
`SERIES`. Nothing else needs to know of it.
"""

from vllm_lean_vocab.series import (
    deferred_vocab,
    draft_vocab,
    glm_mtp,
    qwen3_5_embed_quant,
    qwen3_5_mtp,
)

SERIES = (
    deferred_vocab.PULL_REQUEST,
    qwen3_5_mtp.PULL_REQUEST,
    glm_mtp.PULL_REQUEST,
    qwen3_5_embed_quant.PULL_REQUEST,
    draft_vocab.PULL_REQUEST,
)
