"""Plans on a GPU: the code that Inductor generates for CUDA has their order, and computes what an eager step does."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from generated import Program, launches, programs
from models import GPT, MODELS
from torch import Tensor, nn

from bench.link import start
from fsdp_compile import fully_shard
from fsdp_compile.passes.plan.plan import Plan
from fsdp_compile.passes.post_grad.plan_by_rule import plan_log

LINKS = {"slow": "custom:1e-6,1e6", "far": "custom:1e-2,1e12"}  # bytes count; launches do


@pytest.fixture
def emulated() -> Iterator[None]:
    """Rank 0 of 8 on the emulated link, in place of NCCL's one rank."""
    dist.destroy_process_group()
    start(8)
    yield
    dist.destroy_process_group()
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())


def sharded() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(GPT(layers=4).cuda())


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])  # of this rank


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("link", LINKS)
def test_generated_code_follows_the_plan(monkeypatch: pytest.MonkeyPatch, link: str) -> None:
    """Collectives and waits in the plan's order; what it launches together is one call; gradients equal eager's."""
    torch.backends.cuda.matmul.allow_tf32 = False
    plans: list[Plan] = []
    monkeypatch.setattr(plan_log, "debug", lambda _, direction, plan, **__: plans.append(plan))
    inputs = tuple(each.cuda() for each in MODELS["gpt"].batch(1, 4))
    eager, model = sharded(), sharded()
    MODELS["gpt"].loss(eager, inputs).backward()
    options = {"link": LINKS[link], "device": "h200"}
    run = torch.compile(model, backend="fsdp_compile", options=options, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):  # on a hit no pass runs
        both: tuple[Program, Program] = programs(lambda: MODELS["gpt"].loss(run, inputs))
    for plan, program in zip(plans, both, strict=True):
        assert launches(program) == [step.kind for step in plan.steps if step.kind != "free" for _ in step.units]
    together = any(len(step.units) > 1 for plan in plans for step in plan.steps)
    assert together == any("coalesced" in program.code for program in both) and (together or link == "slow")
    torch.testing.assert_close(gradients(model), gradients(eager), rtol=1e-3, atol=1e-6)
