"""The claims of reference/eager_tf_executor.txt."""

from tests.reference.claims import read_claims

CLAIMS = read_claims(
    "eager_tf",
    """
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
27  The reference of an embedded value is a fixed point of normalising.
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
42  `create_value(value, type_spec=None)` normalises what it embeds.
43  `type_spec` may be anything that is convertible to a type.
44  `type_spec` may be left out for a typed object.
45  `create_value` outside of eager mode is a RuntimeError.
46  `create_value` of a value that is not of its type is a TypeError.
47  `create_value` of a value without a type, given or known, is a ValueError.
""",
)
