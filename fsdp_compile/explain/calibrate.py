"""Measure this machine, and write what was measured as a hardware file.

    cases -> rounds: each case is timed once in every round, so that what disturbs the machine disturbs all alike
    the middle of its times -> the constants of Note [How operations are priced] that agree best with them

With several ranks, under torchrun, all of them time the collectives, and the first one writes the file.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compile.explain.ranks import process_group
from fsdp_compile.passes.cost.hardware import Hardware, Link, Source, with_figures
from fsdp_compile.passes.graph.prices import hardware_at
from fsdp_compile.passes.measure import fit_link, link_times, seconds_of

LEAST_ROUNDS = 5
BURST = 2e-3  # seconds that a case is repeated for in each round, at least

# Rows, inner dimension and columns of matrix products: what blocks of small and large transformers multiply.
PRODUCTS = {
    "cpu": [(m, k, n) for m in (256, 1024)
            for k, n in ((128, 512), (256, 256), (384, 1536), (1024, 1024), (1536, 384))],
    "cuda": [(m, k, n) for m in (2048, 8192)
             for k, n in ((1024, 4096), (2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096))],
}  # fmt: skip
LENGTHS = {"cpu": (64, 128, 256, 512), "cuda": (1024, 2048, 4096, 8192, 16384)}
HEADS = {"cpu": (4, 4, 64), "cuda": (1, 16, 128)}  # batch, heads, width of a head
CHAINS = {"cpu": (1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 22, 1 << 25, 1 << 28)}  # elements
UPDATE = {"cpu": 1 << 22, "cuda": 1 << 28}  # elements
LARGEST, COMING = 1 << 28, 600.0  # bytes of a collective that is timed; seconds to wait for other ranks
STEP_BLOCKS, STEP_RANKS = (2, 8), 8
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float32)}


@dataclass
class Case:
    """Something that is timed.

    Attributes:
        kind: what it measures: "product", "attention", "attention backward", "chain", "eager", "copy", "update",
            "launch" or "step".
        call: does it once.
        work: operations of products and attention, which is causal; bytes that the others read and write or send.
        size: the inner dimension of a product, the length of attention's sequence, or how many blocks a step has.
        dtype: of products and attention.
        times: seconds of one call, one value for each round.
    """

    kind: str
    call: Callable[[], object]
    work: float
    size: int = 0
    dtype: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of one call, over all rounds."""
        return midmean(self.times)


def calibrate(
    device_type: str | None = None,
    base: str | Hardware | None = None,
    seconds: float = 120,
    shard: Callable[[nn.Module], nn.Module] | None = None,
) -> tuple[Hardware, int]:
    """Measure this machine.

    Args:
        device_type: "cuda" or "cpu"; None: the GPU, if there is one.
        base: hardware, or its name, whose numbers stand where nothing is measured; None: by the name of the device.
        seconds: how long it takes, with what compiles first, but for a few rounds at least; at most 300.
        shard: shards a model in place; on a CPU, steps of small models then tell what blocks and steps take beside
            their kernels. A GPU computes while the host does that.

    Returns:
        The hardware, and this process's rank: under torchrun every rank takes part, and one file is to be written.

    Raises:
        ValueError: the device or the base is unknown, or `seconds` is not above 0 and at most 300.
    """
    end = time.perf_counter() + seconds
    if not 0 < seconds <= 300:
        raise ValueError(f"seconds: expected more than 0 and at most 300, found {seconds}")
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected cpu, as torch sees no GPU here, found cuda")
    at = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device("cpu")
    where = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if kind == "cuda":
        torch.cuda.set_device(at)
        where = torch.cuda.get_device_name(at)
    begin = hardware_at(at, base)
    source = Source("measured", f"fsdp-compile calibrate, torch {torch.__version__}, {where}")
    with process_group(STEP_RANKS) if kind == "cpu" and shard else nullcontext():
        cases = [*device_cases(at), *(step_cases(shard) if kind == "cpu" and shard else ())]
        Rounds(cases, at).run(end - time.perf_counter())
    made = fitted(cases, begin, source)
    if ranks > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        try:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            level = "network" if ranks > here else "node"
            assert dist.group.WORLD is not None
            link = fitted_link(
                link_times(dist.group.WORLD, at, LARGEST, COMING),
                getattr(made, level),
                f"{source.source}, {ranks} ranks",
                here if level == "network" else 1,
            )
            made = replace(made, network=link) if level == "network" else replace(made, node=link)
        finally:
            dist.destroy_process_group()
    return made, rank


# --- what is timed ----------------------------------------------------------------------------------------------------


def device_cases(device: torch.device) -> Iterator[Case]:
    """Cases for one device."""
    kind, names = device.type, {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES[device.type]}
    for dtype, name in names.items():
        for m, k, n in PRODUCTS[kind]:
            a, b = (torch.randn(rows, k, dtype=dtype, device=device) for rows in (m, n))
            yield Case("product", partial(F.linear, a, b), 2.0 * m * k * n, k, name)
    dtype, name = next(iter(names.items()))
    batch, heads, width = HEADS[kind]
    attend: Callable[..., Tensor] = partial(F.scaled_dot_product_attention, is_causal=True)
    for length in LENGTHS[kind]:
        shape = (batch, heads, length, width)
        inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        operations = 2.0 * batch * heads * length * length * width  # of both products, halved as it is causal
        out = attend(*inputs)
        back = partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)
        yield Case("attention", partial(torch.no_grad()(attend), *inputs), operations, length, name)
        yield Case("attention backward", back, 2.5 * operations, length, name)
    compiled = torch.compile(_chain, fullgraph=True)  # twice: for the first length, and for any
    for elements in CHAINS[kind]:
        x, y = (torch.randn(elements // 512, 512, dtype=dtype, device=device) for _ in range(2))
        yield Case("chain", partial(compiled, x, y), 4.0 * x.nbytes)
    first = torch.zeros(CHAINS[kind][-1], device=device)
    yield Case("eager", partial(torch.add, first, first), 3.0 * first.nbytes)
    yield Case("copy", partial(torch.empty_like(first).copy_, first), 2.0 * first.nbytes)
    weight = torch.nn.Parameter(torch.zeros(UPDATE[kind] // 1024, 1024, device=device))
    weight.grad = torch.zeros_like(weight)
    yield Case("update", torch.optim.AdamW([weight], foreach=True).step, 7.0 * weight.nbytes)  # p, m, v; and g read
    yield Case("launch", partial(torch.zeros(1, device=device).add_, 1.0), 1.0)


def _chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Fused loops as blocks have them: residual, normalization, and what a gradient needs of an activation."""
    total = x + F.gelu(y)
    return total, F.layer_norm(total, total.shape[-1:])


class Block(nn.Module):
    """A block of a transformer; also `fsdp-compile selfcheck` trains some."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down, self.heads = nn.Linear(4 * width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        """Of `x`, (batch, length, width), the same shape."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def step_cases(shard: Callable[[nn.Module], nn.Module]) -> Iterator[Case]:
    """Whole steps of models that compute next to nothing, on a process group that is there; size is their blocks."""
    x = torch.ones(1, 4, 16)

    def step(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for blocks in STEP_BLOCKS:
        model = shard(nn.Sequential(*(Block(16, 1) for _ in range(blocks))))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=True)
        yield Case("step", partial(step, torch.compile(model, fullgraph=True), optimizer), 1.0, blocks)


# --- timing -----------------------------------------------------------------------------------------------------------


class Rounds:
    """Cases that are timed alternately: in every round each of them for about `BURST` seconds.

    Args:
        cases: what to time; each gets one value in `times` for each round.
        device: where they run.
    """

    def __init__(self, cases: Sequence[Case], device: torch.device) -> None:
        self.cases, self.device, self.done = cases, device, 0
        for case in cases:
            _burst(case, 1, device)  # which may compile
        self.repeats = [max(1, math.ceil(BURST / max(_burst(case, 1, device), 1e-9))) for case in cases]

    def round(self) -> None:
        """Time each case once, in an order that is reversed from round to round."""
        order = list(zip(self.cases, self.repeats, strict=True))[:: 1 if self.done % 2 else -1]
        for case, repeats in order:
            case.times.append(_burst(case, repeats, self.device))
        self.done += 1

    def run(self, seconds: float) -> Sequence[Case]:
        """Rounds until `seconds` have passed, but at least `LEAST_ROUNDS`; the cases with their times."""
        end = time.perf_counter() + seconds
        while self.done < LEAST_ROUNDS or time.perf_counter() < end:
            self.round()
        return self.cases


def midmean(values: Sequence[float]) -> float:
    """The mean of the middle half: robust as a median, and of a sum nearly the sum of those of its terms."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def _burst(case: Case, repeats: int, device: torch.device) -> float:
    """Seconds of a call, of so many one after another.

    One thread is timed by the time that it computes: what other programs compute meanwhile does not count.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return seconds_of(case.call, device, time.process_time if alone else time.perf_counter, repeats)


# --- constants --------------------------------------------------------------------------------------------------------


def fitted(cases: Sequence[Case], base: Hardware, source: Source) -> Hardware:
    """`base` with the constants that agree best with the cases.

    The peak of an accelerator stays that of the data sheet, and efficiencies are parts of it; that of a CPU is the
    fastest product that was measured.
    """
    of: dict[str, list[Case]] = {}
    for case in cases:
        of.setdefault(case.kind, []).append(case)
    dtypes = list(dict.fromkeys(case.dtype for case in of["product"]))
    peak = dict(base.peak)
    if base.name == "cpu" or not set(dtypes) <= set(peak):
        peak |= {dtype: max(case.work / case.seconds for case in of["product"] if case.dtype == dtype)
                 for dtype in dtypes}  # fmt: skip
    main = [case for case in of["product"] if case.dtype == dtypes[0]]
    (efficiency, ramp), (forward, forward_ramp) = (
        _fit_ramp([(case.work / peak[case.dtype], case.size, case.seconds) for case in those])
        for those in (main, of["attention"])
    )
    backward = [case.seconds / (case.work / peak[case.dtype] / forward * (1 + forward_ramp / case.size))
                for case in of["attention backward"]]  # fmt: skip
    beside: dict[str, float] = {}
    if "step" in of:
        (few, short), (many, long) = sorted((case.size, case.seconds) for case in of["step"])
        each = max(0.0, (long - short) / (many - few))  # of a block: half of it in each direction
        beside = {"layer_seconds": each / 2, "step_seconds": max(0.0, short - few * each)}
    rates = {kind: statistics.median(case.work / case.seconds for case in of[kind])
             for kind in ("copy", "chain", "eager", "update")}  # fmt: skip
    bandwidth = rates["copy"] if base.name == "cpu" else base.bandwidth
    return with_figures(
        base,
        source,
        peak=peak,
        bandwidth=bandwidth,
        product_efficiency=efficiency,
        product_ramp=ramp,
        attention_efficiency=forward,
        attention_ramp=forward_ramp,
        attention_backward=statistics.median(backward),
        chain_efficiency=rates["chain"] / bandwidth,
        eager_efficiency=rates["eager"] / bandwidth,
        update_efficiency=rates["update"] / bandwidth,
        kernel_seconds=of["launch"][0].seconds,
        **beside,
    )


def fitted_link(times: Sequence[tuple[float, float]], base: Link, source: str, ranks_per_node: int = 1) -> Link:
    """`base` with the latency and bandwidth that agree best with bytes that each rank sends and seconds.

    Between nodes there are as many rings as ranks of a node, and each takes its part.
    """
    latency, bandwidth = fit_link([(sent / ranks_per_node, seconds) for sent, seconds in times])
    return replace(base, latency=latency, hop=0.0, bandwidth=bandwidth, protocols=(), ramp=(), origin="measured",
                   source=source)  # fmt: skip


def _fit_ramp(points: Sequence[tuple[float, int, float]]) -> tuple[float, float]:
    """Efficiency and ramp of `seconds = ideal / efficiency * (1 + ramp / size)`, by least squares of logarithms.

    Points are ideal seconds, size and measured seconds of each case.
    """
    best = (math.inf, 1.0, 0.0)
    for ramp in [0.0, *(2 ** (step / 4) for step in range(0, 49))]:
        logs = [math.log(ideal * (1 + ramp / size) / seconds) for ideal, size, seconds in points]
        mean = statistics.fmean(logs)
        best = min(best, (sum((each - mean) ** 2 for each in logs), math.exp(mean), ramp))
    return best[1], best[2]
