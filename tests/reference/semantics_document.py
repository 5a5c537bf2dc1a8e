"""What the documents leave easy to miss: claims of semantics.md.

TensorFlow computations (01-21), EagerTFExecutor (22-34), FederatingExecutor and
strategies (35-61), contexts (62-81).
"""

from tests.reference.claims import read_claims

CLAIMS = read_claims(
    "semantics",
    """
01  Computations whose functions share names, from two processes, both run right.
02  Library functions are renamed by a hash of their content.
03  Initialisation runs before everything outside of its closure, on each call.
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
34  Normalising an embedded value again changes nothing.
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
)
