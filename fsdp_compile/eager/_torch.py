"""Private names of torch that listeners need. Checked on torch 2.11, 2.13 and 2.14.

torch.utils._python_dispatch    `TorchDispatchMode`, in which each operator calls Python; with
                                `supports_higher_order_operators` also `torch.cond` and the like
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorMode(TorchDispatchMode):
    """While it is entered, `note` is called with the tensors that each operator has written to."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and note what it writes."""
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            pairs = [*zip(schema.arguments, args, strict=False)]
            pairs += [(each, kwargs[each.name]) for each in schema.arguments if kwargs and each.name in kwargs]
            written = [value for each, value in pairs if each.alias_info is not None and each.alias_info.is_write]
            self.note([leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)])
        return result

    def note(self, written: list[Tensor]) -> None:
        """An operator has written to these tensors."""
