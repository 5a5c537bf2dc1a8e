"""Interprets building blocks inside of a graph that is being built.

Values are what `client_data` says: tensors, sequences laid as rows, structs of them;
functions are Python functions over these. A value at the server is its member. Locals
are evaluated when first needed, as the executors do, and draw under the same names.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import federated_language as fl
import tensorflow as tf

from ray_fed.language import blocks, intrinsics
from ray_fed.language.structs import Struct
from ray_fed.tensorflow.kernels.grafts import Grafts
from ray_fed.tensorflow.kernels.graph_values import UnfitError, flatten, leaf_types
from ray_fed.tensorflow.loading import operators
from ray_fed.tensorflow.tensors import specs
from ray_fed.values.tensor_structures import unflatten

flf = fl.framework
Block = flf.ComputationBuildingBlock
Path = tuple[str, ...]
Names = Mapping[str, Callable[[], Any]]

_IN_GRAPHS = operators.OPERATORS.keys() - {
    intrinsics.AVERAGE.uri,
    intrinsics.CHECK_MAXIMUM.uri,
    intrinsics.CHECK_BITWIDTH.uri,
    intrinsics.MODULAR_ZERO.uri,
}
"""What has no need to look at a value while the graph is built."""

_AS_THEY_ARE = frozenset(
    {flf.FEDERATED_VALUE_AT_SERVER.uri, flf.FEDERATED_ZIP_AT_SERVER.uri}
)
"""What does nothing where a value at the server is its member."""


@dataclasses.dataclass(frozen=True)
class GraphFunction:
    """A function inside of a graph: from its argument, and the locals it runs in."""

    run: Callable[[Any, Path], Any]


class Interpreter:
    """Evaluates building blocks in the graph that is current.

    Args:
        grafts: puts TensorFlow computations into the graph.
        counts: takes tensors that are to be above zero, for the caller to see to it;
            None: whatever raises where one is zero is unfit.
    """

    def __init__(self, grafts: Grafts, counts: list[tf.Tensor] | None = None) -> None:
        self._grafts = grafts
        self._counts = counts

    def call(self, function: Block, argument: Any) -> Any:
        """Return the result of a closed lambda.

        Raises:
            UnfitError: it needs what only executors can do.
        """
        return self._evaluate(function, {}, ()).run(argument, ())

    def _evaluate(  # noqa: C901, PLR0911, PLR0912 (one branch a kind of block)
        self, block: Block, names: Names, path: Path
    ) -> Any:
        match block:
            case flf.Reference():
                return names[block.name]()
            case flf.Lambda():
                return self._close(block, names)
            case flf.Block():
                for name, local in block.locals:
                    names = {**names, name: self._local(name, local, names, path)}
                return self._part(block.result, "result", names, path)
            case flf.Struct():
                return Struct(
                    (name, self._part(element, index, names, path))
                    for index, (name, element) in enumerate(block.items())
                )
            case flf.Selection():
                return self._evaluate(block.source, names, path)[block.as_index()]
            case flf.Call():
                argument = None
                function = self._evaluate(block.function, names, path)
                if block.argument is not None:
                    argument = self._part(block.argument, "argument", names, path)
                return function.run(argument, path)
            case _:
                return self._atom(block)

    def _part(self, part: Block, where: str | int, names: Names, path: Path) -> Any:
        """Evaluate a part of a block; its random numbers depend on its place there."""
        name = blocks.operand_name(part, where)
        return self._evaluate(part, names, path if name is None else (*path, name))

    def _local(
        self, name: str, block: Block, names: Names, path: Path
    ) -> Callable[[], Any]:
        found: list[Any] = []

        def evaluate() -> Any:
            if not found:
                found.append(self._evaluate(block, names, (*path, name)))
            return found[0]

        return evaluate

    def _close(self, block: flf.Lambda, names: Names) -> GraphFunction:
        def run(argument: Any, path: Path) -> Any:
            inner = dict(names)
            if block.parameter_name is not None:
                inner[block.parameter_name] = lambda: argument
            return self._evaluate(block.result, inner, path)

        return GraphFunction(run)

    def _atom(self, block: Block) -> Any:
        match block:
            case flf.Literal():
                value: Any = block.value
                return tf.constant(value, specs.to_tf_dtype(block.type_signature))
            case flf.Intrinsic():
                return GraphFunction(self._intrinsic(block))
            case flf.CompiledComputation():
                return self._compiled(block)
            case _:
                raise UnfitError(f"a building block of kind {type(block).__name__}")

    def _compiled(self, block: flf.CompiledComputation) -> GraphFunction:
        result = cast("fl.FunctionType", block.type_signature).result

        def run(argument: Any, path: Path) -> Any:
            leaves = [] if argument is None else flatten(argument)
            if isinstance(result, fl.SequenceType):
                return self._grafts.defer(block, leaves)
            tensors = self._grafts.call(block, leaves, path)
            for tensor, leaf in zip(tensors, leaf_types(result), strict=True):
                tensor.set_shape(specs.to_spec(cast("fl.TensorType", leaf)).shape)
            return unflatten(iter(tensors), result)

        return GraphFunction(run)

    def _intrinsic(self, block: flf.Intrinsic) -> Callable[[Any, Path], Any]:
        uri, type_spec = block.uri, cast("fl.FunctionType", block.type_signature)

        def operate(argument: Any, _: Path) -> Any:
            parts = [] if argument is None else list(map(flatten, argument))
            shielded = [[self._grafts.shield(t) for t in part] for part in parts]
            return unflatten(iter(operator(shielded, type_spec)), type_spec.result)

        if uri in _IN_GRAPHS:
            operator = operators.OPERATORS[uri]
            return operate
        if uri == intrinsics.AVERAGE.uri and self._counts is not None:
            operator = self._divide_sums
            return operate
        if uri in _AS_THEY_ARE:
            return lambda argument, _: argument
        if uri == flf.FEDERATED_APPLY.uri:
            return lambda argument, path: argument[0].run(argument[1], path)
        if uri == flf.FEDERATED_EVAL_AT_SERVER.uri:
            return lambda argument, path: argument.run(None, path)
        raise UnfitError(f"`{uri}` at clients")

    def _divide_sums(self, parts: list[Any], type_spec: fl.FunctionType) -> list[Any]:
        cast("list[Any]", self._counts).append(operators.count_of(parts))
        return operators.divide_sums(parts, type_spec)
