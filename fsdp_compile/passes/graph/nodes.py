"""Tags of nodes, and kinds of nodes: views, matrix products, loops.

Passes match tags and our own operators, never node names or shapes of graphs. All code asks here for kinds, so that
views, products and fusion mean the same to planned seconds, to planned memory and to the passes that edit graphs.
"""

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fsdp_compile.comm.collectives import STARTS, WAIT
from fsdp_compile.passes._torch import OpOverload

_KEY = "fsdp_compile"
_OWN_KEYS = (_KEY, "val", "tensor_meta", "eager_input_vals", "recompute", "ac_graph_id")  # that no other node inherits

Kind = Literal[
    "cast", "local", "maximum", "gather", "wait", "view", "pack", "add_accumulated", "defer_reduce", "scale", "reduce",
    "wait_reduce", "update", "arriving",
]  # fmt: skip


@dataclass(frozen=True)
class Tag:
    """What a node does, and for which unit.

    Attributes:
        kind: one of:
            cast            of the shard before its gather, or of a gradient before it is packed
            local           computed on the shard, so that what is gathered is smaller
            maximum         of parameters, over all ranks: the all-reduce, its wait, and views of the result
            gather, wait    all-gather of the parameters, and the wait for it
            view            of one parameter in the gathered buffer
            pack            the gradients into one buffer
            add_accumulated  adds to that the gradients accumulated under no_sync
            defer_reduce    passes packed gradients to the eager runtime, which reduces them later
            scale           of gradients, around a sum in float16
            reduce, wait_reduce  reduce-scatter or all-reduce, and the wait for it
            update          of the unit by the optimizer, in backward
            arriving        an input of the graph: parameters that the eager runtime gathers meanwhile
        unit: index of the unit in order of its first gather in the traced forward; of maxima, which are of several: -1.
        path: of the unit's module in the model, for people.
        reshard: whether the unit's gathered buffer is freed between forward and backward; None: not decided yet.
        launch: which coalesced launch of the plan a gather or reduce belongs to; None: it is launched alone.
        wire: in which format a gather or reduce sends values (comm/formats.py); empty: as they are.
    """

    kind: Kind
    unit: int
    path: str
    reshard: bool | None
    launch: int | None = None
    wire: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path or 'root'} {self.wire}".rstrip()


def set_tag(node: fx.Node, tag: Tag) -> None:
    """Attach `tag` to `node`; it survives partitioning."""
    node.meta[_KEY] = tag


def get_tag(node: fx.Node) -> Tag | None:
    """Return the tag of `node`, or None."""
    return node.meta.get(_KEY)


def tag_of(node: fx.Node) -> Tag:
    """Return the tag of `node`, which must have one."""
    tag = get_tag(node)
    assert tag is not None
    return tag


def tagged(graph: fx.Graph, *kinds: Kind) -> list[fx.Node]:
    """The nodes with a tag of one of `kinds`, in graph order, without placeholders."""
    calls = (node for node in graph.nodes if node.op == "call_function")
    return [n for n in calls if (tag := get_tag(n)) is not None and tag.kind in kinds]


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erase what nothing reads, and gathers that nothing reads any more: torch takes their waits for side effects."""
    graph.eliminate_dead_code()
    for node in reversed(tagged(graph, "gather", "wait")):
        if not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def add_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    mode: Any,
    name: Any = None,
) -> fx.Node:
    """Add a call where `graph` inserts nodes, with the value that it has in the fake tensor mode `mode`."""
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    values, options = fx.map_arg((args, kwargs or {}), lambda arg: arg.meta["val"])
    with mode:
        node.meta["val"] = target(*values, **options)
    return node


Emit = Callable[..., fx.Node]  # (kind, target, *args, wire="", **kwargs)


# Note [Names say the format]
# Compilers keep code by the text of graphs, which has names but no tags, and what is sent in a format is rewritten
# behind that (post_grad/messages.py). So names differ where formats do: else a model would run with the code of another
# one, or of a run before, that has other formats.


def emitter(graph: fx.Graph, before: fx.Node, tag: Tag, like: fx.Node | None = None) -> Emit:
    """Return a function that adds a node before `before`, with its fake value and with `tag` of another kind.

    Its name has the format `wire` that it is given: see Note [Names say the format]. Other metadata come from `like`,
    or else from `before`, except for recomputation, which `reshard` decides.
    """
    inherited = {key: value for key, value in (like or before).meta.items() if key not in _OWN_KEYS}
    mode = (like or before).meta["val"].fake_mode

    def emit(kind: Kind, target: Any, *args: Any, wire: str = "", **kwargs: Any) -> fx.Node:
        name = f"{kind}_{tag.path or 'root'}" + f"_{wire}" * bool(wire)
        with graph.inserting_before(before):
            node = add_call(graph, target, args, kwargs, mode=mode, name=name)
        node.meta = {**inherited, "val": node.meta["val"]}
        set_tag(node, replace(tag, kind=kind, wire=wire))
        return node

    return emit


def is_ours(graph: fx.Graph, markers: Iterable[object]) -> bool:
    """Whether the graph has our markers or tags; all other graphs are left untouched."""
    targets = set(markers)
    return any(get_tag(node) or node.target in targets for node in graph.nodes)


def module_path(node: fx.Node) -> str:
    """Path of the module whose forward or backward `node` belongs to, for messages."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    source = next(reversed(stack.values()))[0] if stack else ""
    source = source.partition(".parametrizations")[0]
    words = re.findall(r"\w+", source.replace("L['self']", "").replace("_orig_mod", ""))
    return ".".join(word for word in words if word != "_modules")


# --- kinds ------------------------------------------------------------------------------------------------------------

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default

_COUNTED_AS = {  # operators that torch's flop counter lacks as of 2.13, and the ones whose formulas they share
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}

# Pointwise for Inductor, without torch's tag: scatters into a slice, padding, and casts before decomposition.
_POINTWISE = {aten.select_scatter, aten.slice_scatter, aten.constant_pad_nd, aten._to_copy, aten.full_like}
_REDUCTIONS = {aten._softmax}  # likewise, before decomposition
_CONSTANTS = {aten.full, torch.ops.prims.iota}  # computed from nothing, in whichever loop reads them

# Views that keep the elements' logical order: a flattened result is the flattened input.
SAME_ORDER = frozenset(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
    )
)


def packet_of(node: fx.Node) -> Any:
    """The operator that `node` calls, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


# --- views and readers ------------------------------------------------------------------------------------------------


def is_view(node: fx.Node) -> bool:
    """Whether `node` is a view of its first argument."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target in SAME_ORDER:
        return True
    schema = getattr(node.target, "_schema", None)
    alias = schema.arguments[0].alias_info if schema else None
    return alias is not None and not alias.is_write


def keeps_values(node: Any) -> bool:
    """Whether `node` is a view of its first argument's elements as they are, not of bits, conjugates, negatives."""
    pair = [each.meta["val"] for each in (node, node.args[0])] if is_view(node) else ()
    return len({(value.dtype, value.is_conj(), value.is_neg()) for value in pair}) == 1


def source_of(node: fx.Node, through: Callable[[fx.Node], bool] = is_view) -> fx.Node:
    """The node whose memory `node` views."""
    while through(node):
        node = node.args[0]  # type: ignore[assignment]  # fx arguments are untyped
    return node


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether `node` is its first argument in another shape or dtype."""
    return is_view(node) or node.target is CAST


def is_passed_on(node: fx.Node) -> bool:
    """Whether `node` shares memory with its first argument: a view, an element of a tuple, a constant."""
    return is_view(node) or node.target is operator.getitem or packet_of(node) is aten.lift_fresh_copy


def is_scalar(node: fx.Node) -> bool:
    """Whether `node` is a number, such as a size, and no tensor."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def is_pure(node: fx.Node) -> bool:
    """Whether the operator is deterministic and has no side effects."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not is_random and not schema.is_mutable and node.target not in (*STARTS, WAIT)


def derived(node: fx.Node, kind: Callable[[fx.Node], bool] = is_view_or_cast) -> list[fx.Node]:
    """The users of `node` that are of a kind, by default views and casts, and their users of that kind; each once."""
    members: dict[fx.Node, None] = {}
    work = [node]
    while work:
        users = [user for user in work.pop().users if kind(user) and user not in members]
        members.update(dict.fromkeys(users))
        work += users
    return list(members)


def reads(node: fx.Node, through: Callable[[fx.Node], bool] = is_view) -> Iterator[fx.Node]:
    """The nodes that read `node`, also through views, in the order of users; once for each path."""
    for user in node.users:
        if through(user):
            yield from reads(user, through)
        else:
            yield user


def readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The views of `node`, views of views included, and the other nodes that read it or them; each once."""
    return derived(node, is_view), list(dict.fromkeys(reads(node)))


# --- matrix products --------------------------------------------------------------------------------------------------


def flop_formula(node: fx.Node) -> Callable[..., Any] | None:
    """Torch's formula for the floating-point operations of `node`; None if it has none."""
    packet = packet_of(node)
    return flop_registry.get(_COUNTED_AS.get(packet, packet))


def is_product(node: fx.Node) -> bool:
    """Whether the node computes enough to hide communication: an operator in torch's flop counter.

    Attention on the CPU and flex attention have a formula too, but no graph is cut into tasks at them.
    """
    is_operator = isinstance(node.target, OpOverload)
    return is_operator and packet_of(node) not in _COUNTED_AS and flop_formula(node) is not None


# --- fusion -----------------------------------------------------------------------------------------------------------

# Note [What Inductor fuses]
# Inductor computes pointwise operations, reductions and constants in loops, and fuses loops that read each other into
# one kernel. Three consequences, which planned seconds and planned memory (lifetimes.py) share:
#   1. A value that only loops read passes between them in registers (`stays_in_loops`): neither the write nor the
#      reads cost time, and what a chain of loops takes from elsewhere is read once.
#   2. A pointwise value or a constant that only loops read may have no memory at all: each of its readers computes it,
#      and reads what it was computed from (`may_be_inlined`). A reduction is stored, as its readers need all of it.
#   3. Which of these happens is Inductor's choice, made later by heuristics that differ between versions. Time takes
#      the likely case. Memory must be an upper bound, so where Inductor may choose, both possibilities count.


def is_pointwise(node: fx.Node) -> bool:
    """Whether the node computes each element from elements of its inputs."""
    if node.target is aten.scatter.value and isinstance(node.args[0], fx.Node):
        return packet_of(node.args[0]) in _CONSTANTS  # then Inductor rewrites it as a comparison of indices
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet_of(node) in _POINTWISE


def is_loop(node: fx.Node) -> bool:
    """Whether Inductor computes the node in a loop that it may fuse with others."""
    is_reduction = torch.Tag.reduction in getattr(node.target, "tags", ()) or packet_of(node) in _REDUCTIONS
    return is_pointwise(node) or is_reduction or packet_of(node) in _CONSTANTS


def value_readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read the value of `node`, and not only its size."""
    return (reader for reader in reads(node, is_passed_on) if not is_scalar(reader))


def stays_in_loops(node: fx.Node) -> bool:
    """Whether only loops read and compute the value of `node`. See Note [What Inductor fuses]."""
    return is_loop(node) and all(map(is_loop, value_readers(node)))


def may_be_inlined(node: fx.Node) -> bool:
    """Whether the readers of `node` may compute it for themselves. See Note [What Inductor fuses]."""
    is_constant = node.op == "call_function" and not node.all_input_nodes
    return (is_pointwise(node) or is_constant) and all(map(is_loop, value_readers(node)))
