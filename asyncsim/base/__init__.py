"""Base: errors, call syntax, files, random streams and the console, which know nothing of
asyncsim.
"""
