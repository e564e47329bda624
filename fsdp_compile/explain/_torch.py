"""Private names of torch that predictions need. Checked on torch 2.11 and 2.13.

FakeStore       a store that holds nothing, for process groups of the backend "fake". It may leave `torch.testing`; what
                counts is that `init_process_group("fake", store=...)` accepts it and starts no other process.
FakeTensorMode  tensors without memory: a model that is made under it may be larger than this machine. Look for a public
                name in `torch.compiler` or `torch.fx`.
reset_dynamo    `torch.compiler.reset` clears more than Dynamo (also the caches of Inductor).
"""

from torch._dynamo import reset as reset_dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "FakeTensorMode", "reset_dynamo"]
