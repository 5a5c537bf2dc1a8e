"""Makes a kernel of a stage: its client work as one function, for a graph to loop over.

`up_to_merge` is the part of a stage that clients run, up to its aggregations.

    let v1=federated_broadcast(v0),                       work: <constants, data> ->
        v2=federated_zip_at_clients(<v1, argument[1]>),     let v2=<constant0, data0>,
        v3=federated_map(<f, v2>),                  ->          v3=f(v2)
        v4=federated_aggregate(<v3, zero, add, ...>)        in <v3>
    in federated_zip_at_server(<v4>)

Values that are equal for all clients are computed once, before the clients' work, and
become its constants. Locals keep their names, because the random numbers of a call
depend on them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import federated_language as fl

import ray_fed.plan.plans as plans
from ray_fed.compiler.aggregates import (
    OTHER_FORM,
    Aggregates,
    intrinsic_call,
    read_aggregates,
)
from ray_fed.compiler.client_order import divide
from ray_fed.compiler.expressions import (
    called_uris,
    close_over,
    free_references,
    replace_free,
    select,
    zip_at_server,
)
from ray_fed.language import blocks, type_checks

flf = fl.framework
Block = flf.ComputationBuildingBlock

_CLIENT, _STEP, _SERVER = "client", "step", "server"
_CONSTANT, _DATA, _HANDED = "constant", "data", "handed"
_SELECTED = "selected"
_TENSOR_TYPES = fl.TensorType, fl.StructType
_NAMES = (_CLIENT, _STEP, _SERVER, _CONSTANT, _DATA, _HANDED, _SELECTED)


def fuse(up_to_merge: flf.ConcreteComputation) -> plans.Kernel | plans.Fallback:
    """Return the kernel of the `up_to_merge` of a stage, or the reason for none."""
    block = Block.from_proto(up_to_merge.to_proto())
    if any(name.startswith(_NAMES) for name in blocks.bound_names(block)):
        return plans.Fallback(OTHER_FORM)
    try:
        return _Fusion(read_aggregates(block)).run()
    except plans.Fallback as fallback:
        return plans.Fallback(fallback.reason)


class _Fusion:
    """Divides the locals of one `up_to_merge` into server work and client work."""

    def __init__(self, read: Aggregates) -> None:
        self._read = read
        self._parameter = read.parameter
        self._locals = read.locals
        self._aggregates = read.aggregates
        self._client_locals: list[tuple[str, Block]] = []
        self._members: dict[str, Block] = {}
        self._constants: dict[bytes, tuple[Block, flf.Reference]] = {}
        self._parts: dict[plans.Path, fl.Type] = {}
        self._data: dict[plans.Path, flf.Reference] = {}
        self._handed: dict[str, flf.Reference] = {}
        self._selections: list[SelectArguments] = []

    def run(self) -> plans.Kernel:
        read = self._read
        aggregates = self._aggregates.values()
        merged = [aggregate.value for aggregate in aggregates]
        of_clients = divide([*merged, *read.kept], read.locals)
        first = self._fuse_first(of_clients.handed)
        for name in of_clients.last:
            self._sort(name, self._locals[name])
        members = [self._member(value) for value in merged]
        kept = [self._member(value) for value in read.kept]
        accumulates = [self._close(aggregate.accumulate) for aggregate in aggregates]
        work = self._work([*members, *kept])
        accumulate = self._accumulate(members, accumulates)
        zeros = [aggregate.zero for aggregate in aggregates]
        # This comes last, because all constants of the clients' work are known now.
        server = self._server([*zeros, *(b for b, _ in self._constants.values())])
        return plans.Kernel(
            server=blocks.serialize(server),
            work=blocks.serialize(work),
            accumulate=blocks.serialize(accumulate),
            parts=tuple(self._parts),
            data=tuple(self._data),
            num_aggregations=len(zeros),
            num_kept=len(kept),
            selections=tuple(
                chosen.close([constant for _, constant in self._constants.values()])
                for chosen in self._selections
            ),
            first=first,
        )

    def _fuse_first(self, handed: Sequence[str]) -> plans.Kernel | None:
        if not handed:
            return None
        kept = [flf.Reference(n, self._locals[n].type_signature) for n in handed]
        for index, local in enumerate(kept):
            member = type_checks.member_type(local.type_signature)
            reference = flf.Reference(f"{_HANDED}{index}", member)
            self._handed[local.name] = self._members[local.name] = reference
        read = dataclasses.replace(self._read, aggregates={}, kept=kept)
        return _Fusion(read).run()

    def _sort(self, name: str, block: Block) -> None:
        """Turn a local at clients into a local of one client, or into a constant."""
        uri, argument = intrinsic_call(block)
        match uri:
            case flf.FEDERATED_BROADCAST.uri | flf.FEDERATED_VALUE_AT_CLIENTS.uri:
                self._members[name] = self._constant(argument)
                return
            case flf.FEDERATED_MAP.uri | flf.FEDERATED_MAP_ALL_EQUAL.uri:
                fn, value = select(argument, 0), select(argument, 1)
                member = flf.Call(self._close(fn), self._member(value))
            case flf.FEDERATED_ZIP_AT_CLIENTS.uri:
                member = self._member(argument)
            case flf.FEDERATED_EVAL_AT_CLIENTS.uri:
                member = flf.Call(self._close(argument))
            case flf.FEDERATED_SELECT.uri | flf.FEDERATED_SECURE_SELECT.uri:
                self._members[name] = self._selected(argument)
                return
            case _:
                raise plans.Fallback(f"`{uri}` at clients")
        self._client_locals.append((name, member))
        self._members[name] = flf.Reference(name, member.type_signature)

    def _member(self, block: Block) -> Block:
        """Return one client's member of a value, or struct of values, at clients."""
        type_spec = block.type_signature
        if isinstance(type_spec, fl.StructType):
            elements = [
                (name, self._member(select(block, index)))
                for index, (name, _) in enumerate(type_spec.items())
            ]
            return flf.Struct(elements, type_spec.python_container)
        if isinstance(block, flf.Reference) and block.name in self._members:
            return self._members[block.name]
        path = self._path(block)
        if path is None:
            raise plans.Fallback("a value at clients that no intrinsic made")
        if type_checks.differs_by_client(type_spec):
            name = f"{_DATA}{len(self._data)}"
            reference = flf.Reference(name, type_checks.member_type(type_spec))
            return self._data.setdefault(path, reference)
        return self._constant(block)

    def _path(self, block: Block) -> plans.Path | None:
        match block:
            case flf.Reference() if self._parameter is not None:
                return () if block.name == self._parameter.name else None
            case flf.Selection():
                path = self._path(block.source)
                return None if path is None else (*path, block.as_index())
            case _:
                return None

    def _selected(self, argument: Block) -> Block:
        keys, max_key, state, function = (select(argument, i) for i in range(4))
        source: plans.Path | int | None = self._path(keys)
        if source is None and isinstance(keys, flf.Reference):
            source = [*self._handed].index(keys.name)
        if source is None:
            raise plans.Fallback("`federated_select` of keys in a struct of clients")
        limit, constant = self._constant(max_key), self._constant(state)
        chosen = SelectArguments(self._close(function), source, limit, constant)
        name = f"{_SELECTED}{len(self._selections)}"
        self._selections.append(chosen)
        return flf.Reference(name, chosen.elements)

    def _constant(self, block: Block) -> flf.Reference:
        member = block.type_signature
        if isinstance(member, fl.FederatedType):
            member = member.member
        if flf.type_contains(member, lambda t: not isinstance(t, _TENSOR_TYPES)):
            raise plans.Fallback(f"a value of type `{member}` for all clients")
        key = blocks.serialize(block)
        if key not in self._constants:
            name = f"{_CONSTANT}{len(self._constants)}"
            self._constants[key] = (block, flf.Reference(name, member))
        return self._constants[key][1]

    def _close(self, function: Block) -> Block:
        for uri in sorted(called_uris(function)):
            if uri.startswith("sequence_"):
                raise plans.Fallback(f"`{uri}` at clients")
        return replace_free(function, self._constant)

    def _work(self, members: list[Block]) -> Block:
        constants = [reference for _, reference in self._constants.values()]
        data = [*self._data.values(), *self._handed.values()]
        for index, chosen in enumerate(self._selections):
            data.append(flf.Reference(f"{_SELECTED}{index}", chosen.elements))
        parameter = struct_reference(_CLIENT, [constants, data])
        bound = [*bind(parameter, 0, constants), *bind(parameter, 1, data)]
        return close_over(
            parameter, [*bound, *self._client_locals], flf.Struct(members)
        )

    def _accumulate(self, members: list[Block], adds: list[Block]) -> Block:
        constants = [reference for _, reference in self._constants.values()]
        partials = [
            flf.Reference(
                name, type_checks.function_type(read.merge.type_signature).result
            )
            for name, read in self._aggregates.items()
        ]
        parameter = struct_reference(_STEP, [partials, members, constants])
        calls: list[tuple[str, Block]] = []
        for index, (name, add) in enumerate(zip(self._aggregates, adds, strict=True)):
            pair = [select(select(parameter, p), index) for p in range(2)]
            calls.append((name, flf.Call(add, flf.Struct(pair))))
        results = [flf.Reference(name, call.type_signature) for name, call in calls]
        bound = bind(parameter, 2, constants)
        return close_over(parameter, [*bound, *calls], flf.Struct(results))

    def _server(self, results: list[Block]) -> Block:
        # A local refers to earlier locals only. So in a walk from the last to the
        # first, all users of a local are known when the walk reaches it.
        needed: list[str] = []
        for name in reversed(list(self._locals)):
            used = [*results, *(self._locals[later] for later in needed)]
            if any(name in free_references(block) for block in used):
                needed.insert(0, name)
        for name in needed:
            is_at_clients = type_checks.is_at_clients(self._locals[name].type_signature)
            if is_at_clients or name in self._aggregates:
                raise plans.Fallback("work at the server that needs clients' values")
        placed = [
            block
            if isinstance(block.type_signature, fl.FederatedType)
            else flf.create_federated_value(block, fl.SERVER)
            for block in results
        ]
        # The parts of the argument that are used decide the parameter's type, which
        # `replace` needs. So all parts are collected before any block is rewritten.
        for block in [*placed, *(self._locals[name] for name in needed)]:
            replace_free(block, self._note_part)
        parameter = None
        if self._parts:
            parameter = flf.Reference(_SERVER, fl.StructType(self._parts.values()))

        def replace(free: Block) -> Block | None:
            part, rest = as_passed(free)
            path = self._path(part)
            if path is None:
                return None
            index = list(self._parts).index(path)
            element = flf.Selection(cast("Block", parameter), index=index)
            return functools.reduce(select, rest, cast("Block", element))

        def replaced(block: Block) -> Block:
            return replace_free(block, replace)

        result = zip_at_server([replaced(b) for b in placed])
        locals_ = [(name, replaced(self._locals[name])) for name in needed]
        return close_over(parameter, locals_, result)

    def _note_part(self, free: Block) -> None:
        part, _ = as_passed(free)
        path = self._path(part)
        if path is None:
            return
        type_spec = part.type_signature
        if type_checks.holds_clients(type_spec):
            raise plans.Fallback("work at the server that takes clients' values")
        if type_checks.is_at_clients(type_spec):
            type_spec = fl.FederatedType(type_checks.member_type(type_spec), fl.SERVER)
        self._parts.setdefault(path, type_spec)


@dataclasses.dataclass(frozen=True)
class SelectArguments:
    """The arguments of a `federated_select`.

    Attributes:
        function: Function <state, key> -> element, which refers to constants only.
        keys: The keys of the clients, as in `plans.Selection`.
        max_key: The constant with the largest allowed key.
        state: The constant that is the server's state.
    """

    function: Block
    keys: plans.Path | int
    max_key: flf.Reference
    state: flf.Reference

    @property
    def elements(self) -> fl.SequenceType:
        """The type of the elements that are selected for a client."""
        function = type_checks.function_type(self.function.type_signature)
        return fl.SequenceType(function.result)

    def close(self, constants: Sequence[flf.Reference]) -> plans.Selection:
        """Return the selection for a kernel with these constants."""
        closed = plans.close_selection(self.function, self.state, constants)
        limit = [constant.name for constant in constants].index(self.max_key.name)
        return plans.Selection(blocks.serialize(closed), self.keys, limit)


def struct_reference(name: str, parts: Sequence[Sequence[Block]]) -> flf.Reference:
    """Return a reference to a struct of structs with the types of `parts`."""
    types = [fl.StructType([b.type_signature for b in part]) for part in parts]
    return flf.Reference(name, fl.StructType(types))


def bind(
    parameter: flf.Reference, position: int, references: Sequence[flf.Reference]
) -> list[tuple[str, Block]]:
    """Return locals that name the elements of the struct at `position` in a parameter.

    `references` has the names, in order.
    """
    return [
        (reference.name, select(select(parameter, position), index))
        for index, reference in enumerate(references)
    ]


def as_passed(block: Block) -> tuple[Block, list[int]]:
    """Return the part of the argument that a block selects from, and the way to it.

    The part is the smallest one that contexts pass as a whole: a placed value, or a
    struct without placed values. The way has the indices to select from the part.
    """
    rest: list[int] = []
    while isinstance(block, flf.Selection) and not flf.contains_federated_types(
        block.source.type_signature
    ):
        rest.insert(0, block.as_index())
        block = block.source
    return block, rest
