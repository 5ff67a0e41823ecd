"""What a server keeps of a model, by the name of SGLang's class, as far as its configuration does
not say: the table of docs/models.md."""

from __future__ import annotations

HIDDEN = frozenset(
    {
        "GPT2LMHeadModel", "GemmaForCausalLM", "GraniteForCausalLM", "LlamaForCausalLM",
        "MistralForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM",
        "Qwen3ForCausalLM", "Starcoder2ForCausalLM",
    }
)  # fmt: skip
"""Whose K and V come back from hidden states. Of others KV is kept."""

RECOMPUTED = HIDDEN | {"DeepseekV2ForCausalLM"}
"""Whose recomputed K and V were checked against never-evicted ones."""

REFUSED = frozenset(
    {
        "DeepseekV4ForCausalLM", "Dots3NoteForCausalLM", "Glm5NextForConditionalGeneration",
        "InklingForConditionalGeneration", "InternS2MobiusForConditionalGeneration",
        "JetNemotronForCausalLM", "JetVLMForConditionalGeneration", "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM", "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
        "UnlimitedOCRForCausalLM", "ZayaForCausalLM",
    }
)  # fmt: skip
"""Of which nothing is kept: a start ends, unless by --hc-disable."""
