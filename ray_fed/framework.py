"""Classes and functions for code that extends ray_fed. Imports TensorFlow and Ray."""

from ray_fed.cluster.direct import RayExecutorFactory
from ray_fed.cluster.ray_strategy import RayFederatingStrategy
from ray_fed.compiler.form import MergeableCompForm
from ray_fed.compiler.split import compile_to_mergeable_comp_form
from ray_fed.contexts.mergeable import MergeableCompExecutionContext
from ray_fed.contexts.ray_context import RayExecutionContext
from ray_fed.executors.eager_tf import EagerTFExecutor
from ray_fed.executors.federating import FederatingExecutor
from ray_fed.executors.references import ReferenceResolvingExecutor
from ray_fed.executors.strategy import FederatingStrategy
from ray_fed.executors.threads import ThreadDelegatingExecutor
from ray_fed.language.blocks import deserialize_computation, serialize_computation
from ray_fed.worker.debugging_factory import thread_debugging_executor_factory

__all__ = [
    "EagerTFExecutor",
    "FederatingExecutor",
    "FederatingStrategy",
    "MergeableCompExecutionContext",
    "MergeableCompForm",
    "RayExecutionContext",
    "RayExecutorFactory",
    "RayFederatingStrategy",
    "ReferenceResolvingExecutor",
    "ThreadDelegatingExecutor",
    "compile_to_mergeable_comp_form",
    "deserialize_computation",
    "serialize_computation",
    "thread_debugging_executor_factory",
]
