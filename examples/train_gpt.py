"""Train a small GPT over bytes with sharded parameters, first eagerly, then compiled, and compare the two runs.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py
    python examples/train_gpt.py --steps 20            # one process
    torchrun ... examples/train_gpt.py --save checkpoints            # and after a crash, the same with --resume

Both runs start from the same weights and see the same batches. Rank 0 prints a table and writes a picture of both loss
curves; the exit status is 1 if the curves disagree.
"""

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from data import Batches, load_text
from gpt import GPT, GPTConfig
from measures import PeakMemory, Progress, Run, timed
from options import parse_arguments
from outcome import comparison, disagreement, draw, table
from resume import Checkpoints
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fsdp_compile import fully_shard


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


def train(compiled: bool, text: Tensor, args: argparse.Namespace, device: torch.device) -> Run:
    """One run, from fresh weights or a checkpoint. Only the step is timed: no batch, mean, progress line or saving."""
    memory, label = PeakMemory(device), "compiled" if compiled else "eager"
    config = GPTConfig(layers=args.layers, checkpointing=args.checkpointing)
    model, optimizer, scheduler = build(config, args, device)
    step = training_step(
        torch.compile(model, backend=args.backend) if compiled else model, optimizer, args.bf16, device
    )
    batches = Batches(text, config.context, args)
    run = Run([], [], dist.get_world_size() * args.batch * config.context, 0.0)
    states = Checkpoints(model, optimizer, scheduler, batches, run, args.save and args.save / label)
    if args.resume:
        states.load()
    begun, progress = len(run.losses), Progress(label, run, args.steps)
    while len(run.losses) < args.steps:
        x, y = batches.next()
        loss, seconds = timed(step, x.to(device), y.to(device))
        scheduler.step()
        run.seconds.append(seconds)
        run.losses.append(mean_over_ranks(loss))
        if len(run.losses) == begun + 1:
            memory.forget()
        if len(run.losses) % args.every == 0 or len(run.losses) == args.steps:
            states.save()
    progress.end()
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


def mean_over_ranks(loss: Tensor) -> float:
    """Average a scalar; it also makes the ranks start the next step together."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def report(runs: dict[str, Run], args: argparse.Namespace, device: torch.device) -> None:
    """Print the table, write the picture, and say in a sentence what was compared."""
    print(table(runs, device))
    draw(runs, args.out)
    print(f"wrote {args.out}")
    print(comparison(runs, dist.get_world_size(), device), flush=True)


def main() -> None:
    """Run, report, compare."""
    args = parse_arguments(__doc__)
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
