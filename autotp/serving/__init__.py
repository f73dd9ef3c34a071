"""An OpenAI-compatible server over the ranks of a sharded model: `autotp serve`."""
