"""The claims of reference/mergeable_comp_execution_context.txt."""

from tests.reference.claims import read_claims

CLAIMS = read_claims(
    "mergeable",
    """
01  Executes a mergeable computation in subrounds: a part of the clients each.
02  Is a synchronous context: `invoke` returns the result itself.
03  Has the arguments `async_contexts`, `compiler_fn`, `transform_args`,
    `transform_result`, `num_subrounds`, in this order, all but the first None.
04  A subround that fails and is retried by its context is the only one that runs again.
05  Does not retry by itself: what a context raises for good ends the call.
06  `async_contexts` run at the same time; their `invoke` is a coroutine function.
07  `compiler_fn` is given a ConcreteComputation and returns the form that is executed.
08  Without a compiler, forms are executed and nothing else.
09  `transform_args` is applied to the argument before the computation has it.
10  `transform_result` is applied to the result before it is returned.
11  `num_subrounds` is the total number of subrounds.
12  Unspecified, it is the number of contexts.
13  More subrounds than contexts run one after another, one a context at a time.
14  `invoke(comp, arg=None)` takes a form or a computation.
15  `invoke` verifies that it is given one of these.
16  Without an argument, it is None.
17  Structural arguments arrive as Structs, and are understood so.
18  `invoke` returns the result of the computation.
""",
)
