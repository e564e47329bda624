"""The model of a torchtitan config with its loss, for `fsdp-compile compare --torchtitan MODULE:CONFIG`."""

from collections.abc import Callable, Sequence
from tempfile import gettempdir
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import ConfigManager
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder


def config_of(text: str) -> Any:
    """The `Trainer.Config` that MODULE:CONFIG names, as `--module` and `--config` of torchtitan do.

    Raises:
        ValueError: the text has another form, there is no such module or function, or its model is no decoder.
    """
    module, colon, function = text.rpartition(":")
    if not colon or not module:
        raise ValueError(f"--torchtitan: expected MODULE:CONFIG, found {text!r}")
    try:
        config = ConfigManager().parse_args(["--module", module, "--config", function])
    except ImportError as error:
        raise ValueError(f"--torchtitan: {error}") from error
    if not isinstance(model := getattr(getattr(config, "model_spec", None), "model", None), Decoder.Config):
        raise ValueError(f"--torchtitan: expected a config of a Decoder, found {type(model).__name__} in {text}")
    return config


def factory(text: str) -> tuple[Callable[[], nn.Module], Callable[[int, int], Sequence[Tensor]]]:
    """A function that makes the model of `config_of(text)` on the CPU, with weights that are drawn, its activation
    checkpointing and its loss; and one that makes tokens and labels, `[batch, sequence]` each."""
    config = config_of(text)

    def make() -> nn.Module:
        config.model_spec.model.update_from_config(config=config)
        model = config.model_spec.model.build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        if config.activation_checkpoint is not None:
            config.activation_checkpoint.build(dump_folder=gettempdir()).apply(model)
        return WithLoss(model)

    def example_inputs(batch: int, sequence: int) -> Sequence[Tensor]:
        tokens = torch.randint(config.model_spec.model.vocab_size, (batch, sequence + 1))
        return [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]

    return make, example_inputs


class WithLoss(nn.Module):
    """A decoder of torchtitan that returns the mean cross-entropy of a batch; each sequence is one document."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder
        attention = getattr(decoder.config.first_attention, "inner_attention", None)
        self.is_masked = isinstance(attention, FlexAttention.Config | VarlenAttention.Config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss, shape `()`, of tokens and labels `[batch, sequence]`."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        masks = {"attention_masks": self.decoder.get_attention_masks(positions=positions)} if self.is_masked else {}
        logits = self.decoder(tokens, positions=positions, **masks)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
