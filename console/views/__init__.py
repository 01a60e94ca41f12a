"""Values to lines: pure functions that need no terminal and import neither textual nor asyncssh."""
