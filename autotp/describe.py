from .layouts import *
from .plan import *


def describe(planned, sharded, builder, name, objective, inputs, notes):
    ps = []
    for node, leaf in builder.leaves.items():
        if leaf.kind == "parameter":
            ps.append(
                Parameter(
                    leaf.name,
                    tuple(node.meta["val"].shape),
                    (),
                    str(node.meta["val"].dtype),
                    planned.decisions[node].outs[0],
                )
            )
    return Plan(
        name,
        planned.tp,
        planned.program.digest(),
        builder.cluster.name,
        objective,
        tuple(ps),
        (),
        (),
        Totals(),
        {n.name: d for n, d in planned.decisions.items()},
        inputs,
        tuple(notes),
    )
