"""The demo's own ACP agent: real work on files, no language model, standard library only.

Run it with ``python shared/demo_agent``; it speaks the Agent Client Protocol, version 1, on stdin and stdout. It understands a
handful of plain sentences (:mod:`demo_agent.sentences`), works only inside the session's directory (:mod:`demo_agent.files`)
and asks for permission before every write and every command (:mod:`demo_agent.server`).
"""
