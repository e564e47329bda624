"""A forward that backward runs again: which full views it reads."""

from fsdp_compile.core.unit import Unit
from fsdp_compile.eager._torch import call_after_backward, current_backward
from fsdp_compile.eager.streams import Streams
from fsdp_compile.eager.unsharded import UnshardedUnit


def open_for_recomputation(unit: Unit, full_precision: bool, streams: Streams, whole: bool) -> UnshardedUnit | None:
    """Give `unit` views while backward recomputes a forward: those of the forward that is being recomputed.

    Without one (a reentrant checkpoint ran its first forward without gradients) the recomputed forward is the real one
    and gathers for itself: what is returned.
    """
    gathered: UnshardedUnit | None = next(iter(unit.awaiting_backward), None)
    if gathered is None:
        gathered = UnshardedUnit(unit, full_precision, streams)
        gathered.open(whole)
        gathered.backward = current_backward()
        unit.awaiting_backward.add(gathered)
        call_after_backward(gathered.close, if_failed=gathered.drop_views)  # also keeps it until then
        return gathered
    gathered.recomputed_into = True
    gathered.reopen()
    return None
