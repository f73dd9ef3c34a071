"""Means by which torch's own and other tools find what they know when they work on a sharded module and its tensors."""
