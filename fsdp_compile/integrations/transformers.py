"""`Trainer` for Hugging Face transformers: shards its model and writes sharded checkpoints.

Everything else is the `Trainer` of transformers. Checked with transformers 5.23 and accelerate 1.15.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from fsdp_compile import checkpoint
from fsdp_compile.checkpoint.entries import InModel
from fsdp_compile.checkpoint.untrusted import file_in, load_item, path_in
from fsdp_compile.fsdp_module import FSDPModule
from fsdp_compile.integrations.accelerate import Accelerator
from fsdp_compile.integrations.fsdp_plugin import without_fsdp

__all__ = ["Trainer"]

_FOLDER, _SCHEDULER = "sharded", "scheduler.pt"  # within a checkpoint


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` whose model is sharded over all ranks. Saved models are complete.

    Args:
        arguments: of `transformers.Trainer`.
        shard: as of `Accelerator` in accelerate.py. A model that is sharded already stays as it is.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *arguments: Any, shard: dict[str, Any] | None = None, **named: Any) -> None:
        self._shard_options = shard
        super().__init__(*arguments, **named)

    def _build_accelerator_args(self, **settings: Any) -> dict[str, Any]:
        self._accelerator_settings = super()._build_accelerator_args(**settings)
        return self._accelerator_settings | {"fsdp_plugin": None}

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator that shards models."""
        with without_fsdp():
            super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(shard=self._shard_options, **self._accelerator_settings)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None and isinstance(self.model, FSDPModule):  # all ranks take part, the first one writes
            state_dict = self.accelerator.get_state_dict(self.model)
        super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not isinstance(self.model, FSDPModule):
            return super()._save_optimizer_and_scheduler(output_dir)
        checkpoint.save(self._optimizer_state(), Path(output_dir) / _FOLDER, step=0)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        if folder is None or not (Path(folder) / _FOLDER).is_dir():  # one process has saved it as transformers does
            return super()._load_optimizer_and_scheduler(folder)
        checkpoint.load(self._optimizer_state(), path_in(Path(folder), _FOLDER))
        with open(file_in(Path(folder), _SCHEDULER), "rb") as file:
            self.lr_scheduler.load_state_dict(load_item(file, f"{folder}, {_SCHEDULER}"))

    def _optimizer_state(self) -> dict[str, Any]:  # `_save` writes the weights that train, which are loaded first
        return {"optimizer": InModel("optimizer", [self.model], self.optimizer.optimizer)}
