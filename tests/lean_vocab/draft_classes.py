# SPDX-License-Identifier: Apache-2.0
"""What becomes of each draft class's vocabulary tables, with one pipeline stage.

`DRAFT_CLASSES` says it for vLLM 0.32, `FROM_0_33` where 0.33 adds or changes a class.
Only what a draft may be given is meant: `model.embed_tokens`, and its LM head or one
per MTP layer. Tables besides, such as a Markov head's, are always the draft's own.
"""

from typing import NamedTuple

# Left unallocated; the target's is attached.
DEFERRED = "deferred"
# The same, unless the names in the checkpoint tell that the draft may have its own.
UNLESS_NAMED = "deferred unless named in the checkpoint"
# vLLM builds none.
NONE = "allocates none already"
# Allocated and used.
OWN = "keeps its own"
# Allocated as on stock, where vLLM attaches the target's.
NOT_COVERED = "not covered"


class Tables(NamedTuple):
    """A draft class's tables.

    Attributes:
        embedding: What becomes of its embedding.
        lm_head: What becomes of its LM head, or of its MTP layers'.
        why: The reason, where a table is kept or not covered.

    """

    embedding: str
    lm_head: str
    why: str = ""


ALWAYS = Tables(DEFERRED, DEFERRED)
# Loading sets the flags `has_own_embed_tokens` and `has_own_lm_head`.
MAY_BRING = Tables(UNLESS_NAMED, UNLESS_NAMED)
NO_TABLES = Tables(NONE, NONE)
IN_TARGETS_CHECKPOINT = (
    "it has a flag that loading might set, and its checkpoint is the target's, whose "
    "tables look like its own"
)

DRAFT_CLASSES: dict[str, Tables] = {
    # MTP: the head is the draft's
    "ErnieMTPModel": ALWAYS,
    "Exaone4_5_MTP": ALWAYS,
    "ExaoneMoeMTP": ALWAYS,
    "InternS2MobiusMTP": ALWAYS,
    "LongCatFlashMTPModel": ALWAYS,
    "MiMoMTPModel": ALWAYS,
    "MiMoV2MTPModel": ALWAYS,
    "MiMoV2OmniMTPModel": ALWAYS,
    "MiniMaxM3MTP": ALWAYS,
    "Qwen3NextMTP": ALWAYS,
    "Qwen3_5MTP": ALWAYS,
    "Qwen3_5MoeMTP": ALWAYS,
    "Qwen4ExpMTP": ALWAYS,
    "InklingMTPModel": NO_TABLES,
    "NemotronHMTPModel": Tables(
        DEFERRED, NOT_COVERED, "it compares its head with the target's"
    ),
    "Gemma4MTPModel": Tables(
        NOT_COVERED, OWN, "the head is smaller, and may be the embedding's storage"
    ),
    # MTP: each layer has a head
    "BailingMoeV25MTPModel": ALWAYS,
    "BailingMoeV3MTPModel": ALWAYS,
    "DeepSeekMTPModel": ALWAYS,
    "DeepSeekV4MTPModel": ALWAYS,
    "DeepseekV32MTPModel": ALWAYS,
    "Glm4MoeLiteMTPModel": ALWAYS,
    "Glm4MoeMTPModel": ALWAYS,
    "GlmOcrMTPModel": ALWAYS,
    "HYV3MTPModel": ALWAYS,
    "HYV4MTPModel": ALWAYS,
    "KimiK3MTPModel": ALWAYS,
    "OpenPanguMTPModel": ALWAYS,
    "Glm5NextMTPModel": Tables(DEFERRED, NONE),
    "Dots3NoteMTPModel": Tables(
        OWN, NOT_COVERED, "it says so; " + IN_TARGETS_CHECKPOINT
    ),
    "Step3p5MTP": Tables(DEFERRED, OWN, "each layer's head has weights of its own"),
    # EAGLE
    "EagleCohereForCausalLM": Tables(UNLESS_NAMED, NONE),
    "EagleLlamaForCausalLM": Tables(UNLESS_NAMED, NONE),
    "EagleMistralForCausalLM": Tables(UNLESS_NAMED, NONE),
    "EagleDeepSeekMTPModel": MAY_BRING,
    "EagleLlama4ForCausalLM": MAY_BRING,
    "EagleMiniCPMForCausalLM": MAY_BRING,
    "EagleMistralLarge3ForCausalLM": MAY_BRING,
    # EAGLE3; a head for a smaller vocabulary is the draft's own
    "Eagle3DeepseekV2ForCausalLM": MAY_BRING,
    "Eagle3DeepseekV3ForCausalLM": MAY_BRING,
    "Eagle3LlamaForCausalLM": MAY_BRING,
    "Eagle3MiniMaxM2ForCausalLM": MAY_BRING,
    "Eagle3Qwen2_5vlForCausalLM": MAY_BRING,
    "Eagle3Qwen3ForCausalLM": MAY_BRING,
    "Eagle3Qwen3vlForCausalLM": MAY_BRING,
    "LlamaForCausalLMEagle3": MAY_BRING,
    "PEagleDraftModel": MAY_BRING,
    "PeagleLlamaForCausalLM": MAY_BRING,
    "PeagleQwen3ForCausalLM": MAY_BRING,
    # DFlash
    "DFlash2DraftModel": MAY_BRING,
    "DFlashDraftModel": MAY_BRING,
    "DFlashLagunaForCausalLM": MAY_BRING,
    "DFlashMuseGlimmerAssistantModel": MAY_BRING,
    "LiLiCorrDraftModel": MAY_BRING,
    "MuseGlimmerAssistantModel": MAY_BRING,
    # DSpark
    "Gemma4DSparkModel": MAY_BRING,
    "Qwen3DSparkModel": MAY_BRING,
    "Qwen3OmniDSparkModel": MAY_BRING,
    "K3DSparkModel": NO_TABLES,
    "DSparkDraftModel": Tables(NOT_COVERED, NOT_COVERED, IN_TARGETS_CHECKPOINT),
    "DSparkV41DraftModel": Tables(NOT_COVERED, NOT_COVERED, IN_TARGETS_CHECKPOINT),
    # Others
    "ExtractHiddenStatesModel": NO_TABLES,
    "MedusaModel": Tables(NONE, OWN, "a head per position, trained for it"),
}

# From reading: the tests run on 0.32.
FROM_0_33: dict[str, Tables] = {
    "DFlash2BeamDraftModel": MAY_BRING,
    "DFlashQwen3XPressModel": MAY_BRING,
    "MuseSparkDSparkModel": Tables(UNLESS_NAMED, OWN, "the class says so"),
    "NemotronHMTPModel": NO_TABLES,
    "ParseAuxMTPModel": Tables(NOT_COVERED, NOT_COVERED, IN_TARGETS_CHECKPOINT),
    "Qwen3XPressModel": MAY_BRING,
    "Step5MTP": Tables(DEFERRED, OWN, "each layer's head has weights of its own"),
    "TransformersForMTP": ALWAYS,
    "TransformersMoEForMTP": ALWAYS,
}

# Classes that no configuration is there for, and why not.
NOT_BUILT: dict[str, str] = {
    "ExtractHiddenStatesModel": "has no weights at all",
}
