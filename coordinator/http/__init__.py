"""What operators see and do over HTTP: metrics, health, handoffs, the log as a stream, a web page.

``server`` listens, ``connections`` bounds what clients can take, ``routes`` says what there is,
``answers`` what is answered, ``views`` looks it up, ``openapi`` describes it. It runs in the
coordinator's event loop and never holds it up.
"""
