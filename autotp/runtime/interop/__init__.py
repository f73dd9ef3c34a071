"""What torch's own and other tools meet when they work on a sharded module and its tensors."""
