"""The algorithm: claim; if it is yours, perform and settle; if not, replay, wait or refuse."""
