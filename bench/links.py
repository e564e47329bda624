"""Seconds of collectives by the hardware files beside a table of NCCL's own prices.

`runs/data/nccl_model.csv` was computed with a public port of NCCL's tuner (meta-pytorch/autoparallel, cost_models/
nccl_cost_model.py), which its authors fitted to nccl-tests on H100: within a node to measurements, between 2 to 32
nodes to the figures that NCCL logs and to measurements. "Covered" are these rows, and those of A100 within a node. The
others are extrapolations of the port that cannot be true at once: on 512 H100 an all-gather of 64 MiB takes 25.7 times
as long as an all-reduce, which would gather as well.

    python -m bench links          the errors, by device, ranks and what is fitted
    python -m bench links --fit    the constants that agree best with the covered all-gathers of H100 in `FITTED`

The port's A100 is another machine than that of our file: its ring reaches 87.7 GB/s within a node, where the data sheet
has 300 and nccl-tests report 230 GB/s, and all ranks of a node share one adapter. Within a node the table is therefore
compared with `PORTED`, which has the port's figures in our form, and also with our file.
"""

import argparse
import csv
import math
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from fsdp_compile.passes.cost.hardware import Hardware, Link, Protocol, device
from fsdp_compile.passes.cost.roofline import all_reduce_seconds, launch_seconds, transfer_seconds

TABLE = pathlib.Path(__file__).parent / "runs" / "data" / "nccl_model.csv"
FITTED = {8, 16, 64, 256}, {0.25, 4, 64, 256, 1024}  # ranks and MiB of the rows that constants are fitted to
PORTED = Link("the port's A100", 8.4e-6, 87.7e9, "the port", 3.4e-6, "assumed",
              (Protocol(6.6e-6, 0.6e-6, 0.0, 0.5, 87.7e9), Protocol(14e-6, 1.9e-6, 0.0, 0.92, 240e9)))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A collective of so many MiB in all, its seconds by the table and by us; of which hardware."""

    device: str
    ranks: int
    kind: str
    size: float
    seconds: float
    said: float

    @property
    def error(self) -> float:
        """Ours over the table's, less one."""
        return self.said / self.seconds - 1

    @property
    def is_covered(self) -> bool:
        """Whether the port's authors fitted it, or NCCL logged its figures; of all-gathers and reduce-scatters."""
        most = {"h100-80": 256, PORTED.name: 8}.get(self.device, 0)
        return self.kind != "all_reduce" and self.ranks <= most

    @property
    def is_fitted(self) -> bool:
        """Whether our constants were fitted to it."""
        return self.device == "h100-80" and self.ranks in FITTED[0] and self.size in FITTED[1]


def read_rows(h100: Hardware | None = None) -> list[Row]:
    """The rows of the table, without all-to-alls, which no sharding uses; those of A100 within a node come twice."""
    used = {name: device(name) for name in ("h100-80", "a100-80")} | ({"h100-80": h100} if h100 else {})
    rows = list[Row]()
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            ranks, size, kind = int(row["gpus"]), float(row["full_mib"]), row["collective"]
            wires = {row["device"]: used[row["device"]].connect(int(row["gpus_per_node"]))}
            if row["device"] == "a100-80" and ranks <= 8:
                wires[PORTED.name] = PORTED
            for name, wire in wires.items() if kind != "all_to_all" else ():
                rows.append(Row(name, ranks, kind, size, float(row["seconds"]), seconds(kind, size, ranks, wire)))
    return rows


def seconds(kind: str, size: float, ranks: int, wire: Link) -> float:
    """What we say of a collective of `size` MiB."""
    if kind == "all_reduce":
        return all_reduce_seconds(size * 2**20, ranks, wire)
    return launch_seconds(ranks, wire) + transfer_seconds(size * 2**20, ranks, wire)


# --- the constants ----------------------------------------------------------------------------------------------------

BEGIN = {"latency": 8.4e-6, "bandwidth": 370.8e9, "first": 0.1, "middle": 0.7, "last": 0.9}
SIZES = (1 << 10, 16 << 10, 8 << 20, 32 << 20)  # bytes of each rank at which the ramp bends


def with_constants(values: Sequence[float]) -> Hardware:
    """The H100 with a link within nodes and a ramp between them by `values`, those of `BEGIN`."""
    latency, bandwidth, first, middle, last = values
    base, parts = device("h100-80"), (first, middle, middle, min(1.0, last))
    node = replace(base.node, latency=latency, bandwidth=bandwidth)
    return replace(base, node=node, network=replace(base.network, ramp=tuple(zip(SIZES, parts, strict=True))))


def fit(rounds: int = 30) -> list[float]:
    """Least squares of the logarithms of the rows to fit, by Gauss-Newton steps."""

    def errors(point: torch.Tensor) -> torch.Tensor:
        rows = read_rows(with_constants(point.exp().tolist()))
        found = [math.log1p(row.error) for row in rows if row.is_fitted and row.is_covered]
        return torch.tensor(found, dtype=torch.float64)

    at, little = torch.tensor([*BEGIN.values()], dtype=torch.float64).log(), 1e-4
    for _ in range(rounds):
        now = errors(at)
        moved = at + little * torch.eye(len(at), dtype=torch.float64)
        slopes = torch.stack([(errors(each) - now) / little for each in moved], 1)
        at = at - torch.linalg.lstsq(slopes, now[:, None]).solution[:, 0].clamp(-0.2, 0.2)
    return at.exp().tolist()


# --- the table --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], by: Callable[[Row], object]) -> list[str]:
    """Mean absolute and largest error of the rows that `by` maps to one thing."""
    parts: dict[object, list[Row]] = {}
    for row in rows:
        parts.setdefault(by(row), []).append(row)
    return [f"  {key!s:36} {len(those):4} rows  {fmean(abs(each.error) for each in those):7.1%}  "
            f"{max((each.error for each in those), key=abs):+9.1%}" for key, those in parts.items()]  # fmt: skip


def main() -> None:
    """Print mean absolute and largest errors."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--fit", action="store_true", help="fit the constants anew, and compare with these")
    hardware = None
    if arguments.parse_args().fit:
        values = fit()
        print(*(f"{name} {value:.4g}" for name, value in zip(BEGIN, values, strict=True)), sep=", ")
        hardware = with_constants(values)
    rows = read_rows(hardware)
    covered = [row for row in rows if row.is_covered]
    print("all-gathers and reduce-scatters that are covered")
    print(*table(covered, lambda row: f"{row.device}, {row.ranks} ranks{', fitted' * row.is_fitted}"), sep="\n")
    print("others")
    others = [row for row in rows if not row.is_covered and row.ranks <= 256]
    print(*table(others, lambda row: f"{row.device}, {row.kind}"), sep="\n")
