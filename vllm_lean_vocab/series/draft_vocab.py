# SPDX-License-Identifier: Apache-2.0
"""Every draft whose tables are replaced with the target's has none of its own at PP=1.

Layers and loaders may be imported before plugins are: what is edited there is the body
of functions, imports included.
"""

from vllm_lean_vocab.edits import Enclose, In, Insert, PullRequest, Replace
from vllm_lean_vocab.series.deferred_vocab import IMPORT

MODULE = "vllm.model_executor.models.draft_vocab"
V2 = "vllm/v1/worker/gpu/spec_decode"


def load_function(name: str, draft: str) -> In:
    """The V2 loader of a kind of draft that has one of its own."""
    function = f"load_{name}_model"
    return In(
        f"{V2}/{name}/utils.py",
        Insert("", IMPORT),
        Insert("", f"from {MODULE} import announce_target"),
        Enclose(
            function,
            f"{draft} = get_model(...)",
            "announce_target(target_model, draft_vllm_config)",
        ),
        Insert(
            function,
            f"deferred = deferred_modules({draft})",
            before=f"draft_inner = {draft}.model",
        ),
        Insert(
            function, f"check_attached({draft}, deferred)", before=f"return {draft}"
        ),
    )


PULL_REQUEST = PullRequest(
    id="draft_vocab",
    title="[Spec Decode] Leave vocabulary tables that a draft shares unallocated",
    builds_on=["deferred_vocab"],
    new_files=["vllm/model_executor/models/draft_vocab.py"],
    tests=["tests/v1/spec_decode/test_draft_vocab.py"],
    edits=[
        In(
            "vllm/v1/spec_decode/llm_base_proposer.py",
            Insert("", f"from {MODULE} import announce_from_proposer"),
            Enclose(
                "SpecDecodeBaseProposer.load_model",
                "self.model = self._get_model()",
                "announce_from_proposer(self, target_model)",
            ),
        ),
        In(
            f"{V2}/eagle/utils.py",
            Insert("", f"from {MODULE} import announce_target"),
            Enclose(
                "load_eagle_model",
                "eagle_model = get_model(...)",
                "announce_target(target_model, vllm_config)",
            ),
        ),
        load_function("dflash", "dflash_model"),
        load_function("dspark", "draft_model"),
        In(
            "vllm/model_executor/layers/vocab_parallel_embedding.py",
            Insert(
                "VocabParallelEmbedding.__init__",
                f"from {MODULE} import weights_factory",
                before="self.quant_method.create_weights(...)",
            ),
            Replace(
                "VocabParallelEmbedding.__init__",
                "self.quant_method.create_weights(...)",
                "self.quant_method.create_weights",
                "weights_factory(self)",
            ),
        ),
        In(
            "vllm/model_executor/model_loader/base_loader.py",
            Insert(
                "BaseModelLoader.create_model",
                f"from {MODULE} import settle_vocab\nsettle_vocab(model, model_config)",
                after="model = initialize_model(...)",
            ),
        ),
    ],
)
