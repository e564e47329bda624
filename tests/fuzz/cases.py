"""What a case is, and how one is drawn from a seed. This module imports no torch.

    case = draw(seed=7, how="eager")     a model (a tree of nodes), options of fully_shard, and steps of training

Every field has a default that asks for nothing, so that a case is shrunk by setting fields back.
"""

import random
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any


class Printed:
    """A dataclass that prints as the call that makes it, without defaults."""

    def __repr__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        changed = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, repr=False)
class Node(Printed):
    """A module that maps `[batch, width]` to the same shape, and how the module around it runs it.

    Attributes:
        kind: a key of `layers.KINDS`, or "nest", which runs its children one after the other.
        size: width of the hidden layer.
        unit: whether `fully_shard` is called on it.
        frozen: which of its parameters do not train: "", "first" or "all".
        checkpoint: "", "reentrant" or "non-reentrant".
        times: how often it is run in a row.
        gate: "step": only in steps with `gates`; "rank": only on even ranks; "accumulating": only in passes that do not
            reduce; "no_grad": without gradients; "reversible": without gradients, and with them in the backward of a
            Function, "rerun": without them there too; "backward": the forward around it runs its backward.
        then: "in place": the module around it changes its output in place.
        out: what it returns: "" a tensor, a "view", else a "tuple", "dict" or "dataclass" with a second tensor.
        dtype: of its parameters, where it is not the model's.
        tie: gives it the first weight of the node of this index among those of its kind and size.
        same: makes it the very module that the node of this index is.
        changes: how the module around it changes its first parameter before it runs, a key of `models.CHANGES`.
        aside: where a nest leaves what it computes after its output, which becomes part of the loss: an "attribute",
            a "list" that is one, or "elsewhere", where no hook finds it.
    """

    kind: str = "linear"
    children: tuple["Node", ...] = ()
    size: int = 5
    unit: bool = False
    frozen: str = ""
    checkpoint: str = ""
    times: int = 1
    gate: str = ""
    then: str = ""
    out: str = ""
    dtype: str = ""
    tie: int = -1
    same: int = -1
    changes: str = ""
    aside: str = ""


@dataclass(frozen=True, repr=False)
class Step(Printed):
    """One step of training, and what the script does before it.

    Attributes:
        syncs: for each backward pass whether it reduces; the last one does.
        forwards: how a backward pass is made: "one" forward; the loss of "two" forwards, the first one uncompiled if
            "mixed"; the losses of two forwards, each backward "apart", or the first one last ("crossed"); "eval":
            another one under no_grad before backward.
        gates: whether modules with the gate "step" run.
        before: what happens before the step, a key of `edits.EDITS`.
        clip: whether gradients are clipped.
        keeps_grads: whether the gradients stay for the next step.
    """

    syncs: tuple[bool, ...] = (True,)
    forwards: str = "one"
    gates: bool = True
    before: str = ""
    clip: bool = False
    keeps_grads: bool = False


@dataclass(frozen=True, repr=False)
class Case(Printed):
    """A model, how it is sharded, and how it is trained; see `fully_shard` for the options."""

    nodes: tuple[Node, ...] = ()
    width: int = 3
    out: str = ""  # what the model returns, as `Node.out`
    dtype: str = "float64"
    strategy: str = "FULL_SHARD"
    replicas: int = 1  # with 2: a mesh of (replicas, shards)
    reshard: int = 0  # reshard_after_forward=n
    wrap: str = "units"  # "units": one by one; "policy": those nodes by a policy; "auto"; "none"
    param_dtype: str = ""  # mixed precision
    reduce_dtype: str = ""
    autocast: bool = False  # to bfloat16, around the forwards of each backward pass
    offload: bool = False
    forward_prefetch: bool = False
    backward_prefetch: str = "BACKWARD_PRE"
    limit_all_gathers: bool = True
    no_sync: bool = False  # as the context manager, instead of set_requires_gradient_sync
    uneven: bool = False  # batches of another size on each rank
    input_grads: bool = False
    optimizer: str = "sgd"
    order: str = "any"  # reduction_order
    wire: tuple[str, ...] = ()  # the formats of gathers and reduces, "" for none; "with feedback" behind them
    steps: tuple[Step, ...] = (Step(),)
    caller: str = ""  # what is compiled: "" the model, a "module" that holds it, or a "function" that calls it
    seed: int = 0


def size_of(value: Any) -> int:
    """How many fields of `value` and of what it holds are not the defaults."""
    if isinstance(value, tuple):
        return sum(1 + size_of(each) for each in value)
    if is_dataclass(value):
        changed = (getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default)
        return sum(1 + size_of(each) for each in changed)
    return 0


def nodes_of(nodes: tuple[Node, ...]) -> list[Node]:
    """All nodes of a tree, in the order in which their modules are made."""
    return [each for node in nodes for each in (node, *nodes_of(node.children))]


# --- drawing ----------------------------------------------------------------------------------------------------------

LEAVES = ("linear", "mlp", "scale", "norm", "inplace", "experts", "attention", "conv", "table", "listed", "custom")
LEAVES += ("recurrent", "quantized", "computed", "bits", "stored")
WHOLE_FORWARD = ("experts", "conv")  # docs/limits.md: not behind a backward that a forward runs
EDITS = ("mul", "data", "eval", "summon", "state", "full state", "optimizer state", "freeze", "abandon")
EDITS += ("deepcopy", "new parameter", "roll back", "thaw", "remove", "penalty", "part", "frozen save")
EDITS += ("failed forward", "failed backward")
CHANGES = ("mul", "data", "row", "foreach")
OWN_PASSES = ("reversible", "rerun", "backward")  # gates of modules that run within the backward, or the reverse
WIRES = (("fp8", "bf16"), ("int8", "fp8"), ("bf16", "int8"), ("", "fp8"), ("fp8", ""), ("int8", "fp8", "with feedback"))


def draw(seed: int, how: str = "eager", world_size: int = 2, order: str = "any", wires: bool = False) -> Case:
    """The case of this seed; with `wires` its parameters and gradients are sent in some format."""
    case = _draw(seed, how, world_size)
    if wires:
        return _with_wire(case, random.Random(f"wire {seed}"))
    return case if order == "any" else _in_order(case, how)


def _with_wire(case: Case, rng: random.Random) -> Case:
    """The case in float32, for which there are formats. No forward changes parameters: what a change makes of rounded
    ones is not what a rank stores.
    """

    def of_node(node: Node) -> Node:
        return replace(node, changes="", children=tuple(map(of_node, node.children)))

    wire = rng.choice(WIRES)
    if "with feedback" in wire and (case.strategy == "NO_SHARD" or case.reshard):
        wire = wire[:2]
    return replace(case, nodes=tuple(map(of_node, case.nodes)), dtype="float32", wire=wire)


def _in_order(case: Case, how: str) -> Case:
    """The case with `reduction_order="tree"`, without what that refuses (docs/reproducibility.md)."""
    of_accumulation = {(True, True): (False, True), (False, False, True): (False, False, False, True)}
    of_dtype = {"float16": "float32"}

    def of_node(node: Node) -> Node:
        once: dict[str, Any] = {} if how == "eager" else {"times": 1, "same": -1}  # compiled, a unit runs once
        checkpoint = "non-reentrant" if node.checkpoint else ""
        kind = "mlp" if node.kind == "experts" and how != "eager" else node.kind  # those have a formula for each
        once |= {"gate": "" if node.gate in OWN_PASSES else node.gate, "dtype": of_dtype.get(node.dtype, node.dtype)}
        return replace(node, kind=kind, checkpoint=checkpoint, children=tuple(map(of_node, node.children)), **once)

    def of_step(step: Step) -> Step:
        forwards = {"apart": "two", "crossed": "two", "mixed": "two"}.get(step.forwards, step.forwards)
        forwards = "one" if how != "eager" and forwards == "two" else forwards
        syncs = of_accumulation.get(step.syncs, step.syncs)
        # Gradients of these would be there before the step's.
        before = "" if step.before in ("penalty", "part") else step.before
        return replace(step, syncs=syncs, forwards=forwards, before=before, keeps_grads=False)

    strategy = "FULL_SHARD" if case.strategy == "NO_SHARD" else case.strategy
    nodes, steps = tuple(map(of_node, case.nodes)), tuple(map(of_step, case.steps))
    dtypes = {name: of_dtype.get(getattr(case, name), getattr(case, name)) for name in ("param_dtype", "reduce_dtype")}
    return replace(case, order="tree", strategy=strategy, nodes=nodes, steps=steps, **dtypes)


def _draw(seed: int, how: str, world_size: int) -> Case:
    rng = random.Random(seed)
    wrap = rng.choice(("units", "units", "policy", "auto", "none"))
    # Compiled, all ranks have the same graphs (docs/limits.md, Compilation); behind a backward, operators gather.
    runs_own = rng.random() < 0.3
    gates = OWN_PASSES if runs_own else ("rank",) if how == "eager" else ()
    gates += ("step", "no_grad", "accumulating")
    nodes = _supported(tuple(_node(rng, gates, depth=0) for _ in range(rng.randint(1, 3))), wrap)
    strategy = rng.choice(("FULL_SHARD", "FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    divides = world_size == 4 and strategy == "FULL_SHARD"
    replicas = 2 if divides and rng.random() < 0.3 else 1
    # What a checkpoint recomputes is not cast behind a backward of its unit's forward (docs/limits.md).
    lowers = rng.random() < 0.2 and not (runs_own and any(node.checkpoint for node in nodes_of(nodes)))
    autocast = rng.random() < 0.1  # which leaves float64 as it is
    uneven = how == "eager" and rng.random() < 0.2
    if runs_own and any(node.kind == "recurrent" for node in nodes_of(nodes)):
        uneven = False  # its operators follow the batch, and in a backward of one's own each may gather parameters
    # Units change, whose parameters no other unit has. Under mixed precision the reference computes with a copy.
    changes = wrap == "units" and not lowers and all(node.tie < 0 and node.same < 0 for node in nodes_of(nodes))
    nodes = tuple(_changing(node, rng) for node in nodes) if changes else nodes
    if not any(node.checkpoint or node.gate in OWN_PASSES for node in nodes_of(nodes)):  # those leave it aside twice
        nodes = tuple(_with_aside(node, rng, wrap != "auto") for node in nodes)
    every = nodes_of(nodes)
    # `functional_call` misses parameters that are read again in backward, those of a module with two names (in torch
    # 2.13), and those that a parametrization registers; mixed precision does not cast its tensors.
    again = any(each.checkpoint or each.gate in OWN_PASSES or each.kind == "conv" for each in every)
    functional = not (lowers or again or any(each.same >= 0 for each in every))
    steps = tuple(_step(rng, EDITS + ("functional call",) * functional) for _ in range(rng.randint(1, 3)))
    if any(node.changes for node in every):  # a second forward would change what the first one's backward needs
        steps = tuple(replace(step, forwards="one") for step in steps)
    elif (
        how == "eager"
        and not uneven
        and rng.random() < 0.3
        and not any(node.gate == "rank" or node.kind == "conv" for node in every)  # half parametrized
    ):
        steps = (*steps, Step(before="interrupt"))  # after a step: what that sets up takes other calls on each rank
    return Case(
        nodes=nodes,
        width=rng.choice((1, 3, 5, 8)),
        out=rng.choice(("", "", "tuple", "dict", "dataclass")),
        dtype="float32" if autocast else rng.choice(("float64", "float64", "float64", "float32")),
        strategy=strategy,
        replicas=replicas,
        reshard=2 if divides and replicas == 1 and rng.random() < 0.3 else 0,
        wrap=wrap,
        param_dtype=rng.choice(("float32", "bfloat16", "float16", "")) if lowers else "",
        reduce_dtype=rng.choice(("float32", "", "bfloat16", "float16")) if lowers else "",
        autocast=autocast,
        offload=rng.random() < 0.1,
        forward_prefetch=rng.random() < 0.3,
        backward_prefetch=rng.choice(("BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", "None")),
        limit_all_gathers=rng.random() < 0.8,
        no_sync=rng.random() < 0.5,
        uneven=uneven,
        input_grads=rng.random() < 0.3,
        optimizer=rng.choice(("sgd", "sgd", "adamw", "adamw", "nested")),
        steps=steps,
        caller=rng.choice(("", "module", "function")) if how != "eager" else "",
        seed=seed,
    )


def _node(rng: random.Random, gates: tuple[str, ...], depth: int) -> Node:
    nests = depth < 3 and rng.random() < 0.3
    children = tuple(_node(rng, gates, depth + 1) for _ in range(rng.randint(1, 3))) if nests else ()
    unit = rng.random() < 0.4
    if unit or any(each.unit for each in nodes_of(children)):
        gates = tuple(gate for gate in gates if gate != "rank")
    return Node(
        kind="nest" if nests else rng.choice([k for k in LEAVES if k not in WHOLE_FORWARD or "backward" not in gates]),
        children=children,
        size=rng.choice((1, 5, 7, 16)),
        unit=unit,
        frozen=rng.choice(("first", "all")) if rng.random() < 0.15 else "",
        checkpoint=rng.choice(("reentrant", "non-reentrant", "non-reentrant")) if rng.random() < 0.25 else "",
        times=2 if rng.random() < 0.1 else 1,
        gate=rng.choice(gates) if rng.random() < 0.2 else "",
        then="in place" if rng.random() < 0.1 else "",
        out=rng.choice(("tuple", "dict", "dataclass", "view")) if rng.random() < 0.2 else "",
        dtype=rng.choice(("float32", "float16")) if rng.random() < 0.15 else "",
        tie=rng.randrange(6) if rng.random() < 0.1 else -1,
        same=rng.randrange(6) if rng.random() < 0.1 else -1,
    )


def _supported(nodes: tuple[Node, ...], wrap: str) -> tuple[Node, ...]:
    """The nodes without what is refused, or outside of docs/limits.md.

    A module that is run in several places runs within the forward of its unit; which units other policies than "units"
    choose is not known here. A rank may leave out parts of units, but neither with a checkpoint around or in it
    ("Smaller ones"), nor with a unit in it, which a module that is run again may hold.
    """
    units: list[int | None] = []  # for each node the innermost unit around it; None: it is one
    known = wrap in ("units", "none")

    def visit(node: Node, unit: int, checkpointed: bool) -> Node:
        index, is_unit = len(units), node.unit and wrap != "none"
        shares = known and not is_unit and 0 <= node.same < index and units[node.same] == unit
        units.append(None if is_unit else unit)
        checkpointed |= node.checkpoint != ""
        below = any(each.checkpoint for each in nodes_of(node.children))
        return replace(
            node,
            children=tuple(visit(child, index if is_unit else unit, checkpointed) for child in node.children),
            same=node.same if shares else -1,
            gate="" if node.gate == "rank" and (checkpointed or below or shares or not known) else node.gate,
        )

    return tuple(visit(node, -1, False) for node in nodes)


def _with_aside(node: Node, rng: random.Random, hides: bool) -> Node:
    """`hides`: whether a nest may leave a tensor where no hook finds it. Units that are chosen automatically have
    outputs behind it that nothing uses, which is a limit (docs/limits.md).
    """
    aside = rng.choice(("attribute", "list", "elsewhere")) if node.kind == "nest" and rng.random() < 0.5 else ""
    aside = "attribute" if aside == "elsewhere" and not hides else aside
    children = tuple(_with_aside(child, rng, hides) for child in node.children)
    return replace(node, children=children, aside=aside)


def _changing(node: Node, rng: random.Random) -> Node:
    changes = rng.choice(CHANGES) if rng.random() < 0.2 else ""
    may_change = node.unit and node.times == 1 and node.kind not in ("nest", "quantized", "bits")
    # Else a change between forward and backward is refused.
    may_below = node.times == 1 and not node.checkpoint and node.gate != "reversible"
    children = tuple(_changing(child, rng) for child in node.children) if may_below else node.children
    return replace(node, children=children, changes=changes if may_change else "")


def _step(rng: random.Random, edits: tuple[str, ...]) -> Step:
    return Step(
        syncs=rng.choice(((True,), (True,), (False, True), (False, False, True), (True, True))),
        forwards=rng.choice(("one", "one", "one", "two", "mixed", "apart", "crossed", "eval")),
        gates=rng.random() < 0.8,
        before=rng.choice(edits) if rng.random() < 0.6 else "",
        clip=rng.random() < 0.3,
        keeps_grads=rng.random() < 0.15,
    )
