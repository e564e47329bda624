"""Models from PyPI's `transformers` and `diffusers`, as they come, in the smallest configurations with all their parts.

Nothing is downloaded: weights are drawn. Dropout is off, so that a sharded model can be compared with an unsharded one.
"""

import torch
import torch.nn.functional as F
from models import Case, Inputs, cross_entropy, seeded
from torch import Tensor, nn

VOCABULARY, LENGTH, CLASSES = 61, 12, 5
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 36, "intermediate_size": 50}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def tokens(seed: int, size: int) -> Inputs:
    """Random tokens, `[size, LENGTH]`."""
    return (torch.randint(1, VOCABULARY, (size, LENGTH), generator=seeded(seed)),)


def padded_tokens(seed: int, size: int) -> Inputs:
    """The same and a mask, 0 for the last three of each text."""
    mask = torch.ones(size, LENGTH, dtype=torch.int64)
    mask[:, -3:] = 0
    return *tokens(seed, size), mask


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


# --- models -----------------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    """Linear layers that are `Conv1D`; the head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 16, "n_embd": 36, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**TEXT, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama() -> nn.Module:
    """Grouped queries, rotary buffers, a cache object that goes through all blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, **LAYERS | {"hidden_size": 32}, num_key_value_heads=2))


def bert() -> nn.Module:
    """A decoder bias that is tied to a parameter of another module; a padding mask."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TEXT, **LAYERS, **NO_DROPOUT))


def t5() -> nn.Module:
    """Encoder and decoder share one embedding, only their first blocks have a relative bias, dtypes are looked up."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 36, "d_kv": 18, "d_ff": 50, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**TEXT, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def vit() -> nn.Module:
    """A class token and positions as parameters of their own; the loss is chosen, and noted, in the first forward."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 16, "patch_size": 4, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**LAYERS, **sizes, **NO_DROPOUT))


def mixtral(experts: str) -> nn.Module:
    """Experts in 3-D parameters: all in one product, or in a loop whose length depends on the data."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = LAYERS | {"hidden_size": 32, "intermediate_size": 48}  # grouped products want 16 bytes of alignment
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": experts}
    return MixtralForCausalLM(MixtralConfig(**TEXT, **sizes, **routing, num_key_value_heads=2))


def unet() -> nn.Module:
    """Convolutions, group norms, attention to a text, and skips from one end to the other."""
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


def _logits_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return cross_entropy(lambda x: model(x).logits, inputs)  # type: ignore[arg-type]  # all that it calls


def _own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(input_ids=inputs[0], labels=inputs[0]).loss


def _masked_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(input_ids=inputs[0], attention_mask=inputs[1], labels=inputs[0]).loss


def _picture_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(pixel_values=inputs[0], labels=inputs[1]).loss


def _noise_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    x, times, texts, y = inputs
    return F.mse_loss(model(x, times, encoder_hidden_states=texts).sample, y)


THIRD_PARTY: dict[str, Case] = {
    "gpt2": Case(gpt2, next_tokens, _logits_loss),
    "gpt2_own_loss": Case(gpt2, tokens, _own_loss),  # writes a warning, which breaks the graph
    "llama": Case(llama, tokens, _own_loss),
    "bert": Case(bert, padded_tokens, _masked_loss),
    "t5": Case(t5, tokens, _own_loss),
    "vit": Case(vit, pictures, _picture_loss),
    "mixtral": Case(lambda: mixtral("grouped_mm"), tokens, _own_loss),
    "mixtral_loop": Case(lambda: mixtral("eager"), tokens, _own_loss),  # breaks the graph in each block
    "unet": Case(unet, noise, _noise_loss),
}
