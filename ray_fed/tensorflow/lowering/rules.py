"""Which ops of tf.data and of control flow are lowered, and to what.

A dataset becomes a sequence, and what reads one a loop. Calls, branches and loops
around what is of tf.data are run likewise: a traced value goes in as its leaves and
comes out as itself with other leaves; an iterator is moved on by what happened inside.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.randomness as randomness
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.lowering.passes as passes
import ray_fed.tensorflow.lowering.sequences as sequences
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs.graph_message import FunctionDef, NodeDef
from ray_fed.tensorflow.lowering.inlining import (
    IgnoredResource,
    Inliner,
    Rule,
    SerializedDataset,
    Site,
    TracedValue,
)
from ray_fed.tensorflow.lowering.passes import Iterator
from ray_fed.tensorflow.lowering.sequences import Function, Indexed, Traits

_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "VarHandleOp", "LookupTableFindV2"}
)
"""Stateful to TensorFlow, but asked twice they say the same."""

_UNKNOWN: Any = tf.TensorShape(cast("Any", None))


def specs_of(node: NodeDef) -> list[tf.TensorSpec]:
    """Return the specs of the elements of a dataset's node."""
    written = "output_types" if "output_types" in node.attr else "Toutput_types"
    types = node.attr[written].list.type
    shapes = node.attr["output_shapes"].list.shape
    return [
        tf.TensorSpec(tf.TensorShape(shape), tf.as_dtype(dtype))
        for dtype, shape in zip(types, shapes, strict=True)
    ]


def inlined(
    site: Site,
    attribute: str,
    captured: Sequence[Any],
    *,
    in_order: bool,
    shapes: Sequence[tf.TensorShape] | None = None,
) -> Function:
    """Return the function of an attribute.

    Args:
        site: of a node.
        attribute: of the node.
        captured: what the function takes beside elements.
        in_order: whether it runs after effects of its inputs.
        shapes: of the function's results, where known.
    """
    name = site.node.attr[attribute].func.name
    if any(isinstance(value, TracedValue) and value.moves for value in captured):
        raise Fallback(f"{site.node.op} that takes from an iterator")

    def run(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        entry = inputs if in_order else ()
        arguments = [*inputs, *captured]
        results = site.inliner.call(name, arguments, entry, shapes=shapes)
        if any(isinstance(result, TracedValue) for result in results):
            raise Fallback(f"{site.node.op} of datasets")
        return results

    return run


def traits_of(inliner: Inliner, name: str) -> Traits:
    """Return what the ops of a function mean for a sequence made by it."""
    traits = Traits()
    for node in inliner.function(name).node_def:
        if node.op in _READS:
            continue
        if randomness.differs_by_call(node.op):
            traits = traits & Traits(repeatable=False)
            continue
        called = list(graph_message.functions_of(node))
        for function in called:
            traits = traits & traits_of(inliner, function)
        if not called and inlining.definition_of(node).is_stateful:
            traits = traits & Traits(repeatable=False, effects=True)
    return traits


def selected(function: FunctionDef, num_components: int) -> list[int] | None:
    """Return which arguments a function gives back; None where it does more."""
    body = inlining.of_function(function)
    if body.last:
        return None
    indices = {name: index for index, name in enumerate(body.arguments)}
    positions: list[int] = []
    for result in body.results:
        source = inlining.origin_of(body, result)
        if source not in indices:
            return None
        positions.append(indices[source])
    return positions if all(p < num_components for p in positions) else None


def argument_shapes(site: Site, attribute: str, count: int) -> list[tf.TensorShape]:
    """Return the static shapes of a function's first arguments, as it was traced."""
    function = site.inliner.function(site.node.attr[attribute].func.name)
    shapes: list[tf.TensorShape] = []
    for index in range(count):
        attributes = function.arg_attr[index].attr
        known = attributes["_output_shapes"].list.shape
        shapes.append(tf.TensorShape(known[0]) if known else _UNKNOWN)
    return shapes


def _stream(site: Site, position: int = 0) -> sequences.Stream:
    value = site.inputs[position]
    if not isinstance(value, sequences.Stream):
        raise Fallback(f"{site.node.op} of a dataset from elsewhere")
    return value


def _indexed(site: Site, position: int = 0) -> Indexed:
    value = _stream(site, position)
    if not isinstance(value, Indexed):
        raise Fallback(f"{site.node.op} after a scan or take_while")
    return value


def _map(site: Site) -> list[Any]:
    stream = _stream(site)
    captured = site.inputs[1:]
    if site.node.op != "MapDataset":  # the last is the number of parallel calls
        captured = captured[:-1]
    name = site.node.attr["f"].func.name
    positions = selected(site.inliner.function(name), len(stream.specs))
    if positions is not None and isinstance(stream, Indexed):
        return [sequences.Selected(stream, positions)]
    function = inlined(site, "f", captured, in_order=stream.has_effects)
    if not isinstance(stream, Indexed):
        return [passes.MappedStream(stream, function, specs_of(site.node))]
    traits = traits_of(site.inliner, name)
    return [sequences.Mapped(stream, function, specs_of(site.node), traits)]


def _batch(site: Site) -> list[Any]:
    inner = _indexed(site)
    size = site.inputs[1]
    drop_remainder = tf.zeros([], tf.bool)
    if site.node.op != "BatchDataset":
        drop_remainder = site.inputs[-1]
    if inner.traits.effects and sequences.static(drop_remainder) != 0:
        raise Fallback("elements with effects, some dropped")
    specs = specs_of(site.node)
    return [sequences.Batched(inner, size, drop_remainder, specs)]


def _shuffle(site: Site) -> list[Any]:
    inner, buffer = _indexed(site), site.inputs[1]
    if site.node.attr["reshuffle_each_iteration"].b:
        return [sequences.Shuffled(inner, buffer)]
    return [sequences.FixedOrder(inner, buffer)]


def _filter(site: Site) -> list[Any]:
    inner = _indexed(site)
    name = site.node.attr["predicate"].func.name
    if traits_of(site.inliner, name) != Traits():
        raise Fallback("a filter that draws or has effects")
    predicate = inlined(site, "predicate", site.inputs[1:], in_order=False)
    return [sequences.Filtered(inner, predicate)]


def _zip(site: Site) -> list[Any]:
    inners = [_indexed(site, position) for position in range(len(site.inputs))]
    if any(inner.traits.effects for inner in inners):
        raise Fallback("elements with effects, zipped")
    return [sequences.Zipped(inners)]


def _range(site: Site) -> list[Any]:
    [spec] = specs_of(site.node)
    start, stop, step = site.inputs
    return [sequences.RangeSequence(spec, start, stop, step)]


def _tensor_slices(site: Site) -> list[Any]:
    columns = [(tensor, None) for tensor in site.inputs]
    length = tf.shape(site.inputs[0], tf.int64)[0]
    return [sequences.InMemorySequence(specs_of(site.node), columns, length)]


def _tensors(site: Site) -> list[Any]:
    columns = [(tensor[tf.newaxis], None) for tensor in site.inputs]
    return [
        sequences.InMemorySequence(specs_of(site.node), columns, tf.ones([], tf.int64))
    ]


def _cache(site: Site) -> list[Any]:
    inner = _indexed(site)
    if tf.get_static_value(site.inputs[1]) != b"":
        raise Fallback("a cache in a file")
    if inner.traits.shuffled or not inner.traits.repeatable:
        raise Fallback("a cache of random elements, or of elements with effects")
    return [inner]


def _scan(site: Site) -> list[Any]:
    stream = _stream(site)
    count = len(site.node.attr["Tstate"].list.type)
    initial, captured = site.inputs[1 : 1 + count], site.inputs[1 + count :]
    function = inlined(site, "f", captured, in_order=stream.has_effects)
    shapes = argument_shapes(site, "f", count)
    specs = specs_of(site.node)
    return [passes.Scanned(stream, function, initial, shapes, specs)]


def _take_while(site: Site) -> list[Any]:
    stream = _stream(site)
    captured = site.inputs[1:]
    predicate = inlined(site, "predicate", captured, in_order=stream.has_effects)
    return [passes.TakenWhile(stream, predicate)]


def _reduce(site: Site) -> list[Any]:
    stream = _stream(site)
    count = len(site.node.attr["Tstate"].list.type)
    initial, captured = site.inputs[1 : 1 + count], site.inputs[1 + count :]
    shapes = [spec.shape for spec in specs_of(site.node)]
    in_order = stream.has_effects
    function = inlined(site, "f", captured, in_order=in_order, shapes=shapes)
    return passes.reduce(stream, initial, function, shapes)


def _same(site: Site) -> list[Any]:
    return [_stream(site)]


def _deserialise(site: Site) -> list[Any]:
    [value] = site.inputs
    if not isinstance(value, SerializedDataset):
        raise Fallback("a dataset from elsewhere")
    return [value.sequence]


def _opaque(site: Site) -> list[Any]:
    outputs = len(inlining.definition_of(site.node).output_arg)
    return [IgnoredResource() for _ in range(outputs)]


PIPELINES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("AnonymousSeedGenerator", "DummySeedGenerator", "DeleteSeedGenerator",
         "AnonymousMemoryCache", "DummyMemoryCache", "DeleteMemoryCache"),
        _opaque,
    ),
    **dict.fromkeys(
        ("OptionsDataset", "ModelDataset", "PrefetchDataset", "RewriteDataset",
         "MaxIntraOpParallelismDataset", "PrivateThreadPoolDataset"),
        _same,
    ),
    **dict.fromkeys(("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2"), _map),
    **dict.fromkeys(
        ("BatchDataset", "BatchDatasetV2", "ParallelBatchDataset"), _batch
    ),
    **dict.fromkeys(
        ("ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3"), _shuffle
    ),
    **dict.fromkeys(("CacheDataset", "CacheDatasetV2"), _cache),
    "TakeDataset": lambda site: [sequences.Taken(_indexed(site), site.inputs[1])],
    "SkipDataset": lambda site: [sequences.Skipped(_indexed(site), site.inputs[1])],
    "RepeatDataset": lambda site: [sequences.repeat(_indexed(site), site.inputs[1])],
    "ShardDataset": lambda site: [sequences.Sharded(_indexed(site), *site.inputs[1:])],
    "FilterDataset": _filter,
    "ZipDataset": _zip,
    "RangeDataset": _range,
    "TensorSliceDataset": _tensor_slices,
    "TensorDataset": _tensors,
    "ScanDataset": _scan,
    "TakeWhileDataset": _take_while,
    "ReduceDataset": _reduce,
    "DatasetFromGraph": _deserialise,
}  # fmt: skip


def _leaves(values: Sequence[Any]) -> list[tf.Tensor]:
    """Return the tensors of values, those of one traced value once."""
    seen: set[int] = set()
    leaves: list[tf.Tensor] = []
    for value in values:
        if not isinstance(value, TracedValue):
            leaves.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            leaves.extend(value.leaves())
    return leaves


def _rebuilt(values: Sequence[Any], leaves: Sequence[tf.Tensor]) -> list[Any]:
    """Return the values with other tensors, as `_leaves` gives them."""
    left = list(leaves)
    made: dict[int, TracedValue] = {}
    rebuilt: list[Any] = []
    for value in values:
        if not isinstance(value, TracedValue):
            rebuilt.append(left.pop(0))
            continue
        if id(value) not in made:
            count = len(value.leaves())
            made[id(value)] = value.with_leaves(left[:count])
            del left[:count]
        rebuilt.append(made[id(value)])
    return rebuilt


def _iterators(values: Sequence[Any]) -> list[Iterator]:
    by_id = {id(value): value for value in values if isinstance(value, Iterator)}
    return list(by_id.values())


def _move_on(iterators: Sequence[Iterator], leaves: Sequence[tf.Tensor]) -> None:
    left = list(leaves)
    for iterator in iterators:
        count = len(iterator.leaves())
        iterator.take(left[:count])
        del left[:count]


def _call(site: Site) -> list[Any]:
    return site.call("f", site.inputs)


def _if(site: Site) -> list[Any]:
    condition, *inputs = site.inputs
    if isinstance(condition, TracedValue) or condition.dtype != tf.bool:
        raise Fallback("a branch on what is no bool")
    results: list[list[Any]] = []

    def branch(attribute: str) -> list[tf.Tensor]:
        inner = _rebuilt(inputs, _leaves(inputs))
        name = site.node.attr[attribute].func.name
        outputs = site.inliner.call(name, inner)
        results.append(outputs)
        return [
            *map(tf.identity, _leaves(_iterators(inner))),
            *map(tf.identity, _leaves(_without_iterators(outputs))),
        ]

    chosen = sequences.choose(
        condition, lambda: branch("then_branch"), lambda: branch("else_branch")
    )
    first, second = results
    _check_alike(first, second, "a branch")
    iterators = _iterators(inputs)
    count = len(_leaves(iterators))
    _move_on(iterators, chosen[:count])
    return _outside(first, inputs, chosen[count:])


def _without_iterators(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, Iterator)]


def _outside(
    outputs: Sequence[Any], inputs: Sequence[Any], leaves: Sequence[tf.Tensor]
) -> list[Any]:
    """Return what an inner body gave as values here; iterators are those given in."""
    rebuilt = iter(_rebuilt(_without_iterators(outputs), leaves))
    iterators = _iterators(inputs)
    results: list[Any] = []
    for output in outputs:
        if not isinstance(output, Iterator):
            results.append(next(rebuilt))
            continue
        matching = [iterator for iterator in iterators if iterator.is_like(output)]
        if not matching:
            raise Fallback("an iterator that leaves a loop or branch")
        results.append(matching[0])
    return results


def _check_alike(first: Sequence[Any], second: Sequence[Any], where: str) -> None:
    for one, other in zip(first, second, strict=True):
        is_tensor = not isinstance(one, TracedValue)
        if is_tensor if isinstance(other, TracedValue) else not is_tensor:
            raise Fallback(f"{where} that changes a dataset")
        if isinstance(one, TracedValue) and not one.is_like(other):
            raise Fallback(f"{where} that changes a dataset")


def _while(site: Site) -> list[Any]:
    inputs = site.inputs

    @tf.autograph.experimental.do_not_convert
    def goes_on(*leaves: tf.Tensor) -> tf.Tensor:
        inner = _rebuilt(inputs, leaves)
        before = _leaves(_iterators(inner))
        name = site.node.attr["cond"].func.name
        [condition] = site.inliner.call(name, inner)
        after = _leaves(_iterators(inner))
        # A condition gives a bool alone: it cannot carry on an iterator that it moved.
        if any(x is not y for x, y in zip(before, after, strict=True)):
            raise Fallback("a loop whose condition takes from an iterator")
        return condition

    @tf.autograph.experimental.do_not_convert
    def body(*leaves: tf.Tensor) -> list[tf.Tensor]:
        inner = _rebuilt(inputs, leaves)
        name = site.node.attr["body"].func.name
        outputs = site.inliner.call(name, inner)
        _check_alike(inputs, outputs, "a loop")
        return _leaves(outputs)

    parallel = site.node.attr["parallel_iterations"].i
    results: Any = tf.while_loop(
        goes_on,
        body,
        _leaves(inputs),
        _shapes(site, inputs),
        parallel_iterations=parallel or 10,
    )
    # An iterator is one object for all that read it, so it is moved, not replaced.
    for value, rebuilt in zip(inputs, _rebuilt(inputs, results), strict=True):
        if isinstance(value, Iterator):
            value.take(rebuilt.leaves())
    rebuilt = _rebuilt(inputs, results)
    pairs = zip(inputs, rebuilt, strict=True)
    return [old if isinstance(old, Iterator) else new for old, new in pairs]


def _shapes(site: Site, inputs: Sequence[Any]) -> list[tf.TensorShape]:
    """Return the shapes of leaves at any time."""
    declared = site.node.attr["output_shapes"].list.shape
    seen: set[int] = set()
    shapes: list[tf.TensorShape] = []
    for index, value in enumerate(inputs):
        if not isinstance(value, TracedValue):
            known = index < len(declared)
            shapes.append(tf.TensorShape(declared[index]) if known else value.shape)
        elif id(value) not in seen:
            seen.add(id(value))
            shapes.extend(value.shapes())
    return shapes


def _pass_on(site: Site) -> list[Any]:
    return site.inputs


CONTROL_FLOW: Mapping[str, Rule] = {
    "PartitionedCall": _call,
    "StatefulPartitionedCall": _call,
    "If": _if,
    "StatelessIf": _if,
    "While": _while,
    "StatelessWhile": _while,
    "Identity": _pass_on,
    "IdentityN": _pass_on,
}
