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
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

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
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass
class Case:
    """Something that is timed.

    Attributes:
        kind: what it measures: "product", "attention", "attention backward", "chain", "eager", "copy", "update" or
            "launch".
        call: does it once.
        work: operations of products and attention, which is causal; bytes that the others read and write or send.
        size: the inner dimension of a product, or the length of attention's sequence.
        dtype: of products and attention.
        seconds: of one call, as `time_in_rounds` has found.
    """

    kind: str
    call: Callable[[], object]
    work: float
    size: int = 0
    dtype: str = ""
    seconds: float = 0.0


def calibrate(
    device_type: str | None = None,
    base: str | Hardware | None = None,
    seconds: float = 120,
) -> tuple[Hardware, int]:
    """Measure this machine.

    Args:
        device_type: "cuda" or "cpu"; None: the GPU, if there is one.
        base: hardware, or its name, whose numbers stand where nothing is measured; None: by the name of the device.
        seconds: how long it takes, with what compiles first, but for a few rounds at least; at most 300.

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
    cases = [*device_cases(at)]
    time_in_rounds(cases, at, end - time.perf_counter())
    made = fitted(cases, begin, source)
    if ranks > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        try:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            level, rings = ("network", here) if ranks > here else ("node", 1)
            assert dist.group.WORLD is not None
            times = link_times(dist.group.WORLD, at, LARGEST, COMING)
            found = fitted_link(times, getattr(made, level), f"{source.source}, {ranks} ranks", rings)
            made = replace(made, **{level: found})  # type: ignore[arg-type]  # a field of links
        finally:
            dist.destroy_process_group()
    return made, rank


# --- what is timed ----------------------------------------------------------------------------------------------------


def device_cases(device: torch.device) -> Iterator[Case]:
    """Cases for one device."""
    kind, dtype = device.type, DTYPES[device.type]
    name = str(dtype).removeprefix("torch.")
    for m, k, n in PRODUCTS[kind]:
        a, b = (torch.randn(rows, k, dtype=dtype, device=device) for rows in (m, n))
        yield Case("product", partial(F.linear, a, b), 2.0 * m * k * n, k, name)
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


# --- timing -----------------------------------------------------------------------------------------------------------


def time_in_rounds(cases: Sequence[Case], device: torch.device, seconds: float) -> None:
    """Time cases alternately, in every round each for about `BURST` seconds; the median of its rounds counts.

    The order is reversed from round to round. There are at least `LEAST_ROUNDS`, and more until `seconds` have passed.
    One thread is timed by the time that it computes: what other programs compute meanwhile does not count.
    """
    end = time.perf_counter() + seconds
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    timed = partial(seconds_of, device=device, clock=time.process_time if alone else time.perf_counter)
    for case in cases:
        timed(case.call)  # which may compile
    repeats = [max(1, math.ceil(BURST / max(timed(case.call), 1e-9))) for case in cases]
    times: list[list[float]] = [[] for _ in cases]
    while len(times[-1]) < LEAST_ROUNDS or time.perf_counter() < end:
        for at in range(len(cases))[:: 1 if len(times[-1]) % 2 else -1]:
            times[at].append(timed(cases[at].call, repeats=repeats[at]))
    for case, found in zip(cases, times, strict=True):
        case.seconds = statistics.median(found)


# --- constants --------------------------------------------------------------------------------------------------------


def fitted(cases: Sequence[Case], base: Hardware, source: Source) -> Hardware:
    """`base` with the constants that agree best with the cases.

    The peak of an accelerator stays that of the data sheet, and efficiencies are parts of it; that of a CPU is the
    fastest product that was measured.
    """
    of: dict[str, list[Case]] = {}
    for case in cases:
        of.setdefault(case.kind, []).append(case)
    peak, dtype = dict(base.peak), of["product"][0].dtype
    if base.name == "cpu" or dtype not in peak:
        peak[dtype] = max(case.work / case.seconds for case in of["product"])
    (efficiency, ramp), (forward, forward_ramp) = (
        _fit_ramp([(case.work / peak[case.dtype], case.size, case.seconds) for case in those])
        for those in (of["product"], of["attention"])
    )
    backward = [case.seconds / (case.work / peak[case.dtype] / forward * (1 + forward_ramp / case.size))
                for case in of["attention backward"]]  # fmt: skip
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
