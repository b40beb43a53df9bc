"""The transfer worker: a backend next to one rank's KV memory, in a process or a thread of its own."""
