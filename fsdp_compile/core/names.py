"""The names that parameters have in the model that the user wrote."""

from torch import nn

WRAPPED = "_fsdp_wrapped_module"
_ADDED = (f"{WRAPPED}.", "_checkpoint_wrapped_module.", "_orig_mod.")  # by wrappers: ours, checkpoints', the compiler's


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers add."""
    for prefix in _ADDED:
        name = name.replace(prefix, "")
    return name


def clean_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """For each parameter its first clean name."""
    return {param: clean_name(name) for name, param in model.named_parameters()}
