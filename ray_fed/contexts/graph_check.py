"""Looks at computations before their first call: refuses what cannot run, and warns.

TensorFlow is imported only for a computation that seems to have Python functions.
"""

import logging

import federated_language as fl

from ray_fed.compiler.form import MergeableCompForm
from ray_fed.language import blocks, intrinsics
from ray_fed.rounds.computation_cache import ComputationCache

flf = fl.framework
_logger = logging.getLogger(__name__)

_MARKS = frozenset({b"PyFunc", b"GeneratorDataset"})
"""One of them is in the bytes of every graph with Python functions, as part of an op's
name; other graphs may have them, too."""
_SIMULATED = frozenset(uri.encode() for uri in intrinsics.SIMULATED)


class ComputationChecks:
    """Checks each computation once, as walking through one may take longer than a call.

    Args:
        in_process: whether graphs run in this process; otherwise they run in workers.
    """

    def __init__(self, *, in_process: bool) -> None:
        self._in_process = in_process
        self._warned = False
        self._checked = ComputationCache(self._check)

    def check(self, comp: flf.ConcreteComputation | MergeableCompForm) -> None:
        """Raise if graphs have Python functions that they cannot call.

        Logs a warning, once, where secure aggregation is simulated.

        Raises:
            UnsupportedError: a graph has Python functions, and runs in another process
                than the one that traced it.
        """
        if isinstance(comp, MergeableCompForm):
            for part in (comp.up_to_merge, comp.merge, comp.after_merge):
                self._checked.get(part)
        else:
            self._checked.get(comp)

    def _check(self, comp: flf.ConcreteComputation) -> None:
        # Most computations have none of it, and their bytes are searched in no time.
        written = comp.to_proto().SerializeToString()
        if not any(mark in written for mark in _MARKS | _SIMULATED):
            return
        block = blocks.to_block(comp)
        if block is not None:
            flf.visit_postorder(block, self._check_block)

    def _check_block(self, block: flf.ComputationBuildingBlock) -> None:
        match block:
            case flf.CompiledComputation():
                self._check_graph(block)
            case flf.Intrinsic() if block.uri in intrinsics.SIMULATED:
                self._warn_of_simulation()
            case _:
                pass

    def _check_graph(self, block: flf.CompiledComputation) -> None:
        message = block.to_proto().tensorflow
        if any(mark in message.graph_def.value for mark in _MARKS):
            from ray_fed.tensorflow.graphs import graph_message

            check = (
                graph_message.graph_of
                if self._in_process
                else graph_message.check_portable
            )
            check(message)

    def _warn_of_simulation(self) -> None:
        if self._warned:
            return
        self._warned = True
        _logger.warning(
            "Secure aggregation and selection are simulated in the clear: values are"
            " checked against their bounds and summed, and nothing is hidden from the"
            " server."
        )
