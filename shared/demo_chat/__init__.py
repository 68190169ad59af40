"""The demo: a terminal chat with a runner in a real worker process.

``chat`` is the conversation, ``screen`` what is printed, ``host`` the host of the chat, as far as the plugin sees one.
"""
