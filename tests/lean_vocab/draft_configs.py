# SPDX-License-Identifier: Apache-2.0
"""The smallest configurations and checkpoints that vLLM loads each draft class from.

One of the architectures that vLLM loads with the same class is enough. A checkpoint
holds vocabulary tables and hardly anything else: what it lacks stays uninitialized.
"""

from typing import Any, NamedTuple

VOCAB_SIZE, HIDDEN_SIZE = 16_384, 64
TABLE_BYTES = VOCAB_SIZE * HIDDEN_SIZE * 2

Config = dict[str, Any]
# Tensors by name: their shape, and the value of all elements.
Tensors = dict[str, tuple[tuple[int, ...], float]]

BASE: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
    "attention_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
ONE_LAYER: Config = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
TWO_LAYERS: Config = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
EXPERTS: Config = {
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_experts_per_token": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
LATENT: Config = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
INDEXER: Config = {"index_n_heads": 1, "index_head_dim": 128, "index_topk": 64}
HYPER_CONNECTIONS: Config = {
    "hc_mult": 2,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 2,
    "num_hash_layers": 0,
    "swiglu_limit": 7.0,
    "dspark_target_layer_ids": [0, 1],
    "dspark_markov_rank": 8,
}
QWEN3_NEXT: Config = {
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mtp_num_hidden_layers": 1,
}
MIMO_V2: Config = {
    "layernorm_epsilon": 1e-5,
    "swa_num_attention_heads": 1,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 64,
    "hybrid_layer_pattern": [0, 0],
    "moe_layer_freq": [0, 0],
}
DFLASH: Config = {
    "mask_token_id": 5,
    "target_layer_ids": [0, 1],
    "conv_kernel_size": 2,
    "conv_group_size": 32,
}

TABLE = (VOCAB_SIZE, HIDDEN_SIZE)
EMBEDDING, HEAD = (TABLE, 1.0), (TABLE, 2.0)
OWN_EMBEDDING, OWN_HEAD = (TABLE, 3.0), (TABLE, 4.0)
NORM = ((HIDDEN_SIZE,), 1.0)
PLAIN: Tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
# The MTP layer is stored behind the target's two.
NEXTN: Tensors = {
    "model.layers.2.embed_tokens.weight": EMBEDDING,
    "model.layers.2.shared_head.head.weight": HEAD,
    "model.layers.2.enorm.weight": NORM,
}
BOTH: Tensors = {
    "embed_tokens.weight": OWN_EMBEDDING,
    "lm_head.weight": OWN_HEAD,
}


class Draft(NamedTuple):
    """What a draft is built from.

    Attributes:
        target: The target's configuration; if the draft has none, it is also its.
        tensors: Of the checkpoint that the draft is loaded from; with none, dummy
            weights are.
        draft: The draft's own configuration.
        own: Tables of its own, which the same draft is loaded with once more.
        method: vLLM's name of the method.
        loaders: Which of `load_draft_classes.LOADERS` load it. The legacy one treats
            most classes alike: some stand for all.
        job: More of a job of `load_draft_classes`.

    """

    target: Config
    tensors: Tensors = {}
    draft: Config | None = None
    own: Tensors = {}
    method: str = "mtp"
    loaders: tuple[str, ...] = ("v2",)
    job: dict[str, Any] = {}


def of(architecture: str, model_type: str, *parts: Config, **more: Any) -> Config:
    """Return a configuration: the base's, with parts that later ones win over."""
    config = {"architectures": [architecture], "model_type": model_type, **BASE}
    for part in (*parts, more):
        config |= part
    return config


def around(architecture: str, model_type: str, text: Config, **more: Any) -> Config:
    """Return a multimodal model's configuration."""
    config = {"architectures": [architecture], "model_type": model_type}
    return config | {"text_config": text, "tie_word_embeddings": False} | more


def stand_ins(*names: str, **classes: str) -> dict[str, Any]:
    """Return the part of a job that says what can't be had on a CPU."""
    return {"stand_ins": names, "classes": classes}


def tied(draft: Draft, **more: Any) -> Draft:
    """Return the same draft, with its LM head tied to its embedding."""
    tie = {"tie_word_embeddings": True}
    if draft.draft is not None:
        return draft._replace(draft=draft.draft | tie, **more)
    return draft._replace(target=draft.target | tie, **more)


LLAMA = of("LlamaForCausalLM", "llama")
DEEPSEEK_V3 = of("DeepseekV3ForCausalLM", "deepseek_v3", EXPERTS, LATENT)
GEMMA4 = of(
    "Gemma4ForCausalLM",
    "gemma4_text",
    TWO_LAYERS,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=0,
    attention_k_eq_v=True,
    rope_parameters={"full_attention": BASE["rope_parameters"]},
)


def deepseek_v4(version: str) -> Config:
    parts = EXPERTS, LATENT, INDEXER, HYPER_CONNECTIONS
    return of(f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}", *parts)


def eagle(draft: Config, own: Tensors = BOTH, target: Config = LLAMA) -> Draft:
    projection: Tensors = {"fc.weight": ((HIDDEN_SIZE, 2 * HIDDEN_SIZE), 0.0)}
    return Draft(target, projection, draft, own, "eagle")


def eagle3(draft: Config, own: Tensors = BOTH, target: Config = LLAMA) -> Draft:
    projection: Tensors = {"fc.weight": ((HIDDEN_SIZE, 3 * HIDDEN_SIZE), 0.0)}
    return Draft(target, projection, draft, own, "eagle3")


def dflash(draft: Config, loaders: tuple[str, ...] = ("dflash",)) -> Draft:
    """Return a DFlash draft; the method of one whose loader is DSpark's is, too."""
    method = "dspark" if "dspark" in loaders else "dflash"
    return eagle(draft)._replace(method=method, loaders=loaders)


BOTH_RUNNERS = ("v2", "legacy")
EAGLE3_LLAMA = eagle3(of("LlamaForCausalLM", "llama", ONE_LAYER))._replace(
    loaders=BOTH_RUNNERS
)
QWEN3_DSPARK = dflash(
    of(
        "Qwen3DSparkModel",
        "qwen3",
        ONE_LAYER,
        markov_rank=8,
        target_layer_ids=[0, 1],
        mask_token_id=5,
    ),
    ("dspark",),
)
GEMMA4_MTP = Draft(
    GEMMA4,
    {"model.embed_tokens.weight": OWN_EMBEDDING, "lm_head.weight": OWN_HEAD},
    around(
        "Gemma4AssistantForCausalLM",
        "gemma4_assistant",
        GEMMA4,
        backbone_hidden_size=HIDDEN_SIZE,
    ),
    loaders=("gemma4", "legacy"),
)

DRAFTS: dict[str, Draft] = {
    "MiMoMTPModel": Draft(of("MiMoForCausalLM", "mimo"), PLAIN, loaders=BOTH_RUNNERS),
    "MiMoV2MTPModel": Draft(of("MiMoV2FlashForCausalLM", "mimo_v2", MIMO_V2), PLAIN),
    "MiMoV2OmniMTPModel": Draft(
        of("MiMoV2OmniForCausalLM", "mimo_v2_omni", MIMO_V2), PLAIN
    ),
    "ErnieMTPModel": Draft(
        of(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            moe_intermediate_size=64,
            moe_num_experts=2,
            moe_num_shared_experts=1,
            moe_k=1,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
            moe_layer_interval=1,
        ),
        PLAIN,
    ),
    "ExaoneMoeMTP": Draft(
        of("ExaoneMoEForCausalLM", "exaone_moe", EXPERTS, TWO_LAYERS), PLAIN
    ),
    "Exaone4_5_MTP": Draft(
        of(
            "Exaone4_5_ForConditionalGeneration",
            "exaone4_5",
            text_config=of("Exaone4ForCausalLM", "exaone4", TWO_LAYERS),
            vision_config={"model_type": "exaone4_5_vision", "depth": 1},
        ),
        PLAIN,
    ),
    "LongCatFlashMTPModel": Draft(
        of(
            "LongcatFlashForCausalLM",
            "longcat_flash",
            EXPERTS,
            LATENT,
            num_layers=1,
            ffn_hidden_size=64,
            expert_ffn_hidden_size=64,
            moe_topk=1,
            zero_expert_num=1,
            zero_expert_type="identity",
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
        ),
        {"model.mtp.embed_tokens.weight": EMBEDDING},
    ),
    "Qwen3NextMTP": Draft(
        of("Qwen3NextForCausalLM", "qwen3_next", EXPERTS, QWEN3_NEXT), PLAIN
    ),
    "Qwen3_5MTP": Draft(
        of("Qwen3_5ForCausalLM", "qwen3_5_text", QWEN3_NEXT),
        PLAIN,
        loaders=BOTH_RUNNERS,
    ),
    "Qwen3_5MoeMTP": Draft(
        of("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", EXPERTS, QWEN3_NEXT), PLAIN
    ),
    "InternS2MobiusMTP": Draft(
        around(
            "InternS2MobiusForConditionalGeneration",
            "interns2_mobius",
            of(
                "Qwen3_5MoeForCausalLM",
                "qwen3_5_moe_text",
                EXPERTS,
                QWEN3_NEXT,
                mtp_num_experts=2,
                mtp_num_experts_per_tok=1,
            ),
        ),
        PLAIN,
    ),
    "MiniMaxM3MTP": Draft(
        around(
            "MiniMaxM3SparseForConditionalGeneration",
            "minimax_m3_vl",
            of(
                "MiniMaxM3SparseForCausalLM",
                "minimax_m3_text",
                EXPERTS,
                hidden_act="swigluoai",
                head_dim=128,
                rotary_dim=64,
                dense_intermediate_size=64,
                shared_intermediate_size=64,
                moe_layer_freq=[0, 0, 0],
                sparse_attention_config={
                    "use_sparse_attention": True,
                    "sparse_index_dim": 128,
                    "sparse_num_index_heads": 1,
                    "sparse_topk_blocks": 16,
                    "sparse_block_size": 128,
                    "sparse_score_type": "max",
                    "sparse_init_block": 0,
                    "sparse_local_block": 1,
                    "sparse_disable_index_value": [0, 0, 0],
                    "sparse_attention_freq": [0, 0, 0],
                },
            ),
        ),
        PLAIN | {"model.mtp.layers.0.enorm.weight": NORM},
        job=stand_ins("vllm.models.minimax_m3.nvidia.model.MiniMaxM3MoE"),
    ),
    "Qwen4ExpMTP": Draft(
        of("Qwen4ExpForCausalLM", "qwen4_exp_text", EXPERTS, QWEN3_NEXT, hc_count=2),
        PLAIN,
    ),
    "DeepSeekMTPModel": Draft(DEEPSEEK_V3, NEXTN, loaders=BOTH_RUNNERS),
    "DeepseekV32MTPModel": Draft(
        of("DeepseekV32ForCausalLM", "deepseek_v32", EXPERTS, LATENT, INDEXER),
        NEXTN,
        job=stand_ins(
            "vllm.models.deepseek_v32.nvidia.model.DeepseekV32Attention",
            DeepseekV32MTPModel="vllm.models.deepseek_v32.nvidia.mtp:DeepseekV32MTP",
        ),
    ),
    "DeepSeekV4MTPModel": Draft(
        deepseek_v4("4"),
        {"mtp.0.emb.tok_emb.weight": EMBEDDING, "mtp.0.head.weight": HEAD},
        job=stand_ins(
            "torch.cuda.Stream",
            "vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls",
            DeepSeekV4MTPModel="vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MTP",
        ),
    ),
    "BailingMoeV3MTPModel": Draft(
        of(
            "BailingMoeV3ForCausalLM",
            "bailing_hybrid",
            EXPERTS,
            LATENT,
            layer_group_size=1,
            short_conv_kernel_size=4,
        ),
        {
            "model.word_embeddings.weight": EMBEDDING,
            "lm_head.weight": HEAD,
            "model.layers.2.enorm.weight": NORM,
        },
    ),
    "BailingMoeV25MTPModel": Draft(
        of(
            "BailingMoeV2_5ForCausalLM",
            "bailing_hybrid",
            EXPERTS,
            LATENT,
            layer_group_size=1,
        ),
        {
            "model.word_embeddings.weight": EMBEDDING,
            "lm_head.weight": HEAD,
            "model.layers.2.enorm.weight": NORM,
        },
        loaders=BOTH_RUNNERS,
    ),
    "Glm4MoeMTPModel": Draft(of("Glm4MoeForCausalLM", "glm4_moe", EXPERTS), NEXTN),
    "Glm4MoeLiteMTPModel": Draft(
        of("Glm4MoeLiteForCausalLM", "glm4_moe_lite", EXPERTS, LATENT), NEXTN
    ),
    "GlmOcrMTPModel": Draft(
        of(
            "GlmOcrForConditionalGeneration",
            "glm_ocr",
            text_config=of(
                "GlmOcrTextModel",
                "glm_ocr_text",
                rope_parameters=BASE["rope_parameters"]
                | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 1.0},
            ),
            vision_config={"depth": 1},
        ),
        NEXTN,
    ),
    "Glm5NextMTPModel": Draft(
        of(
            "Glm5NextForCausalLM",
            "glm5_next",
            EXPERTS,
            LATENT,
            INDEXER,
            qk_rope_head_dim=0,
            mhc=False,
            mla_use_nope=True,
            layer_types=["indexed_attention"] * 2,
            mlp_layer_types=["sparse"] * 2,
            index_kpool=4,
            index_kpool_always_select_tail=True,
            indexer_rope_interleave=True,
        ),
        {
            "model.layers.2.embed_tokens.weight": EMBEDDING,
            "model.layers.2.enorm.weight": NORM,
        },
        job=stand_ins("vllm.model_executor.layers.mla.MLAAttention"),
    ),
    "OpenPanguMTPModel": Draft(
        of(
            "PanguUltraMoEForCausalLM",
            "pangu_ultra_moe",
            EXPERTS,
            LATENT,
            router_enable_expert_bias=True,
        ),
        NEXTN,
    ),
    "HYV3MTPModel": Draft(
        of(
            "HYV3ForCausalLM",
            "hy_v3",
            EXPERTS,
            expert_hidden_dim=64,
            route_norm=True,
            qk_norm=True,
        ),
        PLAIN,
    ),
    "HYV4MTPModel": Draft(
        of("HYV4ForCausalLM", "hy_v4", EXPERTS, LATENT, INDEXER), PLAIN
    ),
    "KimiK3MTPModel": Draft(
        around(
            "KimiK3ForConditionalGeneration",
            "kimi_k3",
            of(
                "KimiLinearForCausalLM",
                "kimi_linear",
                EXPERTS,
                LATENT,
                mla_use_nope=True,
                linear_attn_config={
                    "kda_layers": [1],
                    "full_attn_layers": [2],
                    "num_heads": 1,
                    "head_dim": 64,
                    "short_conv_kernel_size": 4,
                },
            ),
        ),
        NEXTN,
        job=stand_ins(
            "torch.cuda.Stream",
            "vllm.models.kimi_k3.nvidia.model.MultiHeadLatentAttention",
        ),
    ),
    "Step3p5MTP": Draft(
        of(
            "Step3p5ForCausalLM",
            "step3p5",
            num_attention_groups=1,
            share_expert_dim=64,
            moe_intermediate_size=64,
            moe_num_experts=2,
            moe_top_k=1,
        ),
        loaders=BOTH_RUNNERS,
    ),
    "Gemma4MTPModel": GEMMA4_MTP,
    "Gemma4MTPModel tied": tied(GEMMA4_MTP)._replace(
        tensors={"model.embed_tokens.weight": OWN_EMBEDDING}
    ),
    "NemotronHMTPModel": Draft(
        of(
            "NemotronHForCausalLM",
            "nemotron_h",
            hybrid_override_pattern="**",
            mtp_hybrid_override_pattern="*",
        ),
        {"backbone.embeddings.weight": EMBEDDING, "lm_head.weight": HEAD},
        loaders=BOTH_RUNNERS,
    ),
    "InklingMTPModel": Draft(
        around(
            "InklingForConditionalGeneration",
            "inkling_mm_model",
            of("InklingForCausalLM", "inkling_model"),
            mtp_config={"num_nextn_predict_layers": 1, "local_layer_ids": []},
        )
    ),
    "EagleCohereForCausalLM": eagle(
        of("EagleCohereForCausalLM", "cohere2", ONE_LAYER),
        {},
        of("Cohere2ForCausalLM", "cohere2", TWO_LAYERS),
    )._replace(tensors={"model.norm.weight": NORM}),
    "EagleLlamaForCausalLM": eagle(
        of("LlamaForCausalLM", "llama", num_hidden_layers=1),
        {"embed_tokens.weight": OWN_EMBEDDING},
    )._replace(loaders=BOTH_RUNNERS),
    "EagleLlama4ForCausalLM": eagle(
        of(
            "Llama4ForCausalLM",
            "llama4_text",
            EXPERTS,
            ONE_LAYER,
            intermediate_size_mlp=64,
            interleave_moe_layer_step=2,
            yoco_global_kv_layer=None,
            yoco_local_kv_layer=None,
            draft_vocab_size=VOCAB_SIZE,
        )
    ),
    "EagleMiniCPMForCausalLM": eagle(
        of(
            "MiniCPMForCausalLM",
            "minicpm",
            ONE_LAYER,
            scale_emb=1,
            scale_depth=1.0,
            dim_model_base=64,
        ),
        {"model.embed_tokens.weight": OWN_EMBEDDING, "lm_head.weight": OWN_HEAD},
    )._replace(tensors={"model.norm.weight": NORM}),
    "EagleMistralForCausalLM": eagle(
        of("MistralForCausalLM", "mistral", num_hidden_layers=1), {}
    )._replace(tensors={"model.norm.weight": NORM}),
    "EagleMistralLarge3ForCausalLM": eagle(
        of("MistralLarge3ForCausalLM", "deepseek_v3", EXPERTS, LATENT, ONE_LAYER),
        {},
        DEEPSEEK_V3,
    )._replace(tensors={}),  # its load_weights fails on vLLM 0.32
    "EagleDeepSeekMTPModel": eagle(
        of("DeepSeekMTPModel", "deepseek_v3", EXPERTS, LATENT, ONE_LAYER),
        target=DEEPSEEK_V3,
    ),
    "Eagle3LlamaForCausalLM": EAGLE3_LLAMA,
    "Eagle3Qwen3ForCausalLM": eagle3(of("Qwen3ForCausalLM", "qwen3", ONE_LAYER)),
    "Eagle3DeepseekV2ForCausalLM": eagle3(
        of("DeepseekV2ForCausalLM", "deepseek_v2", EXPERTS, LATENT, ONE_LAYER),
        target=DEEPSEEK_V3,
    ),
    "DFlashDraftModel": dflash(
        of("DFlashDraftModel", "qwen3", ONE_LAYER, dflash_config=DFLASH),
        ("dflash", "legacy"),
    ),
    "LiLiCorrDraftModel": dflash(
        of(
            "LiLiCorrDraftModel",
            "qwen3",
            ONE_LAYER,
            dflash_config=DFLASH
            | {
                "block_size": 2,
                "lilicorr_hidden_size": 64,
                "lilicorr_candidate_topk": 4,
                "lilicorr_num_heads": 1,
                "lilicorr_num_layers": 1,
                "lilicorr_mlp_ratio": 1,
                "lilicorr_factor_dim": 8,
                "lilicorr_vector_eps": 1e-6,
                "lilicorr_logit_scale": 1.0,
            },
        )
    )._replace(tensors={}, own={}),
    "DFlash2DraftModel": dflash(
        of(
            "DFlash2DraftModel",
            "qwen3",
            ONE_LAYER,
            dflash_config=DFLASH | {"selector_rank": 8, "selector_top_k": 4},
        )
    ),
    "DFlashLagunaForCausalLM": dflash(
        of(
            "DFlashLagunaForCausalLM",
            "qwen3",
            ONE_LAYER,
            dflash_config=DFLASH,
            draft_vocab_size=VOCAB_SIZE,
            gating=True,
            mlp_layer_types=["dense"],
        )
    ),
    "DSparkDraftModel": Draft(
        deepseek_v4("4"),
        PLAIN,
        method="dspark",
        loaders=("dspark",),
        job=stand_ins(
            "torch.cuda.Stream",
            "vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls",
            DSparkDraftModel="vllm.models.deepseek_v4.nvidia.dspark:"
            "DSparkDeepseekV4ForCausalLM",
        ),
    ),
    "DSparkV41DraftModel": Draft(
        deepseek_v4("41"),
        PLAIN,
        method="dspark",
        loaders=("dspark",),
        job=stand_ins(
            "torch.cuda.Stream",
            "vllm.models.deepseek_v41.nvidia.model._select_dsv4_attn_cls",
        ),
    ),
    "Qwen3DSparkModel": QWEN3_DSPARK,
    "Gemma4DSparkModel": Draft(
        GEMMA4,
        {},
        GEMMA4
        | {
            "architectures": ["Gemma4DSparkModel"],
            "target_layer_ids": [0, 1],
            "markov_rank": 8,
        },
        method="dspark",
        loaders=("dspark",),
    ),
    "K3DSparkModel": Draft(
        LLAMA,
        {},
        of(
            "K3DSparkModel",
            "k3_dspark",
            LATENT,
            ONE_LAYER,
            target_layer_ids=[0, 1],
            num_target_layers=2,
            target_hidden_size=HIDDEN_SIZE,
            markov_rank=8,
        ),
        method="dspark",
        loaders=("dspark",),
        job=stand_ins(
            "vllm.models.kimi_k3.nvidia.dspark_mla.K3DSparkDecoderLayer",
            "vllm.models.kimi_k3.nvidia.dspark_mla.K3DSparkModel"
            "._build_fused_context_kv_metadata",
        ),
    ),
    "MedusaModel": Draft(
        LLAMA,
        {},
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "num_heads": 1,
            "num_hidden_layers": 1,
        },
        method="medusa",
        loaders=("legacy",),
    ),
    "Dots3NoteMTPModel": Draft(
        of(
            "Dots3NoteForCausalLM",
            "dots3_note",
            EXPERTS,
            LATENT,
            INDEXER,
            layer_types=["sliding_attention"] * 2,
        ),
        {
            "model.mtp.embed_tokens.weight": OWN_EMBEDDING,
            "model.layers.2.shared_head.head.weight": HEAD,
            "model.layers.2.enorm.weight": NORM,
        },
        job=stand_ins(
            "torch.cuda.Stream",
            "vllm.models.dots3_note.nvidia.model.Dots3NoteSlidingAttention",
        )
        | {
            "modules": [
                f"vllm.models.dots3_note.nvidia.{name}"
                for name in ("attention", "audio_encoder", "vision")
            ]
        },
    ),
}
DRAFTS |= {
    f"{name} tied": tied(DRAFTS[name], tensors={"model.embed_tokens.weight": EMBEDDING})
    for name in ("ErnieMTPModel", "ExaoneMoeMTP", "Qwen3_5MTP", "Qwen4ExpMTP")
}
MINICPM = DRAFTS["EagleMiniCPMForCausalLM"]
DRAFTS |= {
    "EagleMiniCPMForCausalLM tied": tied(
        MINICPM, own={"model.embed_tokens.weight": OWN_EMBEDDING}
    ),
    "Eagle3LlamaForCausalLM smaller vocabulary": eagle3(
        of("LlamaForCausalLM", "llama", ONE_LAYER, draft_vocab_size=VOCAB_SIZE // 2),
        {
            "lm_head.weight": ((VOCAB_SIZE // 2, HIDDEN_SIZE), 4.0),
            "d2t": ((VOCAB_SIZE // 2,), 0.0),
        },
    ),
    # The legacy runner leaves it its embedding.
    "Eagle3LlamaForCausalLM wider": EAGLE3_LLAMA._replace(
        draft=of(
            "LlamaForCausalLM",
            "llama",
            ONE_LAYER,
            hidden_size=2 * HIDDEN_SIZE,
            target_hidden_size=HIDDEN_SIZE,
        ),
        tensors={"fc.weight": ((2 * HIDDEN_SIZE, 3 * HIDDEN_SIZE), 0.0)},
        own={},
    ),
    # Each table alone, and copies of the target's.
    "Eagle3LlamaForCausalLM embedding": EAGLE3_LLAMA._replace(
        own={"embed_tokens.weight": OWN_EMBEDDING}
    ),
    "Eagle3LlamaForCausalLM head": EAGLE3_LLAMA._replace(
        own={"lm_head.weight": OWN_HEAD}
    ),
    "Eagle3LlamaForCausalLM copies": EAGLE3_LLAMA._replace(
        own={"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    ),
}
