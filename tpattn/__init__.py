"""tpattn: transformer attention sharded in two ways at once, weights over `tp` and tokens over `cp`."""

__version__ = "0.1.0"
