"""The lanes, memory and clock of a real machine: CUDA streams, or host lanes."""
