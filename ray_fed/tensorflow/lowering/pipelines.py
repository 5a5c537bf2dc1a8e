"""Rules for datasets: each becomes a sequence, and what reads one a loop."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

import ray_fed.tensorflow.lowering.bodies as bodies
import ray_fed.tensorflow.lowering.derived as derived
import ray_fed.tensorflow.lowering.element_functions as element_functions
import ray_fed.tensorflow.lowering.laid as laid
import ray_fed.tensorflow.lowering.passes as passes
import ray_fed.tensorflow.lowering.reindexed as reindexed
import ray_fed.tensorflow.lowering.scans as scans
import ray_fed.tensorflow.lowering.shuffled as shuffled
import ray_fed.tensorflow.lowering.streams as streams
from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.indexed import Indexed, Traits
from ray_fed.tensorflow.lowering.inlining import Rule, Site
from ray_fed.tensorflow.lowering.symbols import Opaque, Serialised


def _stream(site: Site, position: int = 0) -> streams.Stream:
    value = site.inputs[position]
    if not isinstance(value, streams.Stream):
        raise CannotLower(f"{site.node.op} of a dataset from elsewhere")
    return value


def _indexed(site: Site, position: int = 0) -> Indexed:
    value = _stream(site, position)
    if not isinstance(value, Indexed):
        raise CannotLower(f"{site.node.op} after a scan or take_while")
    return value


def _map(site: Site) -> list[Any]:
    stream = _stream(site)
    captured = site.inputs[1:]
    if site.node.op != "MapDataset":  # the last is the number of parallel calls
        captured = captured[:-1]
    name = site.node.attr["f"].func.name
    positions = element_functions.selected(
        site.inliner.function(name), len(stream.specs)
    )
    if positions is not None and isinstance(stream, Indexed):
        return [derived.Selected(stream, positions)]
    function = element_functions.inlined(
        site, "f", captured, in_order=stream.has_effects
    )
    if not isinstance(stream, Indexed):
        return [
            scans.MappedStream(stream, function, element_functions.specs_of(site.node))
        ]
    traits = element_functions.traits_of(site.inliner, name)
    return [
        derived.Mapped(stream, function, element_functions.specs_of(site.node), traits)
    ]


def _batch(site: Site) -> list[Any]:
    inner = _indexed(site)
    size = site.inputs[1]
    drop_remainder = tf.zeros([], tf.bool)
    if site.node.op != "BatchDataset":
        drop_remainder = site.inputs[-1]
    if inner.traits.effects and reindexed.static(drop_remainder) != 0:
        raise CannotLower("elements with effects, some dropped")
    specs = element_functions.specs_of(site.node)
    return [derived.Batched(inner, size, drop_remainder, specs)]


def _take(site: Site) -> list[Any]:
    return [reindexed.Taken(_indexed(site), site.inputs[1])]


def _skip(site: Site) -> list[Any]:
    return [reindexed.Skipped(_indexed(site), site.inputs[1])]


def _repeat(site: Site) -> list[Any]:
    return [shuffled.repeat(_indexed(site), site.inputs[1])]


def _shard(site: Site) -> list[Any]:
    return [reindexed.Sharded(_indexed(site), site.inputs[1], site.inputs[2])]


def _shuffle(site: Site) -> list[Any]:
    inner, buffer = _indexed(site), site.inputs[1]
    if site.node.attr["reshuffle_each_iteration"].b:
        return [shuffled.Shuffled(inner, buffer)]
    return [shuffled.FixedOrder(inner, buffer)]


def _filter(site: Site) -> list[Any]:
    inner = _indexed(site)
    name = site.node.attr["predicate"].func.name
    if element_functions.traits_of(site.inliner, name) != Traits():
        raise CannotLower("a filter that draws or has effects")
    predicate = element_functions.inlined(
        site, "predicate", site.inputs[1:], in_order=False
    )
    return [reindexed.Filtered(inner, predicate)]


def _zip(site: Site) -> list[Any]:
    inners = [_indexed(site, position) for position in range(len(site.inputs))]
    if any(inner.traits.effects for inner in inners):
        raise CannotLower("elements with effects, zipped")
    return [derived.Zipped(inners)]


def _range(site: Site) -> list[Any]:
    [spec] = element_functions.specs_of(site.node)
    start, stop, step = site.inputs
    return [laid.Counted(spec, start, stop, step)]


def _tensor_slices(site: Site) -> list[Any]:
    columns = [(tensor, None) for tensor in site.inputs]
    length = tf.shape(site.inputs[0], tf.int64)[0]
    return [laid.Laid(element_functions.specs_of(site.node), columns, length)]


def _tensors(site: Site) -> list[Any]:
    columns = [(tensor[tf.newaxis], None) for tensor in site.inputs]
    return [
        laid.Laid(element_functions.specs_of(site.node), columns, tf.ones([], tf.int64))
    ]


def _cache(site: Site) -> list[Any]:
    inner = _indexed(site)
    if tf.get_static_value(site.inputs[1]) != b"":
        raise CannotLower("a cache in a file")
    if inner.traits.shuffled or not inner.traits.repeatable:
        raise CannotLower("a cache of random elements, or of elements with effects")
    return [inner]


def _scan(site: Site) -> list[Any]:
    stream = _stream(site)
    count = len(site.node.attr["Tstate"].list.type)
    initial, captured = site.inputs[1 : 1 + count], site.inputs[1 + count :]
    function = element_functions.inlined(
        site, "f", captured, in_order=stream.has_effects
    )
    shapes = element_functions.argument_shapes(site, "f", count)
    specs = element_functions.specs_of(site.node)
    return [scans.Scanned(stream, function, initial, shapes, specs)]


def _take_while(site: Site) -> list[Any]:
    stream = _stream(site)
    captured = site.inputs[1:]
    predicate = element_functions.inlined(
        site, "predicate", captured, in_order=stream.has_effects
    )
    return [scans.TakenWhile(stream, predicate)]


def _reduce(site: Site) -> list[Any]:
    stream = _stream(site)
    count = len(site.node.attr["Tstate"].list.type)
    initial, captured = site.inputs[1 : 1 + count], site.inputs[1 + count :]
    function = element_functions.inlined(
        site, "f", captured, in_order=stream.has_effects
    )
    shapes = [spec.shape for spec in element_functions.specs_of(site.node)]
    return passes.reduce(stream, initial, function, shapes)


def _same(site: Site) -> list[Any]:
    return [_stream(site)]


def _deserialise(site: Site) -> list[Any]:
    [value] = site.inputs
    if not isinstance(value, Serialised):
        raise CannotLower("a dataset from elsewhere")
    return [value.sequence]


def _opaque(site: Site) -> list[Any]:
    outputs = len(bodies.definition_of(site.node).output_arg)
    return [Opaque() for _ in range(outputs)]


RULES: Mapping[str, Rule] = {
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
    "TakeDataset": _take,
    "SkipDataset": _skip,
    "RepeatDataset": _repeat,
    "ShardDataset": _shard,
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
