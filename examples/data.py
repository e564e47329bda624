"""What train_gpt.py learns: bytes of text, a batch at a time."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from options import refuse
from torch import Tensor


def load_text(path: Path | None, context: int) -> Tensor:
    """Bytes of a file, or of the help texts that every Python carries, as a tensor of tokens."""
    from pydoc_data.topics import topics

    prose = (topic for topic in topics.values() if "+--" not in topic)  # a batch of drawn tables would jolt the curve
    text = path.read_bytes() if path else "\n".join(prose).encode()
    if len(text) <= context:
        refuse(f"--data {path}: {len(text)} bytes; a sequence and its targets need at least {context + 1}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)  # (bytes,)


class Batches:
    """This rank's part of each step's batch; all ranks draw the same positions and take their own.

    Its state is how far it has come: the generator's.
    """

    def __init__(self, text: Tensor, context: int, args: argparse.Namespace) -> None:
        self.text, self.context, self.size = text, context, args.batch
        self.generator = torch.Generator().manual_seed(args.seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, each (batch, context)."""
        mine = slice(dist.get_rank() * self.size, (dist.get_rank() + 1) * self.size)
        drawn = (dist.get_world_size() * self.size, 1)
        at = torch.randint(len(self.text) - self.context, drawn, generator=self.generator)
        window = self.text[at[mine] + torch.arange(self.context + 1)].long()  # (batch, context + 1)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.generator.set_state(state["generator"])
