"""One rank of torchtitan's trainer by this package or by torchtitan's own FSDP2, step by step: what titan.py compares.

All systems have the same config, the same batches, and the weights that the unsharded model draws from seed 0. Before
it is imported, titan.py lets torchtitan use the CPU.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.metrics import MetricsProcessor

from fsdp_compile.integrations.torchtitan import WHOLE, sharded

COMPILED = ("blocks", "whole")


def configured(config: Any, system: str, folder: str) -> Any:
    """A copy of a `Trainer.Config` for one of the systems, which writes to `folder`.

    Sets FSDP_COMPILE_WHOLE_MODEL in this process.
    """
    os.environ[WHOLE] = "1" if system == "whole" else "0"
    changed = replace(
        config,
        compile=replace(config.compile, enable=system in COMPILED),
        metrics=Recorder.Config(log_freq=1, disable_color_printing=True),
        dump_folder=folder,
    )
    if system != "fsdp2":
        return sharded(changed)
    spec = config.model_spec

    def parallelize(model: Any, **options: Any) -> Any:
        model = spec.parallelize_fn(model, **options)
        for module in model.modules():
            if isinstance(
                module, FSDPModule
            ):  # torchtitan's factor of 1.0 is a product before the sum, unknown to gloo
                module.set_force_sum_reduction_for_comms(True)
        return model

    return replace(changed, model_spec=replace(spec, parallelize_fn=parallelize))


@dataclass
class Logged:
    """What torchtitan says of a step: its number, the mean loss over all tokens, and the norm of all gradients."""

    step: int
    loss: float
    norm: float


class Recorder(MetricsProcessor):
    """torchtitan's metrics, which are kept in `records` too."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """As torchtitan's."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.records: list[Logged] = []

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        """Keep what a step has said, and let torchtitan log it."""
        self.records.append(Logged(step, global_avg_loss, grad_norm))
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


def set_values(trainer: Any) -> None:
    """Give the models the weights that the unsharded model draws on the CPU from seed 0, however they are sharded."""
    torch.manual_seed(0)
    whole = trainer.model_config.build()
    with torch.no_grad():
        whole.init_weights(buffer_device=None)
        values = dict(whole.named_parameters())
        for part in trainer.model_parts:
            for name, param in part.named_parameters():
                value = values[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")].to(
                    param.dtype
                )
                is_theirs = type(param.data) is DTensor
                param.copy_(distribute_tensor(value, param.device_mesh, param.placements) if is_theirs else value)


class Steps:
    """Steps of a trainer, one by one, as its `train` takes them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._batches: Iterator[Any] = trainer.batch_generator(trainer.dataloader)

    def __call__(self) -> None:
        self.trainer.step += 1
        self.trainer.train_step(self._batches)

    @property
    def records(self) -> list[Logged]:
        """What was logged so far."""
        records: list[Logged] = self.trainer.metrics_processor.records
        return records
