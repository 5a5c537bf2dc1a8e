"""A lambda on its way down a stack: what it captures is embedded, its body is not."""

from collections.abc import Awaitable, Callable

import federated_language as fl

import ray_fed.blocks as blocks
import ray_fed.plain as plain
import ray_fed.values as values

flf = fl.framework


class Closure:
    """A lambda with what it captures, embedded in the target that it was given to.

    Calling it with an embedded argument evaluates its body there. An executor that
    runs it elsewhere asks for its `portable` form.
    """

    def __init__(
        self,
        block: flf.Lambda,
        captured: dict[str, flf.ExecutorValue],
        call: Callable[[flf.ExecutorValue | None], Awaitable[flf.ExecutorValue]],
    ) -> None:
        self.block = block
        self.captured = captured
        self._call = call

    async def __call__(self, arg: flf.ExecutorValue | None) -> flf.ExecutorValue:
        """Return the lambda's result on an argument embedded in the same target."""
        return await self._call(arg)

    async def portable(self) -> blocks.Function:
        """Return the lambda as a function that can travel: its captures computed."""
        captured: list[tuple[str, bytes, values.Plain]] = []
        functions: list[tuple[str, flf.ComputationBuildingBlock]] = []
        for name, value in self.captured.items():
            if isinstance(value.type_signature, fl.FunctionType):
                function = await to_function(value)
                captured.extend(function.captured)
                functions.append((name, function.building_block()))
            else:
                computed = await value.compute()
                type_spec = value.type_signature
                captured.append(
                    (
                        name,
                        blocks.serialise_type(type_spec),
                        plain.to_plain(computed, type_spec, f"the captured `{name}`"),
                    )
                )
        block = flf.Block(functions, self.block) if functions else self.block
        return blocks.Function(blocks.serialise(block), tuple(captured))


async def to_function(value: flf.ExecutorValue) -> blocks.Function:
    """Return an embedded function as one that can travel.

    Raises:
        ValueMismatchError: the value is no function that is held as a computation.
    """
    match value.reference:
        case Closure() as closure:
            return await closure.portable()
        case flf.ComputationBuildingBlock() as block:
            return blocks.Function(blocks.serialise(block))
        case _:
            return values.narrow(value.reference, blocks.Function, "FederatingExecutor")
