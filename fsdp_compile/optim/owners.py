"""`by_owner`: each sharded parameter is updated by one rank, its owner, by any optimizer that needs complete matrices.

rank 0                      rank 1
a: rows 0, 1   b: row 0     a: row 2   b: rows 1, 2      what the ranks store of parameters and gradients
          |                        |
          all-to-all: the owner of each gets all of it
          |                        |
a, and its state            b, and its state             each rank updates what it owns, by the inner optimizer
          |                        |
          all-to-all: updated parameters return
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_compile.comm import collectives
from fsdp_compile.comm._torch import group_named
from fsdp_compile.optim.matrix_exchange import Exchange
from fsdp_compile.optim.matrix_optimizers import local_data, local_gradient
from fsdp_compile.tensors.nested import is_container, map_items
from fsdp_compile.tensors.shard_spec import FlatSharding, ShardRanks, ShardSpec
from fsdp_compile.tensors.sharded_tensor import ShardedTensor

Group = dict[str, Any]
State = dict[str, Any]  # of one parameter

# Note [State of owners in checkpoints]
# The owner of a parameter has all of its state, in full, and other ranks have none. In the state dict every tensor of
# the state is a sharded tensor of which the owner stores all elements. So torch.distributed.checkpoint writes each from
# its owner and reads it on whatever rank owns it then, for any number of ranks; nothing is gathered. Owners tell the
# other ranks names, shapes and dtypes when a parameter is first updated, so that these show the same keys. Scalars, as
# step counts, are in the owner's state dict alone: another rank's value would be out of date, and DCP may write a plain
# value from any rank that shows it.


class ByOwner(Optimizer):
    """An optimizer that updates each sharded parameter in full, on one rank, by an inner optimizer.

    Use it for updates that need a complete matrix and have state of it: Shampoo, SOAP, Adafactor. Results are those of
    the inner optimizer on one process. Each parameter goes to one of the ranks that it is sharded over, the most
    expensive first, to the rank with the least work. An update costs m * n * min(m, n) for a matrix, else the number of
    elements. A step takes two all-to-alls for each process group and dtype. Under hybrid sharding all replicas do the
    same work. Learning rate schedulers, gradient scalers and hooks work on it.

    The inner optimizer sees the parameters that its rank owns, in full, of which it keeps a copy between steps, and all
    plain parameters, which every rank updates. Its `step` is called without a closure. Groups have the options of the
    inner optimizer, which follows their changes.

    `state` shares memory with the state of the inner optimizer for parameters that this rank owns; for others it has
    tensors of the same shapes without elements here (Note [State of owners in checkpoints]). Load state dicts of any
    number of ranks through torch.distributed.checkpoint; `load_state_dict` takes plain tensors of full shape, which all
    ranks must have, and state that is sharded as the parameters are.

    If the inner optimizer fails in a step, that rank completes the step's collectives before it raises. Other ranks
    raise too if parameters were updated for the first time; otherwise they go on until they next wait for that rank.

    Args:
        params: what `torch.optim` takes (parameters, named ones, or groups with options), in the same order on all
            ranks.
        make_optimizer: called once on each rank with a list of groups, of which some may be empty; returns the inner
            optimizer.

    Attributes:
        inner: this rank's inner optimizer.
        owners: for each sharded parameter the rank that owns it, in the process group that it is sharded over.

    Raises:
        RuntimeError: `make_optimizer` failed on another rank; on that rank, what it raised.
        ValueError: a parameter is on the meta device, or tensor-parallel.
    """

    shards_own_state = True  # for state_dict/optimizer.py

    def __init__(self, params: Iterable[Any], make_optimizer: Callable[[list[Group]], Optimizer]) -> None:
        self.owners: dict[Tensor, int] = {}
        self._full: dict[Tensor, nn.Parameter] = {}  # those that this rank owns
        self._outlines: dict[Tensor, State] = {}  # known state of others, with tensors on the meta device
        self._announced: set[Tensor] = set()  # whose owners have told what state there is; the same on all ranks
        self._loads: dict[ShardRanks, list[int]] = {}  # what each rank has to do in a step
        self.inner: Optimizer | None = None
        super().__init__(params, {})
        inner, error = None, None
        try:
            inner = make_optimizer(self._deal(self.param_groups))
        except Exception as caught:
            error = caught
        self._agree(error, "make_optimizer", {ranks: [] for ranks in self._loads})
        assert inner is not None
        self.inner, self.defaults = inner, inner.defaults
        self._copy_options()

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as `Optimizer.add_param_group`; all ranks must add it."""
        super().add_param_group(param_group)
        if self.inner is not None:
            self.inner.add_param_group(self._deal(self.param_groups[-1:])[0])
            self._copy_options()

    def __getstate__(self) -> Any:
        raise TypeError("by_owner: this optimizer cannot be copied or pickled; save its state_dict()")

    # --- dealing ------------------------------------------------------------------------------------------------------

    def _deal(self, groups: list[Group]) -> list[Group]:
        """Assign parameters to owners; return the groups for the inner optimizer."""
        sharded = [param for group in groups for param in group["params"] if isinstance(param, ShardedTensor)]
        for param in sharded:
            if param.device.type == "meta":
                raise ValueError("params: a parameter is on the meta device; materialize it first")
            if param.spec.tensor_parallel is not None:
                raise ValueError(
                    f"params: a parameter of shape {tuple(param.shape)} is tensor-parallel, which by_owner does not "
                    f"support; leave it to another optimizer"
                )
        for param in sorted(sharded, key=_cost, reverse=True):
            ranks = param.spec.ranks
            loads = self._loads.setdefault(ranks, [0] * ranks.size)
            owner = self.owners[param] = loads.index(min(loads))
            loads[owner] += _cost(param)
            if owner == ranks.rank:
                full = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
                self._full[param] = nn.Parameter(full, param.requires_grad)
        with torch.no_grad():
            self._fetch(sharded, (local_data,))  # some optimizers look at parameters when they are made
        here = [[self._full.get(each, each) for each in group["params"] if self._is_here(each)] for group in groups]
        return [{**_options(group), "params": params} for group, params in zip(groups, here, strict=True)]

    def _is_here(self, param: Tensor) -> bool:
        return param in self._full or param not in self.owners

    def _exchanges(self, params: Iterable[ShardedTensor], columns: int) -> Iterator[tuple[Exchange, list[Any]]]:
        """For each process group, dtype and device an exchange of so many values of each of its parameters; these."""
        alike: dict[Any, list[ShardedTensor]] = {}
        for param in params:
            alike.setdefault((param.spec.ranks, param.dtype, param.device), []).append(param)
        for (ranks, *_), some in alike.items():
            each = [param for param in some for _ in range(columns)]
            yield Exchange(ranks, [param.spec.ranges for param in each], [self.owners[param] for param in each]), some

    # --- a step -------------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient: on all ranks those of the same parameters.

        Calls `closure` once, before the update, and returns what it returned.

        Raises:
            RuntimeError: a gradient was accumulated under `no_sync` and not reduced; parameters are summoned; the first
                update of a parameter failed on another rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self.inner is not None
        params = [param for param in self.owners if isinstance(param, ShardedTensor) and param.grad is not None]
        self._fetch(params, (local_data, local_gradient))
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_options(group))
        error = None
        try:
            self.inner.step()
        except Exception as caught:
            error = caught
        self._send_back(params)
        self._copy_options()
        new: defaultdict[ShardRanks, list[Tensor]] = defaultdict(list)
        for param in params:
            if param not in self._announced:
                new[param.spec.ranks].append(param)
        self._agree(error, "the inner optimizer", new)
        return loss

    def _fetch(self, params: Sequence[ShardedTensor], columns: Sequence[Callable[[ShardedTensor], Tensor]]) -> None:
        """Send owners the parameters, and the gradients if there are two `columns`."""
        for exchange, some in self._exchanges(params, len(columns)):
            stored = [column(param) for param in some for column in columns]  # all ranks raise what any of them does
            exchange.send(stored.__getitem__, stored[0][:0], "parameters of owners")
            arrived = {at: stored[at].clone() for at in exchange.at_home} | dict(exchange.received())
            for at, data in sorted(arrived.items(), key=lambda pair: pair[0]):
                param = some[at // len(columns)]
                full = self._full[param]
                if at % len(columns):
                    full.grad = data.view(param.shape)
                    continue
                if (full.dtype, full.device) != (data.dtype, data.device):
                    full.data = data.view(param.shape)
                full.copy_(data.view(param.shape))

    def _send_back(self, params: Sequence[ShardedTensor]) -> None:
        for exchange, some in self._exchanges(params, 1):
            full = [self._full[each].reshape(-1) if each in self._full else each.local[:0] for each in some]
            exchange.send_back([full[at] for at in exchange.owned], some[0].local[:0], "updated parameters")
            for at, part in chain(((at, full[at]) for at in exchange.at_home), exchange.returned()):
                some[at].local.copy_(part)
            torch.autograd.graph.increment_version([*some, *(param.local for param in some)])
            for each in some:
                if each in self._full:
                    self._full[each].grad = None

    def _agree(self, error: Exception | None, what: str, new: Mapping[ShardRanks, Sequence[Tensor]]) -> None:
        """Raise errors of any rank; exchange outlines of the state of `new` parameters, by their ranks."""
        said, failures = None if error is None else str(error) or repr(error), list[str]()
        for ranks, params in new.items():
            own = {} if error else {i: _outline(each, self.inner.state.get(self._full[each], {}))  # type: ignore[union-attr]  # there are none without
                                    for i, each in enumerate(params) if each in self._full}  # fmt: skip
            found = collectives.gather_objects((own, said), group_named(ranks.group))
            for theirs, _ in found:
                self._outlines.update({params[i]: outline for i, outline in theirs.items()})
            failed = [(rank, failure) for rank, (_, failure) in enumerate(found) if failure]
            failures += [f"{what} failed on rank {rank} of the group: {failure}" for rank, failure in failed]
            self._announced.update(() if failed else params)
        if error is not None or failures:
            raise error or RuntimeError(failures[0])

    # --- options and state --------------------------------------------------------------------------------------------

    def _copy_options(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups if self.inner else (), strict=True):
            group.update(_options(inner))

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter that was updated; built at each access, so changes to it have no effect."""
        shown: defaultdict[Tensor, Any] = defaultdict(dict)
        inner = self.inner.state if self.inner else {}
        for param in (param for group in self.param_groups for param in group["params"]):
            own = inner.get(self._full.get(param, param)) if self._is_here(param) else self._outlines.get(param)
            if own:
                shown[param] = self._shown(param, own) if param in self.owners else own
        return shown

    @state.setter
    def state(self, value: Any) -> None:
        """`Optimizer.__init__` sets an empty state."""

    def _spec(self, param: ShardedTensor, shape: torch.Size) -> ShardSpec:
        numel = shape.numel()
        return ShardSpec(FlatSharding(tuple(shape), self.owners[param] * numel, numel), param.spec.ranks)

    def _shown(self, param: Any, value: Any) -> Any:
        """Turn state of a parameter, or its outline, into sharded tensors."""
        if not isinstance(value, Tensor):
            return map_items(lambda _, each: self._shown(param, each), value)
        if _is_scalar(param, value) or not value.numel():
            return value if value.device.type != "meta" else torch.empty_like(value, device=param.device)
        if value.device.type == "meta":
            local = torch.empty(0, dtype=value.dtype, device=param.device)
        else:
            local = value.detach().reshape(-1)
        return ShardedTensor(local, self._spec(param, value.shape))

    def __setstate__(self, state: Group) -> None:
        """Called by `load_state_dict`, with state by parameters."""
        super().__setstate__({"param_groups": state["param_groups"]})
        assert self.inner is not None
        here = [param for group in self.inner.param_groups for param in group["params"]]
        index = {param: i for i, param in enumerate(here)}
        loaded = {}
        self._outlines, self._announced = {}, set()  # the next step announces again: ranks may have loaded other keys
        for param, values in state["state"].items():
            own = self._loaded(param, values)
            if param in self.owners:
                self._outlines[param] = _outline(param, values)
            if not isinstance(param, Tensor) or self._is_here(param):
                loaded[index.get(self._full.get(param, param), param)] = own
        groups = [
            {**_options(group), "params": [index[param] for param in inner["params"]]}
            for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True)
        ]
        self.inner.load_state_dict({"state": loaded, "param_groups": groups})

    def _loaded(self, param: Any, value: Any) -> Any:
        """Turn a value of a state dict into a plain, full one; all ranks gather what is sharded."""
        if not isinstance(value, Tensor):
            return map_items(lambda _, each: self._loaded(param, each), value)
        if not isinstance(value, ShardedTensor):
            return value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor
        value.spec.ranks.check_here()
        if param in self.owners and value.spec.sharding == self._spec(param, value.shape).sharding:
            return value.local.view(value.shape) if param in self._full else None
        return value.full_tensor()


by_owner = ByOwner


def _cost(param: Tensor) -> int:
    """Relative cost of an update: matrix products for a matrix, otherwise a few operations on each element."""
    return param.numel() * (min(param.shape) if param.dim() == 2 else 1)


def _options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _outline(param: Any, value: Any) -> Any:
    """State without data: tensors on the meta device, dicts without scalars."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if isinstance(each, Tensor) or is_container(each)}
        value = {key: each for key, each in value.items() if not _is_scalar(param, each)}
    return map_items(lambda _, each: _outline(param, each), value)


def _is_scalar(param: Tensor, value: Any) -> bool:
    """Whether `value` is a scalar, unless the parameter is one too: then all its state may be, and is sharded."""
    return isinstance(value, Tensor) and not value.dim() and param.dim() > 0
