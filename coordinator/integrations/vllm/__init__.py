"""The connector for vLLM's engines; see ``docs/vllm.md``.

vLLM loads it by ``kv_connector`` and ``kv_connector_module_path``, twice: in the process of its scheduler,
and in the process of each rank. The scheduler's half has no socket: it tells the ranks what to say, in the
metadata of each step. The ranks' halves talk to the coordinator and report what has ended.

    connector  the class that vLLM loads, and nothing but its interface
    scheduler  the scheduler's half: which requests are handed over, and which blocks these have
    orders     what the scheduler's half tells the ranks
    ranks      a rank's half: its clients, and what vLLM is told of their events
    desk       the requests that one client has at its coordinator
    executor   opt-in: one rank reports for all
    geometry   from vLLM's KV tensors to a pool
    rooms      from a request's transfer id to its room
    settings   ``kv_connector_extra_config``
"""
