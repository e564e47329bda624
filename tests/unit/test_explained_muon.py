"""`explain` with Muon: what its matrices compute and exchange on clusters that need not exist."""

import json
from dataclasses import asdict
from typing import Any

import torch
from models import GPT

from fsdp_compile import explain, fully_shard
from fsdp_compile.explain.matrices import costs_of_matrices, muon_of
from fsdp_compile.explain.ranks import sharded
from fsdp_compile.passes.cost.hardware import device


def tokens(batch: int, sequence: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, sequence, dtype=torch.long),)


def test_explain() -> None:
    """A prediction with Muon has the figures of a plan on as many ranks and the same link, and keeps them in its JSON;
    ranks that store one copy of the parameters count.
    """
    given: Any = {"sequence": 9, "hardware": "h100-80", "alternatives": False}
    report = explain(GPT, tokens, world_size=[8, 64], optimizer="muon", **given)
    one, several = (prediction.matrices for prediction in report.predictions)
    hardware = device("h100-80")
    with sharded(GPT, fully_shard, 8) as model:
        ((_, alike),) = costs_of_matrices(muon_of(model), hardware.connect(8), hardware)
    assert one == (alike,) and several[0].exchange > one[0].exchange
    alone, crossing = (int(each[0].owners.rpartition(" to other nodes")[0].split()[-1].replace(",", ""))
                       for each in (one, several))  # fmt: skip
    assert alone == 0 < crossing, "of the hardware's nodes, not of this machine"
    (hybrid,) = explain(GPT, tokens, world_size=64, optimizer="muon", strategy="HYBRID_SHARD", **given).predictions
    assert hybrid.matrices[0].compute == one[0].compute
    shown = json.loads(report.to_json())["predictions"]
    assert [each["matrices"] for each in shown] == [[asdict(each[0])] for each in (one, several)]
    assert f"behind the step above:\n{several[0]}\n" in str(report) or f"{one[0]}\n" in str(report)
