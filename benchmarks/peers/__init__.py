"""Others who shard models, as the packages themselves, beside autotp in one run."""
