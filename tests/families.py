"""Models from PyPI's `transformers` and `diffusers`, as they come, in the smallest configurations with all their parts.

Nothing is downloaded: weights are drawn. Dropout is off, so that a sharded model can be compared with an unsharded one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import Case, Inputs, cross_entropy, seeded
from torch import Tensor, nn

VOCABULARY, LENGTH, CLASSES = 61, 12, 5
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 36, "intermediate_size": 50}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Without a cache: with one, checkpointing writes a warning, which breaks the graph.
WORDS = TEXT | {"use_cache": False}
NARROW = LAYERS | {"hidden_size": 32, "intermediate_size": 48}  # grouped products want 16 bytes of alignment
HEADS = NARROW | {"num_key_value_heads": 2, "head_dim": 8}
ENCODER_DECODER = WORDS | {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 50, "decoder_ffn_dim": 50, "dropout": 0.0,
    "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip


def tokens(seed: int, size: int) -> Inputs:
    """Random tokens, `[size, LENGTH]`."""
    return (torch.randint(1, VOCABULARY, (size, LENGTH), generator=seeded(seed)),)


def padded_tokens(seed: int, size: int) -> Inputs:
    """A mask, 0 for the last three of each text, and the same."""
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[:, -3:] = 0
    return mask, *tokens(seed, size)


def next_tokens(seed: int, size: int) -> Inputs:
    """Tokens and those that follow them."""
    drawn = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=seeded(seed))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def pictures(seed: int, size: int) -> Inputs:
    """Random pictures, `[size, 3, 16, 16]`, and classes."""
    drawn = torch.randn(size, 3, 16, 16, generator=seeded(seed))
    return drawn, torch.randint(CLASSES, (size,), generator=seeded(seed + 1))


def noise(seed: int, size: int) -> Inputs:
    """Random pictures `[size, 3, 8, 8]`, times, texts `[size, 7, 20]`, and pictures to find."""
    generator = seeded(seed)
    x, y = torch.randn(2, size, 3, 8, 8, generator=generator)
    return x, torch.randint(1000, (size,), generator=generator), torch.randn(size, 7, 20, generator=generator), y


def spectrogram(seed: int, size: int) -> Inputs:
    """Random features `[size, 8, 24]`, and tokens that follow from them."""
    generator = seeded(seed)
    return torch.randn(size, 8, 24, generator=generator), *tokens(seed, size)


def wave(seed: int, size: int) -> Inputs:
    """Random sound, `[size, 400]`, and classes."""
    generator = seeded(seed)
    return torch.randn(size, 400, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


# --- models -----------------------------------------------------------------------------------------------------------


def _of(name: str, head: str, settings: dict[str, Any], **more: Any) -> Callable[[], nn.Module]:
    """What builds transformers' model of a name, with a head, by these settings."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**settings | more)
        return getattr(transformers, f"{name}{head}")(config)

    return build


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(12, 24),
        norm_num_groups=4,
        attention_head_dim=6,
        cross_attention_dim=20,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def _noise_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    x, times, texts, y = inputs
    return F.mse_loss(model(x, times, encoder_hidden_states=texts).sample, y)


def _wav2vec2() -> nn.Module:
    layers = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0}
    sound = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    settings = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
    head = {"final_dropout": 0.0, "activation_dropout": 0.0, "vocab_size": CLASSES}
    model: Any = _of("Wav2Vec2", "ForCTC", NARROW | layers | sound | settings | head)()
    model.freeze_feature_encoder()  # as for fine-tuning; a trained one sets `requires_grad`, which breaks the graph
    return model


def _wave_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    # Of mean logits: the loss of the model itself looks at data, which breaks the graph.
    return F.cross_entropy(model(input_values=inputs[0]).logits.mean(1), inputs[1])


def _own_loss(*names: str) -> Callable[[nn.Module, Inputs], Tensor]:
    """The model's own loss of inputs of these names, whose labels are the last of what there is."""
    return lambda model, inputs: model(**dict(zip(names, inputs, strict=False)), labels=inputs[-1]).loss


def _text(name: str, settings: dict[str, Any], head: str = "ForCausalLM", **more: Any) -> Case:
    return Case(_of(name, head, settings, **more), tokens, _own_loss("input_ids"))


def _vision(name: str, settings: dict[str, Any], **more: Any) -> Case:
    build = _of(name, "ForImageClassification", settings, image_size=16, num_labels=CLASSES, **more)
    return Case(build, pictures, _own_loss("pixel_values"))


GPT2 = _of("GPT2", "LMHeadModel", TEXT, n_positions=16, n_embd=36, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
           attn_pdrop=0.0)  # fmt: skip
MIXTRAL = TEXT | NARROW | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}

THIRD_PARTY: dict[str, Case] = {
    # Linear layers that are `Conv1D`; the head is tied to the embedding.
    "gpt2": Case(GPT2, next_tokens, lambda model, inputs: cross_entropy(lambda x: model(x).logits, inputs)),
    "gpt2_own_loss": Case(GPT2, tokens, _own_loss("input_ids")),  # writes a warning, which breaks the graph
    # Grouped queries, rotary buffers, a cache object that goes through all blocks.
    "llama": _text("Llama", TEXT | LAYERS, hidden_size=32, num_key_value_heads=2),
    # A decoder bias that is tied to a parameter of another module; a padding mask.
    "bert": Case(_of("Bert", "ForMaskedLM", TEXT | LAYERS | NO_DROPOUT), padded_tokens,
                 _own_loss("attention_mask", "input_ids")),
    # Encoder and decoder share one embedding, only their first blocks have a relative bias, dtypes are looked up.
    "t5": _text("T5", TEXT, "ForConditionalGeneration", d_model=36, d_kv=18, d_ff=50, num_layers=2, num_heads=2,
                dropout_rate=0.0, decoder_start_token_id=0),
    # A class token and positions as parameters of their own; the loss is chosen, and noted, in the first forward.
    "vit": _vision("ViT", LAYERS | NO_DROPOUT, patch_size=4),
    # Experts in 3-D parameters: all in one product, or in a loop whose length depends on the data.
    "mixtral": _text("Mixtral", MIXTRAL, experts_implementation="grouped_mm"),
    "mixtral_loop": _text("Mixtral", MIXTRAL, experts_implementation="eager"),  # breaks the graph in each block
    # Convolutions, group norms, attention to a text, and skips from one end to the other.
    "unet": Case(_unet, noise, _noise_loss),
}  # fmt: skip

FAMILIES: dict[str, Case] = {  # two of each: dense, experts, state space, encoder and decoder, vision, audio
    # Norms of queries and keys, whose weights are as long as a head; a tied head.
    "qwen3": _text("Qwen3", WORDS | HEADS, tie_word_embeddings=True),
    # Norms that add one to their weights, sliding windows in every other block, a scaled embedding, capped logits.
    "gemma2": _text("Gemma2", WORDS | HEADS, sliding_window=4, attention_dropout=0.0),
    # Latent attention, a dense first block, groups of experts beside a shared one, the router's bias as a buffer.
    "deepseek_v3": _text(
        "DeepseekV3", WORDS | NARROW, q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        moe_intermediate_size=16, num_key_value_heads=4, experts_implementation="grouped_mm"),
    # Sinks of attention as parameters, biases of experts, a router that is a parameter of its own.
    "gpt_oss": _text("GptOss", WORDS | HEADS, sliding_window=4, num_local_experts=4, num_experts_per_tok=2,
                     experts_implementation="grouped_mm"),
    # A scan over time, parameters that are read outside of layers, a convolution along time.
    "mamba": _text("Mamba", WORDS, hidden_size=24, state_size=4, num_hidden_layers=2, use_mambapy=False),
    # A scan in chunks, heads with a scalar each, a gated norm.
    "mamba2": _text("Mamba2", WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, num_heads=4, head_dim=8,
                    n_groups=2, chunk_size=4),
    # One embedding for encoder, decoder and head; learned positions; a bias of the logits as a buffer.
    "bart": _text("Bart", ENCODER_DECODER, "ForConditionalGeneration", max_position_embeddings=16),
    # Positions as frozen parameters; encoder and decoder share an embedding or have their own.
    "marian": _text("Marian", ENCODER_DECODER, "MTModel", max_position_embeddings=16),
    # Shifted windows, biases looked up in a table, patches that are merged; stages of different widths.
    "swin": _vision("Swin", {"depths": [2, 2], "num_heads": [2, 4]}, patch_size=2, embed_dim=12, window_size=2,
                    drop_path_rate=0.0),
    # Convolutions for each channel, norms of responses, no attention.
    "convnext_v2": _vision("ConvNextV2", {"hidden_sizes": [8, 16], "depths": [2, 2]}, num_stages=2, patch_size=2),
    # Convolutions along time, a frozen table of positions, a decoder that attends to sound; a tied head.
    "whisper": Case(
        _of("Whisper", "ForConditionalGeneration", ENCODER_DECODER, num_mel_bins=8, max_source_positions=12,
            max_target_positions=16), spectrogram, _own_loss("input_features")),
    # A convolution whose weight is computed by a parametrization; frozen convolutions; an unused parameter.
    "wav2vec2": Case(_wav2vec2, wave, _wave_loss),
}  # fmt: skip
