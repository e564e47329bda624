"""Choosing units: "auto", policies, and what is left alone."""

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


def test_auto_takes_the_outermost_repeated_blocks() -> None:
    """Blocks of one class in a container become units; what is repeated inside them does not; the model comes last."""
    assert paths(Model()) == ["blocks.0", "blocks.1", "blocks.2", ""]


def test_auto_descends_into_what_is_not_repeated() -> None:
    """An encoder and a decoder that occur once each are searched for their own blocks."""
    model = nn.Module()
    model.encoder, model.decoder = Model(), Model()
    assert paths(model)[:6] == [f"{half}.blocks.{i}" for half in ("encoder", "decoder") for i in range(3)]


def test_auto_takes_repeated_layers_with_a_weight_matrix() -> None:
    """In a plain stack, linear layers become units; lone norms, activations and a single odd layer stay in the root."""
    model = nn.Sequential(
        nn.Linear(3, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(3, 3)
    )
    assert paths(model) == ["0", "3", ""]


def test_auto_skips_blocks_without_parameters_and_containers() -> None:
    """A list of lists is searched; the inner lists have no forward and are never units."""
    model = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
    assert paths(model) == ["0.0", "0.1", "1.0", "1.1", ""]
    assert paths(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))) == [""]


def _layers() -> list[nn.Module]:
    return [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)]


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Named(nn.Sequential):
    pass


SEQUENCES = {  # the model, and its units
    "layers": (lambda: nn.ModuleList(nn.Sequential(*_layers()) for _ in range(3)), ["0", "1", "2"]),
    "in a sequence": (lambda: nn.Sequential(*(nn.Sequential(*_layers()) for _ in range(2))), ["0", "1"]),
    "of equal layers": (lambda: nn.ModuleList(nn.Sequential(*_layers()[::2]) for _ in range(2)), ["0", "1"]),
    "of a class": (lambda: nn.ModuleList(Named(*_layers()) for _ in range(2)), ["0", "1"]),
    "in a dictionary": (lambda: nn.ModuleDict({name: nn.Sequential(*_layers()) for name in "ab"}), ["a", "b"]),
    "of two halves": (
        lambda: nn.ModuleList(
            nn.Sequential(Residual(nn.LSTM(4, 4)), Residual(nn.Sequential(*_layers()))) for _ in range(2)
        ),
        ["0", "1"],
    ),
    "stem, blocks and head": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()),
            nn.Sequential(Block(), Block()),
            nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),
        ),
        ["1.0", "1.1"],
    ),
    "stages of blocks": (
        lambda: nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2)),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "norms alone": (lambda: nn.ModuleList(nn.Sequential(nn.LayerNorm(4), nn.ReLU()) for _ in range(2)), []),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_auto_takes_sequences_that_repeat(name: str) -> None:
    """An `nn.Sequential` is a block where others of the same layers are beside it, and not a list of blocks itself."""
    make, units = SEQUENCES[name]
    assert paths(make()) == [*units, ""]


def test_auto_takes_a_shared_block_once() -> None:
    """A block that occurs twice in a container is one unit."""
    block = Block()
    assert paths(nn.ModuleList([block, block, Block()])) == ["0", "2", ""]


def test_auto_leaves_the_rest_as_one_unit_when_something_is_sharded() -> None:
    """With any submodule sharded already, "auto" takes the rest as one unit."""
    model = Model()
    assert paths(model, taken=(model.blocks[1],)) == [""]


def test_none_is_one_unit() -> None:
    """None: the model is one unit."""
    assert paths(Model(), None) == [""]


def test_module_wrap_policy() -> None:
    """A `ModuleWrapPolicy` chooses by class, innermost first."""
    assert paths(Model(), ModuleWrapPolicy({Block, nn.Embedding})) == ["embed", "blocks.0", "blocks.1", "blocks.2", ""]
    nested = paths(Model(), ModuleWrapPolicy({Block, nn.LayerNorm}))
    assert nested[:4] == ["blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1"]


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


def test_a_policy_that_does_not_descend_ends_there() -> None:
    """With recurse answered False, no submodule is asked."""
    assert paths(Model(), lambda module, recurse, nonwrapped_numel: False) == [""]


def test_a_set_of_classes() -> None:
    """A set of module classes chooses as the `ModuleWrapPolicy` of it does (E-INIT-5)."""
    for classes in ({Block, nn.Embedding}, frozenset({Block, nn.Embedding})):
        assert paths(Model(), classes) == ["embed", "blocks.0", "blocks.1", "blocks.2", ""]
    with pytest.raises(TypeError, match=r"auto_wrap_policy: expected a set of module classes, found 3 in it"):
        paths(Model(), {3})


def test_policies_that_cannot_be_meant() -> None:
    """A class in place of a set of classes, and classes of which the model has no module, are refused by name."""
    with pytest.raises(TypeError, match=r"auto_wrap_policy: Block is a class; pass a set of classes, \{Block\}"):
        paths(Model(), Block)
    for policy in ({nn.Conv2d}, ModuleWrapPolicy({nn.Conv2d})):
        with pytest.raises(ValueError, match=r"auto_wrap_policy: Model has no module of class Conv2d"):
            paths(Model(), policy)
    assert paths(Model(), ModuleWrapPolicy(set())) == [""]


def test_a_module_that_is_not_descended_into_is_no_unit() -> None:
    """Where a callable answers False to `recurse=True`, it is not asked whether to wrap: torch does not either."""
    assert paths(Model(), lambda module, recurse, nonwrapped_numel: not recurse) == [""]
    enters = lambda module, recurse, nonwrapped_numel: not (recurse and isinstance(module, Block))  # noqa: E731
    assert not any(path.startswith("blocks.") for path in paths(Model(), enters))


def test_size_based_policy() -> None:
    """torch's policy by size: a block has enough elements, its layers and the embedding have not (E-INIT-5)."""
    policy = partial(size_based_auto_wrap_policy, min_num_params=40)
    assert paths(Model(), policy) == ["blocks.0", "blocks.1", "blocks.2", ""]


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
    ["auto", {Block}, partial(size_based_auto_wrap_policy, min_num_params=40),
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
    policy = partial(size_based_auto_wrap_policy, min_num_params=40)
    ignored = collect_ignored(model, None, [model.blocks[0].layers[0].weight])
    assert paths(model, policy, ignored=ignored) == ["blocks.1", "blocks.2", ""]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("blocks", ValueError, 'expected "auto".*found the string .blocks.'),
        (3, TypeError, "auto_wrap_policy.*found int"),
    ],
)
def test_other_policies_are_refused(policy: Any, error: type[Exception], message: str) -> None:
    """Anything else is an error that names the argument and what was found."""
    with pytest.raises(error, match=message):
        choose_units(Model(), policy)
