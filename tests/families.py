"""Two models of each family from PyPI's `transformers`, in the smallest configurations with all their parts.

Families are dense, mixture of experts, state space, encoder and decoder, vision, audio. Nothing is downloaded: weights
are drawn, and dropout is off. `third_party.py` has more models.
"""

from typing import Any

import torch
import torch.nn.functional as F
from models import Case, Inputs, seeded
from third_party import CLASSES, LAYERS, TEXT, pictures, tokens
from torch import Tensor, nn

# Without a cache: with one, checkpointing writes a warning, which breaks the graph.
WORDS = TEXT | {"use_cache": False}
NARROW = LAYERS | {"hidden_size": 32, "intermediate_size": 48}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 50,
    "dropout": 0.0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}


def _of(config: str, model: str, **settings: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def spectrogram(seed: int, size: int) -> Inputs:
    """Random features `[size, 8, 24]`, and tokens that follow from them."""
    generator = seeded(seed)
    return torch.randn(size, 8, 24, generator=generator), *tokens(seed, size)


def wave(seed: int, size: int) -> Inputs:
    """Random sound, `[size, 400]`, and classes."""
    generator = seeded(seed)
    return torch.randn(size, 400, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


# --- models -----------------------------------------------------------------------------------------------------------


def qwen3() -> nn.Module:
    """Norms of queries and keys, whose weights are as long as a head; a tied head."""
    settings = {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    return _of("Qwen3Config", "Qwen3ForCausalLM", **WORDS, **NARROW, **settings)


def gemma2() -> nn.Module:
    """Norms that add one to their weights, sliding windows in every other block, a scaled embedding, capped logits."""
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "attention_dropout": 0.0}
    return _of("Gemma2Config", "Gemma2ForCausalLM", **WORDS, **NARROW, **settings)


def deepseek_v3() -> nn.Module:
    """Latent attention, a dense first block, groups of experts beside a shared one, the router's bias as a buffer."""
    attention = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    routing = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    settings = {"moe_intermediate_size": 16, "num_key_value_heads": 4, "experts_implementation": "grouped_mm"}
    return _of("DeepseekV3Config", "DeepseekV3ForCausalLM", **WORDS, **NARROW, **attention, **routing, **settings)


def gpt_oss() -> nn.Module:
    """Sinks of attention as parameters, biases of experts, a router that is a parameter of its own."""
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
    settings = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    return _of("GptOssConfig", "GptOssForCausalLM", **WORDS, **NARROW, **routing, **settings)


def mamba() -> nn.Module:
    """A scan over time, parameters that are read outside of layers, a convolution along time."""
    settings = {"hidden_size": 24, "state_size": 4, "num_hidden_layers": 2, "use_mambapy": False}
    return _of("MambaConfig", "MambaForCausalLM", **WORDS, **settings)


def mamba2() -> nn.Module:
    """A scan in chunks, heads with a scalar each, a gated norm."""
    settings = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8}
    return _of("Mamba2Config", "Mamba2ForCausalLM", **WORDS, **settings, n_groups=2, chunk_size=4)


def bart() -> nn.Module:
    """One embedding for encoder, decoder and head; learned positions; a bias of the logits as a buffer."""
    return _of("BartConfig", "BartForConditionalGeneration", **WORDS, **ENCODER_DECODER, max_position_embeddings=16)


def marian() -> nn.Module:
    """Positions as frozen parameters; encoder and decoder share an embedding or have their own."""
    return _of("MarianConfig", "MarianMTModel", **WORDS, **ENCODER_DECODER, max_position_embeddings=16)


def swin() -> nn.Module:
    """Shifted windows, biases looked up in a table, patches that are merged; stages of different widths."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 4]}
    settings = {"window_size": 2, "drop_path_rate": 0.0, "num_labels": CLASSES}
    return _of("SwinConfig", "SwinForImageClassification", **sizes, **settings)


def convnext_v2() -> nn.Module:
    """Convolutions for each channel, norms of responses, no attention."""
    settings = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2], "image_size": 16, "patch_size": 2}
    return _of("ConvNextV2Config", "ConvNextV2ForImageClassification", **settings, num_labels=CLASSES)


def whisper() -> nn.Module:
    """Convolutions along time, a frozen table of positions, a decoder that attends to sound; a tied head."""
    settings = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
    return _of("WhisperConfig", "WhisperForConditionalGeneration", **WORDS, **ENCODER_DECODER, **settings)


def wav2vec2() -> nn.Module:
    """A convolution whose weight is computed by a parametrization; frozen convolutions; an unused parameter."""
    layers = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0}
    sound = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    settings = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
    head = {"final_dropout": 0.0}
    everything = NARROW | layers | sound | settings | head | {"activation_dropout": 0.0, "vocab_size": CLASSES}
    model: Any = _of("Wav2Vec2Config", "Wav2Vec2ForCTC", **everything)
    model.freeze_feature_encoder()  # as for fine-tuning; a trained one sets `requires_grad`, which breaks the graph
    return model


def _text_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(input_ids=inputs[0], labels=inputs[0]).loss


def _picture_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(pixel_values=inputs[0], labels=inputs[1]).loss


def _speech_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(input_features=inputs[0], labels=inputs[1]).loss


def _wave_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    # Of mean logits: the loss of the model itself looks at data, which breaks the graph.
    return F.cross_entropy(model(input_values=inputs[0]).logits.mean(1), inputs[1])


FAMILIES: dict[str, dict[str, Case]] = {
    "dense": {"qwen3": Case(qwen3, tokens, _text_loss), "gemma2": Case(gemma2, tokens, _text_loss)},
    "experts": {"deepseek_v3": Case(deepseek_v3, tokens, _text_loss), "gpt_oss": Case(gpt_oss, tokens, _text_loss)},
    "state_space": {"mamba": Case(mamba, tokens, _text_loss), "mamba2": Case(mamba2, tokens, _text_loss)},
    "encoder_decoder": {"bart": Case(bart, tokens, _text_loss), "marian": Case(marian, tokens, _text_loss)},
    "vision": {"swin": Case(swin, pictures, _picture_loss), "convnext_v2": Case(convnext_v2, pictures, _picture_loss)},
    "audio": {"whisper": Case(whisper, spectrogram, _speech_loss), "wav2vec2": Case(wav2vec2, wave, _wave_loss)},
}
