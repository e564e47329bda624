"""Where sharded tensors that were pickled by version 0.2 look for what they are made of."""

from fsdp_compile.tensors.tensor_parallel import TensorParallel as TensorParallel
