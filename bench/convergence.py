"""Loss curves of a small GPT on the text that Python ships: one process, FSDP2, ours eagerly, compiled, compile_step.

One process trains on the whole batch with three seeds, whose spread is the measure; the others on two gloo ranks, each
on its part of the batch, with the first seed. In bf16 one process uses autocast; parameters stay in float32.

    loss        mean of the last 50 steps
    apart       the most by which the mean of 50 steps differs from that of one process with the first seed
    spread      the most by which such means of one process differ between seeds, over the last half
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from bench import systems
from bench.models import gpt
from bench.pictures import IMAGES, STYLE, plt
from bench.report import Found, commit, parser, today, write
from bench.systems.ours import WIRES as WIRES_OF_OURS

SYSTEMS = dict(fsdp2="FSDP2", ours="ours, eager", ours_compiled="ours, compiled", ours_step="ours, compile_step")
WIRES = {f"ours:{name}": f"wire {name}" for name in WIRES_OF_OURS}
Run = tuple[str, str, int]  # title, system, seed
SEEDS, RANKS, WINDOW = 3, 2, 50
Curves = dict[str, Tensor]
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
        mesh, option = init_device_mesh("cpu", (world,)), system.partition(":")[2]
        setup = systems.Setup(torch.device("cpu"), mesh, bf16, option=option)
        prepared = systems.prepare(system, model, workload.blocks(model), setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    whole = prepared.whole_step(optimizer)

    def one(*batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16 and system == "one process"):
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


def curve(system: str, bf16: bool, seed: int, steps: int) -> Tensor:
    """The mean loss of each `WINDOW` steps, from processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        world = 1 if system == "one process" else RANKS
        spawn(_train, (system, world, bf16, seed, steps, folder), world)
        return torch.tensor(json.loads(Path(folder, "losses").read_text())).unfold(0, WINDOW, 1).mean(1)


def rows(curves: Curves) -> list[Found]:
    """A row for each way, from the curves of one precision."""
    alone = torch.stack(list(curves.values())[:SEEDS])
    spread = float((alone.amax(0) - alone.amin(0))[alone.shape[1] // 2 :].max())
    return [{"name": name, "loss": float(each[-1]), "apart": float((each - alone[0]).abs().max()), "spread": spread}
            for name, each in curves.items()]  # fmt: skip


def draw(precisions: dict[str, Curves]) -> None:
    """Curves above, their distance from one process below; the band is where the seeds of one process are."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(2, len(precisions), figsize=(10, 5), sharex=True, sharey="row", squeeze=False)
        for (above, below), (precision, curves) in zip(panels.T, precisions.items(), strict=True):
            alone = torch.stack(list(curves.values())[:SEEDS])
            at = range(WINDOW, WINDOW + alone.shape[1])
            for axes, base in ((above, 0 * alone[0]), (below, alone[0])):
                band = ((each - base).tolist() for each in (alone.amin(0), alone.amax(0)))
                axes.fill_between(at, *band, color="#9aa5b1", alpha=0.5, lw=0, label="one process, three seeds")
                for name, title in SYSTEMS.items():
                    axes.plot(at, (curves[title] - base).tolist(), c=systems.SYSTEMS[name].colour, lw=1.2, label=title)
            above.set_title(precision, loc="left")
            below.set_xlabel("step")
        panels[0][0].set(ylabel=f"loss, mean of {WINDOW} steps")
        panels[1][0].set(ylabel="less that of one process")
        panels[0][-1].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(IMAGES / "convergence.png")


def all_runs(wires_alone: bool) -> list[Run]:
    """What trains, one process with each seed first."""
    runs = [(f"one process, seed {seed}", "one process", seed) for seed in range(SEEDS)]
    runs += [(title, system, 0) for system, title in SYSTEMS.items() if not wires_alone]
    return runs + [(f"{title}, seed {seed}", system, seed) for system, title in WIRES.items() for seed in range(SEEDS)]


def main() -> None:
    """Print the table, write the curves and the picture."""
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--wires", action="store_true", help="wire formats alone, in float32")
    args = arguments.parse_args()
    found: dict[str, Curves] = {}
    for precision in ("fp32",) if args.wires else ("fp32", "bf16"):
        curves = found[precision] = {}
        for name, way, seed in all_runs(args.wires):
            curves[name] = curve(way, precision == "bf16", seed, args.steps)
            print(f"{precision} {name:45} {float(curves[name][-1]):8.4f}", flush=True)
        for row in rows(curves):
            print(f"{precision} {row['name']:45} {row['loss']:8.4f} {row['apart']:9.1e} {row['spread']:8.4f}")
    if args.wires and not args.dry:
        tables = {precision: rows(curves) for precision, curves in found.items()}
        write("convergence_wires", {"date": today(), "commit": commit(), "rows": tables})
    elif not args.dry:
        kept = {precision: {name: [round(loss, 4) for loss in each[::10].tolist()] for name, each in curves.items()}
                for precision, curves in found.items()}  # fmt: skip
        tables = {precision: rows(curves) for precision, curves in found.items()}
        write("convergence", {"date": today(), "commit": commit(), "rows": tables, "curves": kept})
        draw(found)
