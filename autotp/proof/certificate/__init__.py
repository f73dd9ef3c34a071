"""A rank's program, type-checked by spmd_types, which others wrote: no value and no conversion of ours is believed."""
