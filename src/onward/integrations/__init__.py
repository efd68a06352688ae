"""Integrations with other packages' training loops, one module each, which imports that package.

`import onward` imports none of them.
"""
