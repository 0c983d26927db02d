"""How passes are made fast: kernels, packed weights, key/value buffers, attention over them, the loss of a training step.

Nothing here knows a drafter.
"""
