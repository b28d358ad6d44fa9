# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5's vocabulary embeddings may be quantized, target's and draft's alike.

What becomes of a checkpoint's embedding depends on the method that its config has:

- none, as for every method in vLLM with a config for linear layers: as before;
- one that looks up rows, such as compressed-tensors' for int weights: quantized;
- one that can't look up rows, an error, or one that wants a packed table where the
  checkpoint has plain rows: unquantized as before, with a warning. Where the
  checkpoint's table is quantized, loading fails as before, and names the tensor;
- a tied head that would take over a quantized table without its scales: an error.
"""

from vllm_lean_vocab.edits import AddArguments, Edit, In, Insert, PullRequest, Replace

MODELS = "vllm/model_executor/models"


def may_be_quantized(model: str, quant_config: str, name: str) -> Edit:
    """The embedding of a model: it gets the config, and the name to ask it with."""
    return AddArguments(
        f"{model}.__init__",
        # Whatever it is that is called.
        "...(self.vocab_size, config.hidden_size)",
        f"quant_config=for_embedding({quant_config}), prefix={name}",
    )


def target(model: str) -> Edit:
    name = 'maybe_prefix(prefix, "embed_tokens")'
    return may_be_quantized(model, "self.quant_config", name)


def head_is_tied_with_care(model: str) -> Edit:
    """A tied head: not every one can use a quantized table."""
    return Replace(
        f"{model}.__init__",
        "self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)",
        "self.lm_head.tie_weights(self.model.embed_tokens)",
        "tie_lm_head(self.lm_head, self.model.embed_tokens)",
    )


PULL_REQUEST = PullRequest(
    id="qwen3_5_embed_quant",
    title="[Model] Qwen3.5: pass the quantization config to vocabulary embeddings",
    new_files=[f"{MODELS}/quantized_vocab.py"],
    tests=["tests/model_executor/test_qwen3_5_embed_quant.py"],
    edits=[
        In(
            f"{MODELS}/qwen3_5.py",
            Insert("", "from .quantized_vocab import for_embedding, tie_lm_head"),
            target("Qwen3_5Model"),
            head_is_tied_with_care("Qwen3_5ForCausalLMBase"),
        ),
        In(
            f"{MODELS}/interns2_mobius.py",
            Insert("", "from .quantized_vocab import for_embedding, tie_lm_head"),
            target("InternS2MobiusModel"),
            head_is_tied_with_care("InternS2MobiusForCausalLM"),
        ),
        In(
            f"{MODELS}/qwen3_5_mtp.py",
            Insert(
                "",
                "from .quantized_vocab import "
                "for_embedding, target_embedding_name, tie_lm_head",
            ),
            may_be_quantized(
                "Qwen3_5MultiTokenPredictor",
                "quant_config",
                "target_embedding_name(vllm_config)",
            ),
            head_is_tied_with_care("Qwen3_5MTP"),
        ),
    ],
)
