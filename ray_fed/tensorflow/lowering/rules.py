"""Rules that replace ops of tf.data and of control flow while a graph is lowered.

A dataset becomes a sequence object, and an op that reads a dataset becomes a loop.
Calls, branches and loops around ops of tf.data or variables are run symbolically. A
traced value, such as a sequence, enters them as its leaves: the tensors in it that can
change. It leaves them as the same kind of value with new leaves. An iterator or a
variable outside takes the last leaves of its copy inside.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import tensorflow as tf

import ray_fed.tensorflow.graphs.graph_message as graph_message
import ray_fed.tensorflow.graphs.randomness as randomness
import ray_fed.tensorflow.lowering.inlining as inlining
import ray_fed.tensorflow.lowering.passes as passes
import ray_fed.tensorflow.lowering.sequences as sequences
from ray_fed.plan.plans import Fallback
from ray_fed.tensorflow.graphs.graph_message import FunctionDef, NodeDef
from ray_fed.tensorflow.lowering.inlining import (
    Carried,
    IgnoredResource,
    Inliner,
    Rule,
    SerializedDataset,
    Site,
    TracedValue,
)
from ray_fed.tensorflow.lowering.sequences import Function, Indexed, Traits

_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "VarHandleOp", "LookupTableFindV2"}
)
"""Ops that count as stateful but return the same value when they run again."""

_UNKNOWN: Any = tf.TensorShape(cast("Any", None))


def specs_of(node: NodeDef) -> list[tf.TensorSpec]:
    """Return the specs of the components of a dataset's elements, from its node."""
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
    """Return the function in an attribute of a node, as a Python function of tensors.

    A call adds the function to the current graph. It passes `captured` after its
    arguments. If `in_order`, its effects wait for the arguments. `shapes` are the
    static shapes of the results, if known.
    """
    name = site.node.attr[attribute].func.name
    if any(isinstance(value, Carried) for value in captured):
        raise Fallback(f"{site.node.op} of an iterator or variable")

    def run(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        entry = inputs if in_order else ()
        arguments = [*inputs, *captured]
        results = site.inliner.call(name, arguments, entry, shapes=shapes)
        if any(isinstance(result, TracedValue) for result in results):
            raise Fallback(f"{site.node.op} of datasets")
        return results

    return run


def traits_of(inliner: Inliner, name: str) -> Traits:
    """Return the traits of a sequence whose elements the function `name` computes."""
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
    """Return the index of the argument that each result of a function is.

    The result is None if the function computes anything, or returns an argument after
    the first `num_components`.
    """
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
    """Return the static shapes of the first `count` arguments of a node's function."""
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
    if site.node.op != "MapDataset":  # the last input is the number of parallel calls
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
    unseen = site.inliner.unseen()
    carried = _carried([*captured, *unseen])
    if not carried:
        in_order = stream.has_effects
        function = inlined(site, "f", captured, in_order=in_order, shapes=shapes)
        return passes.reduce(stream, initial, function, shapes)
    name, num_elements = site.node.attr["f"].func.name, len(stream.specs)

    # The leaves of carried values are loop variables between state and element.
    def run(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        leaves = inputs[count:-num_elements]
        copies = dict(zip(map(id, carried), _rebuilt(carried, leaves), strict=True))
        inside = [copies.get(id(value), value) for value in captured]
        elements = [*inputs[:count], *inputs[-num_elements:]]
        entry = elements if stream.has_effects else ()
        with site.inliner.carrying([copies[id(value)] for value in unseen]):
            results = site.inliner.call(name, [*elements, *inside], entry)
        if any(isinstance(result, TracedValue) for result in results):
            raise Fallback(f"{site.node.op} of datasets")
        return [*results, *_leaves_after(carried, list(copies.values()))]

    results = passes.reduce(
        stream,
        [*initial, *_leaves(carried)],
        run,
        [*shapes, *(shape for value in carried for shape in value.shapes())],
    )
    _take_all(carried, results[count:])
    return results[:count]


def _same(site: Site) -> list[Any]:
    return [_stream(site)]


def _deserialize(site: Site) -> list[Any]:
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
    "DatasetFromGraph": _deserialize,
}  # fmt: skip


def _leaves(values: Sequence[Any]) -> list[tf.Tensor]:
    # A traced value that occurs twice counts once.
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


def _carried(values: Sequence[Any]) -> list[Carried]:
    by_id = {id(value): value for value in values if isinstance(value, Carried)}
    return list(by_id.values())


def _take_all(carried: Sequence[Carried], leaves: Sequence[tf.Tensor]) -> None:
    left = list(leaves)
    for value in carried:
        count = len(value.leaves())
        value.take(left[:count])
        del left[:count]


def _leaves_after(
    outside: Sequence[Carried], inside: Sequence[Carried]
) -> list[tf.Tensor]:
    for value, copy in zip(outside, inside, strict=True):
        if len(value.leaves()) != len(copy.leaves()):
            raise Fallback("a variable that is initialized in a loop or branch")
    return _leaves(inside)


def _call(site: Site) -> list[Any]:
    return site.call("f", site.inputs)


_OF_CHECKS = frozenset({"Assert", "Const", "Identity", "NoOp"})

_Branch: TypeAlias = Callable[[], "list[tf.Tensor]"]


def _if(site: Site) -> list[Any]:
    condition, attributes = site.inputs[0], site.node.attr
    if isinstance(condition, TracedValue) or condition.dtype != tf.bool:
        raise Fallback("a branch on a value that is not a bool")
    names = [attributes[key].func.name for key in ("then_branch", "else_branch")]

    # TensorFlow writes a check as a branch, which `tf.vectorized_map` does not support.
    bodies = [site.inliner.function(name).node_def for name in names]
    is_check = all(node.op in _OF_CHECKS for body in bodies for node in body)

    def choose(branches: Sequence[_Branch]) -> Any:
        if not is_check or not site.inliner.unseen():
            return tf.cond(condition, *branches)
        pairs = zip(*(branch() for branch in branches), strict=True)
        return [tf.where(condition, first, second) for first, second in pairs]

    return _branch(site, names, choose)


def _case(site: Site) -> list[Any]:
    index = site.inputs[0]
    if isinstance(index, TracedValue):
        raise Fallback("a branch on a value that is not a number")
    names = [function.name for function in site.node.attr["branches"].list.func]

    def choose(branches: Sequence[_Branch]) -> Any:
        return tf.switch_case(index, list(branches))

    return _branch(site, names, choose)


def _branch(
    site: Site,
    names: Sequence[str],
    choose: Callable[[Sequence[_Branch]], Any],
) -> list[Any]:
    # The first input says which branch runs, and `choose` adds the op that does it.
    unseen = site.inliner.unseen()
    inputs = [*site.inputs[1:], *unseen]
    seen = len(inputs) - len(unseen)
    carried = _carried(inputs)
    results: list[list[Any]] = []
    effects: inlining.Anchors = []

    # Each branch changes copies of the carried values and returns their leaves first.
    def run(name: str) -> list[tf.Tensor]:
        inner = _rebuilt(inputs, _leaves(inputs))
        done: inlining.Anchors = []
        with site.inliner.carrying(inner[seen:]):
            outputs = site.inliner.call(name, inner[:seen], done=done)
        results.append(outputs)
        effects.extend(done)
        with tf.control_dependencies(done):
            return [
                *map(tf.identity, _leaves_after(carried, _carried(inner))),
                *map(tf.identity, _leaves(_without_carried(outputs))),
                tf.zeros([], tf.bool),  # in TensorFlow, each branch has a result
            ]

    no_convert = tf.autograph.experimental.do_not_convert
    branches = [no_convert(functools.partial(run, name)) for name in names]
    *chosen, ran = choose(branches)
    site.done.extend([ran] if effects else [])
    for other in results[1:]:
        _check_alike(results[0], other, "a branch")
    count = len(_leaves(carried))
    _take_all(carried, chosen[:count])
    return _outside(results[0], inputs, chosen[count:])


def _without_carried(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, Carried)]


def _outside(
    outputs: Sequence[Any], inputs: Sequence[Any], leaves: Sequence[tf.Tensor]
) -> list[Any]:
    # Carried values in the results of a branch are replaced by the outer objects.
    rebuilt = iter(_rebuilt(_without_carried(outputs), leaves))
    results: list[Any] = []
    for output in outputs:
        if not isinstance(output, Carried):
            results.append(next(rebuilt))
            continue
        matching = [value for value in _carried(inputs) if value.is_like(output)]
        if not matching:
            raise Fallback("an iterator or variable that leaves a loop or branch")
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
    inputs = [*site.inputs, *site.inliner.unseen()]
    seen = len(site.inputs)

    @tf.autograph.experimental.do_not_convert
    def goes_on(*leaves: tf.Tensor) -> tf.Tensor:
        inner = _rebuilt(inputs, leaves)
        before = _leaves(_carried(inner))
        name = site.node.attr["cond"].func.name
        with site.inliner.carrying(inner[seen:]):
            [condition] = site.inliner.call(name, inner[:seen])
        after = _leaves(_carried(inner))
        # A condition returns only a bool, so changes in it would be lost.
        if len(before) != len(after) or any(map(operator.is_not, before, after)):
            raise Fallback("a loop whose condition changes an iterator or variable")
        return condition

    @tf.autograph.experimental.do_not_convert
    def body(*leaves: tf.Tensor) -> list[tf.Tensor]:
        inner = _rebuilt(inputs, leaves)
        name = site.node.attr["body"].func.name
        done: inlining.Anchors = []
        with site.inliner.carrying(inner[seen:]):
            outputs = site.inliner.call(name, inner[:seen], done=done)
        outputs.extend(inner[seen:])
        _check_alike(inputs, outputs, "a loop")
        _leaves_after(_carried(inputs), _carried(inner))
        after = _leaves(outputs)
        if done:
            site.has_effects = True
            with tf.control_dependencies(done):
                after = list(map(tf.identity, after))
        return after

    parallel = site.node.attr["parallel_iterations"].i
    results: Any = tf.while_loop(
        goes_on,
        body,
        _leaves(inputs),
        _shapes(site, inputs),
        parallel_iterations=parallel or 10,
    )
    rebuilt = _rebuilt(inputs, results)
    pairs = list(zip(inputs, rebuilt, strict=True))
    # All readers of a carried value refer to one object, so it is not replaced.
    for value, copy in pairs:
        if isinstance(value, Carried):
            value.take(copy.leaves())
    return [old if isinstance(old, Carried) else new for old, new in pairs[:seen]]


def _shapes(site: Site, inputs: Sequence[Any]) -> list[tf.TensorShape]:
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
    "Case": _case,
    "StatelessCase": _case,
    "While": _while,
    "StatelessWhile": _while,
    "Identity": _pass_on,
    "IdentityN": _pass_on,
}
