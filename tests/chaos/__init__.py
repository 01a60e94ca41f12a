"""`make chaos`: operators, clients and the kernel do their worst to a real pair, for 1,000 requests.

Not collected by pytest; `tests/real/test_chaos.py` runs it shortened.
"""
