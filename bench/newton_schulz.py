"""Whether compiling Muon's arithmetic pays on this machine: `python -m bench muon --newton-schulz`.

For each shape of a matrix, one thread: milliseconds of CPU time of `torch.optim.Muon.step` on one plain parameter, as
it is and by `torch.compile`, and of the matrix products in it alone; seconds to compile; by how much updates differ,
also without momentum and in bfloat16, where that of Newton-Schulz alone is seen. Before that, whether it pays to
multiply several matrices of one shape at once.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Muon

SHAPES = ((384, 384), (1152, 384), (1536, 384), (384, 1536), (64, 16))  # of the GPT of this benchmark, and a tiny one
STEPS, REPEATS = 5, 15  # of Newton-Schulz; of measurements
BATCH = 4  # matrices whose products are one


def milliseconds(call: Callable[[], Any]) -> float:
    """Median CPU time of a call."""
    taken = []
    for _ in range(REPEATS):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return 1000 * statistics.median(taken)


def products(x: Tensor) -> None:
    """The matrix products of Newton-Schulz, with operands as good as any."""
    for _ in range(STEPS):
        gram = x @ x.T
        torch.addmm(x, torch.addmm(gram, gram, gram), x)


def difference(gradient: Tensor, **options: Any) -> tuple[Muon, Any, float, float]:
    """A step as it is and compiled; seconds to compile; the largest difference of updates, by the largest element."""
    params = [nn.Parameter(torch.zeros_like(gradient)) for _ in range(2)]
    muons = [Muon([param], lr=1.0, weight_decay=0.0, ns_steps=STEPS, **options) for param in params]
    compiled: Any = torch.compile(muons[1].step)
    for param in params:
        param.grad = gradient.clone()
    muons[0].step()
    begin = time.perf_counter()
    compiled()
    seconds = time.perf_counter() - begin
    eager, other = (param.detach() for param in params)
    return muons[0], compiled, seconds, float((eager - other).abs().max() / eager.abs().max())


def compare(shape: tuple[int, int]) -> str:
    """A line of the table."""
    torch._dynamo.reset()
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    muon, compiled, seconds, differs = difference(gradient)
    alone = difference(gradient.bfloat16(), momentum=0.0, nesterov=False)[3]
    low = gradient if shape[0] <= shape[1] else gradient.T
    taken = [milliseconds(muon.step), milliseconds(compiled), milliseconds(lambda: products(low.bfloat16()))]
    row = "  ".join(f"{each:8.2f}" for each in (*taken, seconds))
    return f"{shape!s:12} {row}  {differs:10.1e}  {alone:10.1e}"


def one_by_one_and_batched(shape: tuple[int, int]) -> str:
    """A line about the three products of a step of Newton-Schulz: of one matrix, and of four at once, each."""
    x = torch.randn(min(shape), max(shape), generator=torch.Generator().manual_seed(0)).bfloat16()
    x /= x.norm()
    gram = x @ x.T
    many, grams = torch.stack([x] * BATCH), torch.stack([gram] * BATCH)
    single: list[Callable[[], Tensor]] = [
        lambda: x @ x.T, lambda: torch.addmm(gram, gram, gram), lambda: torch.addmm(x, gram, x)
    ]  # fmt: skip
    batched: list[Callable[[], Tensor]] = [
        lambda: torch.bmm(many, many.mT), lambda: torch.baddbmm(grams, grams, grams),
        lambda: torch.baddbmm(many, grams, many),
    ]  # fmt: skip
    taken, at_once = list(map(milliseconds, single)), [milliseconds(each) / BATCH for each in batched]
    rows, columns = x.shape
    flops = 2 * rows * rows * (2 * columns + rows)
    same = all(several()[0].equal(one()) for one, several in zip(single, batched, strict=True))
    row = "  ".join(f"{each:5.2f}" for each in (*taken, *at_once))
    return f"{shape!s:12} {row}  {flops / sum(taken) / 1e6:6.0f}  {same}"


def report() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    print(f"shape        ms of gram, its square, update; of {BATCH} at once, each; Gflop/s of one; same bits")
    for shape in SHAPES:
        print(one_by_one_and_batched(shape), flush=True)
    print("shape        ms eager  compiled  products  s to compile  differs by  Newton-Schulz alone")
    for shape in SHAPES:
        print(compare(shape), flush=True)
