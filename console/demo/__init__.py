"""`kvtop demo`: a prefill/decode deployment on this machine, with load on it, and the console attached."""
