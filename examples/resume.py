"""Saving a run of train_gpt.py, and going on with it."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import Batches
from gpt import GPT
from measures import Run
from options import refuse
from torch.optim.lr_scheduler import LambdaLR

from fsdp_compile import checkpoint


class Checkpoints:
    """All that a run needs to go on as if it had not been stopped, and the folder where it is saved; None: nowhere."""

    def __init__(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer,
        scheduler: LambdaLR,
        batches: Batches,
        run: Run,
        folder: Path | None,
    ) -> None:
        self.run, self.folder = run, folder
        self.parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}

    def state(self) -> dict[str, Any]:
        """What is saved, and what is loaded into."""
        random = {f"rank{dist.get_rank()}": torch.get_rng_state()}  # each rank its own
        if torch.cuda.is_available():
            random[f"cuda{dist.get_rank()}"] = torch.cuda.get_rng_state()
        figures = {"losses": self.run.losses, "seconds": self.run.seconds, "ranks": dist.get_world_size()}
        return {**self.parts, "random": random, "run": figures}

    def save(self) -> None:
        """Save the state after this step; a killed save leaves the last checkpoint as it is."""
        if self.folder is not None:
            checkpoint.save(self.state(), self.folder, len(self.run.losses), keep=2)

    def load(self) -> None:
        """Go on from the newest checkpoint; from the start if there is none."""
        if self.folder is None or checkpoint.latest(self.folder) is None:
            return
        saved = {"run": {"ranks": 0}}
        checkpoint.load(saved, self.folder)
        if saved["run"]["ranks"] != dist.get_world_size():
            refuse(f"--resume: {self.folder} was saved by {saved['run']['ranks']} ranks, found {dist.get_world_size()}")
        state = self.state()
        checkpoint.load(state, self.folder)
        self.run.losses, self.run.seconds = state["run"]["losses"], state["run"]["seconds"]
        torch.set_rng_state(state["random"][f"rank{dist.get_rank()}"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["random"][f"cuda{dist.get_rank()}"])
