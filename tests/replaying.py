"""Code that Inductor generated for CUDA, replayed as a record of what the device would be given (races.py).

record = replayed(program.code)        kernels, collectives, waits, buffers that are freed and used again
record.races == []

Kernels run in one stream, that of the call, unless they are given another. A collective runs in the stream of its
group, after what the call's stream has been given; a wait lets the call's stream go on after it. Nothing is taken to
hold the memory of a collective but the names in the code, so a buffer that is freed before the wait counts as too
early, whatever a process group holds beside. The caller reads what is returned, and may write to what it gave.

A statement that is not known is an error: no race is missed because the code has changed.
"""

import ast
import re
from collections.abc import Iterable, Sequence
from itertools import count
from operator import attrgetter

import torch
from generated import kernels
from races import Clock, Record

from fsdp_compile.core import ops  # noqa: F401  (registers the operators, whose schemas are asked)

COMPUTE = "compute"
_VIEWS = ("reinterpret_tensor", "copy_if_misaligned")
_WAITS = ("fsdp_collectives.wait", "torch.ops._c10d_functional.wait_tensor.default")
_COLLECTIVES = ("fsdp_collectives.", "torch.ops._c10d_functional.")
_NOTHING = re.compile(r"assert_\w+|args\.clear|torch\.cuda\.set_device|torch\.ops\.fsdp_flat\.check_ranks\..*")
_DEFER_REDUCE = "torch.ops.fsdp_flat.defer_reduce.default"
_OWNED = 3  # where that operator is told that nothing else uses its input from now on


def replayed(code: str) -> Record:
    """The record of one generated module."""
    return _Replay(code).record


class _Replay:
    """Runs the statements of `call`. Memory is a number; a name stands for one, or for those of several tensors."""

    def __init__(self, code: str) -> None:
        self.record = Record()
        self.kernels = {name: (params, body) for name, params, body in kernels(code)}
        self.values: dict[str, list[int]] = {}
        self.inputs: set[int] = set()  # what the caller keeps: parameters and their like
        self.handed_over: set[int] = set()  # what the eager runtime holds
        self.in_flight: dict[int, Clock] = {}
        self.streams: set[str] = set()  # names of the stream of the call
        self.numbers, self.place = count(), ""
        functions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)]
        (call,) = [function for function in functions if function.name == "call"]
        self._run(call.body)

    # --- statements ---------------------------------------------------------------------------------------------------

    def _run(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self.place = f"line {statement.lineno}"
            match statement:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name("args")):
                    self._take([name.id for name in names if isinstance(name, ast.Name)])
                case ast.Assign(targets=[ast.Name(name)], value=ast.Call(func=ast.Name("get_raw_stream"))):
                    self.streams.add(name)
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    keys = self._memory(value)
                    if not isinstance(value, ast.Call) or ast.unparse(value.func) not in _VIEWS:
                        for key in keys:
                            self.record.memory[key].name = name
                    before, self.values[name] = self.values.get(name, []), keys
                    self._free(before)
                case ast.Delete(targets=names):
                    self._free(
                        [key for name in names if isinstance(name, ast.Name) for key in self.values.pop(name.id)]
                    )
                case ast.With(body=body) if "_DeviceGuard" in ast.unparse(statement.items[0]):
                    self._run(body)
                case ast.Return(value=ast.expr() as value):
                    self._give("the caller", COMPUTE, self._memory(value), self.inputs)
                case ast.Expr(value=ast.Call() as value):
                    self._call(value)
                case _:
                    raise AssertionError(f"expected a statement that is known, found: {ast.unparse(statement)}")

    def _take(self, names: Sequence[str]) -> None:
        """The inputs: what backward is given to use up goes with its name, parameters and their like do not."""
        for name in names:
            self.values[name] = [self._new(name)]
            if name.startswith(("primals_", "arg")):
                self.inputs.update(self.values[name])

    def _give(
        self,
        name: str,
        stream: str,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        allocates: bool = False,
    ) -> None:
        self.record.operation(name, stream, reads, writes, allocates, self.place)

    def _new(self, name: str) -> int:
        key = next(self.numbers)
        self.record.allocate(key, COMPUTE, name)
        return key

    def _free(self, keys: Iterable[int]) -> None:
        """Names for `keys` are gone: memory without a name is given back."""
        named = {key for held in self.values.values() for key in held}
        for key in set(keys) - named - self.inputs - self.handed_over:
            self.record.give_back(key)

    # --- expressions --------------------------------------------------------------------------------------------------

    def _memory(self, node: ast.expr) -> list[int]:
        """The memory of the tensors in an expression."""
        match node:
            case ast.Name(name):
                assert name in self.values or not name.startswith("buf"), f"expected {name} to be alive"
                return self.values.get(name, [])
            case ast.Subscript(ast.Name(name), ast.Constant(int(index))):
                return [self.values[name][index]]
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return [key for element in elements for key in self._memory(element)]
            case ast.Call():
                return self._call(node)
            case _:
                return []

    def _call(self, node: ast.Call) -> list[int]:
        """What a call returns."""
        function = ast.unparse(node.func)
        if _NOTHING.fullmatch(function):
            return []
        named = {each.arg: self._memory(each.value) for each in node.keywords}
        args = [self._memory(arg) for arg in node.args]
        given = [key for keys in (*args, *named.values()) for key in keys]
        if function in _VIEWS:
            return args[0]
        if function in _WAITS:
            for key in given:
                if key in self.in_flight:  # what was launched together is waited for once
                    self.record.wait(COMPUTE, self.in_flight.pop(key))
            return given
        name = function.removesuffix(".run").removesuffix(".default").rpartition(".")[2]
        if function.startswith("empty_strided"):
            key = self._new(name)
            self._give("memory", COMPUTE, allocates=True)
            return [key]
        if function.startswith(_COLLECTIVES):
            return self._collective(name, function, node, args, named)
        if function.removesuffix(".run") in self.kernels:
            return self._kernel(name, function.removesuffix(".run"), node, args)
        if function == _DEFER_REDUCE:
            return self._defer_reduce(name, node, args)
        written = named.get("out") or self._written(function, args)
        if written is None:
            raise AssertionError(f"expected a call that is known, found: {ast.unparse(node)}")
        made = [] if "out" in named or written else [self._new(name)]
        self._give(name, COMPUTE, given, {*written, *made}, allocates=bool(made))
        return made

    def _written(self, function: str, args: Sequence[list[int]]) -> list[int] | None:
        """What a function without `out` writes to, by an operator's schema; None if it is not known."""
        if function.startswith("extern_kernels."):
            return []
        if not function.startswith(("torch.ops.", "aten.")):
            return None
        schema = attrgetter(function.removeprefix("torch.ops."))(torch.ops)._schema.arguments
        pairs = zip(schema, args, strict=False)
        return [key for each, keys in pairs for key in keys if each.alias_info is not None and each.alias_info.is_write]

    def _kernel(self, name: str, kernel: str, node: ast.Call, args: Sequence[list[int]]) -> list[int]:
        """A kernel of Triton: the text says through which pointers it loads and stores."""
        pointers, body = self.kernels[kernel]
        assert sum(map(bool, args)) == len(pointers), f"expected a tensor for each of {pointers}: {ast.unparse(node)}"
        stores = set(re.findall(r"tl\.(?:store|atomic_\w+)\((\w+)", body))
        loads = set(re.findall(r"tl\.load\((\w+)", body)) | (set(pointers) - stores)
        memory = dict(zip(pointers, args, strict=False))
        (stream,) = [ast.unparse(each.value) for each in node.keywords if each.arg == "stream"]
        uses = [
            [key for pointer in pointers if pointer in chosen for key in memory[pointer]] for chosen in (loads, stores)
        ]
        self._give(name, COMPUTE if stream in self.streams else stream, *uses)
        return []

    def _collective(
        self, name: str, function: str, node: ast.Call, args: Sequence[list[int]], named: dict[str | None, list[int]]
    ) -> list[int]:
        """Starts in the stream of its group, whose name is the last text among the arguments."""
        group = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)][-1]
        stream, sent = f"group {group[:8]}", [key for keys in args for key in keys]
        written = named.get("out") or (self._written(function, args) if function.startswith("torch.") else None)
        made: list[int] = []
        if not written:
            together = "coalesced" in function
            written = made = [self._new(name) for _ in (sent if together else sent[:1])]
            self._give(f"memory for {name}", COMPUTE, allocates=True)
        self.record.order(COMPUTE, stream)
        self._give(name, stream, sent, written)
        self.in_flight.update(dict.fromkeys(written, self.record.event(stream)))
        return made or written

    def _defer_reduce(self, name: str, node: ast.Call, args: Sequence[list[int]]) -> list[int]:
        """The eager runtime takes gradients. Those that it owns it may be reducing from now on, and holds."""
        owned = len(node.args) > _OWNED and ast.unparse(node.args[_OWNED]) == "True"
        result = self._new(name)
        self._give(name, COMPUTE, args[0], [result], allocates=True)
        if owned:
            self.handed_over.update(args[0])
            self.record.order(COMPUTE, "the eager runtime")
            self._give(f"the eager runtime's reduce of {name}", "the eager runtime", args[0], args[0])
        return [result]
