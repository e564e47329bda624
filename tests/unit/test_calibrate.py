"""Calibration: constants that agree with measured times, and the hardware file."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fsdp_compile.explain.calibrate import BURST, LEAST_ROUNDS, Case, fitted, fitted_link, time_in_rounds
from fsdp_compile.passes.cost.hardware import Hardware, Source, device
from fsdp_compile.passes.cost.roofline import (
    attention_seconds,
    chain_seconds,
    launch_seconds,
    product_seconds,
    transfer_seconds,
    update_seconds,
)
from fsdp_compile.tools.cli import main

CPU = torch.device("cpu")


def nothing() -> None: ...


def cases(hardware: Hardware) -> list[Case]:
    """What calibration would measure on `hardware`."""
    made = [Case("product", nothing, 2e9 * k, k, "bfloat16") for k in (128, 512, 2048, 8192)]
    made += [Case("attention", nothing, 1e12, length, "bfloat16") for length in (512, 2048, 8192)]
    made += [Case("attention backward", nothing, 2.5e12, length, "bfloat16") for length in (512, 2048, 8192)]
    made += [Case(kind, nothing, 1e9) for kind in ("chain", "eager", "copy", "update", "launch")]
    for case in made:
        case.seconds = _seconds(case, hardware)
    return made


def _seconds(case: Case, hardware: Hardware) -> float:
    if case.kind == "product":
        return product_seconds(case.work, 0, case.size, case.dtype, hardware)
    if case.kind.startswith("attention"):
        return attention_seconds(case.work, case.size, "backward" in case.kind, case.dtype, hardware)
    return {
        "chain": chain_seconds(case.work, True, hardware),
        "eager": chain_seconds(case.work, False, hardware),
        "copy": case.work / hardware.bandwidth,
        "update": update_seconds(case.work, hardware),
        "launch": hardware.kernel_seconds,
    }[case.kind]


def test_constants_are_found_again() -> None:
    """From times that follow the cost model, the constants that made them."""
    made = replace(device("h100-80"), product_ramp=128.0, attention_ramp=256.0, chain_efficiency=0.7,
                   eager_efficiency=0.3, update_efficiency=0.6)  # fmt: skip
    source = Source("measured", "here")
    again = fitted(cases(made), device("h100-80"), source)
    known, expected = ({name: value for name, value, _, _ in each.figures()} for each in (again, made))
    assert known == pytest.approx(expected, rel=1e-6)
    assert again.sources["product_efficiency"] == source and again.sources["memory"] != source


def test_a_link_is_found_again() -> None:
    """From the times of collectives, latency and bandwidth."""
    for each, base in ((1, device("h100-80").node), (4, replace(device("h100-80").network, ranks_per_node=4))):
        made = replace(base, latency=3e-5, hop=0.0, bandwidth=2e11, protocols=(), ramp=())
        made = replace(made, inside=None if each == 1 else replace(device("h100-80").node, hop=0.0, bandwidth=1e15))
        sizes = (1e4, 1e6, 1e8)
        times = [(size * 7 / 8, launch_seconds(8, made) + transfer_seconds(size, 8, made)) for size in sizes]
        found = fitted_link(times, base, "here", each)
        assert (found.latency, found.bandwidth) == pytest.approx((3e-5, 2e11)) and found.origin == "measured"


def test_rounds_alternate() -> None:
    """Each round times each case once, and the order is reversed from round to round."""
    calls: list[str] = []
    made = [Case("chain", partial(_slow, calls, name), 1.0) for name in "abc"]
    time_in_rounds(made, CPU, 0.0)
    assert "".join(calls) == "abcabc" + ("cbaabc" * LEAST_ROUNDS)[: 3 * LEAST_ROUNDS], (
        "two calls before the first round"
    )
    assert all(case.seconds >= BURST for case in made)


def _slow(calls: list[str], name: str) -> None:
    calls.append(name)
    end = time.process_time() + 2 * BURST  # by either clock
    while time.process_time() < end:
        pass


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time or hardware that cannot be is one line that names it; nothing is written."""
    for options, message in (
        (["--seconds", "301"], "seconds: expected more than 0 and at most 300, found 301"),
        (["--hardware", "h1000"], "expected one of a100-40, "),
    ):
        assert main(["calibrate", str(tmp_path / "out.json"), "--device", "cpu", *options]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
