"""How passes are made fast: kernels, packed weights, key/value buffers, attention over them. Nothing here knows a drafter."""
