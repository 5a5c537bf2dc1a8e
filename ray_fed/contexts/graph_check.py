"""Refuses graphs that cannot run where a context would run them, before a call begins.

TensorFlow is imported only for a computation that seems to have Python functions.
"""

import federated_language as fl

import ray_fed.blocks as blocks
from ray_fed.compiler.form import MergeableCompForm

flf = fl.framework

_MARKS = (b"PyFunc", b"GeneratorDataset")
"""One of them is in the bytes of every graph with Python functions, as part of an op's
name; other graphs may have them, too."""


def check_graphs(
    comp: flf.ConcreteComputation | MergeableCompForm, *, in_process: bool
) -> None:
    """Raise if a computation has Python functions that its graphs cannot call.

    Args:
        comp: whose TensorFlow graphs are looked at.
        in_process: whether they run in this process; else in workers.

    Raises:
        UnsupportedError: a graph has Python functions, and runs in another process
            than the one that traced it.
    """
    if isinstance(comp, MergeableCompForm):
        for part in (comp.up_to_merge, comp.merge, comp.after_merge):
            check_graphs(part, in_process=in_process)
        return

    def check(block: flf.ComputationBuildingBlock) -> None:
        if not isinstance(block, flf.CompiledComputation):
            return
        message = block.to_proto().tensorflow
        if any(mark in message.graph_def.value for mark in _MARKS):
            from ray_fed.tensorflow import graph

            check_message = graph.graph_of if in_process else graph.check_leaves
            check_message(message)

    block = blocks.to_block(comp)
    if block is not None:
        flf.visit_postorder(block, check)
