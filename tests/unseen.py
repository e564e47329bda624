"""Models of transformers, diffusers, timm and torchvision that no other test has, in small configurations.

Nothing is downloaded: weights are drawn. `UNSEEN[name]` makes the model, and what it is given in a forward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Unseen(NamedTuple):
    """A model, what it is given for a batch number, and the library that it is from."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    library: str


WORDS = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
USUAL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 50, "decoder_ffn_dim": 50, "decoder_start_token_id": 0,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
IMAGE = {"image_size": 16, "num_channels": 3, "num_labels": 5}


def words(number: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 61, (2, 12))
    return {"input_ids": ids, "labels": ids}


def classes(number: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 61, (2, 12)), "labels": torch.randint(2, (2,))}


def labelled(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(5, (2,))}


def pixels(number: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def pictures(size: int, count: int = 2) -> Callable[[int], tuple[Tensor]]:
    return lambda number: (torch.randn(count, 3, size, size),)


def of(library: str, config: str, model: str, batch: Callable[[int], Any], **settings: Any) -> Unseen:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return Unseen(make, batch, library)


def hugging(config: str, model: str, batch: Callable[[int], Any], **settings: Any) -> Unseen:
    return of("transformers", f"{config}Config", model, batch, **settings)


def diffusing(model: str, batch: Callable[[int], Any], **settings: Any) -> Unseen:
    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, model)(**settings)

    return Unseen(make, batch, "diffusers")


def vision(model: str, size: int = 32, **settings: Any) -> Unseen:
    def make() -> nn.Module:
        import torchvision

        return getattr(torchvision.models, model)(**settings)

    return Unseen(make, pictures(size), "torchvision")


def image(model: str, size: int = 32, **settings: Any) -> Unseen:
    def make() -> nn.Module:
        import timm

        return timm.create_model(model, num_classes=5, **settings)

    return Unseen(make, pictures(size), "timm")


def latents(number: int) -> dict[str, Tensor]:
    return {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.randint(1000, (2,)),
            "class_labels": torch.randint(10, (2,))}  # fmt: skip


def joint_latents(number: int) -> dict[str, Tensor]:
    return {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.randint(1000, (2,)),
            "encoder_hidden_states": torch.randn(2, 5, 24), "pooled_projections": torch.randn(2, 16)}  # fmt: skip


def packed_latents(number: int) -> dict[str, Tensor]:
    return {"hidden_states": torch.randn(2, 9, 4), "timestep": torch.rand(2), "encoder_hidden_states":
            torch.randn(2, 5, 24), "pooled_projections": torch.randn(2, 16), "img_ids": torch.zeros(9, 3),
            "txt_ids": torch.zeros(5, 3)}  # fmt: skip


def texts_and_pictures(number: int) -> dict[str, Any]:
    ids = torch.randint(1, 60, (2, 7))
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


def translated(number: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(1, 61, (2, 12)), "labels": torch.randint(1, 61, (2, 8))}


def waves(number: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 800), "labels": torch.randint(1, 30, (2, 4))}


def spectra(number: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(1, 60, (2, 6))}


def noisy(number: int) -> dict[str, Tensor]:
    return {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.randint(1000, (2,))}


def series(number: int) -> dict[str, Tensor]:
    return {"past_values": torch.rand(2, 12), "past_time_features": torch.rand(2, 12, 1),
            "past_observed_mask": torch.ones(2, 12), "future_values": torch.rand(2, 4),
            "future_time_features": torch.rand(2, 4, 1)}  # fmt: skip


def latents_and_texts(number: int) -> dict[str, Tensor]:
    return {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.randint(1000, (2,)),
            "encoder_hidden_states": torch.randn(2, 5, 24)}  # fmt: skip


def captioned(number: int) -> dict[str, Any]:
    return {**latents_and_texts(number), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


LM = {**WORDS, **USUAL, "use_cache": False, "max_position_embeddings": 32}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NEOX = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

UNSEEN: dict[str, Unseen] = {
    "opt": hugging("OPT", "OPTForCausalLM", words, **WORDS, hidden_size=32, ffn_dim=48, num_hidden_layers=2,
                   num_attention_heads=4, max_position_embeddings=16, word_embed_proj_dim=16, use_cache=False),
    "gpt_neox": hugging("GPTNeoX", "GPTNeoXForCausalLM", words, **WORDS, **USUAL, **NEOX, use_cache=False),
    "falcon": hugging("Falcon", "FalconForCausalLM", words, **WORDS, hidden_size=32, num_hidden_layers=2,
                      num_attention_heads=4, use_cache=False, alibi=True),
    "bloom": hugging("Bloom", "BloomForCausalLM", words, **WORDS, hidden_size=32, n_layer=2, n_head=4,
                     use_cache=False),
    "phi": hugging("Phi", "PhiForCausalLM", words, **WORDS, **USUAL, use_cache=False),
    "olmo2": hugging("Olmo2", "Olmo2ForCausalLM", words, **WORDS, **USUAL, use_cache=False),
    "cohere": hugging("Cohere", "CohereForCausalLM", words, **WORDS, **USUAL, use_cache=False),
    "granite_moe": hugging("GraniteMoe", "GraniteMoeForCausalLM", words, **WORDS, **USUAL, num_local_experts=4,
                           num_experts_per_tok=2, use_cache=False),
    "gpt_bigcode": hugging("GPTBigCode", "GPTBigCodeForCausalLM", words, **WORDS, n_embd=32, n_layer=2, n_head=4,
                           n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
    "qwen3": hugging("Qwen3", "Qwen3ForCausalLM", words, **LM, num_key_value_heads=2, head_dim=8),
    "gemma3n": hugging("Gemma3nText", "Gemma3nForCausalLM", words, **{**LM, "intermediate_size": [48, 48]}, head_dim=8,
                       num_key_value_heads=2, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8,
                       altup_num_inputs=2, laurel_rank=4, num_kv_shared_layers=0,
                       activation_sparsity_pattern=[0.5, 0.0], sliding_window=4,
                       layer_types=["sliding_attention", "full_attention"]),
    "mixtral": hugging("Mixtral", "MixtralForCausalLM", words, **LM, num_key_value_heads=2, num_local_experts=4,
                       output_router_logits=True),
    "deepseek_v3": hugging("DeepseekV3", "DeepseekV3ForCausalLM", words, **LM, num_key_value_heads=4,
                           n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2,
                           topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=12,
                           qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8),
    "mamba": hugging("Mamba", "MambaForCausalLM", words, **WORDS, hidden_size=32, num_hidden_layers=2, state_size=4,
                     time_step_rank=4, use_cache=False),
    "t5": hugging("T5", "T5ForConditionalGeneration", translated, vocab_size=61, d_model=32, d_kv=8, d_ff=48,
                  num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False),
    "whisper": hugging("Whisper", "WhisperForConditionalGeneration", spectra, **WORDS, **SEQ2SEQ, num_mel_bins=8,
                       max_source_positions=16, max_target_positions=16, dropout=0.0, use_cache=False,
                       suppress_tokens=None, begin_suppress_tokens=None),
    "wav2vec2": hugging("Wav2Vec2", "Wav2Vec2ForCTC", waves, vocab_size=32, **USUAL, **NEOX, activation_dropout=0.0,
                        feat_proj_dropout=0.0, layerdrop=0.0, final_dropout=0.0, conv_dim=[8, 8], conv_stride=[5, 4],
                        conv_kernel=[10, 4], num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
                        mask_time_prob=0.0, num_feat_extract_layers=2),
    "swin": hugging("Swin", "SwinForImageClassification", labelled, **IMAGE, patch_size=2, embed_dim=8, depths=[1, 1],
                    num_heads=[2, 2], window_size=4, drop_path_rate=0.0),
    "unet2d": diffusing("UNet2DModel", noisy, sample_size=16, block_out_channels=(8, 16), layers_per_block=1,
                        norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4),
    "pixart": diffusing("PixArtTransformer2DModel", captioned, num_attention_heads=2, attention_head_dim=8,
                        in_channels=4, out_channels=8, num_layers=2, sample_size=8, patch_size=2,
                        cross_attention_dim=16, caption_channels=24, use_additional_conditions=False),
    "convnext_atto": image("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "olmoe": hugging("Olmoe", "OlmoeForCausalLM", words, **LM, num_key_value_heads=2, num_experts=4,
                     num_experts_per_tok=2),
    "mamba2": hugging("Mamba2", "Mamba2ForCausalLM", words, **WORDS, hidden_size=32, num_hidden_layers=2, state_size=4,
                      num_heads=8, head_dim=8, n_groups=2, chunk_size=4, use_cache=False),
    "modernbert": hugging("ModernBert", "ModernBertForMaskedLM", words, **LM, global_attn_every_n_layers=2,
                          local_attention=8),
    "poolformer": hugging("PoolFormer", "PoolFormerForImageClassification", labelled, num_labels=5, depths=[1, 1],
                          hidden_sizes=[8, 16], num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2],
                          padding=[2, 1], drop_path_rate=0.0),
    "sana": diffusing("SanaTransformer2DModel", latents_and_texts, in_channels=4, out_channels=4, num_attention_heads=2,
                      attention_head_dim=8, num_layers=1, num_cross_attention_heads=2, cross_attention_head_dim=8,
                      cross_attention_dim=16, caption_channels=24, sample_size=8, patch_size=1),
    "time_series": hugging("TimeSeriesTransformer", "TimeSeriesTransformerForPrediction", series, prediction_length=4,
                           context_length=8, lags_sequence=[1, 4], num_time_features=1, d_model=16, encoder_layers=1,
                           decoder_layers=1, encoder_ffn_dim=24, decoder_ffn_dim=24, encoder_attention_heads=2,
                           decoder_attention_heads=2, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
                           encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False),
    "ast": hugging("AST", "ASTForAudioClassification", lambda _: {"input_values": torch.randn(2, 32, 16),
                   "labels": torch.randint(5, (2,))}, **USUAL, **NO_DROPOUT, max_length=32, num_mel_bins=16,
                   patch_size=8, frequency_stride=8, time_stride=8, num_labels=5),
    "vit_tiny": image("vit_tiny_patch16_224", 32, img_size=32, depth=2, embed_dim=24, num_heads=2),
    "albert": hugging("Albert", "AlbertForMaskedLM", words, **WORDS, **USUAL, **NO_DROPOUT, embedding_size=16),
    "electra": hugging("Electra", "ElectraForSequenceClassification", classes, **WORDS, **USUAL, embedding_size=16),
    "deberta_v2": hugging("DebertaV2", "DebertaV2ForMaskedLM", words, **WORDS, **USUAL, **NO_DROPOUT,
                          relative_attention=True, pos_att_type=["p2c", "c2p"], max_position_embeddings=16),
    "xlnet": hugging("XLNet", "XLNetForSequenceClassification", classes, vocab_size=61, d_model=32, n_layer=2,
                     n_head=4, d_inner=48, dropout=0.0),
    "fnet": hugging("FNet", "FNetForMaskedLM", words, **WORDS, hidden_size=32, num_hidden_layers=2,
                    intermediate_size=48, hidden_dropout_prob=0.0),
    "pegasus": hugging("Pegasus", "PegasusForConditionalGeneration", words, **WORDS, **SEQ2SEQ,
                       max_position_embeddings=16, use_cache=False),
    "m2m_100": hugging("M2M100", "M2M100ForConditionalGeneration", words, **WORDS, **SEQ2SEQ,
                       max_position_embeddings=16, use_cache=False),
    "clip": Unseen(
        lambda: __import__("transformers").CLIPModel(__import__("transformers").CLIPConfig(
            text_config={**WORDS, **TOWER, "max_position_embeddings": 16},
            vision_config={**TOWER, "image_size": 16, "patch_size": 4}, projection_dim=12)),
        texts_and_pictures, "transformers"),
    "dinov2": hugging("Dinov2", "Dinov2ForImageClassification", labelled, **USUAL, **IMAGE, patch_size=4),
    "beit": hugging("Beit", "BeitForImageClassification", labelled, **USUAL, **IMAGE, patch_size=4),
    "segformer": hugging("Segformer", "SegformerForImageClassification", labelled, num_labels=5, depths=[1, 1],
                         num_encoder_blocks=2, sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3],
                         strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    "resnet": hugging("ResNet", "ResNetForImageClassification", labelled, num_labels=5, embedding_size=8,
                      hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"),
    "vit_mae": hugging("ViTMAE", "ViTMAEForPreTraining", pixels, **USUAL, image_size=16, patch_size=4,
                       decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
                       decoder_intermediate_size=24),
    "patchtst": hugging("PatchTST", "PatchTSTForPrediction", lambda _: {"past_values": torch.randn(2, 16, 3),
                        "future_values": torch.randn(2, 4, 3)}, num_input_channels=3, context_length=16,
                        prediction_length=4, patch_length=4, patch_stride=4, d_model=16, ffn_dim=24,
                        num_hidden_layers=2, num_attention_heads=2),
    "dit": diffusing("DiTTransformer2DModel", latents, num_attention_heads=2, attention_head_dim=8, in_channels=4,
                     num_layers=2, sample_size=8, norm_type="ada_norm_zero", num_embeds_ada_norm=10,
                     patch_size=2),
    "sd3": diffusing("SD3Transformer2DModel", joint_latents, sample_size=8, patch_size=2, in_channels=4,
                     num_layers=2, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=24,
                     caption_projection_dim=16, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8),
    "flux": diffusing("FluxTransformer2DModel", packed_latents, patch_size=1, in_channels=4, num_layers=1,
                      num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=24,
                      pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)),
    "autoencoder_kl": diffusing("AutoencoderKL", pictures(16), block_out_channels=(8, 16), norm_num_groups=4,
                                down_block_types=("DownEncoderBlock2D",) * 2,
                                up_block_types=("UpDecoderBlock2D",) * 2),
    "resnet18": vision("resnet18", num_classes=5),
    "densenet": Unseen(lambda: __import__("torchvision").models.DenseNet(8, (2, 2), 8, num_classes=5),
                       pictures(32), "torchvision"),
    "mobilenet_v3": vision("mobilenet_v3_small", num_classes=5),
    "googlenet": vision("googlenet", 64, num_classes=5, init_weights=False),
    "shufflenet": vision("shufflenet_v2_x0_5", num_classes=5),
    "resmlp": image("resmlp_12_224", 32, img_size=32),
    "xcit": image("xcit_nano_12_p16_224", 32, depth=2, embed_dim=16, num_heads=2, img_size=32),
    "cait": image("cait_xxs24_224", 32, img_size=32, depth=2, embed_dim=24, num_heads=2),
    "eva02": image("eva02_tiny_patch14_224", 28, img_size=28, depth=2, embed_dim=24, num_heads=2),
    "regnet": image("regnetx_002", 32),
    "maxvit": image("maxvit_rmlp_pico_rw_256", 64, img_size=64),
}  # fmt: skip
