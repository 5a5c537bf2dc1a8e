"""Names of TensorFlow Federated's arguments, and what to pass in ray_fed instead.

`tracebacks.shorten` adds this advice to the TypeError of a call with such a name. Names
and meanings follow https://www.tensorflow.org/federated/api_docs/python/tff.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

_OPTIMIZER = "an optimizer of Keras or its name, not a function"
_RUN = "cohorts are drawn from `data`: pass `cohort_size=` or `sampler=`"
_SPEED = "leave it out"

HERE = {
    "model_fn": "pass `model=`, a `learning.Model`, not a function",
    "client_optimizer_fn": f"pass `client_optimizer=`, {_OPTIMIZER}",
    "server_optimizer_fn": f"pass `server_optimizer=`, {_OPTIMIZER}",
    "base_optimizer": f"pass `optimizer=`, {_OPTIMIZER}",
    "client_learning_rate_fn": "pass `client_learning_rate=`, a schedule of Keras",
    "proximal_strength": "pass `proximal=`",
    "model_aggregator": "pass `aggregator=`, one of `learning.aggregators`",
    "model_update_aggregator": "pass `aggregator=`, one of `learning.aggregators`",
    "client_weighting": "clients count by their examples; for another weighting, pass"
    " `aggregator=learning.aggregators.mean(weighted=False)` or use"
    " `learning.build_process`",
    "model_distributor": "pass `send=` to `learning.build_process`",
    "model_weights_distributor": "pass `send=`, a function",
    "client_work": "pass `client=`, a function",
    "model_finalizer": "pass `server=`, a function or an optimizer of Keras",
    "initial_model_weights_fn": "leave it out: the weights are those of the model",
    "metrics_aggregator": "leave it out: metrics are over the examples of all clients",
    "loop_implementation": _SPEED,
    "use_experimental_simulation_loop": _SPEED,
    "input_spec": "leave it out: the Keras model has the types of its inputs, and"
    " `label_type=` the type of its labels",
    "loss_fn": "pass `loss=`",
    "metrics_constructor": "pass `metrics=`, a list",
    "personalize_fn_dict": "pass `fine_tuning=`, an optimizer of Keras",
    "inner_agg_factory": "pass `inner=`, another aggregator",
    "clipping_norm": "pass `norm=`",
    "zeroing_norm": "pass `norm=`",
    "training_process": "pass `process=`",
    "training_selection_fn": _RUN,
    "total_rounds": "pass `num_rounds=`",
    "evaluation_fn": "pass `evaluate=`, a function of the state alone, or"
    " `validation_data=`",
    "evaluation_selection_fn": "pass `validation_data=`",
    "rounds_per_evaluation": "pass `evaluate_every=`",
    "program_state_manager": "pass `storage_path=`",
    "rounds_per_saving_program_state": "pass `checkpoint_every=`",
    "metrics_managers": "pass `callbacks=`, which takes release managers",
    "default_num_clients": "pass `config=ray_fed.Config(default_num_clients=...)`",
    "client_ids": "pass `ids=`",
    "serializable_dataset_fn": "pass `load=`, a function of an id",
    "client_ids_to_files": "pass the ids as `ids=`, and open the file in `load=`",
    "tensor_slices_dict": "pass `clients=`, with a list of rows for each id",
    "database_filepath": "pass `path=`",
    "split_name": "pass `split=`",
    "num_test_clients": "pass `fraction=`",
}
"""What to do in ray_fed, by the name of TensorFlow Federated's argument."""


def explain(function: Callable[..., Any], names: Iterable[str]) -> str:
    """Return an error message on TensorFlow Federated's names in a call, or "".

    `names` are the call's arguments. Names that `function` has are not mentioned.
    """
    found = [name for name in names if name in HERE]
    if not found:
        return ""
    known = inspect.signature(function).parameters
    unknown = [name for name in found if name not in known]
    if not unknown:
        return ""
    advice = "; ".join(f"for `{name}`, {HERE[name]}" for name in unknown)
    return (
        f"Expected arguments of `{function.__name__}`, found names of TensorFlow"
        f" Federated: {advice}."
    )
