"""torchtitan's Qwen 3 on this package: `--module fsdp_compile.integrations.torchtitan.qwen3`.

It has `model_registry` of `torchtitan.models.qwen3`, and the config functions of its `config_registry`.
"""

from torchtitan.models import qwen3
from torchtitan.models.qwen3 import config_registry

from fsdp_compile.integrations.torchtitan import sharded, sharded_functions

model_registry = sharded(qwen3.model_registry)
globals().update(sharded_functions(config_registry))
