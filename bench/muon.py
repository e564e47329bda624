"""Steps with Muon on the emulated link: `python -m bench muon` (about ten minutes on two cores).

One process plays rank 0 of 8 ranks, which train the GPT of the other parts: Muon for the matrices of its blocks, AdamW
for the rest. CPU seconds of the process count, and those of transfers that are waited for, so that other programs do
not matter. Systems take turns, in an order that changes; figures are medians over rounds.

    by_owner        the compiled model, by_owner over Muon, AdamW
    eager           the compiled model, torch.optim.Muon's own step, AdamW
    step            compile_step(model, [muon, adamw])
    in_backward     the same, where updates, and exchanges of matrices, begin in backward
    fsdp2           FSDP2, blocks compiled: every rank gathers each matrix and computes it, as people write it

`--memory` prints the bytes of parameters, of the optimizers' state and of what they keep, and the most that lives
beside these and the gradients while Muon steps. `--host-time`: CPU time of the optimizer's part
(muon_host_time.py).
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim import AdamW, Muon, Optimizer

from bench import link, muon_host_time
from bench.link import FREE, LINK
from bench.models import WORKLOADS, blocks_of
from bench.parts import link_for
from bench.systems.fsdp2 import overlap
from fsdp_compile import compile_step
from fsdp_compile.api import shard_module
from fsdp_compile.compare.memory import curve, resident, states_of
from fsdp_compile.compare.rounds import rotated
from fsdp_compile.optim import by_owner

Step = Callable[[Tensor, Tensor], Any]
KINDS = ("by_owner", "eager", "step", "in_backward", "fsdp2")


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of blocks, and all other parameters."""
    blocks = dict.fromkeys(param for block in blocks_of(model) for param in block.parameters() if param.dim() == 2)
    return list(blocks), [param for param in model.parameters() if param not in blocks]  # in the model's order


class GatheredMuon(Optimizer):
    """Muon over DTensors as scripts have it: momentum is sharded, each rank gathers and computes each matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self._plain = Muon([nn.Parameter(torch.empty(1, 1))], lr=lr)  # its arithmetic, on what was gathered

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's returns a loss
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
                state["momentum_buffer"].lerp_(param.grad, 0.05)
                update = param.grad.lerp(state["momentum_buffer"], 0.95).full_tensor()
                param.mul_(1 - group["lr"] * 0.1)
                param.to_local().add_(self._orthogonal(update, param))

    def _orthogonal(self, update: Tensor, param: Any) -> Tensor:
        """This rank's rows of Muon's update."""
        stand_in = nn.Parameter(torch.zeros_like(update))
        stand_in.grad = update
        self._plain.param_groups[0].update(params=[stand_in], momentum=0.0, weight_decay=0.0)
        self._plain.state.clear()
        self._plain.step()
        rows = param.to_local().shape[0]
        return stand_in.detach()[:rows]


def loop(model: nn.Module, run: Any, optimizers: list[Optimizer], after: Callable[[], None] = lambda: None) -> Step:
    """A step as a script writes it."""

    def step(tokens: Tensor, targets: Tensor) -> Any:
        run(tokens, targets).backward()
        after()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()

    return step


class Bench:
    def __init__(self, world: int, model: str) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        link.start(world, 0.0, FREE)
        LINK.count_cpu_time()
        self.workload, self.number = WORKLOADS[model](), 0
        self.compute, self.sent = 0.0, dict[str, Any]()

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.workload.build()

    def _sharded(self) -> nn.Module:
        return shard_module(self._model(), forward_prefetch=True, reshard_after_forward="auto")

    def measure_link(self) -> None:
        """Find the seconds of the unsharded compiled model, and what the sharded one sends."""
        model: Any = torch.compile(self._model(), fullgraph=True)
        taken = []
        for _ in range(6):
            begin = LINK.clock()
            model(*self._batch()).backward()
            taken.append(LINK.clock() - begin)
        sharded = self._sharded()
        sharded(*self._batch()).backward()
        LINK.reset()
        sharded(*self._batch()).backward()
        self.compute, self.sent = statistics.median(taken[2:]), LINK.summary()

    def _batch(self) -> tuple[Tensor, Tensor]:
        self.number += 1
        return self.workload.batch(self.number, 0)

    def prepare(self, kind: str, options: dict[str, Any]) -> Step:
        """A system, planned for the link that `options` name."""
        if kind == "fsdp2":
            model = self._model()
            for block in blocks_of(model):
                block.compile(fullgraph=True)
                fsdp2(block)
            fsdp2(model)
            after = overlap(model, blocks_of(model))
            matrices, rest = halves(model)
            return loop(model, model, [GatheredMuon(matrices, lr=0.02), AdamW(rest, lr=1e-3)], after)
        model = self._sharded()
        matrices, rest = halves(model)
        if kind in ("step", "in_backward"):
            both = [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]
            return compile_step(model, both, update_in_backward=kind == "in_backward", options=options)
        run = torch.compile(model, fullgraph=True, backend="fsdp_compile", options=options)
        muon: Any = Muon(matrices, lr=0.02)
        if kind == "by_owner":
            muon = by_owner(matrices, lambda params: Muon(params, lr=0.02))
        return loop(model, run, [muon, AdamW(rest, lr=1e-3)])

    def measure(self, kinds: list[str], ratio: float, rounds: int, steps: int) -> dict[str, dict[str, float]]:
        """Medians of seconds, exposed seconds, and those of exchanges of matrices."""
        latency, bandwidth = link_for(ratio, self.compute, self.sent)
        torch._dynamo.reset()
        prepared = {kind: self.prepare(kind, {"link": f"custom:{latency},{bandwidth}"}) for kind in kinds}
        for step in prepared.values():
            for _ in range(3):
                step(*self._batch())
        LINK.configure(latency, bandwidth)
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for index in range(rounds):
            for kind in rotated(kinds, index):
                prepared[kind](*self._batch())
                found[kind] += [self._one(prepared[kind]) for _ in range(steps)]
        LINK.configure(0.0, FREE)
        keys = next(iter(found.values()))[0]
        return {kind: {key: statistics.median(each[key] for each in of) for key in keys} for kind, of in found.items()}

    def memory(self, kind: str) -> tuple[int, int]:
        """Bytes between steps, and the most beside them and the gradients in a step of Muon: by_owner or eager."""
        model = self._sharded()
        matrices, rest = halves(model)
        muon: Any = Muon(matrices, lr=0.02)
        if kind == "by_owner":
            muon = by_owner(matrices, lambda params: Muon(params, lr=0.02))
        adamw = AdamW(rest, lr=1e-3)
        step = loop(model, model, [muon, adamw])
        step(*self._batch())
        step(*self._batch())
        kept = muon.inner.param_groups[0]["params"] if kind == "by_owner" else []
        there = resident([*model.parameters(), *states_of(muon), *states_of(adamw), *kept])
        model(*self._batch()).backward()
        return there, max((total for _, total in curve(muon.step, torch.device("cpu"))), default=0)

    def _one(self, step: Step) -> dict[str, float]:
        LINK.forget()
        batch = self._batch()
        begin = LINK.clock()
        step(*batch)
        seconds = LINK.clock() - begin
        matrices = [call for call in LINK.calls if call.kind == "all_to_all" and call.issued >= begin]
        return {
            "seconds": seconds,
            "exposed": LINK.summary()["exposed"],
            "exchanges": sum(call.end - call.begin for call in matrices),
            "exchanges_exposed": sum(call.waited for call in matrices),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--model", default="gpt")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--host-time", action="store_true")
    args = parser.parse_args()
    if args.host_time:
        return muon_host_time.report(halves)
    bench = Bench(args.world, args.model)
    for kind in ("by_owner", "eager") if args.memory else ():
        there, above = bench.memory(kind)
        print(f"{kind:12} {there / 1e6:6.1f} MB between steps, at most {above / 1e6:.1f} MB more in a step of Muon")
    if args.memory:
        return
    bench.measure_link()
    for ratio in args.ratios:
        found = bench.measure(args.systems, ratio, args.rounds, args.steps)
        first = found.get("by_owner", next(iter(found.values())))["seconds"]
        print(f"link at {ratio}, {args.world} ranks: ms of a step, exposed, exchanges of matrices, of which exposed")
        for kind, each in found.items():
            row = "  ".join(f"{1000 * value:8.1f}" for value in each.values())
            print(f"  {kind:12} {row}  {each['seconds'] / first:5.2f} x by_owner", flush=True)
        print(json.dumps({"ratio": ratio, **found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
