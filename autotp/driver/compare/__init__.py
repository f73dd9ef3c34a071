"""The original run beside a sharded module on the real ranks, and held against it."""
