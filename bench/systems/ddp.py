"""DistributedDataParallel, compiled with its own graph splitting at buckets: replicated parameters, all-reduce."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.systems import Prepared, Setup
from bench.systems.unsharded import autocast


def prepare(model: nn.Module, blocks: Sequence[nn.Module], setup: Setup) -> Prepared:
    replicated = DistributedDataParallel(model, process_group=setup.mesh.get_group(), gradient_as_bucket_view=True)
    return Prepared(model, autocast(torch.compile(replicated), setup))
