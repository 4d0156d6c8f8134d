"""Places that parameters come from: an op, another module, a call; joined or transposed; and where gradients go."""
