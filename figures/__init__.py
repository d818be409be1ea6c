"""Figures: one study or paper a file; they read a folder of results and draw, and never
simulate.
"""
