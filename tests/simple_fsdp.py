"""A sharding that is not this package's: parameters are DTensors that are gathered where they are read (SimpleFSDP)."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize


class Gathered(nn.Module):
    """A sharded parameter as its module reads it; the derivative averages over the ranks."""

    def forward(self, value: DTensor) -> Tensor:
        return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def simple_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each parameter over the ranks of `mesh`, in place."""
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(param.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded, param.requires_grad))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model
