"""Programs that read experts from a disk with readers and a cache of their own, in closed form."""
