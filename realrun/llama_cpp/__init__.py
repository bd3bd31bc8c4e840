"""llama.cpp on this machine: its routing recorded, its speed measured."""
