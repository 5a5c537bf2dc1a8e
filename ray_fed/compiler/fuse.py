"""Fuses an `up_to_merge` into one function of a client, for a kernel to loop over.

    let v1=federated_broadcast(v0),                       work: <constants, data> ->
        v2=federated_zip_at_clients(<v1, argument[1]>),     let v2=<constant0, data0>,
        v3=federated_map(<f, v2>),                  ->          v3=f(v2)
        v4=federated_aggregate(<v3, zero, add, ...>)        in <v3>
    in federated_zip_at_server(<v4>)

What is no client's is computed once, before: it becomes constants. Locals keep their
names, as these are part of what the random numbers of a call depend on.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import cast

import federated_language as fl

from ray_fed.compiler import first_work
from ray_fed.compiler.aggregates import (
    OTHER_FORM,
    Aggregates,
    UnfusedError,
    intrinsic_call,
    read_aggregates,
)
from ray_fed.compiler.fused_functions import (
    Chosen,
    as_passed,
    bind,
    close_over,
    server_placed,
    struct_reference,
)
from ray_fed.compiler.normalize import free_references
from ray_fed.compiler.substitution import (
    bound_names,
    called_uris,
    replace_free,
    select,
    zip_at_server,
)
from ray_fed.language import blocks, type_checks
from ray_fed.plan import plans

flf = fl.framework
Block = flf.ComputationBuildingBlock
_CLIENT, _STEP, _SERVER = "client", "step", "server"
_CONSTANT, _DATA, _HANDED, _SELECTED = "constant", "data", "handed", "selected"
_OF_TENSORS = fl.TensorType, fl.StructType
_NAMES = (_CLIENT, _STEP, _SERVER, _CONSTANT, _DATA, _HANDED, _SELECTED)


def fuse(up_to_merge: flf.ConcreteComputation) -> plans.Kernel | plans.NoKernel:
    """Return the kernel of the `up_to_merge` of a stage, or why it has none.

    Args:
        up_to_merge: as `compiler.split` writes it, or anybody else.
    """
    block = Block.from_proto(up_to_merge.to_proto())
    if any(name.startswith(_NAMES) for name in bound_names(block)):
        return plans.NoKernel(OTHER_FORM)
    try:
        return _Fusion(read_aggregates(block)).run()
    except UnfusedError as error:
        return plans.NoKernel(str(error))


class _Fusion:
    """Sorts the locals of one computation into server's and client's."""

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
        self._selections: list[Chosen] = []

    def run(self) -> plans.Kernel:
        """Return the kernel."""
        read = self._read
        aggregates = self._aggregates.values()
        merged = [aggregate.value for aggregate in aggregates]
        of_clients = first_work.divide([*merged, *read.kept], read.locals)
        first = self._fuse_first(of_clients.handed)
        for name in of_clients.last:
            self._sort(name, self._locals[name])
        members = [self._member(value) for value in merged]
        kept = [self._member(value) for value in read.kept]
        accumulates = [self._close(aggregate.accumulate) for aggregate in aggregates]
        work = self._work([*members, *kept])
        accumulate = self._accumulate(members, accumulates)
        zeros = [aggregate.zero for aggregate in aggregates]
        server = self._server([*zeros, *(b for b, _ in self._constants.values())])
        return plans.Kernel(
            server=blocks.serialise(server),
            work=blocks.serialise(work),
            accumulate=blocks.serialise(accumulate),
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
        """Return the kernel that hands some locals on; these are members, then."""
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
        """Make a local at clients one of a client, or a constant."""
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
                raise UnfusedError(f"`{uri}` at clients")
        self._client_locals.append((name, member))
        self._members[name] = flf.Reference(name, member.type_signature)

    def _member(self, block: Block) -> Block:
        """Return one client's member of a value at clients, or of a struct of such."""
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
            raise UnfusedError("a value at clients that no intrinsic made")
        if type_checks.differs_by_client(type_spec):
            return self._datum(path, type_checks.member_type(type_spec))
        return self._constant(block)

    def _path(self, block: Block) -> plans.Path | None:
        """Return where in the argument a block lies that selects from it."""
        match block:
            case flf.Reference() if self._parameter is not None:
                return () if block.name == self._parameter.name else None
            case flf.Selection():
                path = self._path(block.source)
                return None if path is None else (*path, block.as_index())
            case _:
                return None

    def _datum(self, path: plans.Path, member: fl.Type) -> Block:
        reference = flf.Reference(f"{_DATA}{len(self._data)}", member)
        return self._data.setdefault(path, reference)

    def _selected(self, argument: Block) -> Block:
        """Return what stands for the elements that were selected for a client."""
        keys, max_key, state, function = (select(argument, i) for i in range(4))
        source: plans.Path | int | None = self._path(keys)
        if source is None and isinstance(keys, flf.Reference):
            source = [*self._handed].index(keys.name)
        if source is None:
            raise UnfusedError("`federated_select` of keys in a struct of clients")
        limit, held = self._constant(max_key), self._constant(state)
        chosen = Chosen(self._close(function), source, limit, held)
        name = f"{_SELECTED}{len(self._selections)}"
        self._selections.append(chosen)
        return flf.Reference(name, chosen.elements)

    def _constant(self, block: Block) -> flf.Reference:
        """Return what stands for a value of the server's in a client's work."""
        member = block.type_signature
        if isinstance(member, fl.FederatedType):
            member = member.member
        if flf.type_contains(member, lambda t: not isinstance(t, _OF_TENSORS)):
            raise UnfusedError(f"a value of type `{member}` for all clients")
        key = blocks.serialise(block)
        if key not in self._constants:
            name = f"{_CONSTANT}{len(self._constants)}"
            self._constants[key] = (block, flf.Reference(name, member))
        return self._constants[key][1]

    def _close(self, function: Block) -> Block:
        """Return a function whose captured values are constants."""
        for uri in sorted(called_uris(function)):
            if uri.startswith("sequence_"):
                raise UnfusedError(f"`{uri}` at clients")
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
        """Return what is computed before any client's work, results at the server."""
        needed: list[str] = []
        for name in reversed(list(self._locals)):
            used = [*results, *(self._locals[later] for later in needed)]
            if any(name in free_references(block) for block in used):
                needed.insert(0, name)
        self._check_server(needed)
        placed = [server_placed(block) for block in results]
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
            taken = flf.Selection(cast("Block", parameter), index=index)
            return functools.reduce(select, rest, cast("Block", taken))

        def replaced(block: Block) -> Block:
            return replace_free(block, replace)

        result = zip_at_server([replaced(b) for b in placed])
        locals_ = [(name, replaced(self._locals[name])) for name in needed]
        return close_over(parameter, locals_, result)

    def _check_server(self, needed: list[str]) -> None:
        for name in needed:
            block = self._locals[name]
            if (
                type_checks.is_at_clients(block.type_signature)
                or name in self._aggregates
            ):
                raise UnfusedError("work at the server that needs clients' values")

    def _note_part(self, free: Block) -> None:
        part, _ = as_passed(free)
        path = self._path(part)
        if path is None:
            return
        type_spec = part.type_signature
        if type_checks.holds_clients(type_spec):
            raise UnfusedError("work at the server that takes clients' values")
        if type_checks.is_at_clients(type_spec):
            type_spec = fl.FederatedType(type_checks.member_type(type_spec), fl.SERVER)
        self._parts.setdefault(path, type_spec)
