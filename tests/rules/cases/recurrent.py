"""Recurrent networks: whole sequences, and single steps."""

from __future__ import annotations

from tests.rules.cases.draw import aten, case, f

SEQUENCE = {"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": True}


def weights(gates: int, directions: int = 1) -> list:
    """Of layers of 4 units that read 3 numbers."""
    return [f(*s) for _ in range(directions) for s in [(gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)]]


ONE, BOTH = {"bidirectional": False, "batch_first": True}, {"bidirectional": True, "batch_first": False}
RECURRENT = [
    case(aten.lstm.input, f(6, 5, 3), [f(1, 6, 4), f(1, 6, 4)], weights(4), **SEQUENCE, **ONE),
    case(aten.lstm.input, f(5, 6, 3), [f(2, 6, 4), f(2, 6, 4)], weights(4, 2), **SEQUENCE, **BOTH),
    case(aten.gru.input, f(6, 5, 3), f(1, 6, 4), weights(3), **SEQUENCE, **ONE),
    *(
        case(op, f(5, 6, 3), f(2, 6, 4), weights(1, 2), **SEQUENCE, **BOTH)
        for op in (aten.rnn_tanh.input, aten.rnn_relu.input)
    ),
    case(aten.lstm_cell, f(6, 3), [f(6, 4), f(6, 4)], *weights(4)),
    case(aten.lstm_cell, f(6, 3), [f(6, 4), f(6, 4)], *weights(4)[:2]),
    case(aten.gru_cell, f(6, 3), f(6, 4), *weights(3)),
    case(aten.gru_cell, f(6, 3), f(6, 4), *weights(3)[:2]),
    *(case(op, f(6, 3), f(6, 4), *weights(1)) for op in (aten.rnn_tanh_cell, aten.rnn_relu_cell)),
]
