"""``kv-coordinator replay``: the requests of a recorded trace, through real processes.

``trace`` reads it, ``script`` reads what goes wrong when and ``faults`` does it, ``geometry`` decides how
large pages and pools are, ``router`` makes requests of prompts and chooses engines, ``playback`` drives it
all, ``samples`` is memory over time, ``result`` sums up, ``table`` and ``plot`` show it, ``command`` is the
face.
"""
