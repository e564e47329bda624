"""Choosing units: "auto", policies, and what is left alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdp_compile.construct.blocks import Ignored
from fsdp_compile.construct.wrap_policy import choose_units, collect_ignored


def paths(
    model: nn.Module,
    policy: Any = "auto",
    taken: tuple[nn.Module, ...] = (),
    ignored: Ignored = Ignored(),  # noqa: B008  (frozen)
) -> list[str]:
    for module in taken:
        vars(module)["_fsdp"] = "sharded already"
    chosen = choose_units(model, policy, ignored)
    return [next(path for path, m in model.named_modules() if m is module) for module in chosen]


class Block(nn.Module):
    def __init__(self, inner: int = 2) -> None:
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(4), nn.ModuleList(nn.Linear(4, 4) for _ in range(inner))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 5)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Named(nn.Sequential):
    pass


def _two_models() -> nn.Module:
    model = nn.Module()
    model.encoder, model.decoder = Model(), Model()
    return model


def _shared() -> nn.Module:
    block = Block()
    return nn.ModuleList([block, block, Block()])


def _sequences(*layers: Callable[[], nn.Module], count: int = 2) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(nn.Sequential(*(make() for make in layers)) for _ in range(count))


LINEAR, WIDE, NARROW = (partial(nn.Linear, *sizes) for sizes in ((3, 3), (4, 8), (8, 4)))
AUTO: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {  # the model, and its units but for the last one, itself
    "the outermost repeated blocks": (Model, BLOCKS),
    "in what is not repeated": (_two_models, [f"{half}.{path}" for half in ("encoder", "decoder") for path in BLOCKS]),
    "repeated layers with a weight matrix": (
        lambda: nn.Sequential(LINEAR(), nn.LayerNorm(3), nn.ReLU(), LINEAR(), nn.LayerNorm(3), nn.Embedding(3, 3)),
        ["0", "3"]),
    "in lists of lists": (
        lambda: nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2)), ["0.0", "0.1", "1.0", "1.1"]),
    "nothing without parameters": (lambda: nn.Sequential(nn.ReLU(), nn.ReLU(), LINEAR()), []),
    "a shared block once": (_shared, ["0", "2"]),
    "sequences of layers": (_sequences(WIDE, nn.ReLU, NARROW, count=3), ["0", "1", "2"]),
    "in a sequence": (lambda: nn.Sequential(*_sequences(WIDE, nn.ReLU, NARROW)()), ["0", "1"]),
    "of equal layers": (_sequences(WIDE, NARROW), ["0", "1"]),
    "of a class": (lambda: nn.ModuleList(Named(WIDE(), NARROW()) for _ in range(2)), ["0", "1"]),
    "in a dictionary": (lambda: nn.ModuleDict({name: nn.Sequential(WIDE(), NARROW()) for name in "ab"}), ["a", "b"]),
    "of two halves": (
        _sequences(lambda: Residual(nn.LSTM(4, 4)), lambda: Residual(nn.Sequential(WIDE(), NARROW()))), ["0", "1"]),
    "stem, blocks and head": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), nn.Sequential(Block(), Block()),
                              nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))), ["1.0", "1.1"]),
    "stages of blocks": (_sequences(Block, Block), ["0.0", "0.1", "1.0", "1.1"]),
    "norms alone": (_sequences(partial(nn.LayerNorm, 4), nn.ReLU), []),
}  # fmt: skip


@pytest.mark.parametrize("what", AUTO)
def test_auto(what: str) -> None:
    """Blocks of one class in a container become units, and an `nn.Sequential` where others of the same layers are
    beside it; not what is repeated inside them, lone layers, nor containers. The model comes last."""
    make, units = AUTO[what]
    assert paths(make()) == [*units, ""]


_forty = partial(size_based_auto_wrap_policy, min_num_params=40)  # a block has them, its layers and the embedding not
POLICIES: dict[str, tuple[Any, list[str]]] = {
    "none": (None, [""]),
    "a ModuleWrapPolicy": (ModuleWrapPolicy({Block, nn.Embedding}), ["embed", *BLOCKS, ""]),
    "innermost first": (ModuleWrapPolicy({Block, nn.LayerNorm}),
                        [path for block in BLOCKS for path in (f"{block}.norm", block)] + [""]),
    "a set": ({Block, nn.Embedding}, ["embed", *BLOCKS, ""]),
    "a frozenset": (frozenset({Block, nn.Embedding}), ["embed", *BLOCKS, ""]),
    "no classes": (ModuleWrapPolicy(set()), [""]),
    "by size": (_forty, [*BLOCKS, ""]),
    "a callable that does not descend": (lambda module, recurse, nonwrapped_numel: False, [""]),
    "a callable that only descends": (lambda module, recurse, nonwrapped_numel: not recurse, [""]),
}  # fmt: skip


@pytest.mark.parametrize("what", POLICIES)
def test_policies(what: str) -> None:
    """As torch's choose, innermost first; the model itself is the last unit (E-INIT-5)."""
    policy, units = POLICIES[what]
    assert paths(Model(), policy) == units


def test_auto_leaves_the_rest_as_one_unit_when_something_is_sharded() -> None:
    """With any submodule sharded already, "auto" takes the rest as one unit."""
    model = Model()
    assert paths(model, taken=(model.blocks[1],)) == [""]


def test_a_module_that_is_not_descended_into_is_no_unit() -> None:
    """Where a callable answers False to `recurse=True`, it is not asked whether to wrap: torch does not either."""
    enters = lambda module, recurse, nonwrapped_numel: not (recurse and isinstance(module, Block))  # noqa: E731
    assert not any(path.startswith("blocks.") for path in paths(Model(), enters))


def test_callable_policy_sees_what_is_not_wrapped_yet() -> None:
    """A callable is asked whether to descend, then, told what no chosen submodule holds, whether to wrap."""
    asked: dict[int, int] = {}

    def at_least_20(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        asked[id(module)] = nonwrapped_numel
        return recurse or nonwrapped_numel >= 20

    model = Model()
    chosen = paths(model, at_least_20)
    assert chosen[:3] == ["embed", "blocks.0.layers.0", "blocks.0.layers.1"]
    assert "blocks.0" not in chosen  # its layers are units: 8 elements are left
    assert asked[id(model.blocks[0])] == 8


def test_custom_policy() -> None:
    """A `CustomPolicy` chooses, innermost first, and may give a module settings of its own (E-INIT-5)."""
    model = Model()
    wanted: dict[nn.Module, Any] = {model: True, model.blocks[1]: {"sharding_strategy": 3}, model.blocks[1].norm: True}
    policy = CustomPolicy(lambda module: wanted.get(module, False))
    assert paths(model, policy) == ["blocks.1.norm", "blocks.1", ""]
    chosen = choose_units(model, policy)
    assert [*chosen.values()] == [{}, {"sharding_strategy": 3}, {}]
    assert paths(model, policy, taken=(model.blocks[1],)) == [""]


def ignoring(model: nn.Module, *modules: nn.Module) -> Ignored:
    return collect_ignored(model, modules, None)


@pytest.mark.parametrize(
    "policy",
    ["auto", {Block}, _forty,
     CustomPolicy(lambda module: isinstance(module, Block))],
)  # fmt: skip
def test_ignored_modules_are_no_units(policy: Any) -> None:
    """No policy chooses an ignored module, nor anything below one (E-INIT-9)."""
    model = Model()
    assert paths(model, policy, ignored=ignoring(model, model.blocks[1])) == ["blocks.0", "blocks.2", ""]
    assert paths(model, policy, ignored=ignoring(model, model.blocks)) == [""]


def test_ignored_parameters_do_not_count() -> None:
    """What is ignored is not part of `nonwrapped_numel` (E-INIT-5, 9)."""
    model = Model()
    ignored = collect_ignored(model, None, [model.blocks[0].layers[0].weight])
    assert paths(model, _forty, ignored=ignored) == ["blocks.1", "blocks.2", ""]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("blocks", ValueError, 'expected "auto".*found the string .blocks.'),
        (3, TypeError, "auto_wrap_policy.*found int"),
        ({3}, TypeError, "auto_wrap_policy: expected a set of module classes, found 3 in it"),
        (Block, TypeError, r"auto_wrap_policy: Block is a class; pass a set of classes, \{Block\}"),
        ({nn.Conv2d}, ValueError, "auto_wrap_policy: Model has no module of class Conv2d"),
        (ModuleWrapPolicy({nn.Conv2d}), ValueError, "auto_wrap_policy: Model has no module of class Conv2d"),
    ],
)
def test_other_policies_are_refused(policy: Any, error: type[Exception], message: str) -> None:
    """Anything else, and what cannot be meant, is an error that names the argument and what was found."""
    with pytest.raises(error, match=message):
        choose_units(Model(), policy)
