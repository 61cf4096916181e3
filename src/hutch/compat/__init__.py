"""Doors for programs that were written for something else: they go on, with boxes behind them."""
