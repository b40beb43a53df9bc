"""The commands by which operators talk to a running coordinator, over its HTTP.

``caller`` asks, ``shown`` writes the answers for people, ``operate`` is the commands themselves.
"""
