"""The claims of reference/federating_executor.txt."""

from tests.reference.claims import read_claims

CLAIMS = read_claims(
    "federating",
    """
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
)
