"""The claims of reference/thread_debugging_executor_factory.txt."""

from tests.reference.claims import read_claims

CLAIMS = read_claims(
    "debugging",
    """
01  Is called with `num_clients=None, clients_per_thread=1`; both may be left out.
02  Returns an executor factory.
03  Its stacks execute computations locally, in this process.
04  References are resolved at the top of the stack only.
05  What clients run must be TensorFlow; a lambda there is refused.
06  Executes the computation that it is passed as it is, each client's work once.
07  Caches nothing: what ran once runs again.
08  Top of the stack is a ReferenceResolvingExecutor over a FederatingExecutor.
09  Under it, each client has a ThreadDelegatingExecutor over an EagerTFExecutor.
10  Every stack has this structure, whatever the number of clients.
11  Each client runs in a thread of its own, at the same time as the others.
12  Follows dependencies of data: what depends on nothing runs at the same time.
13  Executes every federated intrinsic, where the functions it takes are TensorFlow.
14  With `num_clients`, has exactly so many clients.
15  Without, infers their number from the values that it is passed.
16  `clients_per_thread` clients run in sequence on one thread.
17  More clients a thread make fewer threads, and fewer copies of a model.
18  A number of clients below one is a ValueError.
""",
)
