"""The model families that blending is tested with: small random-weight models, written as Hugging Face folders.

docs/models.md is made of this table, see `tests/engine/models_page.py`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.processors import save_processor
from tests.engine.quantise import to_int8

VOCABULARY = 640
LENGTH = 2048
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>",
           "<global-img>", "<end_of_utterance>")

_FACTOR = {"factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | _FACTOR
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 16 for i in range(16)],
         "long_factor": [1.0 + i / 2 for i in range(16)], "original_max_position_embeddings": 256}
_VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 56, "patch_size": 14}
QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
HALF = QUARTER | {"partial_rotary_factor": 0.5}
_TWO_BASES = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
HEADS = {"head_dim": 32}
TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Family:
    """One row of docs/models.md, and what is tested for it.

    Attributes:
        name: the family.
        examples: models that people run.
        special: what is special about it, for blending.
        architecture: the class of transformers that the random-weight model is made with.
        settings: of its configuration, besides `COMMON`.
        model_type: of its configuration, where transformers has no such class; vLLM then draws the weights, as
            `random_weights` says.
        engine: engine arguments, besides those all tests use.
        refusal: what `ModelError` says at start-up, a regular expression; empty where the family works.
        reason: the same for readers of docs/models.md.
        by_vllm: it is vLLM that refuses, for this machine.
        dtype: what vLLM runs it in.
        noise: how far placed keys may be from fresh ones, relative to the largest key.
    """

    name: str
    examples: str
    special: str
    architecture: str
    settings: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    refusal: str = ""
    reason: str = ""
    by_vllm: bool = False
    dtype: str = "float32"
    noise: float = 1e-3

    @property
    def slug(self) -> str:
        """Its name as a test id and a folder."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())


COMMON = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
          "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}

FAMILIES = [
    Family("Llama", "Llama 2, SmolLM2, Yi, TinyLlama", "the plain case", "LlamaForCausalLM"),
    Family("Llama, llama3 rope", "Llama 3.1, 3.2 and 3.3", "rope scaled by wavelength", "LlamaForCausalLM",
           {"rope_parameters": LLAMA3}),
    Family("Llama, dynamic NTK rope", "Llama 2 fine-tunes for longer contexts", "vLLM fixes one table for all lengths",
           "LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    Family("Mistral", "Mistral 7B v0.2 and v0.3, Mistral Nemo", "head size of its own", "MistralForCausalLM",
           HEADS | {"sliding_window": None}),
    Family("Mistral, sliding window", "Mistral 7B v0.1", "every layer sees a window only", "MistralForCausalLM",
           HEADS | {"sliding_window": 64}),
    Family("Qwen2, YaRN", "Qwen2.5 beyond 32k tokens", "YaRN: rope by parts, with a magnitude", "Qwen2ForCausalLM",
           {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0} | _FACTOR | {"factor": 8.0}}),
    Family("Qwen3", "Qwen3 0.6B to 32B", "normalised queries and keys", "Qwen3ForCausalLM", HEADS),
    Family("Qwen3-MoE", "Qwen3-30B-A3B", "mixture of experts", "Qwen3MoeForCausalLM",
           HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [],
                     "decoder_sparse_step": 1}),
    Family("Phi-3", "Phi-3 mini 4k, Phi-4", "fused query, key and value", "Phi3ForCausalLM"),
    Family("Phi-3, long rope", "Phi-3 mini 128k, Phi-3.5, Phi-4 mini",
           "two rope tables; vLLM takes one of them, by `max_model_len`", "Phi3ForCausalLM",
           {"rope_parameters": _LONG, "original_max_position_embeddings": 256}),
    Family("Phi-3, long rope, short table", "the same with `max_model_len` up to 4096", "the other table",
           "Phi3ForCausalLM", {"rope_parameters": _LONG | {"original_max_position_embeddings": LENGTH},
                               "original_max_position_embeddings": LENGTH, "max_position_embeddings": 4 * LENGTH}),
    Family("Gemma 2", "Gemma 2 2B, 9B, 27B", "soft cap on the logits; every other layer sees a window",
           "Gemma2ForCausalLM", TIED | HEADS | WINDOW | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0,
                                                    "final_logit_softcapping": 1000.0}),
    Family("Gemma 3", "Gemma 3 270M and 1B", "two rope bases, windows, normalised queries and keys",
           "Gemma3ForCausalLM",
           TIED | HEADS | WINDOW | {"query_pre_attn_scalar": 32, "rope_parameters": _TWO_BASES}),
    Family("Granite", "Granite 3.x", "multipliers on embeddings, residuals, attention and logits",
           "GraniteForCausalLM", {"attention_multiplier": 0.1, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                                  "logits_scaling": 2.0}),
    Family("OLMo 2", "OLMo 2 1B to 32B",
           "norms behind the layers and over all heads; vLLM runs it through transformers", "Olmo2ForCausalLM"),
    Family("GLM-4", "GLM-4-0414 9B and 32B", "half of each head is rotated, neighbours paired", "Glm4ForCausalLM",
           HEADS | {"rope_parameters": HALF}),
    Family("Command R", "Command R, Aya Expanse", "neighbours paired; attention beside the MLP", "CohereForCausalLM",
           TIED),
    Family("Command R7B", "Command R7B, Command A", "layers without positions between layers with a window",
           "Cohere2ForCausalLM", TIED | HEADS | WINDOW, "cohere2"),
    Family("Command R7B, through transformers", "the same with `model_impl=\"transformers\"`",
           "one angle for each two neighbours", "Cohere2ForCausalLM", TIED | HEADS | WINDOW, "cohere2",
           engine={"model_impl": "transformers"}),
    Family("OLMo 3", "OLMo 3 7B and 32B", "a rope base for each type of layer; vLLM runs it through transformers",
           "Olmo3ForCausalLM", WINDOW),
    Family("nanochat", "nanochat", "turned the other way round, then normalised; vLLM runs it through transformers",
           "NanoChatForCausalLM"),
    Family("MiniCPM 3", "MiniCPM 3 4B", "the rotary dimensions are the last of each head", "MiniCPM3ForCausalLM",
           {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
            "num_key_value_heads": 4}),
    Family("InternLM 2", "InternLM 2 and 2.5", "fused query, key and value", "InternLM2ForCausalLM", {"bias": False},
           "llama"),
    Family("SmolLM3", "SmolLM3 3B", "layers without positions; vLLM runs it through transformers",
           "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    Family("GPT-NeoX", "Pythia", "a quarter of each head is rotated; no grouped heads", "GPTNeoXForCausalLM",
           {"num_key_value_heads": 4, "rope_parameters": QUARTER}),
    Family("int8 weights", "`w8a8` checkpoints of compressed-tensors", "quantised weights and activations",
           "LlamaForCausalLM", HEADS | {"quantize": "int8", "hidden_size": 156}, noise=0.05),
    Family("fp8 weights", "fp8 checkpoints, `quantization=\"fp8\"`", "quantised weights", "LlamaForCausalLM",
           engine={"quantization": "fp8"}, dtype="bfloat16", noise=0.05,
           refusal="static_scaled_fp8_quant", reason="no fp8 kernel (`static_scaled_fp8_quant`)", by_vllm=True),
    Family("fp8 KV cache", "`kv_cache_dtype=\"fp8\"`", "keys and values are rounded", "LlamaForCausalLM",
           engine={"kv_cache_dtype": "fp8"}, refusal="quantised KV cache .*kv_cache_dtype='auto'",
           reason="a quantised KV cache; set `kv_cache_dtype=\"auto\"`"),
    Family("GPT-2", "GPT-2", "learned positions", "GPT2LMHeadModel", refusal="depend on their position",
           reason="its keys depend on their position in a way that cannot be undone"),
    Family("HunYuan", "Hunyuan 0.5B to 7B", "queries and keys normalised after the rotation",
           "HunYuanDenseV1ForCausalLM", HEADS,
           refusal=r"keys of layer .* depend on their position .* turn by the rotary embedding",
           reason="keys are scaled after the rotation, component by component"),
    Family("Llama 4, one kind of cache", "Llama 4 with `disable_hybrid_kv_cache_manager=True`",
           "attention within chunks of a prompt", "Llama4ForCausalLM",
           HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_chunk_size": 64,
                    "intermediate_size_mlp": 192, "no_rope_layers": [1, 0], "interleave_moe_layer_step": 1,
                    "layer_types": ["chunked_attention", "full_attention"]},
           engine={"disable_hybrid_kv_cache_manager": True},
           refusal="attention within chunks of a prompt", reason="attention within chunks of a prompt"),
    Family("BLOOM", "BLOOM", "ALiBi", "BloomForCausalLM", TIED, refusal="does not support ALiBi",
           reason="ALiBi"),
    Family("gpt-oss", "gpt-oss 20B and 120B", "attention sinks", "GptOssForCausalLM",
           HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}, refusal="attention sinks",
           reason="attention sinks"),
    Family("Gemma 3n", "Gemma 3n E2B, E4B", "layers that share KV", "Gemma3nForCausalLM",
           TIED | HEADS | WINDOW | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "laurel_rank": 16,
                               "vocab_size_per_layer_input": VOCABULARY, "activation_sparsity_pattern": [0.0] * 4},
           refusal="shared KV layers", reason="layers without KV of their own"),
    Family("Gemma 4", "Gemma 4", "layers with heads of different sizes", "Gemma4ForCausalLM",
           HEADS | WINDOW | {"num_kv_shared_layers": 0, "global_head_dim": 64, "hidden_size_per_layer_input": 0},
           refusal="different numbers or sizes of KV heads", reason="layers with different KV shapes"),
    Family("DeepSeek-V2", "DeepSeek-V2, V3, R1, Kimi K2", "latent attention (MLA)", "DeepseekV2ForCausalLM",
           {"kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 64},
           refusal=r"latent attention \(MLA\)", reason="latent attention"),
    Family("Mamba", "Mamba, Falcon Mamba", "state space layers", "MambaForCausalLM",
           {"state_size": 8}, refusal="state space layers",
           reason="state space layers"),
    Family("Jamba", "Jamba, Granite 4 H, Nemotron-H, Qwen3-Next", "state space layers between attention layers",
           "JambaForCausalLM", {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
                                "use_mamba_kernels": False}, refusal="state space layers",
           reason="state space layers"),
    Family("Idefics 3, text requests", "SmolVLM, Idefics 3", "an image encoder beside a language model",
           "Idefics3ForConditionalGeneration",
           {"text_config": COMMON | {"model_type": "llama"}, "vision_config": _VISION, "scale_factor": 2,
            "image_token_id": SPECIAL.index("<image>"), "pad_token_id": 1}),
    Family("Idefics 3, text alone", "multimodal models with `limit_mm_per_prompt={\"image\": 0}`",
           "no image processor is needed", "Idefics3ForConditionalGeneration",
           {"text_config": COMMON | {"model_type": "llama"}, "vision_config": _VISION, "scale_factor": 2,
            "image_token_id": SPECIAL.index("<image>"), "pad_token_id": 1},
           engine={"limit_mm_per_prompt": {"image": 0}}),
    Family("Whisper", "Whisper", "encoder and decoder", "WhisperForConditionalGeneration",
           {"d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
            "decoder_start_token_id": 0}, engine={"max_model_len": 400}, refusal="encoder-decoder models",
           reason="encoder-decoder models"),
]

WORKING = [family for family in FAMILIES if not family.refusal]
REFUSED = [family for family in FAMILIES if family.refusal]


def named(name: str) -> Family:
    """The family of that name."""
    return next(family for family in FAMILIES if family.name == name)


def build(family: Family, folder: Path) -> Path:
    """Writes a model of the family, with weights large enough that its answers vary."""
    import transformers

    settings = copy.deepcopy(family.settings)  # transformers writes into what it is given
    quantize = settings.pop("quantize", "")
    settings = settings if "text_config" in settings else COMMON | settings
    if family.model_type:
        folder.mkdir(parents=True)
        configuration = {"architectures": [family.architecture], "model_type": family.model_type}
        (folder / "config.json").write_text(json.dumps(configuration | settings))
    else:
        kind = getattr(transformers, family.architecture)
        randomised(kind(kind.config_class(**settings))).save_pretrained(folder)
    if quantize:
        to_int8(folder)
    if "limit_mm_per_prompt" in family.engine:
        tokenizer().save_pretrained(folder)
    else:
        save_processor(family.architecture, tokenizer(), folder)
    return folder


def randomised(model: Any) -> Any:
    """Draws the weights of a transformers model."""
    model = model.float()
    draw(model)
    return model


def draw(model: Any, *, fresh: bool = False) -> None:
    """Draws a model's weights; norms and other vectors keep near what they are, but for not being all alike.

    Args:
        fresh: vectors other than norms may be memory that was never written.
    """
    import torch

    random = torch.Generator().manual_seed(7)
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.is_floating_point():
            continue
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.dim() > 1:
            # Tied embeddings must not outweigh the layers, or each token answers itself.
            parameter.data.copy_(noise * (0.05 if "embed" in name else 0.2))
        else:
            parameter.data.copy_(noise * 0.1 + ((parameter.data == 1) if fresh else parameter.data))


@contextmanager
def random_weights() -> Iterator[None]:
    """Lets vLLM's load format `dummy` draw weights as `draw` does."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    original = DummyModelLoader.load_weights
    DummyModelLoader.load_weights = lambda self, model, model_config: draw(model, fresh=True)
    try:
        yield
    finally:
        DummyModelLoader.load_weights = original


@functools.cache
def tokenizer() -> Any:
    """A small byte-level tokenizer; a small vocabulary is what makes small models fast."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.engine.texts import PASSAGES, QUESTION, SYSTEM

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([*PASSAGES, SYSTEM, QUESTION], trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>",
                                   additional_special_tokens=list(SPECIAL[2:]))
