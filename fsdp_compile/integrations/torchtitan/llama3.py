"""torchtitan's Llama 3 on this package: `--module fsdp_compile.integrations.torchtitan.llama3`.

It has `model_registry` of `torchtitan.models.llama3`, and the config functions of its `config_registry`.
"""

from torchtitan.models import llama3
from torchtitan.models.llama3 import config_registry

from fsdp_compile.integrations.torchtitan import sharded, sharded_functions

model_registry = sharded(llama3.model_registry)
globals().update(sharded_functions(config_registry))
