"""The recipe of docs/reproducibility.md as code that ranks run, and models to run it with.

    trained(case, group, "eager", "adamw")                  a script's loop on the ranks of `group`, and what came out
    of_ranks(rank, function, worlds=(1, 2, 4))              what `function(group)` returns is equal for all of them

A step has MICROBATCHES of them, however many ranks there are.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import MODELS, MODULES, Case, Routed, mlp, part, squared_error, vectors
from torch import Tensor, nn
from torch.utils import checkpoint as activations

from fsdp_compile import FSDPModule, checkpoint, compile_step, fully_shard, mean_over_ranks, microbatch_seed
from fsdp_compile.core.sharding import clean_name
from fsdp_compile.optim import by_owner
from fsdp_compile.reproducibility import hash_of

MICROBATCHES, STEPS = 4, 3


class Recurrent(nn.Module):
    """A recurrent network with dropout, whose cell runs once per step: its unit runs many times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 6)
        self.blocks = nn.ModuleList([nn.GRUCell(6, 6)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        state = torch.zeros_like(x)
        for _ in range(3):
            state = F.dropout(self.blocks[0](x, state), 0.2)
        return self.head(state)


class LSTM(nn.Module):
    """Two layers of torch's LSTM in one module, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 6, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:  # (batch, 7)
        return self.head(self.lstm(x[:, None].expand(-1, 3, -1))[0][:, -1])


class Checkpointed(nn.Module):
    """Blocks with dropout that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = activations.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class LowRank(nn.Module):
    """A frozen matrix with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 2), nn.Linear(2, 7)
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x) + self.b(self.a(x)))


CASES: dict[str, Case] = {
    **MODELS,
    "short": Case(partial(mlp, blocks=2), vectors, squared_error),
    "experts": Case(Routed, partial(vectors, inputs=8, outputs=8), squared_error),
    "recurrent": Case(Recurrent, vectors, squared_error),
    "checkpointed": Case(Checkpointed, vectors, squared_error),
    "low_rank": Case(LowRank, vectors, squared_error),
    "lstm": Case(LSTM, vectors, squared_error),
    **{name: MODULES[name] for name in ("mha", "parameter_list", "tied_blocks", "tied_ends")},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "matrices": lambda params: torch.optim.Muon(params, lr=0.01),
    "muon": lambda params: by_owner(params, lambda groups: torch.optim.Muon(groups, lr=0.01)),
}


def optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """One optimizer of the model's parameters; Muon takes matrices, and AdamW the others."""
    if name not in ("muon", "matrices"):
        return [OPTIMIZERS[name](model.parameters())]
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    both = ((name, matrices), ("adamw", others))
    return [OPTIMIZERS[of](chosen) for of, chosen in both if chosen]


def train(
    case: Case,
    group: Any,
    how: str,
    model: nn.Module,
    stepping: Iterable[torch.optim.Optimizer],
    steps: Iterable[int] = range(STEPS),
    microbatches: int = MICROBATCHES,
) -> list[float]:
    """Train as a script would, on the ranks of `group`: accumulate, clip, schedule. Each step's loss and norm."""
    ranks, rank, sharded = dist.get_world_size(group), dist.get_rank(group), cast(FSDPModule, model)
    run = model if how == "eager" else torch.compile(model, backend=how)
    here, seen = microbatches // ranks, list[float]()
    for step in steps:
        batch, losses = case.batch(step, 2 * microbatches), []
        for settings in (settings for each in stepping for settings in each.param_groups):
            settings["lr"] = 0.01 / (1 + step)
        for index in range(rank * here, (rank + 1) * here):
            microbatch_seed(step * microbatches + index)
            is_last = index == (rank + 1) * here - 1
            with nullcontext() if is_last else sharded.no_sync():
                loss = case.loss(run, part(batch, index, microbatches))
                (loss / here).backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for each in stepping:
            each.step()
        model.zero_grad()
        seen += [mean_over_ranks(torch.stack(losses), group).item(), float(norm)]
    return seen


def trained(
    case: Case,
    group: Any,
    how: str,
    optimizer: str,
    steps: int = STEPS,
    microbatches: int = MICROBATCHES,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Any, ...]:
    """Train a new model, whose dropout that is off gets this probability: what must not depend on the ranks."""
    torch.manual_seed(0)
    built = case.build()
    for module in built.modules():
        if isinstance(module, nn.Dropout):
            module.p = module.p or dropout
    model = fully_shard(built, reduction_order="tree", **options)
    stepping = optimizers(model, optimizer)
    seen = train(case, group, how, model, stepping, range(steps), microbatches)
    return model.fingerprint(), seen, fingerprint_of_state(model, stepping, group)


def stepped(
    group: Any, options: dict[str, Any], backend: str = "eager", microbatches: int = MICROBATCHES, **sharding: Any
) -> str:
    """The parameters after whole steps; with several microbatches `update_in_backward` is left out, which refuses."""
    case, ranks, rank = CASES["mlp"], dist.get_world_size(group), dist.get_rank(group)
    torch.manual_seed(0)
    model = fully_shard(case.build(), reduction_order="tree", **sharding)
    optimizer, accumulate = torch.optim.AdamW(model.parameters(), lr=0.01), microbatches // ranks
    chosen = options if accumulate == 1 or "update_in_backward" not in options else {}
    step = compile_step(model, optimizer, F.mse_loss, accumulate=accumulate, backend=backend, **chosen)
    for number in range(STEPS):
        inputs, targets = part(case.batch(number, 2 * microbatches), rank, ranks)
        step(inputs, target=targets)
    return model.fingerprint()


def resized(
    rank: int, folder: str, worlds: tuple[int, ...], optimizer: str, how: str, steps: int, microbatches: int
) -> None:
    """A run that is stopped and continued, some steps on each number of ranks, is that of all ranks all along."""
    case, groups = CASES["gpt"], {ranks: first(ranks) for ranks in sorted(set(worlds))}
    expected, seen, state_of = trained(case, None, how, optimizer, steps * len(worlds), microbatches)
    torch._dynamo.reset()
    for number, ranks in enumerate(worlds):
        group = groups[ranks]
        if rank < ranks:
            torch.manual_seed(number)
            model = fully_shard(case.build(), reduction_order="tree", process_group=group)
            stepping = optimizers(model, optimizer)
            state = {"model": model, **{f"optimizer {index}": each for index, each in enumerate(stepping)}}
            if number:
                checkpoint.load(state, folder, process_group=group)
            now = range(steps * number, steps * (number + 1))
            found = train(case, group, how, model, stepping, now, microbatches)
            assert found == seen[2 * now.start : 2 * now.stop], f"{ranks} ranks, steps {now}"
            checkpoint.save(state, folder, number, process_group=group)
            torch._dynamo.reset()
        dist.barrier()
    if rank < worlds[-1]:
        assert model.fingerprint() == expected
        assert fingerprint_of_state(model, stepping, groups[worlds[-1]]) == state_of


def fingerprint_of_state(model: nn.Module, stepped: Iterable[torch.optim.Optimizer], group: Any) -> dict[str, Any]:
    """For each parameter and key of optimizer state its value, or a hash of it, whichever rank has it."""
    names = {param: clean_name(name) for name, param in model.named_parameters()}
    mine: dict[str, Any] = {}
    for param, key, value in ((p, k, v) for each in stepped for p, of in each.state.items() for k, v in of.items()):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        mine[f"{names[param]} {key}"] = hash_of(full).item() if isinstance(full, Tensor) else full
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    return {key: value for of_rank in everyone for key, value in sorted(of_rank.items())}


def first(world: int) -> Any:
    """The group of the first ranks. Others are in groups of their own: a later mesh needs as many on all ranks."""
    return dist.new_subgroups(world)[0]


def of_ranks(rank: int, function: Callable[[Any], Any], worlds: Iterable[int] = (1, 2, 4)) -> None:
    """Call `function` with a group of the first ranks for each number of them; rank 0 finds equal results."""
    found = []
    for world in worlds:
        group = first(world)
        if rank < world:
            found.append(function(group))
        dist.barrier()
        if rank < world and group is not dist.group.WORLD:
            dist.destroy_process_group(group)  # its name, which other ranks have free, is free here too
    assert all(each == found[0] for each in found), found
