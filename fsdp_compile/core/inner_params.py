"""Frozen parameters that are tensor subclasses around other tensors, such as torchao's quantized weights.

    linear.weight  (Int8Tensor)      before: one parameter
    linear._weight_qdata  (int8)     while it is sharded: parameters of their own, in flat parameters like all others,
    linear._weight_scale  (float32)  under the names that torchao's own safetensors files use
    linear.weight                    look-up: the subclass again, put together of what the two are at the moment

See Note [Inner tensors].
"""

# Note [Inner tensors]
# Look-up finds parameters by properties of the module's class (sharding.py), so it can put a subclass together as well:
# of unsharded parameters in a forward, of sharded ones outside. Nothing is installed, and equal modules still share one
# class, hence one graph; `torch.nn.utils.parametrize` would give each module a class of its own, and would call the
# inner tensors `parametrizations.weight.original0`. What the subclass tells beside its tensors lies in the instance.
# The parameter object is lost: a sharded one has one local tensor. So are gradients, and only frozen ones are taken.
# A class of parameters with data of its own and attributes is handled in the same way: the attributes stay here.
# Inner tensors are never cast, whatever `param_dtype` is: what they mean is known to their subclass alone.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_compile.tensors.sharded_tensor import ShardedTensor


@dataclass(eq=False)  # not frozen: Dynamo would guard on each field, those that no code reads too
class Recipe:
    """How a tensor subclass is put together."""

    kind: Any  # its class
    names: tuple[str, ...]  # of its inner tensors
    context: Any  # what `__tensor_flatten__` tells beside these
    size: torch.Size
    stride: tuple[int, ...]
    inner: tuple["Recipe | None", ...]  # for each name the recipe of the inner tensor; None: a plain one
    attributes: dict[str, Any] | None = None  # of a class with data of its own, `names[0]`; None: it is around others

    @property
    def suffixes(self) -> list[str]:
        """The suffixes of the names of the plain tensors, in order."""
        return [
            f"_{name}{rest}"
            for name, recipe in zip(self.names, self.inner, strict=True)
            for rest in (recipe.suffixes if recipe else [""])
        ]

    def put_together(self, plain: Iterator[Tensor]) -> Any:
        """The subclass around the plain tensors that come next."""
        tensors = [recipe.put_together(plain) if recipe else next(plain) for recipe in self.inner]
        if self.attributes is not None and isinstance(tensors[0], ShardedTensor):
            return tensors[0]  # which cannot be of that class: to look at only
        if self.attributes is not None:
            made = tensors[0].as_subclass(self.kind)
            for name, value in self.attributes.items():
                setattr(made, name, value)
            return made
        inner = dict(zip(self.names, tensors, strict=True))
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)


def is_subclass_around_others(tensor: Tensor) -> bool:
    """Whether `tensor` consists of tensors that can become parameters; not DTensors and sharded tensors."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, (DTensor, ShardedTensor))


def has_attributes(param: Tensor) -> bool:
    """Whether `param` is frozen and of a parameter class whose attributes give the data its meaning.
    As bitsandbytes' `Params4bit`: a view of a gathered buffer would lose them.
    """
    is_plain = type(param) in (Tensor, nn.Parameter) or isinstance(param, (DTensor, ShardedTensor))
    return not (is_plain or param.requires_grad or hasattr(param, "__tensor_flatten__"))


def recipe_of(tensor: Any) -> Recipe:
    """The recipe of `tensor`, a subclass of these kinds."""
    if has_attributes(tensor):
        return Recipe(type(tensor), ("data",), None, tensor.size(), tensor.stride(), (None,), dict(vars(tensor)))
    names, context = tensor.__tensor_flatten__()
    tensors = [getattr(tensor, name) for name in names]
    inner = tuple(recipe_of(each) if is_subclass_around_others(each) else None for each in tensors)
    return Recipe(type(tensor), tuple(names), context, tensor.size(), tensor.stride(), inner)


def plain_tensors(tensor: Any) -> list[Tensor]:
    """The plain tensors of `tensor`, in the order of the recipe's `suffixes`."""
    if has_attributes(tensor):
        return [tensor.detach().as_subclass(Tensor)]
    if not is_subclass_around_others(tensor):
        return [tensor]
    return [plain for name in tensor.__tensor_flatten__()[0] for plain in plain_tensors(getattr(tensor, name))]


class InnerParams:
    """The parameters that replace one parameter: its plain tensors, frozen, and the `recipe` to put them together.

    Args:
        param: the parameter.
        device: where it is read.
    """

    def __init__(self, param: nn.Parameter, device: torch.device) -> None:
        there: Tensor = param if param.device == device else param.to(device)  # which its context may name
        self.recipe = recipe_of(there)
        self.params = [nn.Parameter(each.detach(), requires_grad=False) for each in plain_tensors(there)]
        for each in self.params:
            vars(each)["_fsdp_is_inner"] = True

    def named(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """The inner parameters with their names, where the parameter was called `name`."""
        path, dot, attribute = name.rpartition(".")
        return list(zip([path + dot + each for each in inner_names(attribute, self.recipe)], self.params, strict=True))


def is_inner(param: nn.Parameter) -> bool:
    """Whether `param` was an inner tensor of a subclass."""
    return "_fsdp_is_inner" in vars(param)


def inner_names(name: str, recipe: Recipe) -> list[str]:
    """The names of the inner tensors of the parameter `name` in its module."""
    return [f"_{name}{suffix}" for suffix in recipe.suffixes]


def recipes_of(module: nn.Module) -> Mapping[str, Recipe]:
    """The recipes of the parameters of `module` itself, by name."""
    recipes: Mapping[str, Recipe] = module.__dict__.get("_fsdp_recipes", {})
    return recipes


def take_apart(model: nn.Module, inner: Mapping[nn.Parameter, InnerParams]) -> None:
    """Replace parameters by their inner parameters in all modules of `model`."""
    for module in model.modules() if inner else ():
        for name, param in list(module._parameters.items()):
            if param is not None and param in inner:
                replace_items(module._parameters, {name: inner[param].named(name)})
                module.__dict__["_fsdp_recipes"] = {**recipes_of(module), name: inner[param].recipe}


def put_back(model: nn.Module) -> None:
    """Put subclasses together again in all modules of `model`, whose parameters are plain and full."""
    made: dict[tuple[nn.Parameter | None, ...], nn.Parameter] = {}
    for module in model.modules():
        for name, recipe in recipes_of(module).items():
            names = inner_names(name, recipe)
            params = tuple(module._parameters[each] for each in names)
            if params not in made:
                together = recipe.put_together(iter(each.detach() for each in params if each is not None))
                made[params] = nn.Parameter(together, requires_grad=False)
            replace_items(module._parameters, {names[0]: [(name, made[params])], **{each: [] for each in names[1:]}})
        module.__dict__.pop("_fsdp_recipes", None)


def replace_items(held: dict[str, Any], new: Mapping[str, Sequence[tuple[str, Any]]]) -> None:
    """Replace items of `held` by others, in their places."""
    items = list(held.items())
    held.clear()
    for name, value in items:
        held.update(new.get(name, [(name, value)]))
