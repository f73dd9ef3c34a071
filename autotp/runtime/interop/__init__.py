"""Interoperation with tools of torch and other libraries that work on a sharded module and its tensors."""
