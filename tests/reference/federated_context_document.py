"""The claims of reference/federated_context.txt."""

from tests.reference.claims import read_claims

CLAIMS = read_claims(
    "federated_context",
    """
01  Is an interface that implementations subclass; `invoke` is abstract.
02  Is a synchronous context.
03  Invokes a limited set of computations, with guarantees about what goes in and out.
04  Arguments may be nested structures that follow the computation's type.
05  Server-placed arguments are structures of values that can be materialised.
06  Client-placed arguments are what a federated data source's iterator returned.
07  Results are one reference to a value, or structures of such references.
08  There is a reference for each tensor of the result type.
09  Computations that return client-placed values are not allowed.
10  Computations that return functions are not allowed.
11  What Python type a value has follows from its federated type alone.
12  A tensor is a materialisable reference, in arguments and results.
13  A sequence is a materialisable reference.
14  A server-placed value is represented as its member is.
15  A struct with a Python container is that container.
16  A struct whose fields all have names, without a container, is an OrderedDict.
17  A struct whose fields have no names, without a container, is a tuple.
18  A client-placed value is the opaque object that a data source selected.
19  A value of function type is a computation, in arguments only.
20  `invoke(comp, arg)` invokes the computation with the optional argument.
21  `invoke` returns a structure of materialisable references.
22  A result type of other parts than structures, server-placed values and tensors
    is a ValueError.
""",
)
