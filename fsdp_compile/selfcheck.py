"""`fsdp-compile selfcheck`: whether the package works on this machine: `check`, and then `compare`, of a small GPT."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_compile.compare.case import Batch, Case
from fsdp_compile.compare.comparison_report import Comparison
from fsdp_compile.compare.rounds import compare
from fsdp_compile.compare.systems import OURS, Task
from fsdp_compile.compare.verdicts import Report, Row
from fsdp_compile.tools.check import check_loaded

STEPS, TOKENS, WIDTH, LENGTH, BATCH = 3, 32, 32, 16, 2
WAYS = ("eager", "aot_eager", "inductor")
SYSTEMS = ("fsdp2", *OURS)


class _GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        block = partial(nn.TransformerEncoderLayer, WIDTH, 2, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length) -> (batch, length, tokens)
        x, mask = self.tokens(tokens), nn.Transformer.generate_square_subsequent_mask(LENGTH, tokens.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(x)


def _batch(number: int) -> Batch:
    tokens = torch.randint(TOKENS, (BATCH, LENGTH))
    return Batch((tokens,), target=tokens)


def _loss(output: Tensor, tokens: Tensor) -> Tensor:  # (batch, length, tokens), (batch, length)
    return F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _case() -> Case:
    return Case(_GPT, _batch, _loss, partial(torch.optim.SGD, lr=0.1, momentum=0.9))


@dataclass(frozen=True)
class SelfCheck:
    """What came out: values by each way, and systems side by side."""

    values: Report
    systems: Comparison

    @property
    def holds(self) -> bool:
        """Whether values are those of the unsharded model, all ways of this package run, and their losses FSDP2's."""
        runs = {row.system for row in self.systems.ran} >= set(OURS)
        return self.values.holds and runs and not [*self.systems.differences()]

    def __str__(self) -> str:
        return (
            f"{self.values}\n{self.systems}\n{'this installation works' if self.holds else 'this installation fails'}\n"
        )

    def to_json(self) -> str:
        """All of it, for a bug report."""
        values, systems = json.loads(self.values.to_json()), json.loads(self.systems.to_json())
        return json.dumps({"holds": self.holds, "values": values, "systems": systems}, indent=1) + "\n"


def selfcheck(device: str, ranks: int, found: Callable[[Row], None]) -> SelfCheck:
    """Train on `ranks` ranks of this machine, or those of `torchrun`; `found` is called with each row of values."""
    options = {"steps": STEPS, "accumulate": 1, "resume_on": 0, "found": found}
    values = check_loaded(_case, WAYS, ranks, device, **options)
    task = Task(BATCH, LENGTH, bf16=False, device=device)
    systems = compare("the GPT of selfcheck", _case, (_GPT, None), task, ranks, systems=SYSTEMS, steps=STEPS, rounds=1,
                      hardware=None)  # fmt: skip
    return SelfCheck(values, systems)
