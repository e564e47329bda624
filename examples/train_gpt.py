"""Train a small GPT over bytes with sharded parameters, first eagerly, then compiled, and compare the two runs.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py --steps 20            # one process
    torchrun ... examples/train_gpt.py --save checkpoints            # and after a crash, the same with --resume

Both runs start from the same weights and see the same batches. Rank 0 prints a table and writes a picture of both loss
curves; the exit status is 1 if the curves disagree.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fsdp_compile import checkpoint, fully_shard

TOLERANCE = {False: (1e-3, 2e-2), True: (2e-2, 5e-2)}  # bf16 -> relative, over the first 20 steps and at the end
WARM_UP = 3  # steps left out of the median

# --- what to run ------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Read the command line; every refusal says what was found and what to do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--data", type=Path, metavar="FILE", help="train on its bytes (default: the text of Python's own help)")
    option("--steps", type=int, default=60, help="steps of each run (default: %(default)s)")
    option("--batch", type=int, default=4, help="sequences per rank and step (default: %(default)s)")
    option("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: %(default)s)")
    option("--seed", type=int, default=0, help="of the weights and of the batches (default: %(default)s)")
    option("--eager-only", action="store_true", help="leave out the compiled run")
    option("--compile-only", action="store_true", help="leave out the eager run")
    option("--backend", default="inductor", help="torch.compile's backend (default: %(default)s)")
    option("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where each rank has a GPU")
    option("--bf16", action="store_true", help=bf16_help())
    option("--checkpointing", action="store_true", help="recompute each block's activations in backward")
    option("--warmup", type=int, default=0, help="steps over which the learning rate rises (default: %(default)s)")
    option("--save", type=Path, metavar="FOLDER", help="save checkpoints there, the last two of each run")
    option("--every", type=int, default=20, help="steps from one checkpoint to the next (default: %(default)s)")
    option("--resume", action="store_true", help="go on from the newest checkpoints in --save, if there are any")
    option("--out", type=Path, default=Path("train_gpt.png"), metavar="PNG", help="picture (default: %(default)s)")
    args = parser.parse_args()
    check(args)
    return args


def bf16_help() -> str:
    """Say which tolerance holds with and without rounding to bfloat16."""
    (early, end), (early16, end16) = TOLERANCE[False], TOLERANCE[True]
    return (
        f"compute in bfloat16 (autocast); the two losses may then differ by {early16:.0%}% in the first 20 steps and "
        f"{end16:.0%}% at the end (mean of the last 5), instead of {early:.1%}% and {end:.0%}%"
    )


def check(args: argparse.Namespace) -> None:
    """Refuse, before any process group exists, what cannot run."""
    ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if args.steps < 1 or args.batch < 1:
        refuse(f"--steps and --batch must be at least 1, got --steps {args.steps} --batch {args.batch}")
    if args.every < 1 or args.warmup < 0:
        refuse(f"--every must be at least 1 and --warmup at least 0, got --every {args.every} --warmup {args.warmup}")
    if args.resume and not args.save:
        refuse("--resume needs --save FOLDER, to know from where")
    if args.eager_only and args.compile_only:
        refuse("--eager-only with --compile-only leaves nothing to run; give at most one of them")
    if args.data and not args.data.is_file():
        refuse(f"--data {args.data}: no such file")
    if args.device == "cuda" and gpus < ranks:
        refuse(f"--device cuda: found {gpus} GPUs for {ranks} ranks on this machine, each needs one; try --device cpu")
    if not args.out.absolute().parent.is_dir():
        refuse(f"--out {args.out}: its folder does not exist")


def refuse(message: str) -> NoReturn:
    """End the program; every rank says why, for torchrun stops the others as soon as one has ended."""
    print(f"train_gpt.py: error: {message}", file=sys.stderr)
    sys.exit(2)


# --- where to run -----------------------------------------------------------------------------------------------------


def start(choice: str) -> torch.device:
    """Join the process group that torchrun announced, or make one of a single rank, and return this rank's device."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in alone.items() if "RANK" not in os.environ else ():
        os.environ[name] = value
    if choice == "cpu" or torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


# --- what to learn ----------------------------------------------------------------------------------------------------


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


# --- train ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one run of training left behind on this rank."""

    losses: list[float]  # (steps,) mean over ranks
    seconds: list[float]  # (steps,)
    tokens: int  # per step, all ranks
    peak: float  # MB

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first few where there are enough."""
        return statistics.median(self.seconds[WARM_UP:] or self.seconds)

    @property
    def speed(self) -> float:
        """Tokens per second of the median step, all ranks together."""
        return self.tokens / self.step


def train(compiled: bool, text: Tensor, args: argparse.Namespace, device: torch.device) -> Run:
    """One run, from fresh weights or a checkpoint. Only the step is timed: no batch, mean, progress line or saving."""
    memory, label = PeakMemory(device), "compiled" if compiled else "eager"
    config = GPTConfig(checkpointing=args.checkpointing)
    model, optimizer, scheduler = build(config, args, device)
    step = training_step(
        torch.compile(model, backend=args.backend) if compiled else model, optimizer, args.bf16, device
    )
    batches = Batches(text, config.context, args)
    run = Run([], [], dist.get_world_size() * args.batch * config.context, 0.0)
    states = Checkpoints(model, optimizer, scheduler, batches, run, args.save and args.save / label)
    if args.resume:
        states.load()
    begun = len(run.losses)
    progress(label, run, args.steps)
    while len(run.losses) < args.steps:
        x, y = batches.next()
        loss, seconds = timed(step, x.to(device), y.to(device))
        scheduler.step()
        run.seconds.append(seconds)
        run.losses.append(mean_over_ranks(loss))
        progress(label, run, args.steps)
        if len(run.losses) == begun + 1:
            memory.forget()
        if len(run.losses) % args.every == 0 or len(run.losses) == args.steps:
            states.save()
    run.peak = memory.stop()
    return run


def build(
    config: GPTConfig, args: argparse.Namespace, device: torch.device
) -> tuple[GPT, torch.optim.Optimizer, LambdaLR]:
    """The model, sharded in place, its optimizer and the schedule of its learning rate: all that sharding asks for."""
    torch.manual_seed(args.seed)  # every rank starts from the same weights
    model = fully_shard(GPT(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    return model, optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, args.warmup)))


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


def training_step(
    model: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, bf16: bool, device: torch.device
) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward, backward and update; returns this rank's loss once the device has finished."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = model(x, y)  # ()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return loss.detach()

    return step


def timed(step: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Run a step; return its loss and the wall time it took."""
    begin = time.perf_counter()
    loss = step(x, y)
    return loss, time.perf_counter() - begin


def mean_over_ranks(loss: Tensor) -> float:
    """Average a scalar; it also makes the ranks start the next step together."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def progress(label: str, run: Run, steps: int) -> None:
    """Redraw one line on rank 0's terminal; write nothing where stderr is no terminal."""
    if dist.get_rank() != 0 or not sys.stderr.isatty():
        return
    done, bar = len(run.losses), "#" * (30 * len(run.losses) // steps)
    said = f"loss {run.losses[-1]:.3f}  {run.tokens / run.seconds[-1]:8,.0f} tokens/s" if done else "first step ..."
    line = f"\r{label:>8} [{bar:<30}] {done}/{steps}  {said:<32}"
    print(line, end="\n" if done == steps else "", file=sys.stderr, flush=True)


class PeakMemory:
    """Peak memory of this process since `forget`: CUDA's allocator knows it, on a CPU a thread samples /proc."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.done, self.peak = device.type == "cuda", threading.Event(), 0
        give_back_memory()
        self.before = 0 if self.cuda else resident_bytes()
        self.sampler = threading.Thread(target=self._sample, daemon=True)
        if not self.cuda:
            self.sampler.start()

    def _sample(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, resident_bytes())

    def forget(self) -> None:
        """Start again after the first step: what compiling took is not counted, what it left behind is."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.peak = 0

    def stop(self) -> float:
        """The peak in MB; on a CPU less what the process held before."""
        self.done.set()
        if self.cuda:
            return torch.cuda.max_memory_allocated() / 1e6
        self.sampler.join()
        return (max(self.peak, resident_bytes()) - self.before) / 1e6


def resident_bytes() -> int:
    """Resident set of this process, read from /proc; 0 where there is none."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def give_back_memory() -> None:
    """Return an earlier run's freed memory to the system, so that the next run's growth is its own."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):  # glibc
        ctypes.CDLL(None).malloc_trim(0)


# --- what came out ----------------------------------------------------------------------------------------------------


def table(runs: dict[str, Run], device: torch.device) -> str:
    """One column per run, one row per figure, all of rank 0."""
    titles = [
        "",
        "compile, s (first step less median)",
        "median step, ms",
        "tokens/s, all ranks",
        f"peak memory from step 2, MB ({'allocated' if device.type == 'cuda' else 'growth of resident set'})",
        "final loss",
    ]
    width = max(map(len, titles))
    rows = zip(titles, *(column(name, run) for name, run in runs.items()), strict=True)
    return "\n".join(f"{title:<{width}}" + "".join(f"{cell:>12}" for cell in cells) for title, *cells in rows)


def column(name: str, run: Run) -> list[str]:
    """The figures of one run, in the order of the table's titles."""
    compiling = f"{run.seconds[0] - run.step:.1f}" if name == "compiled" else "-"
    return [name, compiling, f"{1e3 * run.step:.1f}", f"{run.speed:,.0f}", f"{run.peak:,.0f}", f"{run.losses[-1]:.4f}"]


LOOK = {  # wide and pale below, thin and dark above: both are seen where they coincide
    "eager": {"color": "#f6b67f", "linewidth": 5, "marker": "o", "markersize": 5},
    "compiled": {"color": "#1f4e79", "linewidth": 1.5, "marker": ".", "markersize": 4},
}


def draw(runs: dict[str, Run], path: Path) -> None:
    """Loss curves on the left, throughputs on the right."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    draw_losses(left, runs)
    draw_speeds(right, runs)
    figure.savefig(path, dpi=150)


def draw_losses(axes: Axes, runs: dict[str, Run]) -> None:
    """One line per run over the steps."""
    for name, run in runs.items():
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=name, **LOOK[name])
    axes.set_title("Training loss", loc="left")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per byte")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)


def draw_speeds(axes: Axes, runs: dict[str, Run]) -> None:
    """One bar per run, its figure above it."""
    speeds = [run.speed for run in runs.values()]
    bars = axes.bar(list(runs), speeds, width=0.55, color=[LOOK[name]["color"] for name in runs])
    axes.bar_label(bars, [f"{speed:,.0f}" for speed in speeds], padding=3)
    axes.set_title("Throughput", loc="left")
    axes.set_ylabel("tokens/s, all ranks, median step")
    axes.margins(x=0.3, y=0.12)


def disagreement(eager: Run, compiled: Run, bf16: bool) -> str | None:
    """Say where the curves part, or None: rounding may move a loss by the tolerance, a wrong gradient moves it more."""
    early, end = TOLERANCE[bf16]
    for step, (a, b) in enumerate(zip(eager.losses[:20], compiled.losses[:20], strict=True), 1):
        if not abs(a - b) <= early * abs(a):  # false for nan too
            return f"step {step}: eager loss {a:.6f}, compiled {b:.6f}, more than {early:.1%} apart"
    a, b = (statistics.mean(run.losses[-5:]) for run in (eager, compiled))
    if not abs(a - b) <= end * abs(a):
        return f"mean of the last 5 losses: eager {a:.6f}, compiled {b:.6f}, more than {end:.0%} apart"
    return None


def report(runs: dict[str, Run], args: argparse.Namespace, device: torch.device) -> None:
    """Print the table and write the picture."""
    print(table(runs, device))
    draw(runs, args.out)
    print(f"wrote {args.out}", flush=True)


def main() -> None:
    """Run, report, compare."""
    args = parse_arguments()
    text = load_text(args.data, GPTConfig().context)
    device = start(args.device)
    first = dist.get_rank() == 0
    if first:
        print(f"{dist.get_world_size()} rank(s) on {device}, {args.steps} steps, batch {args.batch} each", flush=True)
    wanted = {"eager": not args.compile_only, "compiled": not args.eager_only}
    runs = {name: train(name == "compiled", text, args, device) for name in wanted if wanted[name]}
    if first:
        report(runs, args, device)
    parted = disagreement(runs["eager"], runs["compiled"], args.bf16) if len(runs) == 2 else None
    if parted and first:
        print(f"train_gpt.py: error: the loss curves disagree at {parted}", file=sys.stderr, flush=True)
    dist.barrier()  # rank 0 has said it all before any rank ends with an error, at which torchrun stops the others
    dist.destroy_process_group()
    sys.exit(1 if parted else 0)


if __name__ == "__main__":
    main()
