"""Time tree attention beside its peers: every method on the same tensors, in one run, checked before it counts.

Knows workloads, methods, floors and how to time; knows nothing of models, heads or acceptance.
"""

OURS = "deft-flatten"  # the method that all others are compared with
