"""The plugin for SGLang's prefill scheduler; see ``docs/sglang.md``.

SGLang loads it in each of its processes, by the entry point ``sglang.srt.plugins``. It does nothing
unless ``KV_COORDINATOR`` is set. SGLang's own senders go on moving the bytes. What changes is who
decides: the coordinator does, for all ranks at once and within a bound; the scheduler asks nobody and
waits for nobody, it applies what has arrived.

    plugin    the entry point: what is hooked, and when not at all
    hooks     the functions that stand around SGLang's
    link      one scheduler's tie to its coordinator: what is told, and what is applied in which step
    watched   one request whose prefill is complete
    carrier   how rank 0's token rides the scheduler's own broadcast
    herald    tells decode of failures, off the scheduler's thread
    settings  the environment variables
"""
