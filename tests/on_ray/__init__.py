"""RayExecutor on real clusters, each started by a program of its own."""
