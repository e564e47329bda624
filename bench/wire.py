"""Steps with wire formats on the emulated link: forward and backward of a compiled GPT, rank 0 of 8, beside FSDP2.

For each ratio of communication to computing, of the same model in full precision on a free link, the model is compiled
for that link with each wire, and measured. Seconds are those of CPU time that the process computes, and of transfers
that it waits for.

    step       ms of a forward and a backward
    relative   to that of full precision on the same link
    sent       MB that the rank sends in a step
"""

import statistics
from typing import Any

import torch

from bench import link
from bench.link import FREE, LINK
from bench.models import WORKLOADS
from bench.parts import link_for
from bench.report import parser, write
from fsdp_compile import Wire, fully_shard

WORLD = 8
WIRES: dict[str, Any] = {
    "full": None,
    "bf16": "bf16",
    "int8": "int8",
    "fp8": "fp8",
    "fp8 and bf16": Wire("fp8", "bf16"),
    "auto": "auto",
}


class Stepped:
    """A model with a wire, or blocks of FSDP2 compiled one by one (`wire` is "FSDP2")."""

    def __init__(self, name: str, model: str) -> None:
        self.workload, self.name, self.number = WORKLOADS[model](), name, 0
        torch.manual_seed(0)
        made = self.workload.build()
        if name == "FSDP2":
            from torch.distributed.fsdp import fully_shard as fully_shard_2

            for block in self.workload.blocks(made):
                fully_shard_2(block)
                block.compile(fullgraph=True)
            self.model: Any = fully_shard_2(made)
        else:
            self.model = fully_shard(made, wire=WIRES[name])
        self.run: Any = self.model

    def compile(self, latency: float, bandwidth: float) -> None:
        """From here on steps are planned for this link."""
        if self.name == "FSDP2":
            return
        torch._dynamo.reset()
        options = {"link": f"custom:{latency},{bandwidth}"}
        self.run = torch.compile(self.model, fullgraph=True, backend="fsdp_compile", options=options)

    def __call__(self) -> dict[str, float]:
        """Seconds of one step, and bytes sent."""
        batch = self.workload.batch(self.number, 0)
        self.number += 1
        LINK.reset()
        begin = LINK.clock()
        self.run(*batch).backward()
        seconds = LINK.clock() - begin
        self.model.zero_grad()
        return {"step": seconds, "sent": float(sum(call.nbytes for call in LINK.calls))}

    def median(self, number: int) -> dict[str, float]:
        """Of some steps; two that are not counted come first."""
        steps = [self() for _ in range(number + 2)][2:]
        return {key: statistics.median(each[key] for each in steps) for key in steps[0]}


def main() -> None:
    """Print a table and write `bench/results/wire.json`."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ratios", type=float, nargs="+", default=[0.3, 2.0, 4.0])
    arguments.add_argument("--wires", nargs="+", default=[*WIRES, "FSDP2"])
    arguments.add_argument("--model", default="gpt")
    args = arguments.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    link.start(WORLD, 0.0, FREE)
    LINK.count_cpu_time()
    full = Stepped("full", args.model)
    full.compile(2e-5, 1e9)
    free = full.median(args.rounds)["step"]
    LINK.reset()
    full()
    sent = LINK.summary()
    found: dict[str, dict[str, Any]] = {}
    for ratio in args.ratios:
        rows = found.setdefault(str(ratio), {})
        latency, bandwidth = link_for(ratio, free, sent)
        for name in args.wires:
            stepped = Stepped(name, args.model)
            LINK.configure(0.0, FREE)
            stepped.compile(latency, bandwidth)
            stepped()
            LINK.configure(latency, bandwidth)
            rows[name] = stepped.median(args.rounds)
            relative = rows[name]["step"] / rows["full"]["step"]
            print(f"{ratio} {name:14} step {rows[name]['step'] * 1e3:8.1f}  relative {relative:5.2f}  "
                  f"sent {rows[name]['sent'] / 1e6:7.1f}", flush=True)  # fmt: skip
    if not args.dry:
        write("wire", {"free": free, "rows": found})
