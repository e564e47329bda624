"""Loss curves of a small GPT on the text that Python ships: one process, FSDP2, ours eagerly, compiled, compile_step.

One process trains on the whole batch with three seeds, whose spread is the measure; the others on two gloo ranks, each
on its part of the batch, with the first seed. In bf16 one process uses autocast; parameters stay in float32.

    loss        mean of the last 50 steps
    apart       the most by which the mean of 50 steps differs from that of one process with the same seed
    spread      the most by which such means of one process differ between seeds, over the last half
"""

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from bench import systems
from bench.models import gpt
from bench.pictures import IMAGES, STYLE, plt
from bench.report import Found, commit, parser, today, write

SYSTEMS = dict(fsdp2="FSDP2", ours="ours, eager", ours_compiled="ours, compiled", ours_step="ours, compile_step")
SEEDS, RANKS, WINDOW = 3, 2, 50
SHAPE = dict(batch=8, context=64, layers=2, heads=4, dim=64)


def _train(rank: int, system: str, world: int, bf16: bool, seed: int, steps: int, folder: str) -> None:
    """Train, and write the losses, means over ranks, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{system}{bf16}{seed}", rank=rank, world_size=world)
    workload = gpt(**SHAPE)
    torch.manual_seed(seed)
    model = workload.build()
    prepared = systems.Prepared(model, model)
    if system != "one process":
        setup = systems.Setup(torch.device("cpu"), init_device_mesh("cpu", (world,)), bf16)
        prepared = systems.prepare(system, model, workload.blocks(model), setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    whole = prepared.whole_step(optimizer)

    def one(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if bf16 and system == "one process" else nullcontext():
            loss = prepared.forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = torch.zeros(steps)
    for step in range(steps):
        parts = [workload.batch(steps * seed + step, part) for part in ([rank] if world > 1 else range(RANKS))]
        losses[step] = (whole or one)(*(torch.cat(each) for each in zip(*parts, strict=True))).detach()
    dist.all_reduce(losses)
    if rank == 0:
        Path(folder, "losses").write_text(json.dumps((losses / world).tolist()))
    dist.destroy_process_group()


def curve(system: str, bf16: bool, seed: int, steps: int) -> list[float]:
    """The loss of each step, from processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        world = 1 if system == "one process" else RANKS
        spawn(_train, (system, world, bf16, seed, steps, folder), world)
        found: list[float] = json.loads(Path(folder, "losses").read_text())
    return found


def smooth(losses: list[float]) -> Tensor:
    """Means over `WINDOW` steps."""
    return torch.tensor(losses).unfold(0, WINDOW, 1).mean(1)


def of_one_process(curves: dict[str, list[float]]) -> Tensor:
    """Its smoothed curves, a row for each seed."""
    return torch.stack([smooth(curves[f"one process, seed {seed}"]) for seed in range(SEEDS)])


def rows(curves: dict[str, list[float]]) -> list[Found]:
    """A row for each way, from the curves of one precision."""
    alone = of_one_process(curves)
    spread = float((alone.amax(0) - alone.amin(0))[alone.shape[1] // 2 :].max())
    means = {name: smooth(losses) for name, losses in curves.items()}
    return [{"name": name, "loss": float(each[-1]), "apart": float((each - alone[0]).abs().max()), "spread": spread}
            for name, each in means.items()]  # fmt: skip


def draw(curves: dict[str, dict[str, list[float]]]) -> None:
    """Curves above, their distance from one process below; the band is where the seeds of one process are."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, len(curves), figsize=(10, 5), sharex=True, sharey="row", squeeze=False)
        for column, (precision, found) in enumerate(curves.items()):
            alone = of_one_process(found)
            at = range(WINDOW, WINDOW + alone.shape[1])
            for axes, base in ((panels[0][column], 0 * alone[0]), (panels[1][column], alone[0])):
                band = ((each - base).tolist() for each in (alone.amin(0), alone.amax(0)))
                axes.fill_between(at, *band, color="#9aa5b1", alpha=0.5, lw=0, label="one process, three seeds")
                for name, title in SYSTEMS.items():
                    style = dict(color=systems.SYSTEMS[name].colour, linewidth=1.2, label=title)
                    axes.plot(at, (smooth(found[title]) - base).tolist(), **style)
            panels[0][column].set_title(precision, loc="left")
            panels[1][column].set_xlabel("step")
        panels[0][0].set(ylabel=f"loss, mean of {WINDOW} steps")
        panels[1][0].set(ylabel="less that of one process")
        panels[0][-1].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(IMAGES / "convergence.png")


def main() -> None:
    """Print the table, write the curves and the picture."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1000)
    args = arguments.parse_args()
    runs = [(f"one process, seed {seed}", "one process", seed) for seed in range(SEEDS)]
    runs += [(title, system, 0) for system, title in SYSTEMS.items()]
    curves: dict[str, dict[str, Any]] = {}
    for precision in ("fp32", "bf16"):
        todo = {name: (system, precision == "bf16", seed, args.steps) for name, system, seed in runs}
        curves[precision] = {name: curve(*run) for name, run in todo.items()}
        for row in rows(curves[precision]):
            print(
                f"{precision} {row['name']:22} {row['loss']:8.4f} {row['apart']:9.1e} {row['spread']:8.4f}", flush=True
            )
    if not args.dry:
        kept = {precision: {name: [round(loss, 4) for loss in smooth(losses)[::10].tolist()]
                            for name, losses in found.items()} for precision, found in curves.items()}  # fmt: skip
        tables = {precision: rows(found) for precision, found in curves.items()}
        write("convergence", {"date": today(), "commit": commit(), "rows": tables, "curves": kept})
        draw(curves)
