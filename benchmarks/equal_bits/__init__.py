"""Losses on any number of ranks, with `tp_invariant` and without, drawn side by side; and what equal bits cost."""
