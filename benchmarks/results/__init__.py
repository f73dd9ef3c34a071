"""What was measured, and the command that measures again what is older than the code that it depends on."""
