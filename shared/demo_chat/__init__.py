"""The demo: a terminal chat with a runner in a real worker process.

``chat`` is the conversation, ``screen`` what is printed, ``gate`` how a person at the terminal is asked for permission.
"""
