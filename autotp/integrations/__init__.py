"""Sharded modules in libraries that drive the training: each file needs the library that it is for."""
