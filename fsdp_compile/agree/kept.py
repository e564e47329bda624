"""What modules keep after a forward: tensors that it has made, and views of what was gathered for it."""

import weakref
from collections.abc import Iterator, Set
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_compile.core._torch import leaves_of, plain_within
from fsdp_compile.core.settings import warn_caller
from fsdp_compile.core.sharding import original_class
from fsdp_compile.core.unit import Unit
from fsdp_compile.eager.forward_pass import ForwardPass, Listener

_OF_EACH_MODULE = frozenset(vars(nn.Module())) | {"_fsdp_parameters", "_fsdp_units"}
_PLAIN = frozenset((bool, int, float, str, type(None)))  # attributes of most modules


class Kept(Listener):
    """Finds what modules keep.

    Tensors that a forward has made may be where backward enters it: the runtime puts hooks on them. Views of gathered
    parameters are looked for in the first forward of each kind. Where there is one, it warns, and memory is freed no
    sooner than the view, in all forwards of that unit.
    """

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._looked = set[Any]()  # at forwards of these kinds
        self._with_views: weakref.WeakSet[Unit] = weakref.WeakSet()  # units of which modules keep views

    def after_forward(self, gathered: Any, module: nn.Module) -> None:
        """Look at the attributes of `module` and of modules below."""
        if self.root.running is not None and self.root.running.kind not in self._looked:
            memory = {buffer.storage.data_ptr() for buffer in gathered.buffers if not buffer.is_shard}
            if _warn_of_kept_views(module, memory - {0}):
                self._with_views.add(gathered.unit)
        if gathered.unit in self._with_views:
            gathered.hold()

    def complete_forward(self, forward: ForwardPass) -> None:
        """All modules have been looked at."""
        self._looked.add(forward.kind)

    def kept_tensors(self, module: nn.Module) -> Iterator[Tensor]:
        """Tensors that `module` and its submodules keep as attributes, or in a list, tuple or dict that is one."""
        work = [module]
        for each in work:
            attributes = vars(each)
            if attributes.get("_modules"):  # torch.jit.trace makes modules without
                work += filter(None, attributes["_modules"].values())
            for name in filterfalse(_OF_EACH_MODULE.__contains__, attributes):  # few, wherever a unit is freed
                value = attributes[name]
                if type(value) in _PLAIN:
                    continue
                if isinstance(value, Tensor):
                    yield value
                elif type(value) in (list, tuple, dict) and value:
                    inside = value.values() if type(value) is dict else value
                    yield from (item for item in inside if isinstance(item, Tensor))

    def stays(self, module: nn.Module, unit: Unit, opaque: type | None) -> None:
        """Warn that `unit` stays unsharded: of an `opaque` output, or of what nothing returns or keeps."""
        who = f"{original_class(module).__name__} with parameters {', '.join(unit.names[:2])}, ..."
        if opaque:
            warn_caller(
                f"{who} returns a {opaque.__name__}, which may have tensors inside that cannot be seen, so its "
                f"parameters stay unsharded until backward; return tensors, containers of them or a dataclass"
            )
        else:
            warn_caller(
                f"the forward of {who} computes something with gradients that it neither returns nor keeps as an "
                f"attribute, so its parameters stay unsharded until backward; return it, keep it as an attribute or in "
                f"an argument, or compute it under torch.no_grad()"
            )


def _warn_of_kept_views(module: nn.Module, memory: Set[int]) -> bool:
    """Warn of attributes of modules below `module` that lie in `memory`, addresses of what was gathered for it.
    Return whether there are any.
    """
    found = False
    for each in module.modules():
        for name, value in vars(each).items():
            if not isinstance(value, Tensor | list | tuple | dict) or name in ("_fsdp_parameters", "_modules"):
                continue
            plain = (plain_within(leaf) for leaf in leaves_of(value) if type(leaf) is Tensor)
            plain = (leaf for leaf in plain if type(leaf) is Tensor and leaf.layout is torch.strided)
            if any(leaf.untyped_storage().data_ptr() in memory for leaf in plain):
                found = True
                warn_caller(
                    f"{original_class(each).__name__} keeps a view of gathered parameters as {name}: their memory "
                    f"stays as long as it does, and it does not follow later changes of the parameters; compute it in "
                    f"each forward, or keep a clone"
                )
    return found
