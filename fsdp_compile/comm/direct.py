"""Collectives on process groups themselves, as generated code calls them.

What the dispatcher and torch's own layers put between a compiled graph and the process group costs more than a small
collective: on torch 2.13, 10 us for an all-gather and its wait, 32 us for an all-to-all. Graphs hold torch's operators,
so that Inductor knows what it deals with; `passes/post_grad/lower_collectives.py` gives them these names.

    _c10d_functional.all_gather_into_tensor_out(shard, 8, '0', out=full)  ->  fsdp_collectives.all_gather(...)
    _c10d_functional.all_to_all_single(packed, [...], [...], '0')         ->  fsdp_collectives.all_to_all(...)
    _c10d_functional.wait_tensor(full)                                    ->  fsdp_collectives.wait(full)

The first of a graph is called on `fsdp_collectives.at_start`, for an earlier call of the graph may have failed between
a collective and its wait.
"""

from torch import Tensor

from fsdp_compile.comm.collectives import note_wait, profiled, start_all_gather, start_exchange
from fsdp_compile.comm.hops import Gathering


class DirectCollectives:
    """Collectives on process groups themselves. Each generated module has one, which holds what is in flight.

    Generated code passes nothing from a start to its wait but the tensor that is filled. The work is found by the
    address of that tensor, which nothing else can occupy before the wait.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, Gathering] = {}

    @property
    def at_start(self) -> "DirectCollectives":
        """Itself, at the start of a call of the graph: waits for what is left of a call that failed.
        A buffer must not be freed while a collective fills it.
        """
        while self._in_flight:
            _, filling = self._in_flight.popitem()
            filling.wait()
        return self

    def all_gather(self, shard: Tensor, group_size: int, group: str, *, out: Tensor) -> None:
        """Begin to all-gather `shard`, 1-D `[n]`, cast to the dtype of `out`, into `out`, 1-D `[n * group_size]`.

        Read `out` after `wait(out)`.
        """
        with profiled("all_gather", out.numel()):
            self._in_flight[out.data_ptr()] = start_all_gather(out, shard, group)

    def all_to_all(self, packed: Tensor, output_sizes: list[int], input_sizes: list[int], group: str) -> Tensor:
        """Begin to send each rank its slice of `packed`, 1-D; returns a tensor like it, to be read after `wait`.
        All slices have one size; the lists of sizes are those of torch's operator.
        """
        with profiled("reduce", packed.numel()):
            exchange = start_exchange(packed, group)
        self._in_flight[exchange.full.data_ptr()] = exchange
        return exchange.full

    def wait(self, full: Tensor) -> None:
        """Order what follows after the collective that fills `full`."""
        filling = self._in_flight.pop(full.data_ptr(), None)
        if filling is not None:  # else `at_start` was not first, and has waited for it
            try:
                with profiled("wait_reduce" if filling.kind == "reduce" else "wait_all_gather", full.numel()):
                    filling.wait()
            except RuntimeError as error:
                note_wait(error, filling.kind, full.numel())
                raise
