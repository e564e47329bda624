"""The pipeline: passes by name, passes of others, cache keys, and what the forward may save."""

import logging
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiling import Recorder, printed_graphs, small, step
from conftest import RANK
from models import MODELS, Residual, Stack, mlp, squared_error, vectors
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_compile import CompileConfig, MixedPrecision, ShardingStrategy, compile_step, explain_plan, fully_shard
from fsdp_compile.comm.collectives import ALL_GATHER, WAIT
from fsdp_compile.core.ops import REDUCE_ROWS, UNSHARD
from fsdp_compile.passes import PASSES, inductor, printed
from fsdp_compile.passes._torch import saved_for_backward, switched_off
from fsdp_compile.passes.graph.lifetimes import lifetimes, live_bytes
from fsdp_compile.passes.graph.nodes import is_view, tag_of, tagged
from fsdp_compile.passes.hooks import AfterFusion, Pipeline
from fsdp_compile.passes.inductor import compile_with, fsdp_compile_backend, install, placed
from fsdp_compile.passes.pipeline import GraphContext, Pass, enabled
from fsdp_compile.passes.plan.plan import PlanError

X = torch.ones(4, 3)


@pytest.mark.nightly
def test_every_pass_can_be_left_out_by_name() -> None:
    """With `disable`, a pass and those that need it do not run, the others do; the model still compiles and runs."""
    for left_out in PASSES:
        if left_out.name == "reshard":
            continue  # the guard refuses that: test_a_gather_saved_against_the_strategy_is_refused
        torch._dynamo.reset()
        model = fully_shard(small())
        with printed_graphs() as graphs:
            step(torch.compile(model, backend=fsdp_compile_backend, options={"disable": (left_out.name,)}), X)
        ran = {graph.split("\n")[0].rsplit(" ", 1)[1] for graph in graphs}
        assert ran == {each.name for each in enabled(PASSES, CompileConfig(disable=(left_out.name,)))}
        assert left_out.name not in ran


def test_graphs_are_written_where_a_user_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDP_COMPILE_PRINT names a folder: a file for each pass that ran, in its order, as the logger prints it; and the
    first rank says so."""
    monkeypatch.setenv("FSDP_COMPILE_PRINT", str(tmp_path))
    assert printed._rank() == RANK
    monkeypatch.setattr(printed, "_rank", lambda: 0)
    torch._dynamo.reset()
    with printed_graphs() as graphs:
        step(torch.compile(fully_shard(small()), backend=fsdp_compile_backend), X)
    told = capsys.readouterr().err
    for direction in ("joint", "forward", "backward"):
        (folder,) = tmp_path.glob(f"rank0/graph*_{direction}")
        assert f"passes in {folder}" in told
        texts = [graph.partition("\n") for graph in graphs if graph.startswith(f"--- {direction} graph after ")]
        ran = [title.split()[-1] for title, _, _ in texts]
        stage = "joint" if direction == "joint" else "post_grad"
        assert ran == [each.name for each in PASSES if each.stage == stage]
        names = [f"{count:02}_{name}.txt" for count, name in enumerate(ran)]
        assert sorted(path.name for path in folder.iterdir()) == names
        assert [(folder / name).read_text() for name in names] == [f"{text}\n" for _, _, text in texts]


def test_passes_of_layers_have_places() -> None:
    """Each runs right behind the pass that it names; one that names a pass which does not exist is refused."""
    extra = Pass("mine", "post_grad", print, after="order")
    names = [each.name for each in placed(PASSES, [extra])]
    assert names.index("mine") == names.index("order") + 1 and len(names) == len(PASSES) + 1
    with pytest.raises(ValueError, match="'mine' runs after 'odrer', which does not exist"):
        placed(PASSES, [replace(extra, after="odrer")])


LINK = {"link": "custom:2e-5,1e9"}
BAD_OPTIONS: list[tuple[Any, str]] = [
    ({"in_flight": 1}, "options: expected names among disable, reduces_in_flight, .*link.*, found in_flight"),
    ({"disable": "order"}, "disable: expected a tuple of names of passes, found 'order'"),
    ({"disable": [1]}, r"disable: expected a tuple of names of passes, found \[1\]"),
    ({"disable": ("reordr",)}, "disable, or FSDP_COMPILE_DISABLE: expected names among insert_.*found reordr"),
    ({"reduces_in_flight": 0}, "reduces_in_flight must be at least 1, or None, not 0"),
    ({"reduces_in_flight": 1.5}, "reduces_in_flight: expected an int or None, found float"),
    ({"reduces_in_flight": True}, "reduces_in_flight: expected an int or None, found bool"),
    ({"check_ranks_timeout": 0}, "check_ranks_timeout must be above 0 seconds, not 0"),
    ({"check_ranks_timeout": float("nan")}, "check_ranks_timeout must be above 0 seconds, not nan"),
    ({"check_ranks_timeout": "1"}, "check_ranks_timeout: expected a float, found str"),
    ({"link": 3}, "link: expected a str or None, found int"),
    ({"link": "ethernet"}, "link: expected one of h100-nvlink, .*found 'ethernet'"),
    ({**LINK, "device": "h1000"}, "device: expected one of a100-40, .*found 'h1000'"),
    ({**LINK, "device": 3}, "device: expected a str or None, found int"),
    ({**LINK, "budget": "4GB"}, "budget: expected an int or None, found str"),
    ({**LINK, "budget": -1}, "budget must be at least 1 byte, or None, not -1"),
    ({"activations": "recompute"}, "options: expected names among .*, found activations"),
    ({"plan": "absent"}, "plan: expected absent to be text with plans"),
    ({"plan": 3}, "plan: expected a str or None, found int"),
    ({"share_artifacts": 1}, "share_artifacts: expected a bool, found int"),
    ("link", "options: expected a dict.*, found str"),
]


def test_options_that_are_announced_to_go_change_nothing() -> None:
    """They warn."""
    for each in ({"profile": "absent"}, {"record_profile": True}, {"share_artifacts": True}):
        with pytest.warns(FutureWarning, match=f"{next(iter(each))} has no effect any more"):
            assert CompileConfig(**each) == CompileConfig()
    model = fully_shard(small())
    with pytest.warns(UserWarning, match="compile_step: prefetch has no effect any more"):
        compile_step(model, torch.optim.SGD(model.parameters(), 0.1), prefetch=2)


def test_bad_options_are_refused_by_name() -> None:
    """A bad option is an error that begins with its name: of `model.compile` and `compile_step` at once, of
    `torch.compile`, which gives a backend no options before, in the first forward; nothing wraps or changes it."""
    model = fully_shard(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index, (options, message) in enumerate(BAD_OPTIONS):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            model.compile(backend="fsdp_compile", options=options)
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            compile_step(model, optimizer, options=options)
        if index % 5 == 0:  # each of these forwards is traced
            backend = (fsdp_compile_backend, "fsdp_compile")[index % 2]
            with pytest.raises(ValueError, match=f"^{message}"):
                torch.compile(model, backend=backend, options=options)(X)
            torch._dynamo.reset()
    for name, values in {"link": (None, "ethernet"), "device": (3, "h1000"), "budget": (-1, "4GB")}.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"^{name}"):
                explain_plan(model, (X,), **{**LINK, name: value})
    with pytest.raises(TypeError, match=r"^example_inputs: expected a Sequence or a Callable or None, found"):
        explain_plan(model, X, **LINK)
    assert model._compiled_call_impl is None and model(X).shape == (4, 2)


def test_without_other_ranks_the_rule_makes_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Where there are no other ranks nothing is measured, which is said once, and the rule is followed; a budget is
    refused."""
    inductor._log_once.cache_clear()
    options = {"link": "measure"}
    with caplog.at_level(logging.INFO, "fsdp_compile"):
        for _ in range(2):
            torch.compile(fully_shard(small()), backend="fsdp_compile", options=options)(X).sum().backward()
    assert [text for text in caplog.messages if "measured" in text] == [
        "collectives follow the order of blocks, as no link was measured: there are no other ranks"
    ]
    with pytest.raises(PlanError, match=r"^budget=1 needs a link, and the ranks could not measure one: name it"):
        torch.compile(fully_shard(small()), backend="fsdp_compile", options={"budget": 1})(X)


@pytest.mark.parametrize("budget", [1, 100])
def test_a_plan_that_does_not_fit_is_no_error_of_inductor(budget: int) -> None:
    """What can be known only when a graph is planned is an error of plans, and as it is."""
    model = torch.compile(fully_shard(small()), backend="fsdp_compile", options={**LINK, "budget": budget})
    with pytest.raises(PlanError, match=rf"^budget: expected at least \d+ bytes.*found {budget}"):
        model(X)


def test_bad_arguments_of_a_step_are_refused_by_name() -> None:
    """Each argument of `compile_step` that it cannot use is an error that begins with its name."""
    model = fully_shard(small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for name, values in {
        "optimizer": (None, 3, small()),
        "loss_fn": (3, "mse", torch.ones(1)),
        "clip_norm": ("1", -1, float("nan"), True),
        "accumulate": (0, 1.5, "2", True),
        "scaler": (3, True, "dynamic"),
        "update_in_backward": ("yes", 1, None),
        "backend": (3, None, 1.5),
        "options": ([1], "link", 3),
    }.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"^{name}"):
                compile_step(**{"model": model, "optimizer": optimizer, name: value})


def test_default_path_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain `torch.compile` has its passes and its timeout from there."""
    monkeypatch.setenv("FSDP_COMPILE_DISABLE", "pin_order, order")
    monkeypatch.setenv("FSDP_COMPILE_CHECK_RANKS_TIMEOUT", "2.5")
    assert CompileConfig.from_environment() == CompileConfig(disable=("pin_order", "order"), check_ranks_timeout=2.5)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("FSDP_COMPILE_BUDGET", "much", "FSDP_COMPILE_BUDGET must be a number, not 'much'"),
        ("FSDP_COMPILE_ACTIVATIONS", "auto", "FSDP_COMPILE_ACTIVATIONS: this option is gone; torch.utils.checkpoint"),
        ("FSDP_COMPILE_DEVICE", "h1000", "device: expected one of a100-40, .*found 'h1000'"),
        ("FSDP_COMPILE_LINK", "ethernet", "link: expected one of h100-nvlink"),
        ("FSDP_COMPILE_PLAN", "absent", "plan: expected absent to be text with plans"),
        ("FSDP_COMPILE_DISABLE", "reordr", "FSDP_COMPILE_DISABLE: expected names among insert_collectives"),
    ],
)
def test_an_impossible_environment(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    """`fully_shard` refuses it and leaves the model as it was, instead of the first compiled step."""
    monkeypatch.setenv(variable, value)
    model = small()
    with pytest.raises(ValueError, match=text):
        fully_shard(model)
    assert {type(param) for param in model.parameters()} == {nn.Parameter} and type(model) is type(small())


def test_markers_without_a_sequence_number() -> None:
    """Reduces whose unit cannot be told are refused, not given to another unit."""

    def forget(context: GraphContext) -> None:
        for node in context.graph.nodes:
            if node.target is UNSHARD:
                node.meta["seq_nr"] = -1

    passes = (Pass("forget", "joint", forget), *PASSES)
    run = torch.compile(fully_shard(small()), backend=partial(compile_with, passes=passes, config=CompileConfig()))
    with pytest.raises(Exception, match="expected the autograd sequence number of an unshard before it, found"):
        run(X)


def test_memory_of_a_deep_graph() -> None:
    """What is alive in a graph of thousands of layers is computed without recursion."""
    graph = fx.Graph()
    node = start = graph.placeholder("x")
    layers = [node := graph.call_function(torch.ops.aten.relu.default, (node,)) for _ in range(3000)]
    graph.output((node,))
    for each in (start, *layers):
        each.meta["val"] = torch.empty(4, device="meta")
    live = live_bytes(lifetimes(graph, {layer: index for index, layer in enumerate(layers)}, {}, []), len(layers))
    assert live == [16] * 2999 + [32]  # the input, and at last the output


def test_memory_of_operators_that_overwrite() -> None:
    """A result of their own counts, one that is the overwritten input does not."""
    graph = fx.Graph()
    rows = graph.placeholder("rows")
    twice = graph.call_function(torch.ops.aten.mul_.Scalar, (rows, 2))
    total = graph.call_function(REDUCE_ROWS, (twice, "tree"))
    graph.output((total,))
    for each, shape in ((rows, (4, 3)), (twice, (4, 3)), (total, (3,))):
        each.meta["val"] = torch.empty(shape, device="meta")
    alive = lifetimes(graph, {twice: 0, total: 1}, {}, [])
    assert [(each.node, each.size) for each in alive] == [(rows, 48), (total, 12)]


def test_install_chains_to_a_pass_that_is_there() -> None:
    """A pass registered before ours still runs, before ours; installing again does not stack pipelines."""
    seen: list[bool] = []
    foreign = Recorder(lambda graph: seen.append(any(n.target is UNSHARD for n in graph.nodes)))
    with inductor_config.patch(joint_custom_post_pass=foreign):
        model = fully_shard(small())
        install()
        pipeline: Any = inductor_config.joint_custom_post_pass
        assert isinstance(pipeline, Pipeline) and pipeline.previous is foreign
        step(torch.compile(model), X)
    assert seen == [True]  # it saw the markers, so it ran before our passes


@pytest.mark.parametrize("hook", ["joint_custom_post_pass", "post_grad_custom_post_pass"])
def test_a_pass_that_replaces_ours_is_noticed(hook: str) -> None:
    """If another pass takes our place when ours is installed, compiling raises instead of keeping all parameters."""
    model = fully_shard(small())
    torch.compile(model, backend="eager")(X)
    torch._dynamo.reset()
    with (
        inductor_config.patch({hook: Recorder(lambda graph: None)}),
        pytest.raises(Exception, match=f"{hook}: expected the pipeline that fully_shard registered"),
    ):
        step(torch.compile(model), X)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_generated_cpp_code_is_refused(strategy: str) -> None:
    """Torch's C++ wrapper cannot call collectives: compiling raises instead of generating code that crashes."""
    model = fully_shard(small(), sharding_strategy=ShardingStrategy[strategy])
    with (
        inductor_config.patch(cpp_wrapper=True),
        pytest.raises(Exception, match="cpp_wrapper: expected False for a graph with collectives, found True"),
    ):
        step(torch.compile(model), X)


class Attention(nn.Module):
    """Attention as products and a softmax, which Inductor's patterns find and replace."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, 8)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def test_a_graph_that_comes_out_of_order() -> None:
    """Inductor's patterns leave the joint graph unsorted, and call our passes before they sort it."""
    model = torch.compile(fully_shard(nn.Sequential(Attention(), Attention())), fullgraph=True)
    with sdpa_kernel(SDPBackend.MATH):
        step(model, torch.rand(2, 5, 8))


def test_graphs_without_markers_are_left_alone() -> None:
    """Compiling an unsharded model while our pipelines are installed runs none of our passes."""
    fully_shard(small())
    with printed_graphs() as graphs:
        step(torch.compile(small()), X)
    assert graphs == []


def test_nothing_else_in_the_process_changes() -> None:
    """Compiling a sharded model sets three of Inductor's hooks and no other setting of Inductor or Dynamo."""
    hooks = dict.fromkeys(("joint_custom_post_pass", "post_grad_custom_post_pass", "_post_fusion_custom_pass"))
    with inductor_config.patch(hooks):
        before = dict(inductor_config.get_config_copy()), dict(torch._dynamo.config.get_config_copy())
        torch.compile(fully_shard(small()), backend="eager")(X)
        after = dict(inductor_config.get_config_copy()), dict(torch._dynamo.config.get_config_copy())
    assert {
        name for name in before[0] if before[0][name] is not after[0][name] and before[0][name] != after[0][name]
    } == set(hooks)
    assert before[1] == after[1]


@pytest.mark.parametrize("backend", ["inductor", pytest.param(fsdp_compile_backend, marks=pytest.mark.nightly)])
def test_nobody_else_moves_our_collectives(backend: Any) -> None:
    """Inductor's own ways to move, fuse and replace collectives are off in forward and backward of sharded models,
    also if the process, or the options of this compilation, switch them on; and in all that `backend="fsdp_compile"`
    compiles. For other models they stay on.
    """
    seen: list[dict[str, Any]] = []
    see = Recorder(lambda _: seen.append({name: getattr(inductor_config, name) for name in switched_off()}))
    on = {name: True if value is False else "all" for name, value in switched_off().items()}
    options = {"options": on} if backend == "inductor" else {}
    with inductor_config.patch({**on, "post_grad_custom_post_pass": see}):
        step(torch.compile(fully_shard(small()), backend=backend, **options), X)
        assert seen == [switched_off()] * 2
        step(torch.compile(small()), X)
        assert seen[2:] == [on] * 2
        step(torch.compile(small(), backend=fsdp_compile_backend), X)
        assert seen[4:] == [switched_off()] * 2
        assert {name: getattr(inductor_config, name) for name in on} == on


def test_a_backward_on_another_thread_gets_our_passes() -> None:
    """From torch 2.12 on each thread has a configuration of its own; a graph's own is in force wherever it compiles."""
    compiled = torch.compile(fully_shard(small()))
    with printed_graphs() as graphs:
        loss = compiled(X).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    assert any(graph.startswith("--- backward graph after pin_order") for graph in graphs)


def test_the_key_changes_with_all_that_decides_code() -> None:
    """Stage, configuration and the pass before ours are in the key; a pass that has no key switches the caches off."""
    nothing = lambda graph: None  # noqa: E731  (a pass that does nothing, in a line)
    configs = (CompileConfig(), CompileConfig(disable=("pin_order",)), CompileConfig(reduces_in_flight=2))
    keys = [Pipeline(PASSES, stage, config).uuid() for config in configs for stage in ("joint", "post_grad")]
    keys += [Pipeline(PASSES, "joint", CompileConfig(), Recorder(nothing, key)).uuid() for key in ("a", "b")]
    assert len(set(map(str, keys))) == len(keys)
    assert Pipeline(PASSES, "joint", CompileConfig()).uuid() == Pipeline(PASSES, "joint", CompileConfig()).uuid()
    assert Pipeline(PASSES, "joint", CompileConfig(), Recorder(nothing, None)).uuid() is None
    assert Pipeline(PASSES, "joint", CompileConfig(), nothing).uuid() is None
    assert Pipeline((Pass("typed", "joint", print),), "joint", CompileConfig()).uuid() is None
    assert AfterFusion().uuid() and AfterFusion(AfterFusion()).uuid() and AfterFusion(nothing).uuid() is None


class _Seen(Exception):
    """Ends a compilation that has shown all that a test looks at."""


def saved_nodes(model: torch.nn.Module, inputs: Any, loss: Any) -> tuple[list[fx.Node], fx.Graph]:
    """What the compiled forward of `model` saves for backward."""
    found: list[tuple[list[fx.Node], fx.Graph]] = []

    def see(graph: fx.Graph) -> None:
        if saved := saved_for_backward(graph):
            found.append((saved, graph))
            raise _Seen

    with inductor_config.patch(post_grad_custom_post_pass=Recorder(see)):
        fully_shard(model, reshard_after_forward=True)
        compiled = torch.compile(model, fullgraph=True)
        with pytest.raises(Exception, match="_Seen"):
            loss(compiled, inputs)
    assert len(found) == 1
    return found[0]


def is_gathered(node: fx.Node) -> bool:
    """Whether `node` is a view of what a block gathers; the root, which backward reads first, may be kept."""
    while is_view(node):
        node = node.args[0]
    return node.target in (ALL_GATHER, WAIT) and tag_of(node).path != ""


@pytest.mark.parametrize(  # "tied" is "gpt" and more, "frozen" is "mlp" and more
    "name", [name if name in ("tied", "frozen") else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
)
def test_forward_saves_only_shards_and_activations(name: str) -> None:
    """Under FULL_SHARD nothing saved for backward is a gathered buffer of a block or shares its storage (I4)."""
    case = MODELS[name]
    saved, graph = saved_nodes(case.build(), case.batch(1, 4), case.loss)
    gathered = [wait for wait in tagged(graph, "wait") if tag_of(wait).path != ""]
    assert gathered and saved
    assert not [node for node in saved if is_gathered(node)]
    storages = {node.meta["val"].untyped_storage()._cdata for node in gathered}
    assert not [node for node in saved if node.meta["val"].untyped_storage()._cdata in storages]


def test_torchs_budget_for_activations_holds() -> None:
    """With torch's `activation_memory_budget` of 0 a forward saves what it was given alone: shards and a batch."""
    case = MODELS["mlp"]
    with functorch_config.patch(activation_memory_budget=0.0):
        saved, _ = saved_nodes(case.build(), case.batch(1, 4), case.loss)
    assert {node.op for node in saved} == {"placeholder"}


class _BrokenApart(Stack):
    """A graph for each block."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return self.head(x)


def _compiled_one_by_one() -> nn.Module:
    model = fully_shard(mlp(2))
    model.blocks = nn.ModuleList(map(torch.compile, model.blocks))
    return model


def _layers() -> list[nn.Module]:
    return [nn.Linear(7, 7), nn.Linear(7, 5)]


_frees = partial(fully_shard, reshard_after_forward=True)
_WHOLE = partial(torch.compile, fullgraph=True)
_BUDGET = partial(_WHOLE, backend=fsdp_compile_backend, options={**LINK, "budget": 2**30})


@pytest.mark.parametrize(
    ("build", "compile_it", "expected"),
    [
        (lambda: _frees(mlp(2)), _WHOLE, (3, 2)),
        pytest.param(lambda: _frees(mlp(2), auto_wrap_policy=None), _WHOLE, (1, 0), marks=pytest.mark.nightly),
        (lambda: nn.Sequential(*map(_frees, _layers())), _WHOLE, (2, 0)),
        (lambda: _frees(mlp(2)), _BUDGET, (3, 3)),
        (lambda: _frees(nn.Sequential(*_layers()), auto_wrap_policy={nn.Linear}), _WHOLE, (2, 1)),
        (lambda: _frees(_BrokenApart([Residual(11, 23) for _ in range(2)])), torch.compile, (1, 1)),
        pytest.param(_compiled_one_by_one, lambda model: model, (1, 1), marks=pytest.mark.nightly),
    ],
    ids=["a model", "one unit", "roots side by side", "a budget", "blocks alone", "graph breaks", "block by block"],
)
def test_backward_gathers_all_but_the_root(
    build: Callable[[], nn.Module], compile_it: Callable[[nn.Module], nn.Module], expected: tuple[int, int]
) -> None:
    """Forward and backward gather each unit; only a root with which forward ends is gathered once (E-STRAT-4, I4).

    Backward needs nothing of a first layer, and equal blocks with graphs of their own share one.
    """
    model = compile_it(build())
    with printed_graphs() as graphs:
        squared_error(model, vectors(1, 4)).backward()
    found = {"forward": 0, "backward": 0}
    for graph in graphs:
        _, direction, _, _, step = graph.split("\n")[0].split(" ")
        if step == "check_saved":
            found[direction] += graph.count("= all_gather_into_tensor(")
    assert tuple(found.values()) == expected


class _Transformed(nn.Module):
    """A layer that computes with a function of its weight."""

    def __init__(self, function: Callable[["_Transformed"], Tensor], trains: bool) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(40, 40) / 6, requires_grad=trains)
        self.other, self.bias = nn.Parameter(torch.randn(40, 40) / 6), nn.Parameter(torch.zeros(40))
        self.a, self.b = nn.Parameter(torch.randn(2, 40)), nn.Parameter(torch.randn(40, 2))
        self.register_buffer("scale", torch.rand(40, 40) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.function(self), self.bias)


def _float8(m: Any) -> Tensor:
    return m.weight + ((m.weight.detach() / 2).to(torch.float8_e4m3fn).float() * 2 - m.weight.detach())  # type: ignore[no-any-return]


TRANSFORMED: tuple[Callable[[Any], Tensor], ...] = (
    lambda m: m.weight.bfloat16().float(),
    lambda m: m.weight / m.weight.abs().amax(),
    lambda m: m.weight / m.weight.detach().abs().amax(),
    _float8,
    lambda m: (m.weight - m.weight.detach().min()) / (m.weight.detach().max() - m.weight.detach().min()),
    lambda m: m.weight.clamp(-0.1, 0.1).bfloat16().float(),
    lambda m: torch.where(m.weight.detach() > 0, m.weight, m.weight * 0.1).bfloat16().float(),
    lambda m: m.weight.t().bfloat16().contiguous().t().float(),
    lambda m: (m.weight - m.weight.mean(1, keepdim=True)) / (m.weight.var(1, keepdim=True) + 1e-5).sqrt(),
    lambda m: m.weight * m.scale * m.scale[0].exp(),
    lambda m: m.weight + (torch.round(m.weight * m.scale) - m.weight).detach(),
    lambda m: m.weight.softmax(1),
    lambda m: m.weight + m.b @ m.a,
    lambda m: torch.cat(m.weight.chunk(2)[::-1]).softmax(1),
    lambda m: torch.tanh(m.weight) * m.other.sigmoid(),
    lambda m: (m.weight * 0.5 + 0.1).bfloat16().float(),
)


@pytest.mark.parametrize(("trains", "autocast"), [(False, False), (True, True)])
def test_what_is_computed_from_weights_is_not_saved(trains: bool, autocast: bool) -> None:
    """Under FULL_SHARD the forward saves nothing of a parameter's size, whatever it computes from parameters (I4)."""
    model = nn.Sequential(*(_Transformed(function, trains) for function in TRANSFORMED), nn.Linear(40, 4))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        saved, graph = saved_nodes(model, (torch.randn(3, 40), None), lambda run, inputs: run(inputs[0]).square().sum())
    assert len(tagged(graph, "wait")) >= len(TRANSFORMED)
    assert not [node for node in saved if node.op != "placeholder" and node.meta["val"].numel() >= 40 * 40]


def test_random_functions_of_weights_are_saved() -> None:
    """What a random operator makes of a weight is not computed again: it would be another."""
    model = nn.Sequential(_Transformed(lambda m: F.dropout(m.weight, 0.5), True), nn.Linear(40, 4))
    saved, _ = saved_nodes(model, (torch.randn(3, 40), None), lambda run, inputs: run(inputs[0]).square().sum())
    assert [node for node in saved if node.meta["val"].numel() == 40 * 40]


def test_no_shard_reduces_all_and_gathers_nothing() -> None:
    """Under NO_SHARD there is an all-reduce per unit and no other collective, also where replicas are but two."""
    pairs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "replicas"))["replicas"]
    with printed_graphs() as graphs:
        model = fully_shard(small(), mesh=pairs, sharding_strategy=ShardingStrategy.NO_SHARD)
        step(torch.compile(model, fullgraph=True), X)
    joint = graphs[0]
    assert joint.count("= all_reduce(") == 2 and "all_gather" not in joint and "reduce_scatter" not in joint


@pytest.mark.parametrize(("width", "scales"), [(8, 2), (7, 3)], ids=["one segment", "packed"])
def test_gradients_in_float16_are_divided_before_and_behind_the_sum(width: int, scales: int) -> None:
    """By 2 and by 2 among 4 ranks, so that no sum overflows: what is packed, or sent as it is, and the mean."""
    model = fully_shard(nn.Linear(8, width, bias=scales == 3), mixed_precision=MixedPrecision(torch.float16))
    with printed_graphs() as graphs:
        torch.compile(model, backend=fsdp_compile_backend)(torch.ones(2, 8)).sum().backward()
    (graph,) = (each for each in graphs if each.startswith("--- joint graph after insert_collectives"))
    assert graph.count("= div.Scalar(") == scales and graph.count(", 2.0)  # scale root") == scales


class _Side(nn.Module):
    """Two layers beside each other, whose gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def test_units_with_equal_gradients_have_a_reduce_each() -> None:
    """The partitioner merges equal nodes; a shared result would be changed twice by clipping or an update in place."""
    model = fully_shard(_Side(), auto_wrap_policy={nn.Linear}, reshard_after_forward=True)
    with printed_graphs() as graphs:
        step(torch.compile(model, backend=fsdp_compile_backend), torch.ones(2, 4))
    (graph,) = [text for text in graphs if text.startswith("--- backward graph after separate_reduces")]
    waited = re.findall(r"wait_tensor\((\w+)\)  # wait_reduce (\w+)", graph)
    assert {unit for _, unit in waited} == {"left", "right"} and len({reduce for reduce, _ in waited}) == 2


class _Nothing(nn.Linear):
    """Adds zero, which Inductor sees."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 * self.weight.sum()


class _Beside(nn.Module):
    """A layer that adds nothing to the output, and a sum over ranks of somebody else's."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.layer, self.other, self.group = nn.Linear(3, 3), _Nothing(7, 7), group

    def forward(self, x: Tensor) -> Tensor:
        summed = torch.ops._c10d_functional.all_reduce(self.layer(x), "sum", self.group)
        output: Tensor = torch.ops._c10d_functional.wait_tensor(summed) + self.other(x)
        return output


def test_collectives_that_somebody_else_has_written() -> None:
    """They name their group by its form, the same on all ranks, so that these share a compiled graph; and a weight that
    is multiplied by zero is not gathered, nor is anything left that only its gather needed."""
    group = dist.new_group([RANK - 1, RANK])
    model = _Beside(group.group_name)
    for module in (model.other, model):
        fully_shard(module, mixed_precision=MixedPrecision(torch.bfloat16))
    with printed_graphs() as graphs, torch.no_grad():
        torch.compile(model, backend=fsdp_compile_backend)(X)
    (graph,) = (each for each in graphs if each.split("\n")[0].endswith(" after insert_collectives"))
    assert (
        "'fsdp.2x1" in graph and f"'{group.group_name}'" not in graph
    )  # with a number behind it, if others came before
    assert graph.count("= all_gather_into_tensor(") == (1 if torch.__version__ < "2.14" else 2)  # which computes 0 * x
    names = re.findall(r"^(\w+): .* = ", graph, re.MULTILINE)
    assert all(re.search(rf"[(\[, ]{name}\b", graph) for name in names)  # nor cast: each value is read


def test_a_gather_saved_against_the_strategy_is_refused() -> None:
    """Without `reshard` the partitioner keeps gathered parameters; the guard names the unit and the node (I4)."""
    model = torch.compile(_frees(small()), backend=fsdp_compile_backend, options={"disable": ("reshard",)})
    with pytest.raises(Exception, match=r"unit 2: \w+, a view of its gathered parameters of shape .* would be kept"):
        step(model, X)
