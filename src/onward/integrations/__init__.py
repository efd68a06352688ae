"""Training loops of other packages, each in a module of its own that imports its package.

`import onward` imports none of them.
"""
