"""The algorithm: claim the operation; with a lease, perform and settle; without one, replay, wait or refuse."""
