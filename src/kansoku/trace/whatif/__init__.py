"""What-if: how fast the job would be without its stragglers, and who they are.

The method of arXiv 2505.05713: operations of all workers, their dependencies, and a simulation of
the step with some durations replaced by ideal ones.
"""
