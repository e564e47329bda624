"""The collectives that generated code calls: straight on the process group.

What the dispatcher and torch's own layers put between a compiled graph and the process group costs more than a small
collective: on torch 2.13, 10 us for an all-gather and its wait, 32 us for an all-to-all. Graphs hold torch's operators,
so that Inductor knows what it deals with; `passes/post_grad/lower_collectives.py` gives them these names.

    _c10d_functional.all_gather_into_tensor_out(shard, 8, '0', out=full)  ->  fsdp_collectives.all_gather(...)
    _c10d_functional.all_to_all_single(packed, [...], [...], '0')         ->  fsdp_collectives.all_to_all(...)
    _c10d_functional.wait_tensor(full)                                    ->  fsdp_collectives.wait(full)

The first of a graph is called by `fsdp_collectives.at_start`, for an earlier call of the graph may have failed between
a collective and its wait.
"""

import torch
from torch import Tensor

from fsdp_compile.comm._torch import group_named, start_all_to_all
from fsdp_compile.comm.collectives import waiting_for
from fsdp_compile.comm.prefetched import Filling, start_gather, take


class DirectCollectives:
    """Collectives on process groups themselves. Each generated module has one, which holds what is in flight.

    Generated code passes nothing between a start and its wait but the tensor that is filled, so the work in between is
    found by the address of that tensor: nothing else can occupy the address before the wait.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, Filling] = {}

    @property
    def at_start(self) -> "DirectCollectives":
        """Itself, where a call of the graph begins: waits for what is left of a call that failed, and lets go of it.

        Until then works hold their buffers. A buffer must not be freed while the collective that fills it runs.
        """
        while self._in_flight:
            _, filling = self._in_flight.popitem()
            filling.wait()
        return self

    def all_gather(self, shard: Tensor, group_size: int, group: str, *, out: Tensor) -> None:
        """Begin to all-gather `shard`, 1-D `[n]`, cast to the dtype of `out`, into `out`, 1-D `[n * group_size]`.

        `out` is to be read after `wait(out)`. If it was prefetched, `out` becomes the tensor that is being filled (Note
        [Where a prefetched buffer is taken]).
        """
        prefetched = take(shard, out.dtype, group)
        if prefetched is None:
            self._in_flight[out.data_ptr()] = start_gather(out, shard, group)
            return
        full = prefetched.full
        out.set_(full.untyped_storage(), 0, full.shape, (1,))  # no copy: the graph has no view of it yet
        self._in_flight[out.data_ptr()] = prefetched

    def all_to_all(self, packed: Tensor, output_sizes: list[int], input_sizes: list[int], group: str) -> Tensor:
        """Begin to send each rank its slice of `packed`, 1-D; returns a tensor like it, to be read after `wait`.

        All slices have one size; the lists of sizes are those of torch's operator.
        """
        received = torch.empty_like(packed)
        work = start_all_to_all(group_named(group), received, packed)
        self._in_flight[received.data_ptr()] = Filling(received, (work,), kind="reduce")
        return received

    def wait(self, full: Tensor) -> None:
        """Order what follows after the collective that fills `full`."""
        filling = self._in_flight.pop(full.data_ptr(), None)
        if filling is not None:  # else `at_start` was not first, and has waited for it
            with waiting_for(filling.kind, full.numel()):
                filling.wait()
