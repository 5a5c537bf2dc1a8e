"""What the reference documents claim, numbered, in words of our own.

A test holds a claim that its marker names: `@pytest.mark.claim("eager_tf.07")`. It must
fail when the claim is broken. `coverage` joins the two sides.
"""

import re
from collections.abc import Mapping

_DOCUMENTS = {
    # reference/eager_tf_executor.txt
    "eager_tf": """
01  Of computations, runs those in TensorFlow and no others.
02  Runs synchronously: a verb has done its work when it returns.
03  Needs TensorFlow's eager mode: construction fails without, with a RuntimeError.
04  Is constructed with one optional argument, `device`, None by default.
05  Understands tensors.
06  Understands sequences.
07  Understands structures whose fields have names.
08  Understands functions.
09  Understands neither placements nor federated nor abstract types.
10  Takes TensorFlow computations as building blocks, in every form they come in.
11  Takes external data as building blocks.
12  Takes neither lambda calculus nor compositions; structs and selections have verbs.
13  Takes Python constants of simple types.
14  Takes nested structures of these.
15  Takes eager tensors, alone and in structures.
16  Takes eager datasets, alone and in structures.
17  External data names files that the executor can read.
18  Places its work on the device that it is given.
19  Pipelines datasets: elements are read when they are needed.
20  Sets no limit to the size of a dataset.
21  Does not marshal TensorFlow values in and out between calls.
22  Starts no threads of its own.
23  Keeps no state between calls, so there is nothing to checkpoint.
24  Leaves federated computations to others.
25  Can be put under other executors, which add asynchrony and threads.
26  Embeds everything as values of a class of its own, with a reference and a type.
27  The reference of an embedded value is a fixed point of normalizing.
28  The other verbs return such fixed points, too.
29  Accepts a device from TensorFlow's own list of logical devices.
30  A device that is no LogicalDevice is a TypeError.
31  A device that does not exist is a ValueError.
32  `close` releases what the executor holds.
33  An executor with targets closes them.
34  `create_call(comp, arg=None)` calls functions with and without an argument.
35  `create_call` returns an embedded value: the result.
36  `create_call` outside of eager mode is a RuntimeError.
37  `create_call` with arguments of wrong types is a TypeError.
38  `create_selection(source, index)` selects an element and returns it embedded.
39  `create_selection` from what is no struct is a TypeError.
40  `create_selection` with both or neither of index and name is a ValueError.
41  `create_struct(elements)` returns an embedded struct of the elements, in order.
42  `create_value(value, type_spec=None)` normalizes what it embeds.
43  `type_spec` may be anything that is convertible to a type.
44  `type_spec` may be left out for a typed object.
45  `create_value` outside of eager mode is a RuntimeError.
46  `create_value` of a value that is not of its type is a TypeError.
47  `create_value` of a value without a type, given or known, is a ValueError.
""",
    # reference/federating_executor.txt
    "federating": """
01  Handles federated types and intrinsics over executors, some of them for clients.
02  An intrinsic that needs what its strategy does not implement is not implemented.
03  The strategy decides how intrinsics and federated types are carried out.
04  The strategy decides how federated values are represented in the stack.
05  The strategy delegates work to target executors.
06  What is at a placement that nothing implements is refused.
07  What has no placement goes to the unplaced executor: values, computations, work.
08  Brings a strategy into a stack, under an executor that resolves references.
09  Is constructed with `strategy_factory` and `unplaced_executor`.
10  `strategy_factory` is called with the executor; what it returns is used.
11  `close` closes its targets.
12  `create_call` takes TensorFlow computations.
13  `create_call` takes intrinsics.
14  `create_call` takes no argument where the function takes none.
15  `create_call` returns an embedded value of the function's result type.
16  `create_call` with what is not embedded here is a TypeError.
17  `create_call` of what is no function is a TypeError.
18  `create_call` with an argument of another type is a TypeError.
19  `create_call` of a kind that it does not take is a ValueError.
20  `create_selection` selects by index.
21  `create_selection` selects by name.
22  `create_selection` returns the element embedded, with its own type.
23  `create_selection` from what is not embedded here is a TypeError.
24  `create_selection` from what is no struct is a TypeError.
25  `create_selection` with neither index nor name is a ValueError.
26  `create_selection` from a struct of a kind that it does not know is a ValueError.
27  `create_struct` takes a collection of embedded values and returns a struct of them.
28  `create_struct` of what is not embedded here is a TypeError.
29  `create_value` takes definitions of intrinsics.
30  `create_value` takes placements.
31  `create_value` takes messages of intrinsics.
32  `create_value` takes messages of lambdas.
33  `create_value` takes messages of TensorFlow computations.
34  `create_value` takes a list for a federated type, in client order.
35  `create_value` takes Python values for types without functions and placements.
36  `type_spec` may be anything that is convertible to a type.
37  `type_spec` may be left out for what knows its type.
38  `create_value` returns a value of the executor's own class, of the declared type.
39  `create_value` of a value that is not of its type is a TypeError.
40  `create_value` of a kind that it does not take is a ValueError.
""",
    # reference/thread_debugging_executor_factory.txt
    "debugging": """
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
    # reference/mergeable_comp_execution_context.txt
    "mergeable": """
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
    # reference/federated_context.txt
    "federated_context": """
01  Is an interface that implementations subclass; `invoke` is abstract.
02  Is a synchronous context.
03  Invokes a limited set of computations, with guarantees about what goes in and out.
04  Arguments may be nested structures that follow the computation's type.
05  Server-placed arguments are structures of values that can be materialized.
06  Client-placed arguments are what a federated data source's iterator returned.
07  Results are one reference to a value, or structures of such references.
08  There is a reference for each tensor of the result type.
09  Computations that return client-placed values are not allowed.
10  Computations that return functions are not allowed.
11  What Python type a value has follows from its federated type alone.
12  A tensor is a materializable reference, in arguments and results.
13  A sequence is a materializable reference.
14  A server-placed value is represented as its member is.
15  A struct with a Python container is that container.
16  A struct whose fields all have names, without a container, is an OrderedDict.
17  A struct whose fields have no names, without a container, is a tuple.
18  A client-placed value is the opaque object that a data source selected.
19  A value of function type is a computation, in arguments only.
20  `invoke(comp, arg)` invokes the computation with the optional argument.
21  `invoke` returns a structure of materializable references.
22  A result type of other parts than structures, server-placed values and tensors
    is a ValueError.
""",
    # What is easy to miss, of semantics.md: TensorFlow computations (01-21),
    # EagerTFExecutor (22-34), FederatingExecutor and strategies (35-61), contexts.
    "semantics": """
01  Computations whose functions share names, from two processes, both run right.
02  Library functions are renamed by a hash of their content.
03  Initialization runs before everything outside of its closure, on each call.
04  Variables start afresh on each call.
05  Variables start afresh for each client.
06  Tables and variables belong to one call site: two call sites share none.
07  Tables and variables are freed after the call.
08  A session token that the message names is fed.
09  Loaded functions are cached by content and type.
10  The cache of functions is bounded, and drops what was used longest ago.
11  Functions of one device are not those of another.
12  Results are never cached.
13  Functions that return datasets stay on the CPU.
14  Messages nested too deeply are a CompileError that says so.
15  A block of a thousand locals is not too deep.
16  Errors of type at the leaf are TypeErrors, and nothing is cast in silence.
17  Literals are understood by every executor.
18  Literals are understood by the compiler.
19  Dtypes are numpy's and shapes are tuples, whatever the front end is given.
20  Strings are of type `np.str_`.
21  The front end converts None and TensorFlow's dtypes to types.
22  Without a type, nothing but typed objects can be embedded.
23  A computation that is not TensorFlow is a ValueError.
24  Another type, a call of no function, an argument too many: TypeErrors.
25  A struct of another length is a TypeError.
26  A struct with other names is a TypeError.
27  A value without names takes those of its type.
28  Variables are read when they are embedded.
29  A list for a sequence type becomes a dataset, of values or of tensors.
30  Any other iterable is read lazily.
31  Devices: TypeError for what is none, ValueError for one that does not exist.
32  Graph mode is a RuntimeError.
33  `create_selection` takes an index or a name; both or neither are a ValueError.
34  Normalizing an embedded value again changes nothing.
35  An intrinsic needs a concrete type: TypeError.
36  Lambdas are taken lazily.
37  TensorFlow computations are taken lazily.
38  Data is taken lazily.
39  Intrinsics of sequences go to the unplaced executor.
40  An unknown intrinsic is a ValueError.
41  A call, block, selection or reference is a ValueError.
42  `create_call` checks that the argument is assignable to the parameter.
43  `create_call` hands the argument on at the parameter's type.
44  A call of a lambda is a ValueError.
45  An intrinsic that is not implemented is a NotImplementedError.
46  `close` closes the strategy, then the unplaced executor.
47  A value that differs by client is a list or a tuple: else TypeError.
48  It has one element a client: else an error that says both numbers.
49  An all-equal value is given bare.
50  Results at clients are lists.
51  Mapping and zipping at clients give values that are not all-equal.
52  `map_all_equal` of a value that is not all-equal is a ValueError.
53  A sum over no clients is zeros.
54  A mean over no clients is an error that says so.
55  Minimum and maximum exist.
56  Secure sums exist, with one bound a tensor.
57  Secure sums by bitwidth exist.
58  Selection and secure selection exist.
59  Secure intrinsics hold values to their bounds, and say once that they hide nothing.
60  Both strategies aggregate in client order, merge alike, and give the same bits.
61  Lambdas that intrinsics are given run, with what they capture.
62  A factory may keep the cardinalities: they do not change under it.
63  Without clients in the argument, their number is the configured default.
64  Arguments that differ in their number of clients are a ValueError.
65  An argument of clients that is no sequence is a TypeError.
66  A stack is cleaned up on any exception.
67  Executors take lists where datasets are declared, and datasets.
68  `num_subrounds` is the number of contexts by default.
69  A slice is its share of the remaining clients, rounded up.
70  No slice is empty: there may be fewer subrounds than asked for.
71  An argument without clients is replicated `num_subrounds` times.
72  No clients make one subround.
73  Without an argument there are as many runs as asked for.
74  `after_merge` runs once where no result is one a client.
75  `after_merge` runs on each slice where a result is one a client.
76  `up_to_merge` must return a server-placed value: UpToMergeTypeError, a TypeError.
77  `merge` must take two partials: MergeTypeNotAssignableError, a TypeError.
78  `after_merge` must take what it is given: AfterMergeStructureError, a ValueError.
79  An empty struct without a placement may stand in an argument that is cut.
80  `transform_args` is applied.
81  Results of clients come back in client order.
""",
}


def _read(document: str, text: str) -> dict[str, str]:
    paragraphs = re.sub(r"\n +", " ", text.strip()).splitlines()
    claims = dict(paragraph.split("  ", 1) for paragraph in paragraphs)
    assert list(claims) == [f"{index + 1:02}" for index in range(len(paragraphs))]
    return {f"{document}.{number}": words for number, words in claims.items()}


CLAIMS: Mapping[str, str] = {
    name: words
    for document, text in _DOCUMENTS.items()
    for name, words in _read(document, text).items()
}
"""Words by "document.number", as markers name them."""
