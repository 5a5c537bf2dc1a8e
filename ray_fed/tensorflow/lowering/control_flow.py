"""Rules for calls, branches and loops around what is of tf.data.

A symbol goes in as its leaves and comes out as the same symbol with other leaves; an
iterator is moved on by what happened inside.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import ray_fed.tensorflow.lowering.streams as streams
from ray_fed.tensorflow.lowering.bodies import CannotLower
from ray_fed.tensorflow.lowering.inlining import Rule, Site
from ray_fed.tensorflow.lowering.iterators import Iterator
from ray_fed.tensorflow.lowering.symbols import Symbol


def _leaves(values: Sequence[Any]) -> list[tf.Tensor]:
    """Return the tensors of values, those of one symbol once."""
    taken: set[int] = set()
    leaves: list[tf.Tensor] = []
    for value in values:
        if not isinstance(value, Symbol):
            leaves.append(value)
        elif id(value) not in taken:
            taken.add(id(value))
            leaves.extend(value.leaves())
    return leaves


def _rebuilt(values: Sequence[Any], leaves: Sequence[tf.Tensor]) -> list[Any]:
    """Return the values with other tensors, as `_leaves` gives them."""
    left = list(leaves)
    made: dict[int, Symbol] = {}
    rebuilt: list[Any] = []
    for value in values:
        if not isinstance(value, Symbol):
            rebuilt.append(left.pop(0))
            continue
        if id(value) not in made:
            count = len(value.leaves())
            made[id(value)] = value.with_leaves(left[:count])
            del left[:count]
        rebuilt.append(made[id(value)])
    return rebuilt


def _iterators(values: Sequence[Any]) -> list[Iterator]:
    found = {id(value): value for value in values if isinstance(value, Iterator)}
    return list(found.values())


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
    if isinstance(condition, Symbol) or condition.dtype != tf.bool:
        raise CannotLower("a branch on what is no bool")
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

    chosen = streams.choose(
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
    found: list[Any] = []
    for output in outputs:
        if not isinstance(output, Iterator):
            found.append(next(rebuilt))
            continue
        matching = [iterator for iterator in iterators if iterator.is_like(output)]
        if not matching:
            raise CannotLower("an iterator that leaves a loop or branch")
        found.append(matching[0])
    return found


def _check_alike(first: Sequence[Any], second: Sequence[Any], where: str) -> None:
    for one, other in zip(first, second, strict=True):
        is_tensor = not isinstance(one, Symbol)
        if is_tensor if isinstance(other, Symbol) else not is_tensor:
            raise CannotLower(f"{where} that changes a dataset")
        if isinstance(one, Symbol) and not one.is_like(other):
            raise CannotLower(f"{where} that changes a dataset")


def _while(site: Site) -> list[Any]:
    inputs = site.inputs

    @tf.autograph.experimental.do_not_convert
    def goes_on(*leaves: tf.Tensor) -> tf.Tensor:
        inner = _rebuilt(inputs, leaves)
        before = _leaves(_iterators(inner))
        name = site.node.attr["cond"].func.name
        [condition] = site.inliner.call(name, inner)
        after = _leaves(_iterators(inner))
        if any(x is not y for x, y in zip(before, after, strict=True)):
            raise CannotLower("a loop whose condition takes from an iterator")
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
    for value, rebuilt in zip(inputs, _rebuilt(inputs, results), strict=True):
        if isinstance(value, Iterator):
            value.take(rebuilt.leaves())
    rebuilt = _rebuilt(inputs, results)
    pairs = zip(inputs, rebuilt, strict=True)
    return [old if isinstance(old, Iterator) else new for old, new in pairs]


def _shapes(site: Site, inputs: Sequence[Any]) -> list[tf.TensorShape]:
    """Return the shapes of leaves at any time."""
    declared = site.node.attr["output_shapes"].list.shape
    taken: set[int] = set()
    shapes: list[tf.TensorShape] = []
    for index, value in enumerate(inputs):
        if not isinstance(value, Symbol):
            known = index < len(declared)
            shapes.append(tf.TensorShape(declared[index]) if known else value.shape)
        elif id(value) not in taken:
            taken.add(id(value))
            shapes.extend(value.shapes())
    return shapes


def _pass_on(site: Site) -> list[Any]:
    return site.inputs


RULES: Mapping[str, Rule] = {
    "PartitionedCall": _call,
    "StatefulPartitionedCall": _call,
    "If": _if,
    "StatelessIf": _if,
    "While": _while,
    "StatelessWhile": _while,
    "Identity": _pass_on,
    "IdentityN": _pass_on,
}
