"""One training of a language model on text, over many meshes: its losses and gradient norms beside each other."""
